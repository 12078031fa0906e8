//! `cargo xtask mutants`: how many small faults in the model and in `reap/` their own unit tests find.
//!
//! cargo-mutants lists the faults. A round puts one of them into a copy of the workspace, builds the tests there and
//! runs them. cargo-mutants could do that too, but not for a chosen sample, and it waits for all tests where the first
//! failure is enough.

mod copy;
mod mutant;
mod round;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::shell::{cargo_tool, say, target_dir};
use mutant::Mutant;
use round::{Tests, Workshop};

const CARGO_MUTANTS: &str = "27.1.0";

/// Shortest time limit for a run of the tests.
const TIMEOUT_MIN: Duration = Duration::from_secs(20);
/// Time limit as a multiple of the time that the tests take without a fault.
const TIMEOUT_FACTOR: u32 = 4;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// A test failed.
    Caught,
    /// All tests passed.
    Missed,
    /// The tests did not end.
    Timeout,
    /// The mutant does not compile.
    Unviable,
}

impl Outcome {
    const ALL: [Outcome; 4] = [
        Outcome::Caught,
        Outcome::Missed,
        Outcome::Timeout,
        Outcome::Unviable,
    ];

    fn name(self) -> &'static str {
        match self {
            Outcome::Caught => "caught",
            Outcome::Missed => "missed",
            Outcome::Timeout => "timeout",
            Outcome::Unviable => "unviable",
        }
    }
}

/// Tries the sample and prints what came of it.
///
/// # Errors
/// The tests fail without a fault, or a program that is needed cannot be had.
pub fn mutants(args: &Args) -> Result<()> {
    let began = Instant::now();
    let dir = target_dir().join("mutants");
    let tool = cargo_tool("cargo-mutants", CARGO_MUTANTS, "two minutes")?;

    say("1/3 a copy of the workspace, and the mutants in it");
    let tree = dir.join("tree");
    copy::workspace_to(&tree)?;
    let (names, dirs): (Vec<_>, Vec<_>) = ROOMS
        .iter()
        .map(|room| (room.package, format!("{}/**", room.sources)))
        .unzip();
    let mut all = mutant::list(&tool, &tree, &names, &dirs)?;
    if let Some(text) = &args.filter {
        all.retain(|mutant| mutant.name.contains(text.as_str()));
    }
    let count = all.len();
    let sample = mutant::sample(all, args.sample, args.seed);
    ensure!(!sample.is_empty(), "no mutant matches");
    say(format_args!(
        "{} of {count} mutants, seed {}",
        sample.len(),
        args.seed
    ));

    say("2/3 the tests without a fault (the first build takes some minutes)");
    let workshop = Workshop::new(&dir, &tree);
    let mut rounds = Vec::new();
    for room in &ROOMS {
        let mutants: Vec<&Mutant> = sample.iter().filter(|m| m.lies_in(room.sources)).collect();
        if mutants.is_empty() {
            continue;
        }
        let tests = workshop.build(room.package, 0)?.with_context(|| {
            format!("{} does not compile; its errors: cargo check", room.package)
        })?;
        let start = Instant::now();
        let outcome = workshop.test(&tests, room.tests, Duration::from_secs(600))?;
        let time = start.elapsed();
        ensure!(
            outcome == Outcome::Missed,
            "the tests of {} fail without a fault in a PID namespace: {}",
            room.name,
            outcome.name()
        );
        let timeout = TIMEOUT_MIN.max(time * TIMEOUT_FACTOR);
        say(format_args!(
            "{}: tests take {:.1} s, time limit {:.0} s",
            room.name,
            time.as_secs_f64(),
            timeout.as_secs_f64()
        ));
        rounds.push((room, timeout, mutants));
    }

    say("3/3 one build and one run of the tests for each mutant");
    let start = Instant::now();
    let results = try_all(&workshop, &tree, &rounds, sample.len())?;
    print(&results);
    let each = start.elapsed().as_secs_f64() / results.len() as f64;
    say(format_args!(
        "{:.1} s per mutant, {:.1} min in all",
        each,
        began.elapsed().as_secs_f64() / 60.0
    ));
    Ok(())
}

