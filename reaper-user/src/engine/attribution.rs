//! Those who may be members by what they have from their makers, which has to be read first.

use super::Engine;
use reaper_host::facts::Urgency;
use reaper_model::event::ProcessKey;
use reaper_model::session::SessionId;

impl Engine {
    /// Asks what has to be read of those who have been found and whose makers are gone, and concludes whose they are
    /// once it is there: in the order of their births, since one may say whose the next is. Nobody waits for it.
    pub(super) fn attribute(&mut self) {
        let mut suspects = std::mem::take(&mut self.ingest.unattributed);
        if suspects.is_empty() {
            return;
        }
        suspects.sort_unstable_by_key(|key| (key.start, key.pid));
        suspects.dedup();
        let mut told = true;
        for key in suspects {
            let wanted = self.model.facts_to_attribute(key);
            for (of, needs) in &wanted {
                self.request_facts_of(*of, *needs, Urgency::Urgent);
            }
            told &= wanted.is_empty();
            if !told {
                self.ingest.unattributed.push(key);
            } else if self.model.tree.get(key).is_some() {
                self.on_attributed(key);
            } else {
                self.suspect_orphans_of(key);
            }
        }
    }

    /// After a gap: who was known by what they did before they were looked for were never asked about, as the look found
    /// nobody new in them.
    pub(super) fn attribute_late_discovered(&mut self) {
        let turned_up = std::mem::take(&mut self.ingest.late_discovered).into_iter();
        let escaped = turned_up.filter(|key| self.model.may_have_escaped(*key));
        self.ingest.unattributed.extend(escaped);
    }

    /// Whether members of a session may still be found of whom nobody has told: by the first look after the last of those
    /// that are known had ended, where there are such, and by what is being read since.
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
        let last_end = known.or_else(closed).unwrap_or(0);
        let mut suspects = self.ingest.unattributed.iter();
        let scanned = self.source.last_scan();
        let unseen = scanned.is_some_and(|scanned| scanned <= last_end);
        unseen || suspects.any(|key| key.start <= last_end)
    }

    fn on_attributed(&mut self, key: ProcessKey) {
        let now = self.kernel.clock.boot_time();
        for key in self.model.attribute(key) {
            self.ingest.on_late_join(&self.model, key, now);
        }
    }

    /// One is gone before it was known whose it was: those whom it has left are asked instead.
    fn suspect_orphans_of(&mut self, key: ProcessKey) {
        let nodes = self.model.tree.iter();
        let orphans = nodes.filter(|node| node.birth_parent == Some(key));
        let orphans = orphans.map(|node| node.key);
        self.ingest.unattributed.extend(orphans);
    }
}
