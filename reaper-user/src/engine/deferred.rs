//! Those about whom nothing can be said yet: what a rule asks for is being read, or its delay is not over.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Engine;
use super::ingest::Queued;
use reaper_host::facts::{FactAnswer, Urgency};
use reaper_host::kernel::FactReader;
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

/// See the module.
pub struct Deferred {
    /// Reads what is asked for, in threads that nobody waits for.
    pub facts: Box<dyn FactReader>,
    /// Whose facts a decision waits for.
    requested: HashMap<ProcessKey, PendingRead>,
    /// Number of the last that was asked.
    last: u64,
    /// Who waits for the facts of its kin.
    waiting_for_relatives: HashMap<ProcessKey, PendingRead>,
    /// Processes that are being read for how busy they are, with the roots that wait for it: a member of a nested session
    /// belongs to the tree of the outer root too. No ladder waits for these roots: they live.
    unread: HashMap<ProcessKey, Vec<ProcessKey>>,
    /// Number of processes that each of these roots waits for.
    looks: HashMap<ProcessKey, usize>,
    /// Sessions that are over but for those about whom something is still to be said.
    pub closing: HashSet<SessionId>,
    /// Who is to be decided about anew at which time, in ns of the monotonic clock.
    deadlines: HashMap<ProcessKey, (u64, SessionId)>,
    /// How often what could not be read has been tried again.
    tries: HashMap<ProcessKey, u32>,
}

struct PendingRead {
    /// Whose member it is.
    session: SessionId,
    /// Asks are numbered in their order.
    number: u64,
}

impl Deferred {
    pub fn new(facts: Box<dyn FactReader>) -> Deferred {
        Deferred {
            facts,
            requested: HashMap::new(),
            last: 0,
            waiting_for_relatives: HashMap::new(),
            unread: HashMap::new(),
            looks: HashMap::new(),
            closing: HashSet::new(),
            deadlines: HashMap::new(),
            tries: HashMap::new(),
        }
    }

    /// Reads by other rules from now on; what was asked for is asked for again by whoever is decided about.
    pub fn read_by(&mut self, reader: Box<dyn FactReader>) {
        self.facts = reader;
        // Nobody answers these any more.
        self.requested.clear();
        self.waiting_for_relatives.clear();
        self.unread.clear();
        self.looks.clear();
    }

    /// Whether facts are being read that decisions wait for.
    pub fn is_reading(&self) -> bool {
        !self.requested.is_empty() || !self.waiting_for_relatives.is_empty()
    }

    /// When somebody is to be decided about though nothing happens, in ns of the monotonic clock.
    pub fn next(&self) -> Option<u64> {
        self.deadlines.values().map(|(at, _)| *at).min()
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

    /// Whether facts of living members of a session are being read.
    pub fn is_reading_facts_of(&self, id: SessionId, model: &Model) -> bool {
        let mut asked = self.requested.iter().chain(&self.waiting_for_relatives);
        asked.any(|(key, asked)| asked.session == id && model.tree.get(*key).is_some())
    }

    /// Returns the living members of a session that are re-evaluated at a time of their own.
    pub fn deferred_members(
        &self,
        id: SessionId,
        model: &Model,
    ) -> impl Iterator<Item = ProcessKey> {
        let waiting = self.deadlines.iter();
        waiting
            .filter(move |(key, (_, session))| *session == id && model.tree.get(**key).is_some())
            .map(|(key, _)| *key)
    }
}

impl Engine {
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
        let asked = |session| PendingRead { session, number };
        deferred.requested.entry(of).or_insert(asked(its));
        let image = node.map(|node| &node.image);
        deferred.facts.request(of, image, needs, Urgency::Urgent);
        if of != key {
            deferred.waiting_for_relatives.insert(key, asked(session));
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
            let facts = &mut deferred.facts;
            facts.request(key, None, FactSet::ACTIVITY, Urgency::Normal);
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
        match until {
            Some(until) => drop(self.deferred.deadlines.insert(key, (until, session))),
            None => drop(self.deferred.deadlines.remove(&key)),
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
            if self.model.needs_script(node) {
                let (image, uid) = (Arc::clone(&node.image), node.uids.real);
                self.deferred.facts.request_script(key, &image, uid);
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
                let image = Some(&node.image);
                self.deferred
                    .facts
                    .request(key, image, needs, Urgency::Prefetch);
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
            let asked = self.deferred.requested.remove(&key).is_some();
            let node = self.model.tree.get(key);
            // A stranger may have been asked in the place of a root.
            if asked && node.is_some_and(|node| node.state.member.session.is_some()) {
                self.ingest.queued.push(Queued::Process(key));
            }
        }
        // Among its kin are often many who are asked about: once what was asked before it is all there.
        let oldest = self
            .deferred
            .requested
            .values()
            .map(|asked| asked.number)
            .min();
        let is_free = |asked: &PendingRead| oldest.is_none_or(|oldest| oldest > asked.number);
        let free = self
            .deferred
            .waiting_for_relatives
            .extract_if(|_, asked| is_free(asked));
        let free = free.map(|(key, _)| Queued::Process(key));
        self.ingest.queued.extend(free);
        if self.deferred.next().is_some_and(|at| at <= now) {
            let over = self.deferred.deadlines.extract_if(|_, (at, _)| *at <= now);
            for (key, _) in over {
                self.model.forget_volatile(key);
                self.model.forget_unreadable(key);
                self.ingest.queued.push(Queued::Process(key));
            }
        }
    }
}
