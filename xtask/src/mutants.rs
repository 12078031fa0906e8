//! `cargo xtask mutants`: counts the small faults in the model and in `reap/` that their unit tests find.
//!
//! cargo-mutants lists the faults (mutants). This command applies a sample of them, one at a time, to a copy of the
//! workspace and runs the tests there. cargo-mutants cannot: its filters do not select exactly the sample.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::shell::{cargo, cargo_tool, copy_sources, output, say, target_dir};

const CARGO_MUTANTS: &str = "27.1.0";

/// Upper limit for the address space of the tests, in bytes: a mutant may allocate without end.
const MEMORY_MAX: u64 = 4 << 30;

/// Shortest time limit for a run of the tests, in seconds.
const TIMEOUT_MIN: u64 = 20;
/// Time limit as a multiple of the time that the tests take without a fault.
const TIMEOUT_FACTOR: u64 = 4;

const EXAMPLES: &str = "\
Examples:
  # 300 mutants, always the same
  cargo xtask mutants
  # A quick try
  cargo xtask mutants --sample 20
  # Another 300 mutants
  cargo xtask mutants --seed 2
  # Only mutants with this text in their file or description
  cargo xtask mutants --filter policy

The goal is a score of 90 %. The tests run in a PID namespace with limited memory, so a fault in reap/ cannot signal processes of this machine. The command lists survivors and does not fail because of them.";

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Number of mutants to try
    #[arg(long, value_name = "N", default_value_t = 300)]
    sample: usize,
    /// Number that selects the sample
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Only mutants whose file or description contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// Sources that get mutants, and their tests.
struct Part {
    name: &'static str,
    package: &'static str,
    /// Directory of the sources.
    sources: &'static str,
    /// Text that the names of its tests contain.
    tests: &'static str,
}

const PARTS: [Part; 2] = [
    Part {
        name: "model",
        package: "reaper-model",
        sources: "reaper-user/model/src",
        tests: "",
    },
    Part {
        name: "reap",
        package: "reaper-user",
        sources: "reaper-user/src/reap",
        tests: "reap::",
    },
];

/// Outcomes of a mutant: a test failed, all tests passed, the time limit expired, it does not compile.
const OUTCOMES: [&str; 4] = ["caught", "missed", "timeout", "unviable"];
const CAUGHT: usize = 0;
const MISSED: usize = 1;
const TIMEOUT: usize = 2;
const UNVIABLE: usize = 3;

/// Replacement of a part of a file, as cargo-mutants lists it.
#[derive(Clone, Deserialize)]
struct Mutant {
    /// File, relative to the root of the workspace.
    file: String,
    /// `file:line:column: description`.
    name: String,
    replacement: String,
    span: Span,
}

/// Part of a file; `end` is the first place after it.
#[derive(Clone, Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// Position of a character; line and column begin at 1.
#[derive(Clone, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

/// Tries the sample and prints the outcomes.
///
/// # Errors
/// The tests fail without a fault, or a required program cannot be installed.
pub fn mutants(args: &Args) -> Result<()> {
    let began = Instant::now();
    let tool = cargo_tool("cargo-mutants", CARGO_MUTANTS, "two minutes")?;

    say("1/3 copying the workspace and listing its mutants");
    let tree = target_dir().join("mutants/tree");
    copy_sources(&tree)?;
    let mut all = list(&tool, &tree)?;
    if let Some(text) = &args.filter {
        all.retain(|mutant| mutant.name.contains(text.as_str()));
    }
    let count = all.len();
    let sample = sample(all, args.sample, args.seed);
    ensure!(!sample.is_empty(), "no mutant matches");
    let (chosen, seed) = (sample.len(), args.seed);
    say(format_args!("{chosen} of {count} mutants, seed {seed}"));

    let mut results = Vec::new();
    for part in &PARTS {
        let lies_here = |m: &&Mutant| Path::new(&m.file).starts_with(part.sources);
        let mutants: Vec<&Mutant> = sample.iter().filter(lies_here).collect();
        if mutants.is_empty() {
            continue;
        }
        let name = part.name;
        say(format_args!(
            "2/3 running the tests of {name} without a fault (the first build takes some minutes)"
        ));
        ensure!(
            part.builds(&tree)?,
            "{0} does not compile; its errors: cargo check --package {0}",
            part.package
        );
        let start = Instant::now();
        let outcome = part.test(&tree, 600)?;
        ensure!(
            outcome == MISSED,
            "the tests of {name} fail without a fault in a PID namespace: {}",
            OUTCOMES[outcome]
        );
        let seconds = TIMEOUT_MIN.max((start.elapsed() * TIMEOUT_FACTOR as u32).as_secs());
        say(format_args!(
            "3/3 building and testing each mutant, {seconds} s at most"
        ));
        for mutant in mutants {
            let start = Instant::now();
            let outcome = mutant.try_in(part, &tree, seconds)?;
            results.push((name, mutant, outcome));
            println!(
                "[{}/{chosen}] {:<8} {} ({:.1} s)",
                results.len(),
                OUTCOMES[outcome],
                mutant.name,
                start.elapsed().as_secs_f64()
            );
        }
    }
    print(&results);
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    say(format_args!("{minutes:.1} min in all"));
    Ok(())
}

