//! CPU time of the model per event of a backlog.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::Bench;
use super::table::Row;
use crate::shell::{executables, output, say};

/// Builds `benches/replay.rs` of the model, which measures.
///
/// # Errors
/// The build fails.
pub fn build() -> Result<PathBuf> {
    say("building the replay of the model (release)");
    let bench = ["--package", "reaper-model", "--bench", "replay"];
    let arguments = [&["build", "--release"][..], &bench].concat();
    let built = executables(&arguments)?.into_iter().next();
    built.map(|(file, _)| file).context("cargo built no bench")
}

pub fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let lines = output(&mut Command::new(&bench.replay))?;
    lines.lines().map(row).collect()
}

/// Parses a line: number of sessions, number of events, and nanoseconds.
fn row(line: &str) -> Result<Row> {
    let numbers = line.split(' ').map(str::parse::<u64>);
    let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().context("not a number")?;
    let [sessions, events, ns] = numbers[..] else {
        anyhow::bail!("not three numbers: {line}");
    };
    let each = ns as f64 / events as f64 / 1e3;
    let what = format!("CPU per event, model, replay of {sessions} sessions");
    let note = format!("{events} events in {:.0} ms", ns as f64 / 1e6);
    Ok(Row::new(what, each, "µs").at_most(3.0).note(note))
}
