//! What has become of a run. Pure: what is known comes in.

use std::time::Duration;

/// How a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandExit {
    /// With this status.
    Exited(u8),
    /// By a signal of this number.
    Killed(i32),
}

impl CommandExit {
    /// What a shell says of it: the status, or 128 and the number of the signal.
    pub fn status(self) -> u8 {
        match self {
            CommandExit::Exited(status) => status,
            CommandExit::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }
}

/// What is known of a run at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunState {
    /// What the done-probe says, `None` without one.
    pub done: Option<bool>,
    /// How the command has ended, `None` as long as it lives.
    pub end: Option<CommandExit>,
    /// Somebody has stopped it, by this signal.
    pub stop: Option<i32>,
    /// Since its start, and how much it may be.
    pub age: Duration,
    pub budget: Option<Duration>,
    /// Since its last output, and how much it may be.
    pub silent: Duration,
    pub idle: Option<Duration>,
}

/// How a run has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// The done-probe says so, or without one, the command has left with status 0.
    Success,
    /// The command has left with another status.
    Failed,
    /// The command is gone, by a signal, or with status 0 though the done-probe says that it is not done.
    Death,
    /// It has taken longer than it may.
    Timeout,
    /// It has said nothing for longer than it may.
    Idle,
    /// Somebody has stopped it: neither a success nor a failure.
    Cancelled,
}

impl RunOutcome {
    /// As the report has it.
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

    /// Whether there is something to be looked into.
    pub fn is_failure(self) -> bool {
        !matches!(self, RunOutcome::Success | RunOutcome::Cancelled)
    }
}

/// What has become of a run by what is known of it, `None` while it is in progress.
///
/// What the done-probe says goes before all else, with the end of the command too; whoever stops it is no
/// cause of a failure; and who has ended has not run out of time.
pub fn outcome(facts: &RunState) -> Option<RunOutcome> {
    let over = |spent: Duration, limit: Option<Duration>| limit.is_some_and(|limit| spent >= limit);
    match facts.end {
        _ if facts.done == Some(true) => Some(RunOutcome::Success),
        _ if facts.stop.is_some() => Some(RunOutcome::Cancelled),
        Some(CommandExit::Exited(0)) if facts.done.is_none() => Some(RunOutcome::Success),
        Some(CommandExit::Exited(0) | CommandExit::Killed(_)) => Some(RunOutcome::Death),
        Some(CommandExit::Exited(_)) => Some(RunOutcome::Failed),
        None if over(facts.age, facts.budget) => Some(RunOutcome::Timeout),
        None if over(facts.silent, facts.idle) => Some(RunOutcome::Idle),
        None => None,
    }
}

#[cfg(test)]
mod tests;
