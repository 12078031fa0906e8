//! `cargo xtask mutants`: how many small faults in the model and in `reap/` their own unit tests find.
//!
//! cargo-mutants lists the faults. Each of a sample is put into a copy of the workspace, where the tests are built and
//! run. cargo-mutants could do that too, but its filters let through what was not chosen.

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
  cargo xtask mutants                     300 mutants, always the same ones
  cargo xtask mutants --sample 20         a first look
  cargo xtask mutants --seed 2            300 others
  cargo xtask mutants --filter policy     only mutants with this in their file or description

The goal is a score of 90 %. The tests run in a PID namespace and with limited memory, so that a fault in reap/ can
signal no process of this machine. Survivors are listed, and do not fail the command.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
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

/// Sources to put faults into, and the tests that should find them.
struct Room {
    name: &'static str,
    package: &'static str,
    /// Directory of the sources.
    sources: &'static str,
    /// Text that the names of its tests contain.
    tests: &'static str,
}

const ROOMS: [Room; 2] = [
    Room {
        name: "model",
        package: "reaper-model",
        sources: "reaper-user/model/src",
        tests: "",
    },
    Room {
        name: "reap",
        package: "reaper-user",
        sources: "reaper-user/src/reap",
        tests: "reap::",
    },
];

/// Names of what can come of a mutant: a test failed, all passed, they did not end, it does not compile.
const OUTCOMES: [&str; 4] = ["caught", "missed", "timeout", "unviable"];
const CAUGHT: usize = 0;
const MISSED: usize = 1;
const TIMEOUT: usize = 2;
const UNVIABLE: usize = 3;

/// A replacement of one piece of a file, as cargo-mutants lists it.
#[derive(Clone, Deserialize)]
struct Mutant {
    /// File, relative to the root of the workspace.
    file: String,
    /// `file:line:column: description`.
    name: String,
    replacement: String,
    span: Span,
}

/// A piece of a file; `end` is the first place after it.
#[derive(Clone, Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// A character of a file; line and column begin at 1.
#[derive(Clone, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

/// Tries the sample and prints what came of it.
///
/// # Errors
/// The tests fail without a fault, or a program that is needed cannot be had.
pub fn mutants(args: &Args) -> Result<()> {
    let began = Instant::now();
    let tool = cargo_tool("cargo-mutants", CARGO_MUTANTS, "two minutes")?;

    say("1/3 a copy of the workspace, and the mutants in it");
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
    for room in &ROOMS {
        let lies_here = |m: &&Mutant| Path::new(&m.file).starts_with(room.sources);
        let mutants: Vec<&Mutant> = sample.iter().filter(lies_here).collect();
        if mutants.is_empty() {
            continue;
        }
        let name = room.name;
        say(format_args!(
            "2/3 the tests of {name} without a fault (the first build takes some minutes)"
        ));
        ensure!(
            room.builds(&tree)?,
            "{0} does not compile; its errors: cargo check --package {0}",
            room.package
        );
        let start = Instant::now();
        let outcome = room.test(&tree, 600)?;
        ensure!(
            outcome == MISSED,
            "the tests of {name} fail without a fault in a PID namespace: {}",
            OUTCOMES[outcome]
        );
        let seconds = TIMEOUT_MIN.max((start.elapsed() * TIMEOUT_FACTOR as u32).as_secs());
        say(format_args!(
            "3/3 one build and one run of the tests, within {seconds} s, for each mutant"
        ));
        for mutant in mutants {
            let start = Instant::now();
            let outcome = mutant.try_in(room, &tree, seconds)?;
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

/// Lists the mutants of all rooms.
fn list(tool: &Path, tree: &Path) -> Result<Vec<Mutant>> {
    let mut command = Command::new(tool);
    command.args(["mutants", "--list", "--json", "--no-config", "--dir"]);
    command.arg(tree).current_dir(tree);
    for room in &ROOMS {
        let files = format!("{}/**", room.sources);
        command.args(["--package", room.package, "--file", &files]);
    }
    serde_json::from_str(&output(&mut command)?).context("the list of cargo-mutants")
}

/// Returns `count` mutants, or all if there are fewer, in the order of the list.
///
/// The choice depends on what a mutant changes and not on its line: most of a sample stays the same when the code
/// around it changes.
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

impl Room {
    /// Has cargo build or run the unit tests in a copy of the workspace.
    fn cargo(&self, tree: &Path) -> Command {
        let mut cargo = cargo();
        cargo
            .args(["test", "--quiet", "--locked", "--lib", "--package"])
            .arg(self.package)
            .current_dir(tree)
            .env("CARGO_TARGET_DIR", target_dir().join("mutants/build"))
            // Tests inherit from this profile. Time goes into builds, so that nothing is optimised.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_INCREMENTAL", "1")
            // Lets a stable libtest end at the first failure.
            .env("RUSTC_BOOTSTRAP", "1")
            // One mutant's failures are not tried with the next one.
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

    /// Runs the tests until one fails, for so many seconds.
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

/// Returns cargo's setting for what runs a test executable. No process outside of the namespace has a pid in it. The end
/// of its init, the shell, ends all others.
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
    fn try_in(&self, room: &Room, tree: &Path, seconds: u64) -> Result<usize> {
        let file = tree.join(&self.file);
        let name = || file.display().to_string();
        let text = fs::read_to_string(&file).with_context(name)?;
        let changed = self.applied(&text);
        fs::write(&file, changed.with_context(|| self.name.clone())?).with_context(name)?;
        let outcome = match room.builds(tree) {
            Ok(true) => room.test(tree, seconds),
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
        // Spaces, so that the replacement joins no word beside it.
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
        "room", OUTCOMES[0], OUTCOMES[1], OUTCOMES[2], OUTCOMES[3], "score"
    );
    for room in ROOMS.iter().map(|room| room.name).chain(["total"]) {
        let mut counts = [0_usize; OUTCOMES.len()];
        for (its, _, outcome) in results {
            counts[*outcome] += usize::from(room == "total" || room == *its);
        }
        let [caught, missed, timeout, unviable] = counts;
        // The share of caught mutants among those that tests could judge.
        let score = match caught + missed {
            0 => "-".to_owned(),
            judged => format!("{:.1} %", 100.0 * caught as f64 / judged as f64),
        };
        if counts != [0; OUTCOMES.len()] {
            println!("{room:<8}{caught:>10}{missed:>10}{timeout:>10}{unviable:>10}{score:>10}");
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
