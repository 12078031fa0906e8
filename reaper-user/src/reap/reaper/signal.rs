//! The signals of a round: who is queued is opened, looked at once more, signalled, and then has its memory read.

use nix::errno::Errno;

use super::Reaper;
use crate::reap::{
    ReapEvent, ReapFailure, ReapOutcome, ReleaseReason, SentBy, SentSignal, SignalStep, send,
};
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::ProcessKey;
use reaper_model::policy::Decision;

/// Whether a process is still due, with the decision about it where there is one to report.
pub(super) type IsDue = Result<Option<Decision>, ReleaseReason>;

impl Reaper {
    /// Opens what is queued. Whatever the ring holds when this returns must be drained into the model
    /// before [`Reaper::signal_queued`].
    pub fn open_queued(&mut self) {
        for key in std::mem::take(&mut self.queue) {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            if target.pidfd.is_some() {
                self.queue.push(key);
                continue;
            }
            match self.signals.open(key.pid) {
                // What is open already ends, and then it has its turn.
                Ok(pidfd)
                    if pidfd.handle().file() >= self.files_max
                        && self.open_pidfds > 0
                        && !self.observe =>
                {
                    self.waiting_for_files.push_back(key);
                }
                Ok(pidfd) => {
                    target.pidfd = Some(pidfd);
                    self.open_pidfds += 1;
                    self.queue.push(key);
                }
                // Its exit record, which is in the ring by now, tells how it ended.
                Err(nix::Error::ESRCH) if target.signals_had != 0 => {}
                Err(nix::Error::ESRCH) => {
                    self.finish(key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited))
                }
                // Nothing is sent: what cannot be opened is decided about all the same.
                Err(errno) if self.observe => {
                    target.obstacle = Some(ReapOutcome::Failed(ReapFailure::Errno(errno as i32)));
                    self.queue.push(key);
                }
                Err(nix::Error::EMFILE | nix::Error::ENFILE) if self.open_pidfds > 0 => {
                    self.waiting_for_files.push_back(key)
                }
                Err(errno) => {
                    self.finish(key, ReapOutcome::Failed(ReapFailure::Errno(errno as i32)))
                }
            }
        }
    }

    /// What is opened and queued for its first signal. Where records were lost, the programs of these are
    /// to be read anew before they are signalled: what one has become unseen may be kept.
    pub fn unsignalled(&self) -> Vec<ProcessKey> {
        let unsignalled = |key: &&ProcessKey| {
            let target = self.targets.get(*key);
            target.is_some_and(|target| target.pidfd.is_some() && target.last_signal.is_none())
        };
        self.queue.iter().filter(unsignalled).copied().collect()
    }

    /// Closes what was opened for one of which nobody can say that it is that one, as the source could not get hold of
    /// it: when others have given their open files back, it has its turn again.
    pub fn release_failed(&mut self, key: ProcessKey, errno: Errno) {
        self.queue.retain(|queued| *queued != key);
        let Some(target) = self.targets.get_mut(&key) else {
            return;
        };
        self.open_pidfds -= usize::from(target.pidfd.take().is_some());
        if self.open_pidfds > 0 {
            self.waiting_for_files.push_back(key);
        } else {
            self.finish(key, ReapOutcome::Failed(ReapFailure::Errno(errno as i32)));
        }
    }

    /// Lets go of one of which it cannot be told what it is by now. Where it is queued, it is passed over.
    pub fn release_unreadable(&mut self, key: ProcessKey) {
        self.finish(key, ReapOutcome::NotSent(ReleaseReason::UidUnreadable));
    }

    /// Notes how much memory processes have that were sent their first signal since the last call, of at most `max` of
    /// them. `memory` reads it by pid. Only for when the signals of a round are out.
    ///
    /// One that has ended meanwhile has no reading: its pid may be another's.
    pub fn measure_memory(&mut self, max: usize, memory: impl Fn(u32) -> Option<ProcessMemory>) {
        for key in std::mem::take(&mut self.unmeasured).into_iter().take(max) {
            if let Some(target) = self.targets.get_mut(&key)
                && let Some(pidfd) = &target.pidfd
            {
                target.memory = memory(key.pid).filter(|_| !pidfd.handle().has_exited());
            }
        }
    }

    /// Signals an opened process, which may be the `init` of a pid namespace, if it is the one that was claimed and still
    /// `due`, by the decision about it where there is one to report. Lets go of one that is not. Returns whether it was
    /// sent the first signal of its escalation, and so has to be woken.
    pub(super) fn signal(&mut self, key: ProcessKey, due: IsDue, init: bool) -> bool {
        match self.signal_if_due(key, due, init) {
            Ok(step) => matches!(step, Some(SignalStep::Terminate(_))),
            Err(released) => {
                self.finish(key, ReapOutcome::NotSent(released));
                false
            }
        }
    }

    /// Wakes processes that were signalled together, given with the oldest first.
    pub(super) fn wake(&self, signalled: &[ProcessKey]) {
        for key in signalled.iter().rev() {
            let target = self.targets.get(key);
            if let Some(pidfd) = target.and_then(|target| target.pidfd.as_ref()) {
                // If it is gone already, so much the better.
                let _ = send::send(pidfd.handle(), key.pid, self.own_pid, SignalStep::Continue);
            }
        }
    }

    /// Returns what was sent, if anything was.
    fn signal_if_due(
        &mut self,
        key: ProcessKey,
        due: IsDue,
        init: bool,
    ) -> Result<Option<SignalStep>, ReleaseReason> {
        let Some(target) = self.targets.get_mut(&key) else {
            return Ok(None);
        };
        let Some(pidfd) = &target.pidfd else {
            if let Some(decision) = due? {
                self.reports.push(ReapEvent::Decided { key, decision });
            }
            return Err(ReleaseReason::ObserveMode);
        };
        // One that has had a signal and is gone now has its end confirmed by its pidfd.
        let waited_for = target.last_signal.is_some();
        if target.exit_status.is_some() {
            return if waited_for {
                Ok(None)
            } else {
                Err(ReleaseReason::AlreadyExited)
            };
        }
        let decision = match due {
            Err(ReleaseReason::AlreadyExited) if waited_for => return Ok(None),
            // Of what another has sent it. Its exit record is on its way.
            Err(ReleaseReason::AlreadyExited) if target.signals_had != 0 => {
                target.watch_exit(key);
                return Ok(None);
            }
            due => due?,
        };
        if !std::mem::replace(&mut target.is_reported, true)
            && let Some(decision) = decision
        {
            self.reports.push(ReapEvent::Decided { key, decision });
        }
        let Some(ladder) = self.escalations.get(&target.escalation) else {
            return Err(ReleaseReason::ObserveMode);
        };
        let step = ladder.step(target.signals_had, init);
        let first = target.last_signal.is_none() && target.signals_had == 0;
        if target.last_signal == Some(step.signal()) {
            return Ok(None);
        }
        let sent = send::send(pidfd.handle(), key.pid, self.own_pid, step);
        match sent {
            Ok(()) => {
                target.obstacle = None;
                if target.last_signal.replace(step.signal()).is_none() {
                    self.unmeasured.push(key);
                }
                if step != SignalStep::Continue {
                    let now = self.clock.boot_time();
                    target.first_signal = target.first_signal.or(first.then_some(now));
                    let due_at = target.due_at.filter(|_| first);
                    self.reports.push(ReapEvent::Signal(SentSignal {
                        key,
                        signal: step.signal(),
                        by: SentBy::Service,
                        latency: due_at.map(|due_at| now.saturating_sub(due_at)),
                    }));
                }
            }
            // Between the last look and now: its exit record is on its way.
            Err(nix::Error::ESRCH) => {}
            Err(nix::Error::EPERM) => {
                target.obstacle = Some(ReapOutcome::Failed(ReapFailure::Eperm));
            }
            Err(errno) => {
                target.obstacle = Some(ReapOutcome::Failed(ReapFailure::Errno(errno as i32)));
            }
        }
        target.watch_exit(key);
        Ok(sent.is_ok().then_some(step))
    }
}