/// Lists the mutants of [`PARTS`].
fn list(tool: &Path, tree: &Path) -> Result<Vec<Mutant>> {
    let mut command = Command::new(tool);
    command.args(["mutants", "--list", "--json", "--no-config", "--dir"]);
    command.arg(tree).current_dir(tree);
    for part in &PARTS {
        let files = format!("{}/**", part.sources);
        command.args(["--package", part.package, "--file", &files]);
    }
    serde_json::from_str(&output(&mut command)?).context("the list of cargo-mutants")
}

/// Returns `count` mutants, or all if there are fewer, in the order of the list.
///
/// The choice depends on the change and not on its line, so most of a sample stays the same when the surrounding code
/// changes.
fn sample(all: Vec<Mutant>, count: usize, seed: u64) -> Vec<Mutant> {
    let mut equal: HashMap<String, u64> = HashMap::new();
    let mut ranked = Vec::new();
    for (at, mutant) in all.into_iter().enumerate() {
        let key = format!("{seed}\0{}\0{}", mutant.file, mutant.description());
        let nth = equal.entry(key.clone()).or_default();
        *nth += 1;
        ranked.push((Sha256::digest(format!("{key}\0{nth}")), at, mutant));
    }
    ranked.sort_by_key(|(hash, ..)| *hash);
    ranked.truncate(count);
    ranked.sort_by_key(|(_, at, _)| *at);
    ranked.into_iter().map(|(.., mutant)| mutant).collect()
}

impl Part {
    /// Returns a cargo command that builds or runs the unit tests in the copy of the workspace.
    fn cargo(&self, tree: &Path) -> Command {
        let mut cargo = cargo();
        cargo
            .args(["test", "--quiet", "--locked", "--lib", "--package"])
            .arg(self.package)
            .current_dir(tree)
            .env("CARGO_TARGET_DIR", target_dir().join("mutants/build"))
            // The test profile inherits from dev. Builds take most of the time, so keep them cheap.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_INCREMENTAL", "1")
            // Allows `--fail-fast` in a stable libtest.
            .env("RUSTC_BOOTSTRAP", "1")
            // Failures of one mutant must not be replayed with the next one.
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        cargo
    }

    fn builds(&self, tree: &Path) -> Result<bool> {
        let status = self.cargo(tree).arg("--no-run").status();
        Ok(status.context("cannot start cargo")?.success())
    }

    /// Runs the tests until one fails, for at most `seconds`, and returns the outcome.
    fn test(&self, tree: &Path, seconds: u64) -> Result<usize> {
        let mut cargo = self.cargo(tree);
        cargo.arg("--config").arg(runner(seconds));
        cargo.args(["--", "-Zunstable-options", "--fail-fast", self.tests]);
        let status = cargo.status().context("cannot start cargo")?;
        Ok(match status.code() {
            Some(0) => MISSED,
            Some(124 | 137) => TIMEOUT,
            code => {
                // Failed tests exit with 101, or with more than 128 after a signal.
                let confined = !matches!(code, Some(1 | 125..=127));
                ensure!(
                    confined,
                    "cannot run tests with timeout, prlimit and unshare: {status}"
                );
                CAUGHT
            }
        })
    }
}

/// Returns the `runner` setting of cargo, which runs a test executable in a PID namespace.
///
/// Processes outside have no pid in the namespace, so tests cannot signal them. The shell is its init: when it exits, the
/// kernel kills all others.
fn runner(seconds: u64) -> String {
    let words = format!(
        "timeout {seconds} prlimit --as={MEMORY_MAX} unshare --pid --fork --kill-child --mount-proc"
    );
    let mut words: Vec<&str> = words.split(' ').collect();
    if !nix::unistd::geteuid().is_root() {
        words.extend(["--user", "--map-root-user"]);
    }
    words.extend(["sh", "-c", "\"$@\"; exit $?", "sh"]);
    // A list of strings is the same in JSON and TOML.
    format!("target.'cfg(unix)'.runner={}", json!(words))
}

