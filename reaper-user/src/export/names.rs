//! Names of outcomes and signals, shared by lines, JSON and journal.

use std::borrow::Cow;
use std::fmt::Display;

use nix::sys::signal::Signal;

use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason};

/// Returns the value of the key `outcome`.
pub fn outcome_name(outcome: &ReapOutcome) -> &'static str {
    match outcome {
        ReapOutcome::Exited(_) => "ended",
        ReapOutcome::Failed(_) => "failed",
        ReapOutcome::NotSent(_) => "not_sent",
    }
}

/// Returns the value of the key `reason` of an outcome: why a process was not ended, or was not signalled. Returns
/// `None` if it has ended.
pub fn outcome_reason(outcome: &ReapOutcome) -> Option<Cow<'static, str>> {
    Some(match outcome {
        ReapOutcome::Exited(_) => return None,
        ReapOutcome::Failed(failure) => FailureName(failure).to_string().into(),
        ReapOutcome::NotSent(ReleaseReason::NotDue(reason)) => reason.name().into(),
        ReapOutcome::NotSent(ReleaseReason::UidUnreadable) => "uid_unreadable".into(),
        ReapOutcome::NotSent(ReleaseReason::ObserveMode) => "observe_mode".into(),
        ReapOutcome::NotSent(ReleaseReason::AlreadyExited) => "already_exited".into(),
        ReapOutcome::NotSent(ReleaseReason::PidReused) => "pid_reused".into(),
    })
}

/// Name of a signal, or `SIG` and its number if it has none.
pub struct SignalName(pub u8);

impl Display for SignalName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Signal::try_from(i32::from(self.0)) {
            Ok(signal) => f.write_str(signal.as_str()),
            Err(_) => write!(f, "SIG{}", self.0),
        }
    }
}

/// Name of the reason why a process could not be ended.
pub struct FailureName<'a>(pub &'a ReapFailure);

impl Display for FailureName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            ReapFailure::Stopped => f.write_str("reaper_stopped"),
            ReapFailure::Eperm => f.write_str("EPERM"),
            ReapFailure::Errno(errno) => write!(f, "{:?}", nix::Error::from_raw(*errno)),
            ReapFailure::KillTimeout('D') => f.write_str("uninterruptible_sleep"),
            ReapFailure::KillTimeout(state) => write!(f, "not_exiting_state_{state}"),
        }
    }
}
