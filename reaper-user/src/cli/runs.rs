//! Helpers for `reaper ps`, `stop`, `wait` and `logs`.

use super::show::count;
use super::{Failure, OWN_FAILURE, is_broken_pipe};
use crate::export::{message, printable, redact};
use crate::run::{RecordError, RecordedRun, Runs, StopError, Survivor};
use reaper_host::sys;

/// Longest command line in a message, in characters.
const COMMAND_MAX: usize = 200;

impl From<RecordError> for Failure {
    fn from(error: RecordError) -> Failure {
        match error {
            RecordError::Unknown(_) | RecordError::Ambiguous { .. } => {
                Failure::Refused(printable(&error.to_string(), 1000))
            }
            other => Failure::Other(other.into()),
        }
    }
}

impl From<StopError> for Failure {
    fn from(error: StopError) -> Failure {
        match error {
            StopError::Record(error) => error.into(),
            other => Failure::Refused(printable(&other.to_string(), 1000)),
        }
    }
}

/// Prints the error of a command about runs, and returns its exit status: 125, also if there is no such run.
///
/// # Errors
/// Standard output was closed.
pub(super) fn own_status(result: Result<u8, Failure>) -> Result<u8, Failure> {
    match result {
        Err(Failure::Other(error)) if is_broken_pipe(&error) => Err(Failure::Other(error)),
        Err(failure) => {
            failure.print();
            Ok(OWN_FAILURE)
        }
        result => result,
    }
}

/// Opens the records of the user's runs, after closing those whose `reaper run` was killed.
pub(super) fn open() -> Result<Runs, Failure> {
    let runs = Runs::of_user()?;
    close_dead(&runs, true);
    Ok(runs)
}

/// Closes runs whose `reaper run` was killed. Prints processes that could not be ended, with `verbose` also what was
/// ended.
pub(super) fn close_dead(runs: &Runs, verbose: bool) {
    let closed = match runs.close_dead() {
        Ok(closed) => closed,
        Err(error) => {
            return tracing::warn!(
                "runs whose `reaper run` was killed are not cleaned up: {error}"
            );
        }
    };
    for run in &closed {
        let result = run.record.result.as_ref();
        let ended = result.map_or(0, |result| result.ended);
        if verbose {
            let ended = count(ended as u64, "process", "processes");
            let why = result.and_then(|result| result.notes.first());
            let why = why.map_or("", String::as_str);
            message!(
                "reaper: closed run {}: {why}; ended {ended}",
                run_label(run)
            );
        }
        print_survivors(run, result.map_or(&[], |result| &result.left));
    }
}

/// Returns the run without pids of another pid namespace, where they mean other processes.
pub(super) fn shown_here(mut run: RecordedRun) -> RecordedRun {
    run.record = run.record.shown_in(sys::non_initial_pid_namespace().ok());
    run
}

/// Prints the processes of a run that could not be ended.
pub(super) fn print_survivors(run: &RecordedRun, all: &[Survivor]) {
    for left in all {
        message!("reaper: run {}: left behind: {}", run.id(), survivor(left));
    }
}

/// Returns a process that could not be ended, with the reason.
pub(super) fn survivor(left: &Survivor) -> String {
    let (command, why) = (printable(&left.command, COMMAND_MAX), &left.reason);
    match left.pid {
        None => format!("a process of another pid namespace ({command}): {why}"),
        Some(pid) => format!("pid {pid} ({command}): {why}"),
    }
}

/// Returns the id of a run, with its name if it has one.
pub(super) fn run_label(run: &RecordedRun) -> String {
    match &run.record.header.name {
        Some(name) => format!("{} ({name})", run.id()),
        None => run.id().to_owned(),
    }
}

/// Returns the command of a run, without secrets.
pub(super) fn redacted_command(run: &RecordedRun) -> Vec<String> {
    let redacted_command = run.record.header.command.iter().map(String::as_bytes);
    let shown =
        redact::arguments(redacted_command).map(|word| String::from_utf8_lossy(&word).into_owned());
    shown.collect()
}
