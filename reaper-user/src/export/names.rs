//! Names of events, outcomes, signals and sessions, the same in lines, JSON and the journal.

use std::borrow::Cow;
use std::fmt::Display;

use nix::sys::signal::Signal;

use super::record::{EventBody, Lifecycle, SessionRef};
use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason, SentBy};

/// Name of what happened, as it stands under `event`.
pub fn event_name(body: &EventBody) -> &'static str {
    match body {
        EventBody::Ready { .. } => "ready",
        EventBody::Lifecycle {
            what: Lifecycle::Fork,
            ..
        } => "fork",
        EventBody::Lifecycle {
            what: Lifecycle::Exec,
            ..
        } => "exec",
        EventBody::Lifecycle {
            what: Lifecycle::Move,
            ..
        } => "cgroup.migrate",
        EventBody::Lifecycle {
            what: Lifecycle::Exit { .. },
            ..
        } => "exit",
        EventBody::Orphan { .. } => "orphan",
        EventBody::Reparent { .. } => "reparent",
        EventBody::SessionOpen { .. } => "session.open",
        EventBody::CaughtUp { .. } => "caught_up",
        EventBody::SessionResume { .. } => "session.resume",
        EventBody::SessionRootExit { .. } => "session.root_exit",
        EventBody::SessionRelaunch { .. } => "session.relaunch",
        EventBody::SessionClose { .. } => "session.close",
        EventBody::Boundary { .. } => "boundary",
        EventBody::Decision { .. } => "decision",
        EventBody::Leftover { .. } => "leftover",
        EventBody::Keep { kept: Some(_), .. } => "keep",
        EventBody::Keep { kept: None, .. } => "unkeep",
        EventBody::ConfigReload { .. } => "config.reload",
        EventBody::Signal { .. } => "signal",
        EventBody::Outcome { .. } => "outcome",
        EventBody::GapOpen { .. } => "gap.open",
        EventBody::GapClose { .. } => "gap.close",
        EventBody::MemberMapFull { .. } => "member_map.full",
        EventBody::Dropped { .. } => "dropped",
        EventBody::Malformed { .. } => "malformed",
        EventBody::Summary { .. } => "summary",
    }
}

/// The word under `outcome`.
pub fn outcome_name(outcome: &ReapOutcome) -> &'static str {
    match outcome {
        ReapOutcome::Exited(_) => "ended",
        ReapOutcome::Failed(_) => "failed",
        ReapOutcome::NotSent(_) => "not_sent",
    }
}

/// The word under `reason` of an outcome: why a process lives on, or was let go.
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

/// The word under `sent_by`.
pub fn signaller_name(signaller: SentBy) -> &'static str {
    match signaller {
        SentBy::Service => "service",
        SentBy::Kernel => "kernel",
    }
}

/// A session's name outside: its agent, and pid and start of the process that was its root first.
pub struct SessionIdText<'a>(pub &'a SessionRef);

impl Display for SessionIdText<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SessionRef { agent, first_root } = self.0;
        write!(f, "{agent}-{}-{:x}", first_root.pid, first_root.start)
    }
}

/// A signal's name, or its number if it has none.
pub struct SignalName(pub u8);

impl Display for SignalName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Signal::try_from(i32::from(self.0)) {
            Ok(signal) => f.write_str(signal.as_str()),
            Err(_) => write!(f, "SIG{}", self.0),
        }
    }
}

/// Why a process could not be ended, in one word.
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
