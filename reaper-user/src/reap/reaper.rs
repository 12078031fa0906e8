//! The claims: who is to be ended, and on whose ladder.

mod end;
mod signal;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::target::Target;
use super::{Escalation, ReapEvent, ReapOutcome, ReleaseReason, Stage, Times, files_max};
use reaper_host::kernel::{Clock, Kernel, Signals};
use reaper_model::Model;
use reaper_model::Node;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::policy::{Decision, Reason};
use reaper_model::session::SessionId;

/// See the module.
pub struct Reaper {
    own_pid: u32,
    times: Times,
    /// Nothing is signalled.
    observe: bool,
    targets: HashMap<ProcessKey, Target>,
    escalations: BTreeMap<SessionId, Escalation>,
    /// Deadlines of the escalations. See [`Reaper::update`].
    deadlines: BTreeSet<(u64, SessionId)>,
    /// Escalations that may have no claims.
    unclaimed: BTreeSet<SessionId>,
    /// How many of the targets are members of each session.
    members: HashMap<SessionId, usize>,
    /// How many of the targets have a pidfd.
    open_pidfds: usize,
    /// While there are such, no file with this number or a higher one is kept open: to look at processes takes some too.
    files_max: u64,
    /// To be signalled next: opened, if need be, and then drained past, before it is.
    queue: Vec<ProcessKey>,
    /// To be opened once there is room for more open files.
    waiting_for_files: VecDeque<ProcessKey>,
    /// Processes that were sent their first signal since the last [`Reaper::measure_memory`].
    unmeasured: Vec<ProcessKey>,
    clock: Arc<dyn Clock>,
    signals: Arc<dyn Signals>,
    tokens: HashMap<u64, ProcessKey>,
    last_token: u64,
    reports: Vec<ReapEvent>,
}

impl Reaper {
    pub fn new(kernel: &Kernel, times: Times, observe: bool) -> Reaper {
        Reaper {
            own_pid: kernel.processes.own_pid(),
            times,
            observe,
            targets: HashMap::new(),
            escalations: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            members: HashMap::new(),
            open_pidfds: 0,
            files_max: files_max(),
            queue: Vec::new(),
            waiting_for_files: VecDeque::new(),
            unmeasured: Vec::new(),
            clock: Arc::clone(&kernel.clock),
            signals: Arc::clone(&kernel.signals),
            tokens: HashMap::new(),
            last_token: 0,
            reports: Vec::new(),
        }
    }

    /// Other delays, for the ladders that are opened from now on.
    pub fn set_times(&mut self, times: Times) {
        self.times = times;
    }

    /// Ladders that are open.
    pub fn open_escalations(&self) -> usize {
        self.escalations.len()
    }

    /// Whether a session's ladder is open.
    pub fn has_open_escalation(&self, session: SessionId) -> bool {
        self.escalations.contains_key(&session)
    }

    /// Whether members of this very session are claimed, be it on another's ladder.
    pub fn has_members_of(&self, session: SessionId) -> bool {
        self.members.contains_key(&session)
    }

    /// Returns where a session's ladder is; `None` if it is not open.
    pub fn stage(&self, session: SessionId) -> Option<Stage> {
        self.escalations.get(&session).map(Escalation::stage)
    }

    /// The open ladders, and where they are.
    pub fn stages(&self) -> impl Iterator<Item = (SessionId, Stage)> {
        self.escalations
            .iter()
            .map(|(session, ladder)| (*session, ladder.stage()))
    }

    /// Opens a ladder as the service before this one left it, with SIGKILL due at `kill_at` on the
    /// monotonic clock. Who belongs on it is claimed afterwards, before the next
    /// [`Reaper::close_empty`]; the session is one that is due by itself, in no other that is.
    pub fn resume(&mut self, session: SessionId, kill_at: u64) {
        if !self.observe {
            let ladder = Escalation::resumed(self.times, kill_at, self.clock.monotonic());
            self.escalations.entry(session).or_insert(ladder);
            // Adds its deadline.
            self.update(session, |_| ());
            self.unclaimed.insert(session);
        }
    }

    /// Gives a session's ladder its whole grace again if it is open: a rule has ended the root alone, and the rest of
    /// the tree is only now due.
    pub fn restart_grace(&mut self, session: SessionId) {
        let (times, now) = (self.times, self.clock.monotonic());
        self.update(session, |ladder| *ladder = ladder.renewed(times, now));
    }

    /// Changes an escalation. Nothing else changes its deadline, so `deadlines` is up to date.
    fn update<T>(
        &mut self,
        session: SessionId,
        change: impl FnOnce(&mut Escalation) -> T,
    ) -> Option<T> {
        let escalation = self.escalations.get_mut(&session)?;
        self.deadlines.remove(&(escalation.deadline(), session));
        let result = change(escalation);
        self.deadlines.insert((escalation.deadline(), session));
        Some(result)
    }

    /// How long before SIGKILL a session's ladder sends SIGTERM: of that which goes on, or else of one that began now.
    pub fn grace(&self, session: Option<SessionId>, times: Times) -> Duration {
        let open = session.and_then(|session| self.escalations.get(&session));
        open.map_or(times.grace, Escalation::grace)
    }

    /// Whether something waits to be signalled.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Who does.
    pub fn queued(&self) -> &[ProcessKey] {
        &self.queue
    }

    /// When [`Reaper::tick`] is wanted next, on the monotonic clock.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Returns what is readable when [`Reaper::confirm_exits`] has something to do.
    pub fn exit_poll(&self) -> impl AsFd {
        Arc::clone(&self.signals)
    }

    pub fn is_claimed(&self, key: ProcessKey) -> bool {
        self.targets.contains_key(&key)
    }

    /// Whether it has been reported of a process that it is to be reaped.
    pub fn has_reported(&self, key: ProcessKey) -> bool {
        self.targets
            .get(&key)
            .is_some_and(|target| target.is_reported)
    }

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
        self.last_token += 1;
        self.tokens.insert(self.last_token, key);
        let due_at = decision
            .due
            .map(|due| if late { key.start } else { due.at });
        let target = Target {
            escalation: ladder,
            session,
            is_reported: told,
            pidfd: None,
            token: self.last_token,
            due_at: due_at.filter(|_| !held),
            first_signal: None,
            last_signal: None,
            signals_had: had,
            exit_status: None,
            signal_failure: None,
            rss: u64::MAX,
            memory: None,
        };
        self.targets.insert(key, target);
        *self.members.entry(session).or_default() += 1;
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

    /// What has happened since the last call.
    pub fn take_reports(&mut self) -> Vec<ReapEvent> {
        std::mem::take(&mut self.reports)
    }
}

#[cfg(test)]
mod tests;
