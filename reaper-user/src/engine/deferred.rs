//! Those about whom nothing can be said yet: what a rule asks for is being read, or its delay is not over.

use std::collections::BTreeSet;

use hashbrown::{HashMap, HashSet};

use super::Engine;
use super::ingest::Queued;
use reaper_host::facts::{FactAnswer, FactReader, Urgency};
use reaper_model::Model;
use reaper_model::event::ProcessKey;
use reaper_model::facts::{Fact, FactSet};
use reaper_model::policy::Decision;
use reaper_model::session::SessionId;

/// How often what could not be read is tried again, and after how many ns (times 4, 16, 64).
const TRIES: u32 = 3;
const TRY_AFTER: u64 = 250_000_000;

/// Of how many that is counted: those that have ended are among them.
const TRIED_MAX: usize = 4096;

/// Takes the place of the uid of a process that has exited: no user has this one.
const UNKNOWN_UID: u32 = u32::MAX;

/// See the module.
pub struct Deferred {
    /// Reads what is asked for, in threads that nobody waits for.
    pub facts: Box<dyn FactReader>,
    /// Processes whose facts a decision waits for, by the number of the request.
    requested: Waiting,
    /// Number of the last request.
    last: u64,
    /// Processes that wait for the facts of their relatives, by the number of the request.
    waiting_for_relatives: Waiting,
    /// Processes that are being read for how busy they are, with the roots that wait for it: a member of a nested session
    /// belongs to the tree of the outer root too. No ladder waits for these roots: they live.
    unread: HashMap<ProcessKey, Vec<ProcessKey>>,
    /// Number of processes that each of these roots waits for.
    looks: HashMap<ProcessKey, usize>,
    /// Sessions that are checked in the next round: they close once all of their members are decided about.
    pub closing: HashSet<SessionId>,
    /// Sessions that close after a deadline of one of their members. They are not checked before.
    pub closing_later: HashSet<SessionId>,
    /// Processes by the time of their re-evaluation, in ns of the monotonic clock.
    deadlines: Waiting,
    /// How often what could not be read has been tried again.
    tries: HashMap<ProcessKey, u32>,
}

