//! What `reaper ps`, `stop`, `wait` and `logs` have in common.

use super::Failure;
use super::show::count;
use crate::export::{message, printable, redact};
use crate::run::{RecordError, RecordedRun, Runs, StopError, Survivor};

/// Characters of a command line in a message.
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

/// Those of this user, after those were closed whose owner is gone.
pub(super) fn open() -> Result<Runs, Failure> {
    let runs = Runs::of_user()?;
    close_dead(&runs, true);
    Ok(runs)
}

/// Closes them. What cannot be ended is told of in any case, with `talk` what was ended too.
pub(super) fn close_dead(runs: &Runs, talk: bool) {
    let closed = match runs.close_dead() {
        Ok(closed) => closed,
        Err(error) => return tracing::warn!("{error}"),
    };
    for known in &closed {
        let over = known.record.result.as_ref();
        let ended = over.map_or(0, |over| over.ended);
        if talk {
            let ended = count(ended as u64, "process", "processes");
            let why = over.and_then(|over| over.notes.first());
            let why = why.map_or("", String::as_str);
            message!(
                "reaper: run {} is closed: {why}; {ended} of it ended",
                called(known)
            );
        }
        print_survivors(known, over.map_or(&[], |over| &over.left));
    }
}

/// Says who of a run could not be ended.
pub(super) fn print_survivors(known: &RecordedRun, all: &[Survivor]) {
    for left in all {
        let (pid, why) = (left.pid, &left.reason);
        let command = printable(&left.command, COMMAND_MAX);
        message!(
            "reaper: left behind of run {}: pid {pid} ({command}): {why}",
            known.id()
        );
    }
}

/// Its id, and its name if it has one.
pub(super) fn called(known: &RecordedRun) -> String {
    match &known.record.header.name {
        Some(name) => format!("{} ({name})", known.id()),
        None => known.id().to_owned(),
    }
}

/// The words of its command, without secrets.
pub(super) fn words(known: &RecordedRun) -> Vec<String> {
    let words = known.record.header.command.iter().map(String::as_bytes);
    let shown = redact::arguments(words).map(|word| String::from_utf8_lossy(&word).into_owned());
    shown.collect()
}
