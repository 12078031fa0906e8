//! Deferred decisions: members that wait for facts from /proc or for the delay of a rule.
//!
//! Worker threads read the facts ([`FactReader`]). The member is evaluated again when they arrive or a deadline passes.

use std::collections::BTreeSet;

use hashbrown::{HashMap, HashSet};

use super::Engine;
use super::queue::Queued;
use reaper_host::facts::{FactAnswer, FactReader, Urgency};
use reaper_model::Model;
use reaper_model::event::ProcessKey;
use reaper_model::facts::{Fact, FactSet};
use reaper_model::policy::Decision;
use reaper_model::session::{Session, SessionId};

/// Number of retries of a failed read. The delays are 4, 16 and 64 times [`RETRY_DELAY_NS`]: 1 s, 4 s and 16 s.
const RETRIES: u32 = 3;
const RETRY_DELAY_NS: u64 = 250_000_000;

/// Limit of processes with a retry counter. Exited processes keep theirs, so all are dropped at the limit.
const RETRY_COUNTERS_MAX: usize = 4096;

/// Interval between two checks for a display server, in ns.
const DISPLAY_INTERVAL_NS: u64 = 1_000_000_000;

/// Uid in place of that of an exited process. No user has it.
const UNKNOWN_UID: u32 = u32::MAX;

/// Members without a final decision, with what each of them waits for.
pub struct Deferred {
    /// Reads /proc on worker threads. The engine never blocks on them.
    pub facts: Box<dyn FactReader>,
    /// Processes whose facts a decision needs, by the number of the request.
    requested: Waiting,
    /// Number of the latest request.
    last: u64,
    /// Processes that wait for facts of relatives, by the number of the request.
    waiting_for_relatives: Waiting,
    /// Processes whose activity is being read, with the living roots and due members that wait for it. A member of a
    /// nested session belongs to the tree of the outer root too.
    waiters: HashMap<ProcessKey, Vec<ProcessKey>>,
    /// Number of activity readings that each of them still waits for.
    activity_left: HashMap<ProcessKey, usize>,
    /// Sessions to check in the next round. They close once all of their members are decided.
    pub closing: HashSet<SessionId>,
    /// Sessions to check after the deadline of one of their members.
    pub closing_later: HashSet<SessionId>,
    /// Processes by the time of their re-evaluation, in ns of CLOCK_MONOTONIC.
    deadlines: Waiting,
    /// Number of retries of failed reads by process.
    retries: HashMap<ProcessKey, u32>,
    /// Time of the next check for a display server, in ns of CLOCK_MONOTONIC.
    next_display_check: u64,
}

/// Waiting processes, each with a number (a time or a request number) and its session.
#[derive(Default)]
struct Waiting {
    by_process: HashMap<ProcessKey, (u64, SessionId)>,
    by_number: BTreeSet<(u64, ProcessKey)>,
    by_session: BTreeSet<(SessionId, ProcessKey)>,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.by_process.is_empty()
    }

    fn contains(&self, key: ProcessKey) -> bool {
        self.by_process.contains_key(&key)
    }

    /// Returns the lowest number.
    fn first(&self) -> Option<u64> {
        self.by_number.first().map(|(number, _)| *number)
    }

    /// Returns the processes of a session.
    fn of(&self, id: SessionId) -> impl Iterator<Item = ProcessKey> {
        let first = ProcessKey { pid: 0, start: 0 };
        let all = self.by_session.range((id, first)..);
        all.take_while(move |(session, _)| *session == id)
            .map(|(_, key)| *key)
    }

    /// Adds a process and replaces its earlier entry.
    fn insert(&mut self, key: ProcessKey, number: u64, session: SessionId) {
        self.remove(key);
        self.by_process.insert(key, (number, session));
        self.by_number.insert((number, key));
        self.by_session.insert((session, key));
    }

    /// Removes a process. Returns its session if it had an entry.
    fn remove(&mut self, key: ProcessKey) -> Option<SessionId> {
        let (number, session) = self.by_process.remove(&key)?;
        self.by_number.remove(&(number, key));
        self.by_session.remove(&(session, key));
        Some(session)
    }

    /// Removes the processes with numbers up to `number`. Returns them with their sessions, lowest number first.
    fn take_until(&mut self, number: u64) -> Vec<(ProcessKey, SessionId)> {
        let mut taken = Vec::new();
        while let Some((first, key)) = self.by_number.first().copied()
            && first <= number
        {
            taken.extend(self.remove(key).map(|session| (key, session)));
        }
        taken
    }
}