impl Mutant {
    /// Returns the name without its file, line and column.
    fn description(&self) -> &str {
        self.name
            .split_once(": ")
            .map_or(&self.name, |(_, description)| description)
    }

    /// Writes the mutant into its file below `tree`, builds and runs the tests, and restores the file.
    fn try_in(&self, part: &Part, tree: &Path, seconds: u64) -> Result<usize> {
        let file = tree.join(&self.file);
        let name = || file.display().to_string();
        let text = fs::read_to_string(&file).with_context(name)?;
        let changed = self.applied(&text);
        fs::write(&file, changed.with_context(|| self.name.clone())?).with_context(name)?;
        let outcome = match part.builds(tree) {
            Ok(true) => part.test(tree, seconds),
            Ok(false) => Ok(UNVIABLE),
            Err(error) => Err(error),
        };
        fs::write(&file, text).with_context(name)?;
        outcome
    }

    /// Returns the text with the replacement in it, or `None` if the text has no such place.
    fn applied(&self, text: &str) -> Option<String> {
        let (start, end) = (self.span.start.offset(text)?, self.span.end.offset(text)?);
        let (before, after) = (text.get(..start)?, text.get(end..)?);
        // The blanks separate the replacement from adjacent words.
        Some(format!("{before} {} {after}", self.replacement))
    }
}

impl Place {
    /// Returns the byte offset of the place.
    fn offset(&self, text: &str) -> Option<usize> {
        let mut lines = text.split_inclusive('\n');
        let before: usize = lines.by_ref().take(self.line - 1).map(str::len).sum();
        let line = lines.next().unwrap_or_default();
        let mut columns = line.char_indices().map(|(at, _)| at).chain([line.len()]);
        Some(before + columns.nth(self.column - 1)?)
    }
}

/// Prints a table of the rooms and the list of survivors.
fn print(results: &[(&str, &Mutant, usize)]) {
    println!(
        "\n{:<8}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "part", OUTCOMES[0], OUTCOMES[1], OUTCOMES[2], OUTCOMES[3], "score"
    );
    for part in PARTS.iter().map(|part| part.name).chain(["total"]) {
        let mut counts = [0_usize; OUTCOMES.len()];
        for (its, _, outcome) in results {
            counts[*outcome] += usize::from(part == "total" || part == *its);
        }
        let [caught, missed, timeout, unviable] = counts;
        // Share of caught mutants among those that compile and finish in time.
        let score = match caught + missed {
            0 => "-".to_owned(),
            judged => format!("{:.1} %", 100.0 * caught as f64 / judged as f64),
        };
        if counts != [0; OUTCOMES.len()] {
            println!("{part:<8}{caught:>10}{missed:>10}{timeout:>10}{unviable:>10}{score:>10}");
        }
    }
    for wanted in [MISSED, TIMEOUT] {
        let mut survivors = results.iter().filter(|(.., it)| *it == wanted).peekable();
        if survivors.peek().is_some() {
            println!("\n{}:", OUTCOMES[wanted]);
            survivors.for_each(|(_, mutant, _)| println!("  {}", mutant.name));
        }
    }
    println!();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(file: &str, line: usize, columns: (usize, usize), replacement: &str) -> Mutant {
        let place = |column| Place { line, column };
        Mutant {
            file: file.to_owned(),
            name: format!("{file}:{line}:{}: replace with {replacement}", columns.0),
            replacement: replacement.to_owned(),
            span: Span {
                start: place(columns.0),
                end: place(columns.1),
            },
        }
    }

    #[test]
    fn mutant_replaces_its_span_counted_in_characters() {
        let text = "// ä\nlet ü = a && b;\n";
        let changed = mutant("a.rs", 2, (11, 13), "||").applied(text);
        assert_eq!(changed.as_deref(), Some("// ä\nlet ü = a  ||  b;\n"));
        assert_eq!(mutant("a.rs", 9, (11, 13), "||").applied(text), None);
    }

    #[test]
    fn sample_is_the_same_for_a_seed_and_survives_moved_lines() {
        let all = |shift: usize| -> Vec<Mutant> {
            (1..50)
                .map(|line| mutant("a.rs", line + shift, (1, 2), &(line % 7).to_string()))
                .collect()
        };
        let names = |shift, seed| -> Vec<usize> {
            let chosen = sample(all(shift), 5, seed);
            chosen.iter().map(|m| m.span.start.line - shift).collect()
        };
        assert_eq!(names(0, 1).len(), 5);
        assert_eq!(names(0, 1), names(100, 1));
        assert_ne!(names(0, 1), names(0, 2));
        assert_eq!(sample(all(0), 100, 1).len(), 49);
    }
}
