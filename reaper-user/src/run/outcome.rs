//! Decides the outcome of a run. Pure: the caller passes in the state.

use std::time::Duration;

/// Exit of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandExit {
    /// Exited with this status.
    Exited(u8),
    /// Killed by the signal with this number.
    Killed(i32),
}

impl CommandExit {
    /// Returns the status as a shell reports it: the exit status, or 128 plus the number of the signal.
    pub fn status(self) -> u8 {
        match self {
            CommandExit::Exited(status) => status,
            CommandExit::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }
}

/// State of a run at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunState {
    /// Last result of the done check; `None` without a check.
    pub done: Option<bool>,
    /// Exit of the command; `None` while it runs.
    pub end: Option<CommandExit>,
    /// Number of the signal by which the run was stopped.
    pub stop: Option<i32>,
    /// Time since the start of the command.
    pub age: Duration,
    /// Limit for `age`.
    pub budget: Option<Duration>,
    /// Time since the last output.
    pub silent: Duration,
    /// Limit for `silent`.
    pub idle: Option<Duration>,
}

/// Outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// The done check succeeded or, without a check, the command exited with status 0.
    Success,
    /// The command exited with another status, or it could not start.
    Failed,
    /// A signal killed the command, it exited with status 0 while the done check failed, or its supervisor was killed.
    Death,
    /// The time limit expired.
    Timeout,
    /// The limit on the time without output expired.
    Idle,
    /// A user or another process stopped the run: neither a success nor a failure.
    Cancelled,
}

impl RunOutcome {
    /// Returns the name that the report uses.
    pub fn as_str(self) -> &'static str {
        match self {
            RunOutcome::Success => "success",
            RunOutcome::Failed => "failed",
            RunOutcome::Death => "death",
            RunOutcome::Timeout => "timeout",
            RunOutcome::Idle => "idle",
            RunOutcome::Cancelled => "cancelled",
        }
    }

    /// Returns whether the run counts as failed: any outcome but `Success` and `Cancelled`.
    pub fn is_failure(self) -> bool {
        !matches!(self, RunOutcome::Success | RunOutcome::Cancelled)
    }
}

/// Returns the outcome of a run, or `None` while it is in progress.
///
/// A successful done check takes precedence over everything. A stop is never a failure. The time limits do not apply to
/// a command that has exited.
pub fn outcome(state: &RunState) -> Option<RunOutcome> {
    let expired =
        |spent: Duration, limit: Option<Duration>| limit.is_some_and(|limit| spent >= limit);
    match state.end {
        _ if state.done == Some(true) => Some(RunOutcome::Success),
        _ if state.stop.is_some() => Some(RunOutcome::Cancelled),
        Some(CommandExit::Exited(0)) if state.done.is_none() => Some(RunOutcome::Success),
        Some(CommandExit::Exited(0) | CommandExit::Killed(_)) => Some(RunOutcome::Death),
        Some(CommandExit::Exited(_)) => Some(RunOutcome::Failed),
        None if expired(state.age, state.budget) => Some(RunOutcome::Timeout),
        None if expired(state.silent, state.idle) => Some(RunOutcome::Idle),
        None => None,
    }
}

#[cfg(test)]
mod tests;
