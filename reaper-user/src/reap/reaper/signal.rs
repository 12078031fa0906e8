//! Runs the steps of a round: opens pidfds, checks the processes again, signals them, and measures their memory.

use nix::errno::Errno;

use super::Reaper;
use crate::reap::escalation::{Escalation, ns};
use crate::reap::target::Target;
use crate::reap::{
    ReapEvent, ReapFailure, ReapOutcome, ReleaseReason, SentBy, SentSignal, SignalStep, send,
};
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::ProcessKey;
use reaper_model::policy::Decision;

/// Whether a process is still due, with the decision if it has to be reported.
pub(super) type IsDue = Result<Option<Decision>, ReleaseReason>;

impl Reaper {
    /// Opens pidfds of the queued processes. The ring must be drained after that and before [`Reaper::signal_queued`].
    ///
    /// A process whose pidfd cannot be opened leaves the queue. It waits if there are too many open files, until
    /// another pidfd is closed. Otherwise its claim is finished, or its exit record finishes it. In observe mode it
    /// stays queued, unless it has exited. Nor does a process stay queued that an ancestor with a longer grace may need.
    pub fn open_queued(&mut self) {
        for key in std::mem::take(&mut self.queue) {
            let is_left = self.is_left(key);
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            if is_left {
                // An exit needs no confirmation while there is no signal.
                self.open_pidfds -= usize::from(target.pidfd.take().is_some());
                continue;
            }
            if target.pidfd.is_some() {
                self.queue.push(key);
                continue;
            }
            match self.signals.open(key.pid) {
                // An open pidfd will be closed after an exit. Then this process is next.
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
                // Its exit record is in the ring, with the exit status.
                Err(nix::Error::ESRCH) if target.signals_had != 0 => {}
                Err(nix::Error::ESRCH) => {
                    self.finish(key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited))
                }
                // No signal is sent in observe mode, so the decision is reported without a pidfd.
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

    /// Returns whether a process is left alone: an ancestor to which a rule gives a grace is claimed too, and may need it.
    ///
    /// The exit of that ancestor queues it again. It is signalled earlier if the ancestor has no more time left than the
    /// general grace: the ancestor may wait for its exit. The process's own grace begins when it is no longer left.
    pub(super) fn is_left(&mut self, key: ProcessKey) -> bool {
        let now = self.clock.monotonic();
        let Some(target) = self.targets.get(&key) else {
            return false;
        };
        let Some(above) = target.needed_by else {
            return false;
        };
        let general = self.escalations.get(&target.escalation);
        let general = ns(general.map_or(self.times.grace, Escalation::grace));
        let may_need = |above: &Target| {
            above.exit_status.is_none()
                && (above.is_left || now.saturating_add(general) < above.kill_at)
        };
        let is_left = !self.observe
            && target.last_signal.is_none()
            && target.signals_had == 0
            && self.targets.get(&above).is_some_and(may_need);
        let Some(target) = self.targets.get_mut(&key) else {
            return false;
        };
        let was_left = std::mem::replace(&mut target.is_left, is_left);
        if is_left {
            target.due_at = None;
            self.left.entry(above).or_default().insert(key);
        } else {
            target.needed_by = None;
            if was_left {
                target.kill_at = now.saturating_add(target.grace.max(general));
            }
        }
        is_left
    }

    /// Returns the opened processes that are queued for their first signal. If records were lost, their programs must
    /// be read again before the signal: one may run a program now that is kept.
    pub fn unsignalled(&self) -> Vec<ProcessKey> {
        let unsignalled = |key: &&ProcessKey| {
            let target = self.targets.get(*key);
            target.is_some_and(|target| target.pidfd.is_some() && target.last_signal.is_none())
        };
        self.queue.iter().filter(unsignalled).copied().collect()
    }

    /// Closes a pidfd that the source lacks the files to confirm. The process waits until fewer files are open. If no
    /// other pidfd is open, its claim fails with `errno`.
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

    /// Releases a claimed process that cannot be read, even if it is queued.
    pub fn release_unreadable(&mut self, key: ProcessKey) {
        self.finish(key, ReapOutcome::NotSent(ReleaseReason::UidUnreadable));
    }

    /// Measures the memory of up to `max` processes that had their first signal since the last call. The others get no
    /// reading.
    ///
    /// `memory` reads it by pid. A process that has exited has no reading, since its pid may have been reused. Call
    /// this only after all signals of a round, so that it does not delay them.
    pub fn measure_memory(&mut self, max: usize, memory: impl Fn(u32) -> Option<ProcessMemory>) {
        for key in std::mem::take(&mut self.unmeasured).into_iter().take(max) {
            if let Some(target) = self.targets.get_mut(&key)
                && let Some(pidfd) = &target.pidfd
            {
                target.memory = memory(key.pid).filter(|_| !pidfd.handle().has_exited());
            }
        }
    }

    /// Signals an opened process if it is the claimed one and still `due`, and otherwise releases it. `init`: it is the
    /// init of a pid namespace. Returns whether it got the first signal of its escalation and must be woken.
    pub(super) fn signal(&mut self, key: ProcessKey, due: IsDue, init: bool) -> bool {
        match self.signal_if_due(key, due, init) {
            Ok(step) => matches!(step, Some(SignalStep::Terminate(_))),
            Err(reason) => {
                self.finish(key, ReapOutcome::NotSent(reason));
                false
            }
        }
    }

    /// Wakes processes that were signalled together, youngest first. `signalled` has the oldest first.
    pub(super) fn wake(&self, signalled: &[ProcessKey]) {
        for key in signalled.iter().rev() {
            let target = self.targets.get(key);
            if let Some(pidfd) = target.and_then(|target| target.pidfd.as_ref()) {
                // It may have exited already.
                let _ = send::send(pidfd.handle(), key.pid, self.own_pid, SignalStep::Continue);
            }
        }
    }

    /// Signals a process if it is still due. Returns the step that was sent, `None` if the signal failed or none was
    /// needed.
    ///
    /// # Errors
    /// Returns the reason to release the process.
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
        // A process that had a signal and has exited is confirmed by its pidfd.
        let had_signal = target.last_signal.is_some();
        if target.exit_status.is_some() {
            return if had_signal {
                Ok(None)
            } else {
                Err(ReleaseReason::AlreadyExited)
            };
        }
        let decision = match due {
            Err(ReleaseReason::AlreadyExited) if had_signal => return Ok(None),
            // It exited after a signal from another sender. Its exit record is on its way.
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
        let Some(escalation) = self.escalations.get(&target.escalation) else {
            return Err(ReleaseReason::ObserveMode);
        };
        let is_patient = self.clock.monotonic() < target.kill_at;
        let step = escalation.step(target.signals_had, init, is_patient);
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
            // It has just exited. Its exit record is on its way.
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
