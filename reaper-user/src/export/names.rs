//! Names of events, outcomes, signals and sessions, the same in lines, JSON and the journal.

use std::borrow::Cow;
use std::fmt::Display;

use nix::sys::signal::Signal;

use super::record::{Body, Lifecycle, SessionRef};
use crate::reap::{Failure, Outcome, Released, Signaller};

/// Name of what happened, as it stands under `event`.
pub fn event_name(body: &Body) -> &'static str {
    match body {
        Body::Ready { .. } => "ready",
        Body::Lifecycle {
            what: Lifecycle::Fork,
            ..
        } => "fork",
        Body::Lifecycle {
            what: Lifecycle::Exec,
            ..
        } => "exec",
        Body::Lifecycle {
            what: Lifecycle::Move,
            ..
        } => "move",
        Body::Lifecycle {
            what: Lifecycle::Exit { .. },
            ..
        } => "exit",
        Body::Orphan { .. } => "orphan",
        Body::Reparent { .. } => "reparent",
        Body::SessionOpen { .. } => "session.open",
        Body::CaughtUp { .. } => "caught_up",
        Body::SessionResume { .. } => "session.resume",
        Body::SessionRootGone { .. } => "session.root_gone",
        Body::SessionRelaunch { .. } => "session.relaunch",
        Body::SessionClose { .. } => "session.close",
        Body::Boundary { .. } => "boundary",
        Body::Decision { .. } => "decision",
        Body::Stray { .. } => "stray",
        Body::Keep { kept: Some(_), .. } => "keep",
        Body::Keep { kept: None, .. } => "unkeep",
        Body::Reload { .. } => "config.reload",
        Body::Signal { .. } => "signal",
        Body::Outcome { .. } => "outcome",
        Body::GapOpen { .. } => "gap.open",
        Body::GapClosed { .. } => "gap.closed",
        Body::Unfollowed { .. } => "members.full",
        Body::Dropped { .. } => "dropped",
        Body::Malformed { .. } => "malformed",
        Body::Summary { .. } => "summary",
    }
}

/// The word under `outcome`.
pub fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Ended(_) => "ended",
        Outcome::Failed(_) => "failed",
        Outcome::Released(_) => "not_sent",
    }
}

/// The word under `reason` of an outcome: why a process lives on, or was let go.
pub fn outcome_reason(outcome: &Outcome) -> Option<Cow<'static, str>> {
    Some(match outcome {
        Outcome::Ended(_) => return None,
        Outcome::Failed(failure) => FailureName(failure).to_string().into(),
        Outcome::Released(Released::NotDue(reason)) => reason.name().into(),
        Outcome::Released(Released::Unreadable) => "unreadable".into(),
        Outcome::Released(Released::Observed) => "observe".into(),
        Outcome::Released(Released::Gone) => "gone".into(),
        Outcome::Released(Released::Identity) => "identity".into(),
    })
}

/// The word under `sent_by`.
pub fn signaller_name(signaller: Signaller) -> &'static str {
    match signaller {
        Signaller::Service => "service",
        Signaller::Kernel => "kernel",
    }
}

/// A session's name outside: its agent, and pid and start of the process that was its root first.
pub struct SessionId<'a>(pub &'a SessionRef);

impl Display for SessionId<'_> {
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
pub struct FailureName<'a>(pub &'a Failure);

impl Display for FailureName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Failure::Stopped => f.write_str("stopped"),
            Failure::Eperm => f.write_str("eperm"),
            Failure::Errno(errno) => write!(f, "{:?}", nix::Error::from_raw(*errno)),
            Failure::Stuck('D') => f.write_str("uninterruptible"),
            Failure::Stuck(state) => write!(f, "stuck in state {state}"),
        }
    }
}
