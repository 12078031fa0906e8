//! Assigns late-discovered processes to sessions.
//!
//! A scan can find a process whose creator has already exited. Its session then follows only from what it inherited,
//! such as environment markers, which worker threads read from /proc. The engine does not block on them.

use super::Engine;
use reaper_host::facts::Urgency;
use reaper_model::event::ProcessKey;
use reaper_model::session::SessionId;

impl Engine {
    /// Requests missing facts of unattributed processes, and assigns those whose facts are complete. Unattributed
    /// processes are discovered ones that may belong to a session. In place of one that has exited, queues its
    /// children.
    ///
    /// Processes are handled in the order of their start, because an assigned process is evidence for the next ones.
    /// The first one with missing facts therefore holds back those behind it.
    pub(super) fn attribute(&mut self) {
        let mut unattributed = std::mem::take(&mut self.ingest.unattributed);
        if unattributed.is_empty() {
            return;
        }
        unattributed.sort_unstable_by_key(|key| (key.start, key.pid));
        unattributed.dedup();
        let mut is_complete = true;
        for key in unattributed {
            let wanted = self.model.facts_to_attribute(key);
            for (subject, needs) in &wanted {
                self.request_facts_of(*subject, *needs, Urgency::Urgent);
            }
            is_complete &= wanted.is_empty();
            if !is_complete {
                self.ingest.unattributed.push(key);
            } else if self.model.tree.get(key).is_some() {
                self.on_attributed(key);
            } else {
                self.queue_children_of(key);
            }
        }
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
    /// There are none if the source has scanned since the last known member exited, or needs no scans. All processes
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
        let mut unattributed = self.ingest.unattributed.iter();
        let scanned = self.source.last_scan();
        let not_scanned = scanned.is_some_and(|scanned| scanned <= last_exit);
        not_scanned || unattributed.any(|key| key.start <= last_exit)
    }

    /// Assigns a process to a session if its facts show that it belongs there. Handles all processes that join by that.
    fn on_attributed(&mut self, key: ProcessKey) {
        let now = self.kernel.clock.boot_time();
        for key in self.model.attribute(key) {
            self.ingest.on_late_join(&self.model, key, now);
        }
    }

    /// Queues the children of a process that exited before it could be attributed.
    fn queue_children_of(&mut self, key: ProcessKey) {
        let nodes = self.model.tree.iter();
        let children = nodes.filter(|node| node.birth_parent == Some(key));
        let children = children.map(|node| node.key);
        self.ingest.unattributed.extend(children);
    }
}
