//! Signals processes and confirms their exit. Only this module sends signals.
//!
//! A process is *claimed* once and then belongs to an escalation, usually that of its session:
//!
//! ```text
//!   claim ─▶ open a pidfd ─▶ drain the ring past that ─▶ is it still due? ─▶ signal ─▶ confirm
//!                             (engine)                    (policy, again)
//! ```
//!
//! The pidfd refers to the process that had the pid when it was opened. Each earlier exit has its record in the ring.
//! After the drain, the tree therefore shows whether that was the claimed process. Since Linux 6.9, the inode of the
//! pidfd shows it as well. An open pidfd never refers to another process.
//!
//! In observe mode the steps are the same, but the claim is released instead of the signal.
//!
//! `run` and a stand-alone `scan` have no events: [`PollingReaper`] reads the process table where the engine drains the
//! ring.
//!
//! A process may have been signalled by an earlier service or by a probe. It then gets no second SIGTERM, and its exit
//! counts as reaped. SIGKILL is sent again.

mod escalation;
mod reaper;
mod send;
mod target;

use std::fmt;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;

use reaper_host::advice::Advised as _;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::policy::{Decision, Reason};
use reaper_model::session::SessionId;

pub use escalation::{Escalation, SignalStep, Stage, Times};
pub use reaper::Reaper;
#[cfg(target_os = "linux")]
pub use reaper::polling::PollingReaper;
pub use reaper::polling::{Due, DueProcess, reap_all};
pub use send::signal_own;
#[cfg(target_os = "linux")]
pub use send::{STOP_SIGVAL, forward, kill_child, stop_supervisor, terminate_own};

/// Number of file descriptors that are left for other uses, if the limit allows.
const FILES_LEFT: u64 = 256;

/// Returns the limit on open pidfds: the limit of files, less [`FILES_LEFT`] or a quarter of it, whichever is less.
/// The rest is left for reading /proc.
fn files_max() -> u64 {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(now, _)| now);
    files - FILES_LEFT.min(files / 4)
}

/// Sender of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SentBy {
    /// This program, through a pidfd.
    Service,
    /// A probe, at a fork, exec or loss of the parent.
    Kernel,
}

/// A signal that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSignal {
    pub key: ProcessKey,
    pub signal: Signal,
    pub by: SentBy,
    /// Nanoseconds from the event that made the process due until after its first signal. `None` for later signals.
    pub latency: Option<u64>,
}

/// Result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReapResult {
    pub key: ProcessKey,
    pub outcome: ReapOutcome,
    /// Strongest signal that the process was sent, by any sender.
    pub signal: Option<Signal>,
    /// Nanoseconds from the first signal to the confirmed exit or the failure. `None` if there was none, or another
    /// sender sent it.
    pub duration: Option<u64>,
    /// Memory right after the first signal, if it could be read and the exit is confirmed. A zombie has no memory.
    pub memory: Option<ProcessMemory>,
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapOutcome {
    /// The process has exited. Its pidfd or, for a process that was already signalled, its exit record confirms that.
    Exited(ExitStatus),
    /// The process is still alive.
    Failed(ReapFailure),
    /// The process was released without a signal.
    NotSent(ReleaseReason),
}

/// Reason why a process could not be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapFailure {
    /// This program was stopped first.
    Stopped,
    /// This program may not signal the process.
    Eperm,
    /// Opening or using the pidfd failed with this `errno`.
    Errno(i32),
    /// SIGKILL had no effect in time. The value is the process state in /proc.
    KillTimeout(char),
}

impl fmt::Display for ReapFailure {
    /// Writes the reason for people, as a sentence about the process.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReapFailure::Stopped => f.write_str("reaper was stopped before the process exited"),
            ReapFailure::Eperm => {
                f.write_str("it may not be signalled by this user; end it as root")
            }
            ReapFailure::Errno(errno) => {
                let errno = nix::Error::from_raw(*errno);
                write!(f, "it cannot be signalled: {}", errno.advised())
            }
            ReapFailure::KillTimeout('D') => f.write_str(
                "it did not exit after SIGKILL: it waits in the kernel (state D), for example for a disk, and \
                 exits after that",
            ),
            ReapFailure::KillTimeout(state) => {
                write!(f, "it did not exit after SIGKILL (state {state})")
            }
        }
    }
}

/// Reason why a claimed process is released without a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    AlreadyExited,
    /// The process is no longer to be reaped, for the reason of its present decision.
    NotDue(Reason),
    /// The uids of the process can no longer be read.
    UidUnreadable,
    /// The process would be signalled, but the mode is observe.
    ObserveMode,
    /// The pid belongs to another process now.
    PidReused,
}

/// Report of the reaper. Reports are in the order in which things happened.
#[derive(Clone, Debug)]
pub enum ReapEvent {
    /// The identity of the process and the decision to reap it are verified, or need no verification.
    Decided {
        key: ProcessKey,
        decision: Decision,
    },
    Signal(SentSignal),
    Outcome {
        /// Session of which the process is a member.
        session: SessionId,
        result: ReapResult,
    },
    /// The escalation of a session has ended: it has no claims left.
    Closed {
        session: SessionId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_max_leaves_some_files() {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let left = files - files_max();
        assert!(0 < left && left <= FILES_LEFT && left <= files / 4);
    }
}
