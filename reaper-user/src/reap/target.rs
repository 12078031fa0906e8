//! One claimed process.

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};

use super::{ReapOutcome, ReleaseReason};
use reaper_host::kernel::WatchedHandle;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::session::SessionId;

/// See the module.
#[derive(Default)]
pub(super) struct Target {
    /// The session on whose ladder it is.
    pub(super) escalation: SessionId,
    /// The session it is a member of: that one, or one nested in it.
    pub(super) session: SessionId,
    /// That it is to be reaped has been told.
    pub(super) is_reported: bool,
    pub(super) pidfd: Option<Box<dyn WatchedHandle>>,
    /// Number under which the pidfd is waited on.
    pub(super) token: u64,
    /// What made it due, in ns since boot; `None` for one that was left to its maker at first.
    pub(super) due_at: Option<u64>,
    /// When this program sent it its first signal, if nobody had before.
    pub(super) first_signal: Option<u64>,
    /// How far it has come here: the signal of the last step.
    pub(super) last_signal: Option<Signal>,
    /// What it has been sent by others, and maybe by this program: `MEMBER_SIGTERM_SENT` and `MEMBER_SIGKILL_SENT`.
    pub(super) signals_had: u32,
    /// Its exit record, which comes before the end is confirmed.
    pub(super) exit_status: Option<ExitStatus>,
    /// Why it could not be signalled at the last attempt.
    pub(super) obstacle: Option<ReapOutcome>,
    /// Memory at the last look, to tell progress from none; 0 before the first one.
    pub(super) rss: u64,
    /// What it had right after its first signal.
    pub(super) memory: Option<ProcessMemory>,
}

impl Target {
    /// Whether it has exited, by its pidfd.
    pub(super) fn has_exited(&self) -> bool {
        let pidfd = self.pidfd.as_ref();
        pidfd.is_some_and(|pidfd| pidfd.handle().has_exited())
    }

    /// Has the exit confirmed by its pidfd.
    pub(super) fn watch_exit(&self, key: ProcessKey) {
        if let Some(pidfd) = &self.pidfd
            && let Err(error) = pidfd.watch_exit(self.token)
        {
            tracing::error!("pid {}: cannot wait for its exit: {error}", key.pid);
        }
    }

    /// The strongest signal it was sent, by whomever.
    pub(super) fn signal(&self) -> Option<Signal> {
        if self.signals_had & MEMBER_SIGKILL_SENT != 0 {
            Some(Signal::SIGKILL)
        } else {
            let had = (self.signals_had & MEMBER_SIGTERM_SENT != 0).then_some(Signal::SIGTERM);
            self.last_signal.or(had)
        }
    }

    /// What came of it: one that is gone has ended of the signal that another has sent it, if one has.
    pub(super) fn outcome(&self, outcome: ReapOutcome) -> ReapOutcome {
        match outcome {
            ReapOutcome::NotSent(ReleaseReason::AlreadyExited) if self.signal().is_some() => {
                ReapOutcome::Exited(self.exit_status.unwrap_or(ExitStatus::Unknown))
            }
            outcome => outcome,
        }
    }
}
