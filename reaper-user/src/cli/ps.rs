//! `reaper ps`

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use super::Failure;
use super::client::{BOLD, DIM, age};
use super::runs::{open, redacted_command};
use super::show::{fit, width};
use crate::export::{print, printable, to_json};
use crate::run::{RecordedRun, RunHeader, RunRecord, RunResult};
use reaper_host::sys;

pub(super) const HELP: &str = "\
Needs no service. Lists the commands that you have started with `reaper run`. Runs whose `reaper run` process was \
    killed are closed first, and what is left of them is ended: the command, if its pid still belongs to it, its \
    descendants and the processes in its cgroup. Runs from before the last boot are only closed.

Columns: AGE is the time since the start, LEFT what remains of --timeout.

Examples:
  reaper ps
  reaper ps --all --json | jq '.runs[] | select(.outcome == \"timeout\") | .id'";

/// Characters of a column, and of a command line.
const COLUMN_MAX: usize = 32;
const COMMAND_MAX: usize = 256;

#[derive(Args)]
pub(super) struct PsArgs {
    /// Also those that are over: the last 100, for 30 days.
    #[arg(long)]
    all: bool,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct PsOutput<'a> {
    schema: u32,
    runs: Vec<Shown<'a>>,
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    start: RunHeader,
    /// `waiting`, `running`, `ending`, `lost` (its owner is gone, and it cannot be closed from here) or `closed`.
    state: &'static str,
    /// Of the command, once that has been started.
    pid: Option<u32>,
    age_ms: u64,
    remaining_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,
    #[serde(flatten)]
    over: Option<&'a RunResult>,
}

pub(super) fn run(args: &PsArgs) -> Result<(), Failure> {
    let runs = open()?;
    let mut known = runs.list(args.all)?;
    // It may have ended since it was read.
    known.retain_mut(|known| {
        let ended =
            known.record.result.is_none() && known.has_supervisor().is_ok_and(|owned| !owned);
        if let (true, Ok(now)) = (ended, runs.reload(known)) {
            *known = now;
        }
        args.all || known.record.result.is_none()
    });
    runs.prune();
    let said = PsOutput {
        schema: 1,
        runs: known.iter().map(Shown::of).collect(),
    };
    let text = match args.json {
        true => to_json(&said),
        false => table(&said.runs, args.all, width()).into_bytes(),
    };
    print(text).map_err(|error| Failure::Other(error.into()))
}

impl Shown<'_> {
    fn of(known: &RecordedRun) -> Shown<'_> {
        let RunRecord {
            header: start,
            commands,
            claim,
            result: over,
            ..
        } = &known.record;
        let first = commands.first();
        let state = match (over, claim, first) {
            (Some(_), _, _) => "closed",
            _ if known.has_supervisor().is_ok_and(|owned| !owned) => "lost",
            (None, Some(_), _) => "ending",
            (None, None, Some(_)) => "running",
            (None, None, None) => "waiting",
        };
        let now = Timestamp::now();
        let since = Duration::try_from(now.duration_since(start.started)).unwrap_or_default();
        let lasted = over.as_ref().and_then(|over| over.duration_ms);
        let spent = || {
            let began = first.map_or_else(sys::monotonic, |first| first.at);
            sys::monotonic().saturating_sub(began) / 1_000_000
        };
        let budget = start.timeout_ms.filter(|_| over.is_none());
        Shown {
            state,
            pid: first.map(|first| first.process.pid),
            age_ms: lasted.unwrap_or(since.as_millis() as u64),
            remaining_ms: budget.map(|budget| budget.saturating_sub(spent())),
            log: start.detached.then(|| known.log().display().to_string()),
            over: over.as_ref(),
            start: RunHeader {
                command: redacted_command(known),
                ..start.clone()
            },
        }
    }

    /// What stands in the columns before the command.
    fn columns(&self) -> [String; 8] {
        let text = |text: &Option<String>| {
            text.as_deref()
                .map_or_else(|| "-".into(), |text| printable(text, COLUMN_MAX))
        };
        let time = |ms: Option<u64>| ms.map_or_else(|| "-".into(), |ms| age(ms / 1000));
        [
            printable(&self.start.id, COLUMN_MAX),
            text(&self.start.name),
            self.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
            match self.over {
                Some(over) => over.outcome.as_str().to_owned(),
                None => self.state.to_owned(),
            },
            time(Some(self.age_ms)),
            time(self.remaining_ms),
            text(&self.start.session),
            text(&self.start.agent),
        ]
    }
}

fn table(runs: &[Shown<'_>], all: bool, width: Option<usize>) -> String {
    if runs.is_empty() {
        let more = if all {
            ""
        } else {
            "; `--all` shows those that are over"
        };
        return format!("{DIM}no run{more}{DIM:#}\n");
    }
    let head = [
        "id",
        "name",
        "pid",
        "state",
        "age",
        "remaining",
        "session",
        "agent",
    ]
    .map(String::from);
    let rows: Vec<_> = runs.iter().map(Shown::columns).collect();
    // What no run has is no column, but for the first few.
    let shown = |n: &usize| *n < 5 || rows.iter().any(|row| row[*n] != "-");
    let columns: Vec<usize> = (0..head.len()).filter(shown).collect();
    let wide = |n: usize| {
        let all = rows.iter().chain([&head]);
        all.map(|row| row[n].chars().count())
            .max()
            .unwrap_or_default()
    };
    let line = |row: &[String; 8]| -> String {
        let pad = |n: &usize| format!("{:<1$}  ", row[*n], wide(*n));
        columns.iter().map(pad).collect()
    };
    let mut out = format!("{BOLD}{}command{BOLD:#}\n", line(&head));
    for (row, run) in rows.iter().zip(runs) {
        let before = line(row);
        let command = fit(
            &run.start.command.join(" "),
            before.chars().count(),
            COMMAND_MAX,
            width,
        );
        out += &format!("{before}{command}\n");
    }
    out
}

#[cfg(test)]
mod tests;
