//! `reaper ps`: lists the user's runs.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use super::Failure;
use super::client::{BOLD, DIM};
use super::runs::{open, redacted_command, shown_here};
use super::show::{count, fit, time, width};
use crate::export::{self, print, printable};
use crate::run::{RecordedRun, RunHeader, RunRecord, RunResult};
use reaper_host::sys;

pub(super) const HELP: &str = "\
Needs no service. Lists the commands that you have started with `reaper run`. Runs whose `reaper run` process was \
    killed are closed first, and what is left of them is ended: the command, if its pid still belongs to it, its \
    descendants and the processes in its cgroup. Runs from before the last boot are only closed.

Columns: STATE is `waiting`, `running`, `ending` or `lost`, and for a finished run its outcome: `success`, `failed`, \
    `death` (a signal, or --done-when said that it is not done), `timeout`, `idle` or `cancelled`. AGE is the time since the \
    start; for a finished run, how long it took. LEFT is what remains of --timeout. PID is `-` for a run of another pid \
    namespace, such as a container.

Examples:
  reaper ps

  # List the ids of the runs that --timeout ended
  reaper ps --all --json | jq '.runs[] | select(.outcome == \"timeout\") | .id'";

/// Longest value of a column, in characters.
const COLUMN_MAX: usize = 32;
/// Longest command, in characters.
const COMMAND_MAX: usize = 256;

#[derive(Args)]
pub(super) struct PsArgs {
    /// Include finished runs: the last 100, up to 30 days.
    #[arg(long)]
    all: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct PsOutput<'a> {
    schema: u32,
    runs: Vec<ListedRun<'a>>,
}

#[derive(Serialize)]
struct ListedRun<'a> {
    #[serde(flatten)]
    start: RunHeader,
    /// `waiting`, `running`, `ending`, `closed`, or `lost` if its `reaper run` was killed and it cannot be closed here.
    state: &'static str,
    /// Pid of the command, once it has started. `None` too if it belongs to another pid namespace.
    pid: Option<u32>,
    /// Time since the record was created. Of a closed run its duration, if a supervisor has observed that.
    age_ms: u64,
    /// Time left of `--timeout`; `None` without it and for a closed run.
    remaining_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,
    #[serde(flatten)]
    result: Option<&'a RunResult>,
}

pub(super) fn run(args: &PsArgs) -> Result<(), Failure> {
    let runs = open()?;
    let mut known = runs.list(args.all)?;
    // A run may have ended since its record was read.
    known.retain_mut(|known| {
        let ended = known.record.result.is_none()
            && known.has_supervisor().is_ok_and(|supervised| !supervised);
        if let (true, Ok(now)) = (ended, runs.reload(known)) {
            *known = now;
        }
        args.all || known.record.result.is_none()
    });
    runs.prune();
    let known: Vec<RecordedRun> = known.into_iter().map(shown_here).collect();
    let output = PsOutput {
        schema: 1,
        runs: known.iter().map(ListedRun::of).collect(),
    };
    let text = match args.json {
        true => export::to_json(&output),
        false => table(&output.runs, args.all, width()).into_bytes(),
    };
    print(text).map_err(Failure::stdout)
}

/// Returns a run as one line of JSON, as in the list.
pub(super) fn to_json(run: &RecordedRun) -> Vec<u8> {
    let run = shown_here(run.clone());
    export::to_json(&ListedRun::of(&run))
}

