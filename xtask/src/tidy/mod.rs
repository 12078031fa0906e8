//! `cargo xtask tidy`: checks import rules, the names in the root directory, formatting and lints.

mod graph;
mod rules;
mod scan;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::shell::{self, cargo, run, say, workspace};
use rules::{RULES, Rule};
use scan::Mention;

/// Names of files and directories that are allowed in the root of the repository, besides those that git ignores.
const ROOT: &str = ".cargo .ci .gitattributes .github .gitignore CHANGELOG.md CONTRIBUTING.md Cargo.lock Cargo.toml \
    LICENSE-APACHE LICENSE-MIT README.md SECURITY.md reaper-common reaper-ebpf reaper-user tests xtask";

/// Runs all checks even if one fails, so that one run shows all violations.
///
/// # Errors
/// A check fails, or a file cannot be read.
pub fn tidy() -> Result<()> {
    let files = shell::files()?;
    let mut complaints = names_in_root(&files);
    let mut scanned = Vec::new();
    for file in files.into_iter().filter(|file| has_rust(file)) {
        let source = fs::read_to_string(workspace().join(&file));
        let mentions = scan::scan(&file, &source.with_context(|| file.display().to_string())?)?;
        complaints.extend(violations(&file, &mentions));
        scanned.push((file, mentions));
    }
    complaints.extend(graph::complaints(&scanned));
    for complaint in &complaints {
        println!("{complaint}");
    }
    if complaints.is_empty() {
        say(format_args!(
            "{} import rules hold, no circular imports, no imports against the flow, no unknown names in the root",
            RULES.len()
        ));
    }
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"];
    let mut failures = Vec::new();
    if !complaints.is_empty() {
        failures.push(format!("{} rules violated", complaints.len()));
    }
    for arguments in [&["fmt", "--all", "--check"][..], &clippy] {
        failures.extend(run(cargo().args(arguments)).err().map(|e| e.to_string()));
    }
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    Ok(())
}

fn names_in_root(files: &[PathBuf]) -> Vec<String> {
    let names: BTreeSet<&OsStr> = files.iter().filter_map(|file| file.iter().next()).collect();
    let is_known = |name: &OsStr| ROOT.split_whitespace().any(|known| name == known);
    let unknown = names.into_iter().filter(|name| !is_known(name));
    unknown
        .map(|name| {
            format!(
                "{}: root: name not allowed in the root directory",
                name.display()
            )
        })
        .collect()
}

fn has_rust(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "rs")
}

/// Returns `path:line: rule: …` for each mention in a source file that a rule forbids.
fn violations(file: &Path, mentions: &[Mention]) -> Vec<String> {
    let mut found = Vec::new();
    let rules: Vec<&Rule> = RULES.iter().filter(|rule| rule.covers(file)).collect();
    for mention in mentions {
        for rule in rules.iter().filter(|rule| rule.forbids(mention)) {
            let (file, line, Rule { name, why, .. }) = (file.display(), mention.line, rule);
            let path = mention.path.join("::");
            found.push(format!("{file}:{line}: {name}: `{path}`: {why}"));
        }
    }
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violation_names_file_line_and_rule() {
        let file = Path::new("reaper-user/model/src/tree.rs");
        let mentions = scan::scan(file, "//! Pure.\n\nuse std::fs::File;\n").unwrap();
        let found = violations(file, &mentions);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("reaper-user/model/src/tree.rs:3: pure-model: `std::fs::File`: "),
            "{}",
            found[0]
        );
    }
}