/// Processes that wait, each with a number (a time, or that of a request) and its session.
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

    /// Adds a process, in place of what it waited for before.
    fn insert(&mut self, key: ProcessKey, number: u64, session: SessionId) {
        self.remove(key);
        self.by_process.insert(key, (number, session));
        self.by_number.insert((number, key));
        self.by_session.insert((session, key));
    }

    /// Removes a process. Returns its session if it waited.
    fn remove(&mut self, key: ProcessKey) -> Option<SessionId> {
        let (number, session) = self.by_process.remove(&key)?;
        self.by_number.remove(&(number, key));
        self.by_session.remove(&(session, key));
        Some(session)
    }

    /// Removes the processes up to a number. Returns them with their sessions, the lowest number first.
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
            unread: HashMap::new(),
            looks: HashMap::new(),
            closing: HashSet::new(),
            closing_later: HashSet::new(),
            deadlines: Waiting::default(),
            tries: HashMap::new(),
        }
    }

    /// Reads by other rules from now on; what was asked for is asked for again by whoever is decided about.
    pub fn read_by(&mut self, reader: Box<dyn FactReader>) {
        self.facts = reader;
        // Nobody answers these any more.
        self.requested = Waiting::default();
        self.waiting_for_relatives = Waiting::default();
        self.unread.clear();
        self.looks.clear();
    }

    /// Whether facts are being read that decisions wait for.
    pub fn is_reading(&self) -> bool {
        !self.requested.is_empty() || !self.waiting_for_relatives.is_empty()
    }

    /// When somebody is to be decided about though nothing happens, in ns of the monotonic clock.
    pub fn next(&self) -> Option<u64> {
        self.deadlines.first()
    }

    /// Returns when to read a process again that could not be read; `None` if that was tried often enough. Times are in
    /// nanoseconds of the monotonic clock.
    pub fn next_retry(&mut self, key: ProcessKey, now: u64) -> Option<u64> {
        if self.tries.len() >= TRIED_MAX {
            self.tries.clear();
        }
        let tries = self.tries.entry(key).or_default();
        *tries += 1;
        (*tries <= TRIES).then(|| now + (TRY_AFTER << (2 * *tries)))
    }

    /// Checks in this round whether a session can be closed, if it waits for a deadline.
    pub fn check_close(&mut self, id: SessionId) {
        if self.closing_later.remove(&id) {
            self.closing.insert(id);
        }
    }

    /// Whether facts of living members of a session are being read.
    pub fn is_reading_facts_of(&self, id: SessionId, model: &Model) -> bool {
        let asked = self.requested.of(id);
        let mut asked = asked.chain(self.waiting_for_relatives.of(id));
        asked.any(|key| model.tree.get(key).is_some())
    }

    /// Returns the living members of a session that are re-evaluated at a time of their own.
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
    /// Requests facts about a process for which its program does not matter.
    pub(super) fn request_facts_of(&mut self, key: ProcessKey, needs: FactSet, urgency: Urgency) {
        let node = self.model.tree.get(key);
        let uid = node.map_or(UNKNOWN_UID, |node| node.uids.real);
        let facts = &mut self.deferred.facts;
        facts.request(key, None, uid, needs, urgency);
    }

    /// Has facts read that a decision about a member rests on: its own, those of its kin, or those of its whole tree.
    pub(super) fn request_facts(
        &mut self,
        key: ProcessKey,
        session: SessionId,
        decision: &Decision,
    ) {
        if decision.needs.contains(FactSet::ACTIVITY) {
            self.ask_activity(key, session);
        }
        let needs = decision.needs.without(FactSet::ACTIVITY);
        if needs.is_empty() {
            return;
        }
        let of = decision.relative.unwrap_or(key);
        let node = self.model.tree.get(of);
        let its = node
            .and_then(|node| node.state.member.session)
            .unwrap_or(session);
        let deferred = &mut self.deferred;
        deferred.last += 1;
        let number = deferred.last;
        if !deferred.requested.contains(of) {
            deferred.requested.insert(of, number, its);
        }
        let image = node.map(|node| &node.image);
        let uid = node.map_or(UNKNOWN_UID, |node| node.uids.real);
        let facts = &mut deferred.facts;
        facts.request(of, image, uid, needs, Urgency::Urgent);
        if of != key {
            deferred.waiting_for_relatives.insert(key, number, session);
        }
    }

    /// Has it read how busy the tree of a root is. The root is evaluated again when all of its processes are read.
    fn ask_activity(&mut self, root: ProcessKey, session: SessionId) {
        // What was read before is older than what the decision asks for, where all was.
        self.model.forget_activity_within(root);
        let members = self.model.members_within(session);
        let members: Vec<ProcessKey> = members.map(|node| node.key).collect();
        for key in members {
            let deferred = &mut self.deferred;
            let roots = deferred.unread.entry(key).or_default();
            if !roots.contains(&root) {
                roots.push(root);
                *deferred.looks.entry(root).or_default() += 1;
            }
            self.request_facts_of(key, FactSet::ACTIVITY, Urgency::Normal);
        }
    }

    /// Takes note of an answer about how busy a process is, and has each root evaluated again that waited for no other.
    fn on_activity(&mut self, key: ProcessKey) {
        for root in self.deferred.unread.remove(&key).unwrap_or_default() {
            let Some(left) = self.deferred.looks.get_mut(&root) else {
                continue;
            };
            *left -= 1;
            if *left == 0 {
                self.deferred.looks.remove(&root);
                self.model.on_tree_read(root);
                self.ingest.queued.push(Queued::Process(root));
            }
        }
    }

    /// Has a process decided about anew at a time, in ns of the monotonic clock; `None`: no more.
    pub(super) fn defer(&mut self, key: ProcessKey, session: SessionId, until: Option<u64>) {
        if let Some(session) = self.deferred.deadlines.remove(key) {
            self.deferred.check_close(session);
        }
        if let Some(until) = until {
            self.deferred.deadlines.insert(key, until, session);
        }
    }

    /// What could not be read is tried again a few times, since that may pass; gives when, in ns of the monotonic clock.
    pub(super) fn retry_unreadable(&mut self, key: ProcessKey) -> Option<u64> {
        if !self.model.is_unread(key) {
            return None;
        }
        self.deferred.next_retry(key, self.kernel.clock.monotonic())
    }

    /// Has what rules may ask for, and what changes with the program only, read before anything is due.
    pub(super) fn prefetch(&mut self) {
        let mut fresh = std::mem::take(&mut self.ingest.new_images);
        let wanted = self.model.rules.facts_to_prefetch();
        self.ingest.map_changes.extend(self.model.take_released());
        fresh.sort_unstable_by_key(|key| (key.start, key.pid));
        fresh.dedup();
        for key in fresh {
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
            // In the cgroup of its root it has no unit of its own; and of the root's all have to know.
            let at_home = session.is_some_and(|session| {
                session.root != node.key && session.cgroup_id == node.image.cgroup_id
            });
            let mut needs = node.missing_facts(wanted);
            if at_home {
                needs = needs.without(FactSet::UNIT);
            }
            let told = node.keep_marker() != Fact::Unread;
            if told && self.model.rules.needs_only_keep_marker() {
                needs = needs.without(FactSet::MARKERS);
            }
            // Whether one hands over to the other when it leaves.
            let is_root = session.is_some_and(|session| session.root == node.key);
            if is_root && node.image.tty != 0 {
                needs |= node.missing_facts(FactSet::STDIN);
            }
            // When it has ended, nobody can ask it any more.
            if is_root && self.source.is_polling() {
                needs |= node.missing_facts(FactSet::INHERITED | FactSet::UNIT);
            }
            if self.model.needs_arguments(node) {
                needs |= FactSet::ARGUMENTS;
            }
            if !needs.is_empty() {
                facts.request(key, image, uid, needs, Urgency::Prefetch);
            }
        }
    }

    /// Takes in what has been read, and sees to those whose time has come.
    pub(super) fn apply_facts(&mut self) {
        let now = self.kernel.clock.monotonic();
        self.model
            .set_suspended(self.kernel.clock.boot_time().saturating_sub(now));
        self.model.set_now(self.kernel.clock.boot_time());
        for FactAnswer {
            key,
            requested: asked,
            found,
            at,
        } in self.deferred.facts.take()
        {
            self.model.set_facts(key, asked, found, at);
            if asked.contains(FactSet::CONVERSATIONS) {
                self.successions.on_facts();
            }
            if asked.intersects(FactSet::ARGUMENTS | FactSet::SCRIPT) {
                let all = self.model.reclassify(key, at, &mut self.outputs);
                self.on_session_events(at);
                self.ingest.map_changes.extend(all.left);
                for key in all.joined {
                    self.ingest.on_late_join(&self.model, key, at);
                }
                // What was read is of the program before, where it has run another since.
                let node = self.model.tree.get(key);
                if node.is_some_and(|node| self.model.needs_script(node)) {
                    self.ingest.new_images.push(key);
                }
            }
            if asked.contains(FactSet::ACTIVITY) {
                self.on_activity(key);
                continue;
            }
            // That nothing spares it may have come to be known.
            self.ingest.map_changes.push(key);
            let asked = self.deferred.requested.remove(key);
            let node = self.model.tree.get(key);
            // A stranger may have been asked in the place of a root.
            if asked.is_some() && node.is_some_and(|node| node.state.member.session.is_some()) {
                self.ingest.queued.push(Queued::Process(key));
            }
        }
        // Among its kin are often many who are asked about: once what was asked before it is all there.
        let oldest = self.deferred.requested.first();
        let before = oldest.map_or(u64::MAX, |oldest| oldest - 1);
        let free = self.deferred.waiting_for_relatives.take_until(before);
        self.ingest
            .queued
            .extend(free.into_iter().map(|(key, _)| Queued::Process(key)));
        for (key, session) in self.deferred.deadlines.take_until(now) {
            self.deferred.check_close(session);
            self.model.forget_volatile(key);
            self.model.forget_unreadable(key);
            self.ingest.queued.push(Queued::Process(key));
        }
    }
}