impl ListedRun<'_> {
    fn of(known: &RecordedRun) -> ListedRun<'_> {
        let RunRecord {
            header: start,
            commands,
            claim,
            result,
            ..
        } = &known.record;
        let first = commands.first();
        let state = match (result, claim, first) {
            (Some(_), _, _) => "closed",
            _ if known.has_supervisor().is_ok_and(|supervised| !supervised) => "lost",
            (None, Some(_), _) => "ending",
            (None, None, Some(_)) => "running",
            (None, None, None) => "waiting",
        };
        let now = Timestamp::now();
        let since = Duration::try_from(now.duration_since(start.started)).unwrap_or_default();
        let duration = result.as_ref().and_then(|result| result.duration_ms);
        let spent = || {
            let began = first.map_or_else(sys::monotonic, |first| first.at);
            sys::monotonic().saturating_sub(began) / 1_000_000
        };
        let budget = start.timeout_ms.filter(|_| result.is_none());
        ListedRun {
            state,
            pid: first.and_then(|first| first.process.pid),
            age_ms: duration.unwrap_or(since.as_millis() as u64),
            remaining_ms: budget.map(|budget| budget.saturating_sub(spent())),
            log: start.detached.then(|| known.log().display().to_string()),
            result: result.as_ref(),
            start: RunHeader {
                command: redacted_command(known),
                ..start.clone()
            },
        }
    }

    /// Returns the outcome of a finished run, the state of another one.
    fn shown_state(&self) -> &'static str {
        self.result
            .map_or(self.state, |result| result.outcome.as_str())
    }

    /// Returns the age. `None` for a finished run whose duration nothing has measured: its age would grow without meaning.
    fn age_ms_if_known(&self) -> Option<u64> {
        let is_measured = self
            .result
            .is_none_or(|result| result.duration_ms.is_some());
        is_measured.then_some(self.age_ms)
    }

    /// Returns the columns before the command, with `-` for a missing value.
    fn columns(&self) -> [String; 8] {
        let text = |text: &Option<String>| {
            text.as_deref()
                .map_or_else(|| "-".into(), |text| printable(text, COLUMN_MAX))
        };
        let time = |ms: Option<u64>| ms.map_or_else(|| "-".into(), |ms| time(ms / 1000));
        [
            printable(&self.start.id, COLUMN_MAX),
            text(&self.start.name),
            self.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
            self.shown_state().to_owned(),
            time(self.age_ms_if_known()),
            time(self.remaining_ms),
            text(&self.start.session),
            text(&self.start.agent),
        ]
    }
}

/// Returns the number of runs in each state.
fn summary(runs: &[ListedRun<'_>], all: bool) -> String {
    if runs.is_empty() {
        return match all {
            true => "No run is recorded.".into(),
            false => "No run is open; `reaper ps --all` lists finished runs too.".into(),
        };
    }
    let mut states: Vec<(&str, usize)> = Vec::new();
    for run in runs {
        let state = run.shown_state();
        match states.iter_mut().find(|(known, _)| *known == state) {
            Some((_, number)) => *number += 1,
            None => states.push((state, 1)),
        }
    }
    let states = states
        .iter()
        .map(|(state, number)| format!("{number} {state}"));
    let states: Vec<String> = states.collect();
    let runs = count(runs.len() as u64, "run", "runs");
    format!("{runs}: {}", states.join(", "))
}

fn table(runs: &[ListedRun<'_>], all: bool, width: Option<usize>) -> String {
    let mut out = format!("{BOLD}{}{BOLD:#}\n", summary(runs, all));
    if runs.is_empty() {
        return out;
    }
    let head = [
        "ID", "NAME", "PID", "STATE", "AGE", "LEFT", "SESSION", "AGENT",
    ]
    .map(String::from);
    let rows: Vec<_> = runs.iter().map(ListedRun::columns).collect();
    // The first five columns are always shown, the others only if a run has a value.
    let shown = |n: &usize| *n < 5 || rows.iter().any(|row| row[*n] != "-");
    let columns: Vec<usize> = (0..head.len()).filter(shown).collect();
    let column_width = |n: usize| {
        let all = rows.iter().chain([&head]);
        all.map(|row| row[n].chars().count())
            .max()
            .unwrap_or_default()
    };
    let line = |row: &[String; 8]| -> String {
        let pad = |n: &usize| format!("{:<1$}  ", row[*n], column_width(*n));
        columns.iter().map(pad).collect()
    };
    out += &format!("\n{DIM}{}COMMAND{DIM:#}\n", line(&head));
    for (row, run) in rows.iter().zip(runs) {
        let before = line(row);
        let command = run.start.command.join(" ");
        let command = fit(&command, before.chars().count(), COMMAND_MAX, width);
        out += &format!("{before}{command}\n");
    }
    out
}

#[cfg(test)]
mod tests;