/// What came of a mutant.
struct Tried<'a> {
    room: &'static str,
    mutant: &'a Mutant,
    outcome: Outcome,
}

/// Builds each mutant while the tests of the one before it run.
fn try_all<'a>(
    workshop: &Workshop,
    tree: &Path,
    rounds: &[(&'static Room, Duration, Vec<&'a Mutant>)],
    count: usize,
) -> Result<Vec<Tried<'a>>> {
    let (send, receive) = sync_channel::<(usize, &Room, Duration, &'a Mutant, Option<Tests>)>(0);
    thread::scope(|scope| {
        let tester = scope.spawn(move || -> Result<Vec<Tried<'a>>> {
            let mut results = Vec::new();
            for (at, room, timeout, mutant, tests) in receive {
                let start = Instant::now();
                let outcome = match &tests {
                    Some(tests) => workshop.test(tests, room.tests, timeout)?,
                    None => Outcome::Unviable,
                };
                println!(
                    "[{at}/{count}] {:<8} {} ({:.1} s)",
                    outcome.name(),
                    mutant.name,
                    start.elapsed().as_secs_f64()
                );
                results.push(Tried {
                    room: room.name,
                    mutant,
                    outcome,
                });
            }
            Ok(results)
        });
        let mut at = 0;
        let built = rounds.iter().try_for_each(|(room, timeout, mutants)| {
            mutants.iter().try_for_each(|mutant| {
                at += 1;
                let original = mutant.put_into(tree)?;
                let tests = workshop.build(room.package, at);
                original.restore()?;
                // Fails only if the tester has failed, which reports why.
                let _ = send.send((at, room, *timeout, mutant, tests?));
                anyhow::Ok(())
            })
        });
        drop(send);
        let results = tester
            .join()
            .map_err(|_| anyhow!("the test thread panicked"))?;
        built?;
        results
    })
}

/// Prints a table of the rooms and the list of survivors.
fn print(results: &[Tried]) {
    let mut counts: BTreeMap<&str, BTreeMap<Outcome, usize>> = BTreeMap::new();
    for tried in results {
        for room in [tried.room, "total"] {
            *counts
                .entry(room)
                .or_default()
                .entry(tried.outcome)
                .or_default() += 1;
        }
    }
    println!();
    print!("{:<8}", "room");
    for outcome in Outcome::ALL {
        print!("{:>10}", outcome.name());
    }
    println!("{:>10}", "score");
    for room in ROOMS.iter().map(|room| room.name).chain(["total"]) {
        let Some(counts) = counts.get(room) else {
            continue;
        };
        let number = |outcome| counts.get(&outcome).copied().unwrap_or(0);
        print!("{room:<8}");
        for outcome in Outcome::ALL {
            print!("{:>10}", number(outcome));
        }
        println!(
            "{:>10}",
            score(number(Outcome::Caught), number(Outcome::Missed))
        );
    }
    for outcome in [Outcome::Missed, Outcome::Timeout] {
        let mut names: Vec<String> = results
            .iter()
            .filter(|tried| tried.outcome == outcome)
            .map(|tried| tried.mutant.place_and_description())
            .collect();
        names.sort();
        if !names.is_empty() {
            println!("\n{}:", outcome.name());
            names.iter().for_each(|name| println!("  {name}"));
        }
    }
    println!();
}

/// Returns the share of caught mutants among those that tests could judge.
fn score(caught: usize, missed: usize) -> String {
    match caught + missed {
        0 => "-".to_owned(),
        judged => format!("{:.1} %", 100.0 * caught as f64 / judged as f64),
    }
}

/// A file with the text it had before a mutant was put into it.
struct Original {
    file: PathBuf,
    text: String,
}

impl Original {
    fn restore(&self) -> Result<()> {
        std::fs::write(&self.file, &self.text).with_context(|| self.file.display().to_string())
    }
}
