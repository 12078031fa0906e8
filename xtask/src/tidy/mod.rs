//! `cargo xtask tidy`: what a reader of the sources may rely on, checked.

mod graph;
mod rules;
mod scan;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell::{cargo, run, say, workspace};
use rules::{RULES, Rule};
use scan::Mention;

/// The names that may lie in the root of the repository: those of the architecture, and what every
/// Rust project has there. What git ignores may lie there too.
const ROOT: &[&str] = &[
    ".cargo",
    ".ci",
    ".git",
    ".gitattributes",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "SECURITY.md",
    "reaper-common",
    "reaper-ebpf",
    "reaper-user",
    "target",
    "tests",
    "xtask",
];

/// Looks at everything before it fails, so that one run shows all there is to put right.
pub fn tidy() -> Result<()> {
    let root = workspace();
    let mut complaints = names_in_root(&root)?;
    let mut scanned = Vec::new();
    for file in sources(&root)? {
        let source =
            fs::read_to_string(root.join(&file)).with_context(|| file.display().to_string())?;
        let mentions = scan::scan(&file, &source)?;
        complaints.extend(violations(&file, &mentions));
        scanned.push((file, mentions));
    }
    complaints.extend(graph::complaints(&scanned));
    for complaint in &complaints {
        println!("{complaint}");
    }
    if complaints.is_empty() {
        say(format_args!(
            "{} import rules hold, no import runs in a circle or against the flow, the root is clean",
            RULES.len()
        ));
    }
    let rest = [
        run(cargo().args(["fmt", "--all", "--check"])),
        run(cargo().args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ])),
    ];
    let mut failures: Vec<String> = rest
        .into_iter()
        .filter_map(Result::err)
        .map(|e| e.to_string())
        .collect();
    if !complaints.is_empty() {
        failures.insert(0, format!("{} rules violated", complaints.len()));
    }
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    Ok(())
}

fn names_in_root(root: &Path) -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for entry in fs::read_dir(root).with_context(|| root.display().to_string())? {
        let name = entry?.file_name();
        if ROOT.iter().any(|allowed| name == *allowed) {
            continue;
        }
        let ignored = Command::new("git")
            .arg("-C")
            .arg(root)
            .args(["check-ignore", "-q"])
            .arg(&name)
            .status();
        if !ignored.is_ok_and(|status| status.success()) {
            complaints.push(format!(
                "{}: root: no such name belongs into the root",
                name.display()
            ));
        }
    }
    Ok(complaints)
}

/// All Rust sources of the workspace, relative to its root, in order.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let mut dirs: Vec<PathBuf> = [
        "reaper-common",
        "reaper-ebpf",
        "reaper-user",
        "tests",
        "xtask",
    ]
    .map(PathBuf::from)
    .to_vec();
    let mut files = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(root.join(&dir)).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let path = dir.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// `path:line: rule: …` for each thing in a source that a rule forbids there.
fn violations(file: &Path, mentions: &[Mention]) -> Vec<String> {
    let rules: Vec<&Rule> = RULES.iter().filter(|rule| rule.covers(file)).collect();
    let complain = |mention: &Mention, rule: &Rule| {
        format!(
            "{}:{}: {}: `{}`: {}",
            file.display(),
            mention.line,
            rule.name,
            mention.path.join("::"),
            rule.why
        )
    };
    let mut found: Vec<_> = mentions
        .iter()
        .flat_map(|mention| {
            rules
                .iter()
                .filter(|rule| rule.forbids(mention))
                .map(|rule| complain(mention, rule))
        })
        .collect();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_names_file_line_and_rule() {
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
