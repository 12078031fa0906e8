//! Claims of the service: the model provides identity, decision and exit status.

use reaper_model::event::{ExitStatus, ProcessKey, TICK_NS};
use reaper_model::policy::{Decision, Reason};
use reaper_model::session::{RootExit, SessionId};
use reaper_model::{Model, Node};

use super::Reaper;
use crate::reap::target::Target;
use crate::reap::{Escalation, ReapEvent, ReapOutcome, ReleaseReason, send};

/// Number of processes that are checked together and then signalled. A small number keeps the checks fresh until the
/// signal, a large one shares the work that the checks have in common.
const BATCH_MAX: usize = 128;

impl Reaper {
    /// Claims a member, which adds it to the escalation of its session or of the outermost enclosing one that is due.
    /// Queues it for a signal, unless it is left to its parent. In observe mode there is no escalation.
    ///
    /// Returns false, and does nothing, if it is already claimed, has exited or is not a member.
    pub fn claim(&mut self, model: &Model, key: ProcessKey, decision: &Decision) -> bool {
        let Some(node) = model.tree.get(key).filter(|_| !self.is_claimed(key)) else {
            return false;
        };
        let Some(session) = node.state.member.session else {
            return false;
        };
        // A rule can reap a member of a living agent. The escalation is then that of its session.
        let escalation = model.escalation_of(node).unwrap_or(session);
        let parent = node.parent.filter(|_| node.orphaned.is_none());
        let parent = parent.and_then(|parent| self.targets.get(&parent));
        let late = decision.reason == Reason::ForkedAfterRootExit
            || parent.is_some_and(|parent| parent.signal().is_some())
                && may_be_born_after(key, decision);
        let kill_at = match decision.grace_ns {
            0 => 0,
            grace => self.clock.monotonic().saturating_add(grace),
        };
        let signals_had = node.state.member.signals_sent;
        let waits_for_parent = !self.observe
            && self.add_to_escalation(escalation, key, late)
            && node.orphaned.is_none()
            && signals_had == 0;
        // The decision about a process that was already signalled needs no verification.
        let is_reported = waits_for_parent || !self.observe && signals_had != 0;
        let due_at = decision
            .due
            .map(|due| if late { key.start } else { due.at });
        let target = Target {
            kill_at,
            grace: decision.grace_ns,
            needed_by: decision.needed_by,
            escalation,
            session,
            is_reported,
            due_at: due_at.filter(|_| !waits_for_parent),
            signals_had,
            ..Target::default()
        };
        self.insert(key, target);
        if is_reported {
            let decision = decision.clone();
            self.reports.push(ReapEvent::Decided { key, decision });
        }
        if !waits_for_parent {
            self.queue.push(key);
        }
        true
    }

    /// Adds a process to an escalation, which is opened if needed. Returns whether it must wait for its parent to exit.
    /// A process that was born after SIGTERM (`late`) may belong to the parent's cleanup. It is left alone until
    /// SIGKILL is due, while its parent is alive.
    fn add_to_escalation(&mut self, session: SessionId, key: ProcessKey, late: bool) -> bool {
        let now = self.clock.monotonic();
        let escalation = self.escalations.entry(session);
        escalation.or_insert_with(|| Escalation::new(self.times, now));
        if self.update(session, |escalation| late && escalation.on_birth(now)) == Some(true) {
            self.queue_all(session);
        }
        self.update(session, |escalation| {
            escalation.on_claim(key);
            late && escalation.is_before_kill()
        }) == Some(true)
    }

    /// Notes the exit status of a process if it is claimed; its pidfd confirms the exit later. Without a pidfd,
    /// finishes the claim. Also queues the claimed orphans of the process that have not been signalled yet.
    pub fn on_exit(&mut self, node: &Node, exit_status: ExitStatus, orphans: &[ProcessKey]) {
        let key = node.key;
        if let Some(target) = self.targets.get_mut(&key) {
            target.exit_status = Some(exit_status);
            target.signals_had |= node.state.member.signals_sent;
            if target.pidfd.is_none() {
                self.finish(key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited));
            }
        }
        // Orphans that were left to their parent are signalled now.
        for orphan in orphans {
            if self
                .targets
                .get(orphan)
                .is_some_and(|target| target.last_signal.is_none())
            {
                self.queue.push(*orphan);
            }
        }
    }

    /// Returns whether a queued process has no known pidfd inode (before Linux 6.9). Then only the tree confirms its
    /// identity, and only if no record is lost between opening and signalling.
    pub fn needs_confirmation(&self, model: &Model) -> bool {
        let without_inode = |key: &ProcessKey| {
            model
                .tree
                .get(*key)
                .is_some_and(|node| node.pidfd_inode == 0)
        };
        self.queue.iter().any(without_inode)
    }

    /// Signals the queued processes that are still due according to the model. If records were lost since the opening
    /// (`lossless` is false), pidfds without a known inode are opened again in the next round.
    pub fn signal_queued(&mut self, model: &mut Model, lossless: bool) {
        let queue = std::mem::take(&mut self.queue);
        for keys in queue.chunks(BATCH_MAX) {
            self.signal_some(keys, model, lossless);
        }
    }

    /// Signals one batch of queued processes, see [`Reaper::signal_queued`]. Verifies all of them, then evaluates and
    /// signals each in the order of `keys`, and then wakes them.
    fn signal_some(&mut self, keys: &[ProcessKey], model: &mut Model, lossless: bool) {
        let mut opened = Vec::with_capacity(keys.len());
        for key in keys.iter().copied() {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let has_inode = model.tree.get(key).is_none_or(|node| node.pidfd_inode != 0);
            if !lossless
                && !has_inode
                && target.last_signal.is_none()
                && target.pidfd.take().is_some()
            {
                self.open_pidfds -= 1;
            }
            match &target.pidfd {
                None if target.obstacle.is_some() => opened.push((key, Ok(()))),
                // Its pidfd is opened in the next round.
                None => self.queue.push(key),
                Some(pidfd) => {
                    opened.push((key, send::verify_identity(model, key, pidfd.handle())))
                }
            }
        }
        let round = model.evaluation();
        let mut signalled = Vec::new();
        for (key, identified) in opened {
            let node = round.node(key);
            if let Some(target) = self.targets.get_mut(&key) {
                target.signals_had |= node.map_or(0, |node| node.state.member.signals_sent);
            }
            let due = identified.and_then(|()| send::check_due(&round, key).map(Some));
            if self.signal(key, due, node.is_some_and(|node| node.namespace_init)) {
                signalled.push(key);
            }
        }
        self.wake(&signalled);
    }
}

/// Returns whether a process may be born after the exit that made it due: its start is known only to the clock tick, and
/// the exit was in that tick.
fn may_be_born_after(key: ProcessKey, decision: &Decision) -> bool {
    let is_same_tick = |due: RootExit| due.at / TICK_NS == key.start / TICK_NS;
    key.exact_start().is_none() && decision.due.is_some_and(is_same_tick)
}
