//! Assigns late-discovered processes to sessions.
//!
//! A scan can find a process whose creator has already exited. Its session then follows only from what it inherited,
//! such as environment markers, which worker threads read from /proc. The engine does not block on them.

use std::collections::BTreeSet;

use super::Engine;
use reaper_host::facts::Urgency;
use reaper_model::event::ProcessKey;
use reaper_model::session::SessionId;

/// Discovered processes that may belong to a session, in the order of their start.
#[derive(Default)]
pub struct Unattributed {
    /// Start in ns since boot, and pid.
    waiting: BTreeSet<(u64, u32)>,
    /// Processes in `waiting` whose facts have not been requested.
    added: Vec<ProcessKey>,
}

impl Unattributed {
    /// Adds a process if it is not waiting yet.
    pub fn insert(&mut self, key: ProcessKey) {
        if self.waiting.insert((key.start, key.pid)) {
            self.added.push(key);
        }
    }

    /// Removes a process. Returns whether it was waiting.
    pub fn remove(&mut self, key: ProcessKey) -> bool {
        self.waiting.remove(&(key.start, key.pid))
    }

    /// Returns the process that started first.
    fn first(&self) -> Option<ProcessKey> {
        let (start, pid) = *self.waiting.first()?;
        Some(ProcessKey { pid, start })
    }

    /// Removes and returns the processes that were added since the last call and still wait.
    fn take_added(&mut self) -> Vec<ProcessKey> {
        let mut added = std::mem::take(&mut self.added);
        added.retain(|key| self.waiting.contains(&(key.start, key.pid)));
        added
    }
}

impl Extend<ProcessKey> for Unattributed {
    fn extend<T: IntoIterator<Item = ProcessKey>>(&mut self, keys: T) {
        keys.into_iter().for_each(|key| self.insert(key));
    }
}

impl Engine {
    /// Requests missing facts of unattributed processes, and assigns those whose facts are complete.
    ///
    /// Processes are handled in the order of their start, because an assigned process is evidence for the next ones.
    /// The first one with missing facts therefore holds back those behind it. Their facts are requested in advance.
    pub(super) fn attribute(&mut self) {
        while let Some(key) = self.ingest.unattributed.first()
            && !self.request_missing_facts(key)
        {
            self.ingest.unattributed.remove(key);
            self.on_attributed(key);
        }
        for key in self.ingest.unattributed.take_added() {
            self.request_missing_facts(key);
        }
    }

    /// Requests the facts that are missing to assign a process. Returns whether any are.
    fn request_missing_facts(&mut self, key: ProcessKey) -> bool {
        let missing = self.model.facts_to_attribute(key);
        for (subject, needs) in &missing {
            self.request_facts_of(*subject, *needs, Urgency::Urgent);
        }
        !missing.is_empty()
    }

    /// Queues late-discovered processes for attribution if they may have escaped from a session. A later event than the
    /// lost fork added them to the model, so the scan does not discover them.
    pub(super) fn attribute_late_discovered(&mut self) {
        let late = std::mem::take(&mut self.ingest.late_discovered).into_iter();
        let escaped = late.filter(|key| self.model.may_have_escaped(*key));
        self.ingest.unattributed.extend(escaped);
    }

    /// Returns whether undiscovered members of a session may exist.
    ///
    /// None exist if the source has scanned since the last known member exited, or needs no scans. All processes
    /// that started before that exit must also be attributed. Returns false once the engine stops.
    pub(super) fn may_have_undiscovered(&self, id: SessionId) -> bool {
        if self.stopping {
            return false;
        }
        let known = self
            .model
            .sessions
            .get(id)
            .map(|session| session.last_exit_at);
        let closed = || self.sessions.get(&id).map(|tally| tally.last_exit_at);
        let last_exit = known.or_else(closed).unwrap_or(0);
        let scanned = self.source.last_scan();
        let not_scanned = scanned.is_some_and(|scanned| scanned <= last_exit);
        let first = self.ingest.unattributed.first();
        not_scanned || first.is_some_and(|key| key.start <= last_exit)
    }

    /// Assigns a process to a session if its facts show that it belongs there. Handles all processes that join by that.
    fn on_attributed(&mut self, key: ProcessKey) {
        let now = self.kernel.clock.boot_time();
        for key in self.model.attribute(key) {
            self.ingest.on_late_join(&self.model, key, now);
        }
    }
}