impl Deferred {
    pub fn new(facts: Box<dyn FactReader>) -> Deferred {
        Deferred {
            facts,
            requested: Waiting::default(),
            last: 0,
            waiting_for_relatives: Waiting::default(),
            waiters: HashMap::new(),
            activity_left: HashMap::new(),
            closing: HashSet::new(),
            closing_later: HashSet::new(),
            deadlines: Waiting::default(),
            retries: HashMap::new(),
            next_display_check: 0,
        }
    }

    /// Replaces the reader after a change of the rules. Open requests are dropped, since the old reader no longer
    /// delivers answers. The caller must queue the members again.
    pub fn set_reader(&mut self, reader: Box<dyn FactReader>) {
        self.facts = reader;
        self.requested = Waiting::default();
        self.waiting_for_relatives = Waiting::default();
        self.waiters.clear();
        self.activity_left.clear();
    }

    /// Returns whether decisions wait for facts other than the activity of trees.
    pub fn is_reading(&self) -> bool {
        !self.requested.is_empty() || !self.waiting_for_relatives.is_empty()
    }

    /// Returns the time of the next re-evaluation, in ns of CLOCK_MONOTONIC.
    pub fn next(&self) -> Option<u64> {
        self.deadlines.first()
    }

    /// Counts a failed read of a process. Returns when to retry it, `None` after three retries. Both times are in
    /// ns of CLOCK_MONOTONIC.
    pub fn next_retry(&mut self, key: ProcessKey, now: u64) -> Option<u64> {
        if self.retries.len() >= RETRY_COUNTERS_MAX {
            self.retries.clear();
        }
        let retries = self.retries.entry(key).or_default();
        *retries += 1;
        (*retries <= RETRIES).then(|| now + (RETRY_DELAY_NS << (2 * *retries)))
    }

    /// Moves a session that waits for a deadline to those that are checked in the next round. Does nothing for others.
    pub fn check_close(&mut self, id: SessionId) {
        if self.closing_later.remove(&id) {
            self.closing.insert(id);
        }
    }

    /// Returns whether decisions about living members of a session wait for facts.
    pub fn is_reading_facts_of(&self, id: SessionId, model: &Model) -> bool {
        let waiting = self.requested.of(id);
        let mut waiting = waiting.chain(self.waiting_for_relatives.of(id));
        waiting.any(|key| model.tree.get(key).is_some()) || self.is_reading_activity_for(id, model)
    }

    /// Returns whether the decision about a member of a session waits for the activity of a tree.
    fn is_reading_activity_for(&self, id: SessionId, model: &Model) -> bool {
        if self.activity_left.is_empty() {
            return false;
        }
        let members = model
            .sessions
            .get(id)
            .into_iter()
            .flat_map(Session::members);
        let mut members = members.filter_map(|pid| model.tree.by_pid(pid));
        members.any(|node| self.activity_left.contains_key(&node.key))
    }

    /// Returns the living members of a session that have a time of re-evaluation.
    pub fn deferred_members(
        &self,
        id: SessionId,
        model: &Model,
    ) -> impl Iterator<Item = ProcessKey> {
        let waiting = self.deadlines.of(id);
        waiting.filter(|key| model.tree.get(*key).is_some())
    }
}

impl Engine {
    /// Requests facts about a process that do not depend on its program.
    pub(super) fn request_facts_of(&mut self, key: ProcessKey, needs: FactSet, urgency: Urgency) {
        let node = self.model.tree.get(key);
        let uid = node.map_or(UNKNOWN_UID, |node| node.uids.real);
        let facts = &mut self.deferred.facts;
        facts.request(key, None, uid, needs, urgency);
    }

    /// Requests the facts that a decision about a member needs: of the member, of a relative, or of its whole tree. The
    /// member is evaluated again once they have arrived.
    pub(super) fn request_facts(
        &mut self,
        key: ProcessKey,
        session: SessionId,
        decision: &Decision,
    ) {
        if decision.needs.contains(FactSet::ACTIVITY) {
            let relative = decision.relative.and_then(|key| self.model.tree.get(key));
            let other = relative.and_then(|node| node.state.member.session);
            self.request_activity(key, other.unwrap_or(session));
        }
        let needs = decision.needs.without(FactSet::ACTIVITY);
        if needs.is_empty() {
            return;
        }
        let subject = decision.relative.unwrap_or(key);
        let node = self.model.tree.get(subject);
        let subject_session = node
            .and_then(|node| node.state.member.session)
            .unwrap_or(session);
        let deferred = &mut self.deferred;
        deferred.last += 1;
        let number = deferred.last;
        if !deferred.requested.contains(subject) {
            deferred.requested.insert(subject, number, subject_session);
        }
        let image = node.map(|node| &node.image);
        let uid = node.map_or(UNKNOWN_UID, |node| node.uids.real);
        let facts = &mut deferred.facts;
        facts.request(subject, image, uid, needs, Urgency::Urgent);
        if subject != key {
            deferred.waiting_for_relatives.insert(key, number, session);
        }
    }

