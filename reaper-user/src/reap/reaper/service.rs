//! Claims of the service: the model says which process is meant, whether it is still due, and how it exited.

use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::policy::{Decision, Reason};
use reaper_model::session::SessionId;
use reaper_model::{Model, Node};

use super::Reaper;
use crate::reap::target::Target;
use crate::reap::{Escalation, ReapEvent, ReapOutcome, ReleaseReason, send};

/// Processes that are looked at together, and then signalled: what is found out of the first is to be young still when
/// its turn comes, and what they have in common is to be found out once.
const TOGETHER: usize = 128;

impl Reaper {
    /// Takes on a process that is to be reaped; false if somebody has already.
    pub fn claim(&mut self, model: &Model, key: ProcessKey, decision: &Decision) -> bool {
        let Some(node) = model.tree.get(key).filter(|_| !self.is_claimed(key)) else {
            return false;
        };
        let Some(session) = node.state.member.session else {
            return false;
        };
        // A rule may want it reaped though its agent lives.
        let ladder = model.escalation_of(node).unwrap_or(session);
        let late = decision.reason == Reason::ForkedAfterRootExit;
        let had = node.state.member.signals_sent;
        let held =
            !self.observe && self.step_on(ladder, key, late) && node.orphaned.is_none() && had == 0;
        // Of what has been signalled there is nothing left to verify before it is told.
        let told = held || !self.observe && had != 0;
        let due_at = decision
            .due
            .map(|due| if late { key.start } else { due.at });
        let target = Target {
            escalation: ladder,
            session,
            is_reported: told,
            due_at: due_at.filter(|_| !held),
            signals_had: had,
            ..Target::default()
        };
        self.insert(key, target);
        if told {
            let decision = decision.clone();
            self.reports.push(ReapEvent::Decided { key, decision });
        }
        if !held {
            self.queue.push(key);
        }
        true
    }

    /// One more on a ladder. True for one that was born into a tree which has been sent SIGTERM: a
    /// handler of that may have made it to clean up, so it is left to its maker while that lives.
    fn step_on(&mut self, session: SessionId, key: ProcessKey, late: bool) -> bool {
        let now = self.clock.monotonic();
        let ladder = self.escalations.entry(session);
        ladder.or_insert_with(|| Escalation::new(self.times, now));
        if self.update(session, |ladder| late && ladder.on_birth(now)) == Some(true) {
            self.queue_all(session);
        }
        self.update(session, |ladder| {
            ladder.on_claim(key);
            late && ladder.is_before_kill()
        }) == Some(true)
    }

    /// The exit record of a process and the orphans it left.
    pub fn on_exit(&mut self, node: &Node, ended: ExitStatus, orphans: &[ProcessKey]) {
        let key = node.key;
        if let Some(target) = self.targets.get_mut(&key) {
            target.exit_status = Some(ended);
            target.signals_had |= node.state.member.signals_sent;
            if target.pidfd.is_none() {
                self.finish(key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited));
            }
        }
        // The clean-up's maker is gone: nobody waits for it any more.
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
                None if target.obstacle.is_some() => opened.push((key, Ok(()))),
                // Its turn to be opened comes in the next round.
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
