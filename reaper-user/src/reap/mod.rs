//! Ending what is due: the one place that sends a signal.
//!
//! A process is *claimed* once, whoever asks, and is then on the ladder of its session:
//!
//! ```text
//!   claim ─▶ open a pidfd ─▶ drain the ring past that ─▶ is it still due? ─▶ signal ─▶ confirm
//!                             (engine)                    (policy, again)
//! ```
//!
//! The pidfd names whoever had the pid when it was opened. Whatever had exited by then has its record
//! in the ring, so that after the draining the tree tells whether that was the process that was meant;
//! where the kernel numbers pidfds (6.9), the number says so too. From then on the pidfd cannot come
//! to mean another process.
//!
//! In observe the same is done up to the signal, and then the claim is let go.
//!
//! `run` and a stand-alone `scan` have no events: [`PollingReaper`] reads the process table again where the engine drains the ring.
//!
//! What the service before this one, or a probe, has sent a process counts: its claim goes the same way,
//! but without a second SIGTERM, and its end is one that was brought about. A SIGKILL is sent again.

mod escalation;
mod reaper;
mod send;
mod target;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;

use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::policy::{Decision, Reason};
use reaper_model::session::SessionId;

pub use escalation::{Escalation, SignalStep, Stage, Times};
pub use reaper::Reaper;
pub use reaper::polling::{Due, PollingReaper, reap_all};
pub use send::signal_own;
#[cfg(target_os = "linux")]
pub use send::{STOP_SIGVAL, forward, stop_supervisor, terminate_own};

/// How many files are left for others to open, if there are so many.
const FILES_LEFT: u64 = 256;

/// From which number on no pidfds are kept while there are others: to look at processes takes files too.
fn files_max() -> u64 {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(now, _)| now);
    files - FILES_LEFT.min(files / 4)
}

/// Who has sent a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SentBy {
    /// This program, through a pidfd.
    Service,
    /// A probe, to one at whose fork, exec or orphaning it was.
    Kernel,
}

/// What came of trying to signal a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSignal {
    pub key: ProcessKey,
    pub signal: Signal,
    pub by: SentBy,
    /// From what made it due to after the first signal was sent, in ns; `None` for later ones.
    pub latency: Option<u64>,
}

/// What became of a claimed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReapResult {
    pub key: ProcessKey,
    pub outcome: ReapOutcome,
    /// The strongest signal it was sent, by any sender.
    pub signal: Option<Signal>,
    /// From the first signal to its confirmed end or the failure, in ns; `None` if another sent that.
    pub duration: Option<u64>,
    /// What it had right after its first signal, where that could be read and its end is confirmed: a zombie has
    /// nothing.
    pub memory: Option<ProcessMemory>,
}

/// How it ended for a process that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapOutcome {
    /// It has exited, as its pidfd says, or as was read before there was one for what others signalled.
    Exited(ExitStatus),
    /// It lives on.
    Failed(ReapFailure),
    /// It was let go without a signal: it had exited before, or is not due any more.
    NotSent(ReleaseReason),
}

/// Why a process could not be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapFailure {
    /// This program was stopped before it had ended.
    Stopped,
    /// Not permitted to signal it.
    Eperm,
    /// Opening or using its pidfd failed.
    Errno(i32),
    /// SIGKILL has no effect; its state in /proc is this.
    KillTimeout(char),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    AlreadyExited,
    NotDue(Reason),
    /// Under which uid it runs cannot be told any more.
    UidUnreadable,
    /// It would be signalled now, but nothing is in observe.
    ObserveMode,
    /// The pid belongs to another process by now.
    PidReused,
}

/// A report of the reaper, in the order in which things happened.
#[derive(Clone, Debug)]
pub enum ReapEvent {
    /// It has been verified, or needs no verifying, that a process is the one that was decided about,
    /// and that it is still to be reaped.
    Decided {
        key: ProcessKey,
        decision: Decision,
    },
    Signal(SentSignal),
    Outcome {
        /// The session it was a member of.
        session: SessionId,
        result: ReapResult,
    },
    /// Nothing is left on a session's ladder.
    Closed {
        session: SessionId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_files_are_used_and_some_are_left() {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let left = files - files_max();
        assert!(0 < left && left <= FILES_LEFT && left <= files / 4);
    }
}
