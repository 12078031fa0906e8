//! Confirms exits, and gives up on processes that do not exit.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::Reaper;
use crate::reap::target::Target;
use crate::reap::{Escalation, ReapEvent, ReapFailure, ReapOutcome, ReapResult};
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::session::SessionId;

/// Total time that the reaper waits at its stop for pidfds to confirm exits.
const CONFIRM_AT_STOP: Duration = Duration::from_millis(200);

impl Reaper {
    /// Finishes the claims of processes whose exit is recorded and reported by their pidfd. Returns the number of exits
    /// that pidfds reported, 0 if there are no more. Also returns the processes without an exit record. The caller must
    /// pass these to [`Reaper::on_unrecorded_exit`] before the next call.
    pub fn confirm_exits(&mut self) -> (usize, Vec<ProcessKey>) {
        let mut unrecorded = Vec::new();
        let ready = self.signals.exited();
        for token in &ready {
            let Some(key) = self.tokens.get(token).copied() else {
                continue;
            };
            match self.targets.get(&key).and_then(|target| target.exit_status) {
                Some(exit_status) => self.finish(key, ReapOutcome::Exited(exit_status)),
                None => unrecorded.push(key),
            }
        }
        (ready.len(), unrecorded)
    }

    /// Finishes the claim of a process whose exit is confirmed, with or without an exit record.
    pub fn on_unrecorded_exit(&mut self, key: ProcessKey) {
        if let Some(target) = self.targets.get(&key) {
            self.finish(
                key,
                ReapOutcome::Exited(target.exit_status.unwrap_or(ExitStatus::Unknown)),
            );
        }
    }

    /// Advances the escalations whose deadline has passed. If the grace has just expired, queues all claims for
    /// SIGKILL. Later, checks for progress. `memory` returns state and RSS in bytes of a process.
    pub fn tick(&mut self, memory: impl Fn(ProcessKey) -> (char, u64)) {
        let now = self.clock.monotonic();
        let expired: Vec<_> = self
            .deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline <= now)
            .map(|(_, id)| *id)
            .collect();
        for session in expired {
            let is_before_kill = |escalation: &Escalation| escalation.is_before_kill();
            if self.escalations.get(&session).is_some_and(is_before_kill) {
                self.update(session, |escalation| escalation.kill(now));
                self.queue_all(session);
            } else {
                self.check_progress(session, now, &memory);
            }
        }
    }

    /// Checks for progress if no process has exited for a while. A killed process that runs, or any that frees memory,
    /// makes progress. After two checks in a row without progress, finishes the claims that had SIGKILL or could not be
    /// signalled. Others are queued for SIGKILL.
    fn check_progress(
        &mut self,
        session: SessionId,
        now: u64,
        memory: &impl Fn(ProcessKey) -> (char, u64),
    ) {
        let mut stuck = Vec::new();
        let mut progress = false;
        let Some(escalation) = self.escalations.get_mut(&session) else {
            return;
        };
        for key in escalation.claims() {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let (state, rss) = memory(key);
            progress |= rss < target.rss;
            target.rss = rss;
            // A killed process may wait for a free CPU to exit.
            progress |= target.last_signal == Some(Signal::SIGKILL) && state == 'R';
            match target.obstacle {
                Some(outcome) => stuck.push((key, outcome)),
                // Also if its exit record was read, but its pidfd does not confirm the exit.
                None if target.exit_status.is_some()
                    || target.last_signal == Some(Signal::SIGKILL) =>
                {
                    stuck.push((key, ReapOutcome::Failed(ReapFailure::KillTimeout(state))));
                }
                // It joined later and has not had its signal yet, has a longer grace, or is left to an ancestor.
                None => self.queue.push(key),
            }
        }
        if progress || !escalation.on_stall() || stuck.is_empty() {
            self.update(session, |escalation| escalation.on_progress(now));
            return;
        }
        for (key, outcome) in stuck {
            self.finish(key, outcome);
        }
    }

    /// Queues the claimed processes of an escalation for the next round.
    pub(super) fn queue_all(&mut self, session: SessionId) {
        if let Some(escalation) = self.escalations.get(&session) {
            self.queue.extend(escalation.claims());
        }
    }

    /// Removes a claim and its pidfd, and reports the outcome. Queues the processes that were left to it, and one that
    /// waits for files.
    /// Does nothing if the process is not claimed.
    pub(super) fn finish(&mut self, key: ProcessKey, outcome: ReapOutcome) {
        let Some(target) = self.targets.remove(&key) else {
            return;
        };
        self.tokens.remove(&target.token);
        self.queue
            .extend(self.left.remove(&key).into_iter().flatten());
        self.open_pidfds -= usize::from(target.pidfd.is_some());
        if let Some(members) = self.members.get_mut(&target.session) {
            *members -= 1;
            if *members == 0 {
                self.members.remove(&target.session);
            }
        }
        // There is room for one more pidfd. If none is open, no later exit would make room for the others.
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
        let has_exited = matches!(outcome, ReapOutcome::Exited(_));
        self.reports.push(ReapEvent::Outcome {
            session: target.session,
            result: ReapResult {
                key,
                outcome,
                signal: target.signal(),
                duration: target.first_signal.map(|first| now.saturating_sub(first)),
                memory: target.memory.filter(|_| has_exited),
            },
        });
        let now = self.clock.monotonic();
        self.update(target.escalation, |escalation| {
            escalation.on_finished(key, now)
        });
        self.unclaimed.insert(target.escalation);
    }

    /// Gives up all claims, without further signals. Not for a handover: the next service continues them by
    /// [`Reaper::resume`].
    pub fn stop(&mut self) {
        self.give_up(|_, _| ReapOutcome::Failed(ReapFailure::Stopped));
    }

    /// Finishes all claims, those of living processes with the given outcome.
    ///
    /// A process that has exited did not fail, even if its pidfd was not polled yet. The pidfd becomes readable a
    /// moment after the exit record, so this waits for it.
    pub(super) fn give_up(&mut self, outcome: impl Fn(ProcessKey, &Target) -> ReapOutcome) {
        let end = self.clock.after(CONFIRM_AT_STOP);
        let keys: Vec<ProcessKey> = self.targets.keys().copied().collect();
        for key in keys {
            let Some(target) = self.targets.get(&key) else {
                continue;
            };
            let timeout = match target.exit_status {
                Some(_) => Duration::from_nanos(end.saturating_sub(self.clock.monotonic())),
                None => Duration::ZERO,
            };
            let pidfd = target.pidfd.as_ref();
            let outcome = match pidfd.is_some_and(|pidfd| pidfd.handle().wait(timeout)) {
                true => ReapOutcome::Exited(target.exit_status.unwrap_or(ExitStatus::Unknown)),
                false => outcome(key, target),
            };
            self.finish(key, outcome);
        }
    }

    /// Closes the escalations without claims. All that was read must be decided first. Otherwise the child of a process
    /// that has just exited would get a new escalation, which starts from SIGTERM.
    pub fn close_empty(&mut self) {
        for session in std::mem::take(&mut self.unclaimed) {
            if let Some(escalation) = self.escalations.get(&session).filter(|it| it.is_empty()) {
                self.deadlines.remove(&(escalation.deadline(), session));
                self.escalations.remove(&session);
                self.reports.push(ReapEvent::Closed { session });
            }
        }
    }
}
