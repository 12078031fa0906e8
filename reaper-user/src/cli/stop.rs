//! `reaper stop`: stops runs.

use super::runs::{open, print_survivors, run_label};
use super::{Failure, OWN_FAILURE, ps};
use crate::export::{print, printable};
use crate::run::RunOutcome;

pub(super) const HELP: &str = "\
A run is stopped as by its own time limit: --signal first, then SIGKILL after the --grace that it was started with. A \
    second `stop` skips the grace. The outcome is `cancelled`, neither a success nor a failure, and the hooks do not run. \
    A run that has ended by itself in the meantime keeps its own outcome. `stop` waits until no process is left.

`stop` signals only the `reaper run` process, which then ends the run, and only if the recorded pid still belongs to it. If one \
    of several runs cannot be stopped, the others still are.

Examples:
  # Stop a run by its name
  reaper stop web

  # Stop a run by the first characters of its id
  reaper stop k4

Exit status:
  0    all runs have ended
  1    processes could not be ended; they are listed
  2    wrong usage
  125  there is no such run, or it cannot be stopped

With --json, each object has the keys of `reaper ps --json`.";

/// Stops the runs and returns the exit status. If one cannot be stopped, the others still are.
pub(super) fn run(names: &[String], json: bool) -> Result<u8, Failure> {
    let runs = open()?;
    let mut status = 0;
    let mut report = |failure: Failure| {
        failure.print();
        status = OWN_FAILURE;
    };
    let mut all = Vec::new();
    for name in names {
        match runs.find(name).map_err(Failure::from) {
            Ok(run) => all.push(run),
            Err(failure) => report(failure),
        }
    }
    // Requests all stops before it waits for the first.
    all.retain(|run| {
        let stopped = match run.record.result {
            None => runs.stop(run),
            Some(_) => Ok(()),
        };
        stopped.map_err(|error| report(error.into())).is_ok()
    });
    let mut left = false;
    for run in all {
        let had_ended = run.record.result.is_some();
        let run = match runs.wait(&run) {
            Ok(run) => run,
            Err(error) => {
                report(error.into());
                continue;
            }
        };
        let Some(result) = &run.record.result else {
            continue;
        };
        let outcome = result.outcome.as_str();
        let state = match result.outcome {
            _ if had_ended => format!("had already ended: {outcome}"),
            RunOutcome::Cancelled => "stopped".to_owned(),
            _ => format!("ended by itself: {outcome}"),
        };
        let line = printable(&format!("{} {state}", run_label(&run)), usize::MAX);
        let line = match json {
            true => ps::to_json(&run),
            false => format!("{line}\n").into_bytes(),
        };
        print(line).map_err(Failure::stdout)?;
        print_survivors(&run, &result.left);
        left |= !result.left.is_empty() && !had_ended;
    }
    Ok(status.max(u8::from(left)))
}
