//! The CPU time that the model takes for an event of a backlog.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::table::Row;
use crate::shell::{executables, output, say};

/// The test that measures.
const TEST: &str = "tests::replay::time_of_a_replay";

/// Builds the tests of the model, optimised.
///
/// # Errors
/// The build fails.
pub fn build() -> Result<PathBuf> {
    say("building the tests of the model, optimised");
    let package = ["--package", "reaper-model", "--lib"];
    let arguments = [&["test", "--release", "--no-run"][..], &package].concat();
    let built = executables(&arguments)?.into_iter().next();
    built.map(|(file, _)| file).context("cargo built no tests")
}

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut tests = Command::new(&bench.model_tests);
    tests.args(["--exact", TEST, "--ignored", "--nocapture"]);
    let said = output(&mut tests)?;
    let lines = said.lines().filter_map(|line| line.strip_prefix("replay "));
    let rows: Vec<Row> = lines.map(row).collect::<Result<_>>()?;
    ensure!(!rows.is_empty(), "{TEST} says nothing");
    Ok(rows)
}

/// Reads a line: the number of sessions, that of events and the nanoseconds that they took.
fn row(line: &str) -> Result<Row> {
    let numbers = line.split(' ').map(str::parse::<u64>);
    let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().context("no number")?;
    let [sessions, events, ns] = numbers[..] else {
        anyhow::bail!("not three numbers: {line}");
    };
    let each = ns as f64 / events as f64 / 1e3;
    let what = format!("CPU for an event, model, replay of {sessions} sessions");
    let note = format!("{events} events in {:.0} ms", ns as f64 / 1e6);
    Ok(Row::new(what, each, "µs").at_most(3.0).note(note))
}
