//! One process on its way to its end.

use nix::sys::signal::Signal;

use super::ReapResult;
use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason, SignalStep, send};
use reaper_host::kernel::{ProcessHandle, ProcessTable};
use reaper_host::source::procfs::{ProcessMemory, Procfs};
use reaper_host::sys;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::{ProcessKey, Uids};

/// See the module.
pub(super) struct Target {
    /// Given back once it has ended.
    pub(super) pidfd: Option<Pidfd>,
    pub(super) strongest: Option<Signal>,
    pub(super) first_signal: Option<u64>,
    pub(super) memory: Option<ProcessMemory>,
    pub(super) refused: Option<nix::Error>,
    /// At the last look there was something that spares it.
    pub(super) spared: bool,
    /// What came of it, and when.
    pub(super) done: Option<(ReapOutcome, u64)>,
}

impl Target {
    pub(super) fn new(pidfd: Pidfd) -> Target {
        Target {
            pidfd: Some(pidfd),
            strongest: None,
            first_signal: None,
            memory: None,
            refused: None,
            spared: false,
            done: None,
        }
    }

    pub(super) fn has_exited(&self) -> bool {
        self.pidfd.as_ref().is_none_or(Pidfd::has_exited)
    }

    pub(super) fn uids(&self, pid: u32) -> Option<Uids> {
        self.pidfd.as_ref()?.uids(pid)
    }

    /// Sends what is due, if it has not been sent; whether it was. Who is asked to end has to be woken after it.
    pub(super) fn signal(&mut self, key: ProcessKey, own: u32, step: SignalStep) -> bool {
        let signal = step.signal();
        if self.strongest == Some(signal) {
            return false;
        }
        let Some(pidfd) = &self.pidfd else {
            return false;
        };
        match send::send(pidfd, key.pid, own, step) {
            Ok(()) => {
                self.strongest = Some(signal);
                self.refused = None;
                self.first_signal = self.first_signal.or_else(|| Some(sys::boot_time()));
                return true;
            }
            // It has exited: its pidfd says so.
            Err(nix::Error::ESRCH) => {}
            Err(error) => self.refused = Some(error),
        }
        false
    }

    /// Notes what it has after its first signal.
    pub(super) fn measure_memory(&mut self, key: ProcessKey, procfs: &Procfs) {
        if self.memory.is_none() {
            let memory = procfs.memory(key.pid, true);
            // By then the pid may be somebody else's.
            self.memory = memory.filter(|_| !self.has_exited());
        }
    }

    pub(super) fn told(self, key: ProcessKey, procfs: &Procfs) -> ReapResult {
        let (outcome, at) = self.done.unwrap_or_else(|| {
            let failure = match self.refused {
                _ if self.spared => return (ReapOutcome::NotSent(ReleaseReason::UidUnreadable), 0),
                Some(nix::Error::EPERM) => ReapFailure::Eperm,
                Some(errno) => ReapFailure::Errno(errno as i32),
                None => ReapFailure::KillTimeout(procfs.state(key.pid).unwrap_or('?')),
            };
            (ReapOutcome::Failed(failure), 0)
        });
        let outcome = match outcome {
            ReapOutcome::Exited(_) if self.strongest.is_none() => {
                ReapOutcome::NotSent(ReleaseReason::AlreadyExited)
            }
            outcome => outcome,
        };
        let ended = matches!(outcome, ReapOutcome::Exited(_));
        let first = self.first_signal.filter(|_| ended);
        ReapResult {
            key,
            outcome,
            signal: self.strongest,
            duration: first.map(|first| at.saturating_sub(first)),
            memory: self.memory,
        }
    }
}
