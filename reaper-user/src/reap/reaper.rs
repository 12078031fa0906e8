//! Keeps the claims: the processes to end, each with its escalation.
//!
//! Two callers use the claims. `service` takes identity and decision from the model, which follows every event.
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

/// Claimed processes and open escalations.
pub struct Reaper {
    own_pid: u32,
    times: Times,
    /// Whether no signals are sent.
    observe: bool,
    targets: HashMap<ProcessKey, Target>,
    escalations: BTreeMap<SessionId, Escalation>,
    /// Deadlines of the escalations, kept by [`Reaper::update`].
    deadlines: BTreeSet<(u64, SessionId)>,
    /// Escalations that may have no claims.
    unclaimed: BTreeSet<SessionId>,
    /// Number of claimed members by session.
    members: HashMap<SessionId, usize>,
    /// Number of claimed processes with an open pidfd.
    open_pidfds: usize,
    /// File descriptor from which on no further pidfd is kept open while others are: reading /proc needs files too.
    files_max: u64,
    /// Processes of the next round of signals. Their pidfds are opened first, and the source is drained after that.
    queue: Vec<ProcessKey>,
    /// Processes that wait for the exit of an ancestor which may need them, by that ancestor.
    left: HashMap<ProcessKey, BTreeSet<ProcessKey>>,
    /// Processes whose pidfd is opened once fewer files are open.
    waiting_for_files: VecDeque<ProcessKey>,
    /// Processes that had their first signal since the last [`Reaper::measure_memory`].
    unmeasured: Vec<ProcessKey>,
    clock: Arc<dyn Clock>,
    signals: Arc<dyn Signals>,
    /// Claimed processes by the number that their pidfd is watched with.
    tokens: HashMap<u64, ProcessKey>,
    last_token: u64,
    reports: Vec<ReapEvent>,
}

impl Reaper {
    /// Creates a reaper without claims. With `observe` it sends no signals.
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
            left: HashMap::new(),
            waiting_for_files: VecDeque::new(),
            unmeasured: Vec::new(),
            clock,
            signals,
            tokens: HashMap::new(),
            last_token: 0,
            reports: Vec::new(),
        }
    }

    /// Sets the delays of escalations that are opened from now on.
    pub fn set_times(&mut self, times: Times) {
        self.times = times;
    }

    pub fn open_escalations(&self) -> usize {
        self.escalations.len()
    }

    /// Returns whether an escalation is open for this very session, not only for an enclosing one.
    pub fn has_open_escalation(&self, session: SessionId) -> bool {
        self.escalations.contains_key(&session)
    }

    /// Returns whether members of this very session are claimed, even if by the escalation of another session.
    pub fn has_members_of(&self, session: SessionId) -> bool {
        self.members.contains_key(&session)
    }

    /// Returns the stage of a session's escalation, `None` if it is not open.
    pub fn stage(&self, session: SessionId) -> Option<Stage> {
        self.escalations.get(&session).map(Escalation::stage)
    }

    /// Returns the stages of all open escalations.
    pub fn stages(&self) -> impl Iterator<Item = (SessionId, Stage)> {
        self.escalations
            .iter()
            .map(|(session, escalation)| (*session, escalation.stage()))
    }

    /// Opens the escalation that an earlier service left, with SIGKILL due at `kill_at` (ns of CLOCK_MONOTONIC).
    ///
    /// Its members must be claimed before the next [`Reaper::close_empty`]. No enclosing session may be due. Does
    /// nothing in observe mode, or if the escalation is open.
    pub fn resume(&mut self, session: SessionId, kill_at: u64) {
        if !self.observe {
            let escalation = Escalation::resumed(self.times, kill_at, self.clock.monotonic());
            self.escalations.entry(session).or_insert(escalation);
            // Adds its deadline.
            self.update(session, |_| ());
            self.unclaimed.insert(session);
        }
    }

    /// Restarts the grace of an open escalation: a rule has ended the root only, and the others are due only now. Does
    /// nothing if none is open.
    pub fn restart_grace(&mut self, session: SessionId) {
        let (times, now) = (self.times, self.clock.monotonic());
        self.update(session, |escalation| {
            *escalation = escalation.renewed(times, now)
        });
    }

    /// Changes an escalation. All changes of a deadline go through here, so `deadlines` is up to date. Returns the
    /// result of `change`, `None` if no escalation is open.
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

    /// Returns the time between SIGTERM and SIGKILL of the session's open escalation. If none is open, returns that in
    /// `times`.
    pub fn grace(&self, session: Option<SessionId>, times: Times) -> Duration {
        let open = session.and_then(|session| self.escalations.get(&session));
        open.map_or(times.grace, Escalation::grace)
    }

    /// Returns the processes of the next round of signals, without those that wait for their parent or for free files.
    pub fn queued(&self) -> &[ProcessKey] {
        &self.queue
    }

    /// Returns when to call [`Reaper::tick`] next, in ns of CLOCK_MONOTONIC. `None` if no escalation is open.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Returns a descriptor that is readable when [`Reaper::confirm_exits`] has work.
    pub fn exit_poll(&self) -> impl AsFd {
        Arc::clone(&self.signals)
    }

    pub fn is_claimed(&self, key: ProcessKey) -> bool {
        self.targets.contains_key(&key)
    }

    /// Returns whether the decision to reap a claimed process was reported.
    pub fn has_reported(&self, key: ProcessKey) -> bool {
        self.targets
            .get(&key)
            .is_some_and(|target| target.is_reported)
    }

    /// Adds a claim with a new token. Does not add it to an escalation.
    fn insert(&mut self, key: ProcessKey, target: Target) {
        self.last_token += 1;
        self.tokens.insert(self.last_token, key);
        *self.members.entry(target.session).or_default() += 1;
        let token = self.last_token;
        self.targets.insert(key, Target { token, ..target });
    }

    /// Removes and returns the reports since the last call, in order.
    pub fn take_reports(&mut self) -> Vec<ReapEvent> {
        std::mem::take(&mut self.reports)
    }
}

#[cfg(test)]
mod tests;
