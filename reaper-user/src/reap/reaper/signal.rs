//! The signals of a round: who is queued is opened, looked at once more, signalled, and then has its memory read.

use nix::errno::Errno;

use super::Reaper;
use crate::reap::{
    ReapEvent, ReapFailure, ReapOutcome, ReleaseReason, SentBy, SentSignal, SignalStep, send,
};
use reaper_host::kernel::WatchedHandle;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::Model;
use reaper_model::event::ProcessKey;
use reaper_model::policy::Evaluation;

/// Processes that are looked at together, and then signalled: what is found out of the first is to be young still when
/// its turn comes, and what they have in common is to be found out once.
const TOGETHER: usize = 128;
/// Processes whose memory is read after a round of signals, at most: the next round waits for that.
const MEASURED_MAX: usize = 256;

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
                    target.signal_failure = Some(ReapFailure::Errno(errno as i32));
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

    /// Whether something is queued that the kernel has given no number by which its pidfd could be told:
    /// only the tree can vouch for that, and only if nothing was lost between opening and signalling.
    pub fn needs_confirmation(&self, model: &Model) -> bool {
        let unnumbered = |key: &ProcessKey| {
            model
                .tree
                .get(*key)
                .is_some_and(|node| node.pidfd_inode == 0)
        };
        self.queue.iter().any(unnumbered)
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

    /// Signals what is queued and is, by what the model knows now, still due. Where records were lost
    /// since the opening (`lossless` is false), what has no number is opened anew in the next round.
    pub fn signal_queued(&mut self, model: &mut Model, lossless: bool) {
        let queue = std::mem::take(&mut self.queue);
        for keys in queue.chunks(TOGETHER) {
            self.signal_some(keys, model, lossless);
        }
    }

    fn signal_some(&mut self, keys: &[ProcessKey], model: &mut Model, lossless: bool) {
        let mut opened = Vec::with_capacity(keys.len());
        for key in keys.iter().copied() {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let numbered = model.tree.get(key).is_none_or(|node| node.pidfd_inode != 0);
            if !lossless
                && !numbered
                && target.last_signal.is_none()
                && target.pidfd.take().is_some()
            {
                self.open_pidfds -= 1;
            }
            match &target.pidfd {
                None if target.signal_failure.is_some() => opened.push((key, Ok(()))),
                // Its turn to be opened comes in the next round.
                None => self.queue.push(key),
                Some(pidfd) => {
                    opened.push((key, send::verify_identity(model, key, pidfd.handle())))
                }
            }
        }
        let round = model.evaluation();
        let mut asked = Vec::new();
        for (key, identified) in opened {
            match self.signal(&round, key, identified) {
                Ok(Some(SignalStep::Terminate(_))) => asked.push(key),
                Ok(_) => {}
                Err(released) => self.finish(key, ReapOutcome::NotSent(released)),
            }
        }
        // They stand with the oldest first.
        for key in asked.into_iter().rev() {
            let target = self.targets.get(&key);
            if let Some(pidfd) = target.and_then(|target| target.pidfd.as_ref()) {
                // If it is gone already, so much the better.
                let _ = send::send(pidfd.handle(), key.pid, self.own_pid, SignalStep::Continue);
            }
        }
    }

    /// Notes how much memory those have who have been sent their first signal since the last call, as
    /// `memory` reads it by pid. Only for when the signals of a round are out.
    ///
    /// Who has ended meanwhile has no reading: its pid may be another's.
    pub fn measure_memory(&mut self, memory: impl Fn(u32) -> Option<ProcessMemory>) {
        for key in std::mem::take(&mut self.unmeasured)
            .into_iter()
            .take(MEASURED_MAX)
        {
            if let Some(target) = self.targets.get_mut(&key)
                && let Some(pidfd) = &target.pidfd
            {
                target.memory = memory(key.pid).filter(|_| !pidfd.handle().has_exited());
            }
        }
    }

    /// Gives what was sent, if anything was.
    fn signal(
        &mut self,
        round: &Evaluation<'_>,
        key: ProcessKey,
        identified: Result<(), ReleaseReason>,
    ) -> Result<Option<SignalStep>, ReleaseReason> {
        let Some(target) = self.targets.get_mut(&key) else {
            return Ok(None);
        };
        let Some(pidfd) = &target.pidfd else {
            let decision = send::check_due(round, key)?;
            self.reports.push(ReapEvent::Decided { key, decision });
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
        let node = round.node(key);
        let init = node.is_some_and(|node| node.namespace_init);
        target.signals_had |= node.map_or(0, |node| node.state.member.signals_sent);
        let decision = match identified.and_then(|()| send::check_due(round, key)) {
            Err(ReleaseReason::AlreadyExited) if waited_for => return Ok(None),
            // Of what another has sent it. Its exit record is on its way.
            Err(ReleaseReason::AlreadyExited) if target.signals_had != 0 => {
                watch_exit(&**pidfd, key, target.token);
                return Ok(None);
            }
            verified => verified?,
        };
        if !std::mem::replace(&mut target.is_reported, true) {
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
                target.signal_failure = None;
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
            Err(nix::Error::EPERM) => target.signal_failure = Some(ReapFailure::Eperm),
            Err(errno) => target.signal_failure = Some(ReapFailure::Errno(errno as i32)),
        }
        watch_exit(&**pidfd, key, target.token);
        Ok(sent.is_ok().then_some(step))
    }
}

fn watch_exit(pidfd: &dyn WatchedHandle, key: ProcessKey, token: u64) {
    if let Err(error) = pidfd.watch_exit(token) {
        tracing::error!("pid {}: cannot wait for its exit: {error}", key.pid);
    }
}
