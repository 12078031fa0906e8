//! The claims: which processes are to be ended, and by which escalation.
//!
//! The same claims serve two callers. `service` takes identity and decision from the model, which follows every event.
//! `polling` takes them from a scan of the process table after the pidfd was opened.

mod end;
pub(super) mod polling;
mod service;
mod signal;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::target::Target;
use super::{Escalation, ReapEvent, Stage, Times, files_max};
use reaper_host::kernel::{Clock, Signals};
use reaper_model::event::ProcessKey;
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
    /// Without claims. `observe`: nothing is signalled.
    pub fn new(
        own_pid: u32,
        clock: Arc<dyn Clock>,
        signals: Arc<dyn Signals>,
        times: Times,
        observe: bool,
    ) -> Reaper {
        Reaper {
            own_pid,
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
            clock,
            signals,
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

    /// Processes that wait to be signalled.
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

    /// Claims a process.
    fn insert(&mut self, key: ProcessKey, target: Target) {
        self.last_token += 1;
        self.tokens.insert(self.last_token, key);
        *self.members.entry(target.session).or_default() += 1;
        let token = self.last_token;
        self.targets.insert(key, Target { token, ..target });
    }

    /// What has happened since the last call.
    pub fn take_reports(&mut self) -> Vec<ReapEvent> {
        std::mem::take(&mut self.reports)
    }
}

#[cfg(test)]
mod tests;
