//! One claimed process.

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};

use super::{ReapOutcome, ReleaseReason};
use reaper_host::advice::Advised as _;
use reaper_host::kernel::WatchedHandle;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::session::SessionId;

#[derive(Default)]
pub(super) struct Target {
    /// Session whose escalation it belongs to.
    pub(super) escalation: SessionId,
    /// Session of which it is a member: the same one, or one nested in it.
    pub(super) session: SessionId,
    /// Whether the decision to reap it has been reported.
    pub(super) is_reported: bool,
    pub(super) pidfd: Option<Box<dyn WatchedHandle>>,
    /// Number that identifies the pidfd when it becomes readable.
    pub(super) token: u64,
    /// Time of the event that made it due, in ns since boot. `None` if it was first left to its parent.
    pub(super) due_at: Option<u64>,
    /// Time of the first signal, in ns since boot, if this program sent it.
    pub(super) first_signal: Option<u64>,
    /// Time before which it gets no SIGKILL, in ns of CLOCK_MONOTONIC, if that is later than for the others; 0 otherwise.
    pub(super) kill_at: u64,
    /// Grace that a rule gives its program, in ns; 0 for the general one.
    pub(super) grace: u64,
    /// Ancestor to whose program a rule gives a grace, and which may need this process until its exit.
    pub(super) needed_by: Option<ProcessKey>,
    /// Whether it is left alone until the exit of that ancestor.
    pub(super) is_left: bool,
    /// Signal of the last step that was taken.
    pub(super) last_signal: Option<Signal>,
    /// Signals it has been sent by others, and possibly by this program: `MEMBER_SIGTERM_SENT`, `MEMBER_SIGKILL_SENT`.
    pub(super) signals_had: u32,
    /// Exit status from the exit record, which arrives before the exit is confirmed.
    pub(super) exit_status: Option<ExitStatus>,
    /// Outcome of the last attempt to signal it, if that failed.
    pub(super) obstacle: Option<ReapOutcome>,
    /// Memory in bytes at the last check for progress, 0 before the first one.
    pub(super) rss: u64,
    /// Memory right after the first signal.
    pub(super) memory: Option<ProcessMemory>,
}

impl Target {
    /// Returns whether the pidfd says that it has exited. False without a pidfd.
    pub(super) fn has_exited(&self) -> bool {
        let pidfd = self.pidfd.as_ref();
        pidfd.is_some_and(|pidfd| pidfd.handle().has_exited())
    }

    /// Registers the pidfd, so that the exit is reported. Does nothing without a pidfd. An error is logged.
    pub(super) fn watch_exit(&self, key: ProcessKey) {
        if let Some(pidfd) = &self.pidfd
            && let Err(error) = pidfd.watch_exit(self.token)
        {
            tracing::error!(
                "cannot watch process {} for its exit: {}; it is signalled, but its exit may be reported late or not at all",
                key.pid,
                error.advised()
            );
        }
    }

    /// Returns the strongest signal it was sent, by any sender. `None` if it was sent none.
    pub(super) fn signal(&self) -> Option<Signal> {
        if self.signals_had & MEMBER_SIGKILL_SENT != 0 {
            Some(Signal::SIGKILL)
        } else {
            let had = (self.signals_had & MEMBER_SIGTERM_SENT != 0).then_some(Signal::SIGTERM);
            self.last_signal.or(had)
        }
    }

    /// Returns the final outcome. `AlreadyExited` becomes `Exited` if any sender has signalled the process. All other
    /// outcomes stay as they are.
    pub(super) fn outcome(&self, outcome: ReapOutcome) -> ReapOutcome {
        match outcome {
            ReapOutcome::NotSent(ReleaseReason::AlreadyExited) if self.signal().is_some() => {
                ReapOutcome::Exited(self.exit_status.unwrap_or(ExitStatus::Unknown))
            }
            outcome => outcome,
        }
    }
}