    /// Forgets the activity (CPU time and I/O) of all members of a session and of those nested in it, and requests it
    /// again. `root`, the root of the session or a process that is due, is re-evaluated after the last answer.
    fn request_activity(&mut self, root: ProcessKey, session: SessionId) {
        // Earlier readings are outdated.
        self.model.forget_activity_within(root);
        let members = self.model.members_within(session);
        let members: Vec<ProcessKey> = members.map(|node| node.key).collect();
        for key in members {
            let deferred = &mut self.deferred;
            let roots = deferred.waiters.entry(key).or_default();
            if !roots.contains(&root) {
                roots.push(root);
                *deferred.activity_left.entry(root).or_default() += 1;
            }
            self.request_facts_of(key, FactSet::ACTIVITY, Urgency::Normal);
        }
    }

    /// Notes that the activity of a process has been read. Queues each root that waits for no other answer.
    fn on_activity(&mut self, key: ProcessKey) {
        for root in self.deferred.waiters.remove(&key).unwrap_or_default() {
            let Some(left) = self.deferred.activity_left.get_mut(&root) else {
                continue;
            };
            *left -= 1;
            if *left == 0 {
                self.deferred.activity_left.remove(&root);
                self.model.on_tree_read(root);
                self.ingest.queued.push(Queued::Process(root));
            }
        }
    }

    /// Sets when a process is re-evaluated, in ns of CLOCK_MONOTONIC. `None` cancels that.
    pub(super) fn defer(&mut self, key: ProcessKey, session: SessionId, until: Option<u64>) {
        if let Some(session) = self.deferred.deadlines.remove(key) {
            self.deferred.check_close(session);
        }
        if let Some(until) = until {
            self.deferred.deadlines.insert(key, until, session);
        }
    }

    /// Counts a failed read of a process with unreadable facts, whose cause may be temporary. Returns when to retry it,
    /// in ns of CLOCK_MONOTONIC. Returns `None` if its facts are readable, or after the last retry.
    pub(super) fn retry_unreadable(&mut self, key: ProcessKey) -> Option<u64> {
        if !self.model.has_unreadable_facts(key) {
            return None;
        }
        self.deferred.next_retry(key, self.kernel.clock.monotonic())
    }

    /// Requests, with low priority, facts that rules may need once members are due. Only facts of members in
    /// `new_images`, and only those that stay valid until the next exec. Of untracked processes, requests only scripts.
    pub(super) fn prefetch(&mut self) {
        let mut keys = std::mem::take(&mut self.ingest.new_images);
        let wanted = self.model.rules.facts_to_prefetch();
        self.ingest.map_changes.extend(self.model.take_released());
        keys.sort_unstable_by_key(|key| (key.start, key.pid));
        keys.dedup();
        for key in keys {
            let Some(node) = self.model.tree.get(key) else {
                continue;
            };
            let session = node
                .state
                .member
                .session
                .and_then(|id| self.model.sessions.get(id));
            let (image, uid) = (Some(&node.image), node.uids.real);
            let facts = &mut self.deferred.facts;
            if self.model.needs_script(node) {
                facts.request(key, image, uid, FactSet::SCRIPT, Urgency::Normal);
            }
            if session.is_none() {
                continue;
            }
            // In the root's cgroup a process has the root's systemd unit, which is read once, for the root.
            let in_root_cgroup = session.is_some_and(|session| {
                session.root != node.key && session.cgroup_id == node.image.cgroup_id
            });
            let mut needs = node.missing_facts(wanted);
            if in_root_cgroup {
                needs = needs.without(FactSet::UNIT);
            }
            let knows_marker = node.keep_marker() != Fact::Unread;
            if knows_marker && self.model.rules.needs_only_keep_marker() {
                needs = needs.without(FactSet::MARKERS);
            }
            // Decides after an exit whether the terminal's next agent is a successor or a helper.
            let is_root = session.is_some_and(|session| session.root == node.key);
            if is_root && node.image.tty != 0 {
                needs |= node.missing_facts(FactSet::STDIN);
            }
            // Shows which agent continues the work of another one. With a polling source the exit of the root is noticed
            // too late to read its facts, which members are compared with.
            if is_root {
                needs |= node.missing_facts(FactSet::INHERITED);
            }
            if is_root && self.source.is_polling() {
                needs |= node.missing_facts(FactSet::UNIT);
            }
            if self.model.needs_arguments(node) {
                needs |= FactSet::ARGUMENTS;
            }
            if !needs.is_empty() {
                facts.request(key, image, uid, needs, Urgency::Prefetch);
            }
        }
    }

