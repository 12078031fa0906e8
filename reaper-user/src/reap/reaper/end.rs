//! What becomes of those who were signalled: they end, or nothing moves any more.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::Reaper;
use crate::reap::target::Target;
use crate::reap::{Escalation, ReapEvent, ReapFailure, ReapOutcome, ReapResult};
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::session::SessionId;

/// Time limit for all pidfds together that are to confirm an exit when this program stops.
const CONFIRM_AT_STOP: Duration = Duration::from_millis(200);

impl Reaper {
    /// Confirms the ends of some that have exited. Gives how many there were, 0 if there are no more,
    /// and those of which no exit record was read: these must be told by [`Reaper::on_unrecorded_exit`]
    /// before the next call.
    pub fn confirm_exits(&mut self) -> (usize, Vec<ProcessKey>) {
        let mut unrecorded = Vec::new();
        let ready = self.signals.exited();
        for token in &ready {
            let Some(key) = self.tokens.get(token).copied() else {
                continue;
            };
            match self.targets.get(&key).and_then(|target| target.exit_status) {
                Some(ended) => self.finish(key, ReapOutcome::Exited(ended)),
                None => unrecorded.push(key),
            }
        }
        (ready.len(), unrecorded)
    }

    /// Ends a claim whose exit is confirmed, whether or not anything told how it came.
    pub fn on_unrecorded_exit(&mut self, key: ProcessKey) {
        if let Some(target) = self.targets.get(&key) {
            self.finish(
                key,
                ReapOutcome::Exited(target.exit_status.unwrap_or(ExitStatus::Unknown)),
            );
        }
    }

    /// Takes the ladders on whose time has come.
    pub fn tick(&mut self, memory: impl Fn(ProcessKey) -> (char, u64)) {
        let now = self.clock.monotonic();
        let expired: Vec<_> = self
            .deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline <= now)
            .map(|(_, id)| *id)
            .collect();
        for session in expired {
            let is_before_kill = |ladder: &Escalation| ladder.is_before_kill();
            if self.escalations.get(&session).is_some_and(is_before_kill) {
                self.update(session, |ladder| ladder.kill(now));
                self.queue_all(session);
            } else {
                self.look_for_progress(session, now, &memory);
            }
        }
    }

    /// Nothing has ended for a while: a process that runs or gives memory back is on its way, the rest is stuck.
    fn look_for_progress(
        &mut self,
        session: SessionId,
        now: u64,
        memory: &impl Fn(ProcessKey) -> (char, u64),
    ) {
        let mut stuck = Vec::new();
        let mut progress = false;
        let Some(ladder) = self.escalations.get_mut(&session) else {
            return;
        };
        for key in ladder.claims() {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let (state, rss) = memory(key);
            progress |= rss < target.rss;
            target.rss = rss;
            // On a busy machine a killed process waits for a processor to exit on.
            progress |= target.last_signal == Some(Signal::SIGKILL) && state == 'R';
            match target.obstacle {
                Some(outcome) => stuck.push((key, outcome)),
                // Or it has exited, and that does not come to its end.
                None if target.exit_status.is_some()
                    || target.last_signal == Some(Signal::SIGKILL) =>
                {
                    stuck.push((key, ReapOutcome::Failed(ReapFailure::KillTimeout(state))));
                }
                // It has come since, and has not had its signal yet.
                None => self.queue.push(key),
            }
        }
        if progress || !ladder.on_stall() || stuck.is_empty() {
            self.update(session, |ladder| ladder.on_progress(now));
            return;
        }
        for (key, outcome) in stuck {
            self.finish(key, outcome);
        }
    }

    pub(super) fn queue_all(&mut self, session: SessionId) {
        if let Some(ladder) = self.escalations.get(&session) {
            self.queue.extend(ladder.claims());
        }
    }

    pub(super) fn finish(&mut self, key: ProcessKey, outcome: ReapOutcome) {
        let Some(target) = self.targets.remove(&key) else {
            return;
        };
        self.tokens.remove(&target.token);
        self.open_pidfds -= usize::from(target.pidfd.is_some());
        if let Some(members) = self.members.get_mut(&target.session) {
            *members -= 1;
            if *members == 0 {
                self.members.remove(&target.session);
            }
        }
        // There is room for one more pidfd now. If none is open, no exit will make room for the others.
        while let Some(next) = self.waiting_for_files.pop_front() {
            if self.targets.contains_key(&next) {
                self.queue.push(next);
                if self.open_pidfds > 0 {
                    break;
                }
            }
        }
        let now = self.clock.boot_time();
        let outcome = target.outcome(outcome);
        let ended = matches!(outcome, ReapOutcome::Exited(_));
        self.reports.push(ReapEvent::Outcome {
            session: target.session,
            result: ReapResult {
                key,
                outcome,
                signal: target.signal(),
                duration: target.first_signal.map(|first| now.saturating_sub(first)),
                memory: target.memory.filter(|_| ended),
            },
        });
        let now = self.clock.monotonic();
        self.update(target.escalation, |ladder| ladder.on_finished(key, now));
        self.unclaimed.insert(target.escalation);
    }

    /// Gives up what is still claimed, since this program stops and no other takes over. Where another does, the claims
    /// are left as they are, to be taken up by [`Reaper::resume`].
    pub fn stop(&mut self) {
        self.give_up(|_, _| ReapOutcome::Failed(ReapFailure::Stopped));
    }

    /// Ends all claims, those of processes that live on with the outcome that is given.
    ///
    /// A process that has exited did not fail to end, though its pidfd was not polled yet. Waits for the pidfd of one whose
    /// exit record was read: it becomes readable a moment after that.
    pub(super) fn give_up(&mut self, outcome: impl Fn(ProcessKey, &Target) -> ReapOutcome) {
        let end = self.clock.after(CONFIRM_AT_STOP);
        let keys: Vec<ProcessKey> = self.targets.keys().copied().collect();
        for key in keys {
            let Some(target) = self.targets.get(&key) else {
                continue;
            };
            let patience = match target.exit_status {
                Some(_) => Duration::from_nanos(end.saturating_sub(self.clock.monotonic())),
                None => Duration::ZERO,
            };
            let pidfd = target.pidfd.as_ref();
            let outcome = match pidfd.is_some_and(|pidfd| pidfd.handle().wait(patience)) {
                true => ReapOutcome::Exited(target.exit_status.unwrap_or(ExitStatus::Unknown)),
                false => outcome(key, target),
            };
            self.finish(key, outcome);
        }
    }

    /// Closes the ladders on which nobody is left. Only for when all is decided about that has been read:
    /// a process may have left one to its child a moment ago, and a new ladder would begin at its foot.
    pub fn close_empty(&mut self) {
        for session in std::mem::take(&mut self.unclaimed) {
            if let Some(ladder) = self.escalations.get(&session).filter(|it| it.is_empty()) {
                self.deadlines.remove(&(ladder.deadline(), session));
                self.escalations.remove(&session);
                self.reports.push(ReapEvent::Closed { session });
            }
        }
    }
}