    /// Checks once a second whether the host has a display server. If that changes, so does what the probes may signal.
    pub(super) fn look_for_display(&mut self) {
        let now = self.kernel.clock.monotonic();
        if now < self.deferred.next_display_check {
            return;
        }
        self.deferred.next_display_check = now.saturating_add(DISPLAY_INTERVAL_NS);
        let has_display = self.deferred.facts.has_display();
        if self.model.set_has_display(has_display) {
            let members = self.model.tree.iter();
            let members = members.filter(|node| node.state.member.session.is_some());
            let members = members.map(|node| node.key);
            self.ingest.map_changes.extend(members);
        }
    }

    /// Sets the model's clock to the present. Returns `CLOCK_MONOTONIC` in ns.
    pub(super) fn set_model_time(&mut self) -> u64 {
        let monotonic = self.kernel.clock.monotonic();
        let boot = self.kernel.clock.boot_time();
        self.model.set_time(boot, boot.saturating_sub(monotonic));
        monotonic
    }

    /// Applies the facts that have arrived. Queues the members that waited for them, and those whose deadline has
    /// passed. A command line or script can show that a process is an agent, which opens a session.
    pub(super) fn apply_facts(&mut self) {
        let now = self.set_model_time();
        let mut reclassified = Vec::new();
        for FactAnswer {
            key,
            requested,
            found,
            at,
        } in self.deferred.facts.take()
        {
            self.model.set_facts(key, requested, found, at);
            if requested.contains(FactSet::UNIT) {
                // The next service cannot read the unit of a root that has exited before.
                let of_root = self.model.sessions.of_root(key);
                self.map_sync
                    .dirty
                    .extend(of_root.map(|session| session.id));
            }
            if requested.contains(FactSet::CONVERSATIONS) {
                self.successions.on_facts();
            }
            if requested.intersects(FactSet::ARGUMENTS | FactSet::SCRIPT) {
                let changed = self.model.reclassify(key, at, &mut self.outputs);
                self.on_session_events(at);
                self.ingest.map_changes.extend(changed.left);
                reclassified.push(key);
                for key in changed.joined {
                    self.ingest.on_late_join(&self.model, key, at);
                }
                // The answer may be about an earlier program of the process.
                let node = self.model.tree.get(key);
                if node.is_some_and(|node| self.model.needs_script(node)) {
                    self.ingest.new_images.push(key);
                }
            }
            if requested.contains(FactSet::ACTIVITY) {
                self.on_activity(key);
                continue;
            }
            // The facts may rule out all reasons to keep it, which its map entry must then say.
            self.ingest.map_changes.push(key);
            let request = self.deferred.requested.remove(key);
            let node = self.model.tree.get(key);
            // A process outside of all sessions may have been read on behalf of an exited root.
            if request.is_some() && node.is_some_and(|node| node.state.member.session.is_some()) {
                self.ingest.queued.push(Queued::Process(key));
            }
        }
        // The program of a process may keep all below it, which their map entries then say.
        let below = self.model.tree.descendants_of_all(reclassified);
        self.ingest.map_changes.extend(below);
        // Decisions often need facts of several relatives. Waiting for all older requests avoids repeated evaluation.
        let oldest = self.deferred.requested.first();
        let before = oldest.map_or(u64::MAX, |oldest| oldest - 1);
        let ready = self.deferred.waiting_for_relatives.take_until(before);
        self.ingest
            .queued
            .extend(ready.into_iter().map(|(key, _)| Queued::Process(key)));
        for (key, session) in self.deferred.deadlines.take_until(now) {
            self.deferred.check_close(session);
            self.model.forget_volatile(key);
            self.model.forget_unreadable(key);
            self.ingest.queued.push(Queued::Process(key));
        }
    }
}
