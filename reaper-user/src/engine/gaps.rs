//! What the kernel does not tell: what was there before, and what was lost. /proc knows it.

use hashbrown::HashSet;

use super::Engine;
use crate::export::Body;
use crate::model::event::{Ended, Event, EventKind, Key, Provenance};
use crate::source::procfs::{Glance, ProcfsError};
use crate::sys;

impl Engine {
    /// Takes in the process table. What happened since the probes were attached waits in the ring and
    /// is merged afterwards.
    pub(super) fn seed(&mut self) -> Result<HashSet<u32>, ProcfsError> {
        // Parents before their children, so that membership finds its way down.
        let rows = self.procfs.snapshot()?.parents_first();
        let pids = rows.iter().map(|row| row.key.pid).collect();
        for row in rows {
            self.apply(&Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind: EventKind::Seen(row),
            });
        }
        Ok(pids)
    }

    /// If records were lost, says so and finds in /proc what they would have told.
    pub(super) fn look_for_loss(&mut self) {
        let lost = self.source.lost();
        if lost.total == self.lost.total {
            return;
        }
        let since = lost.since(&self.lost);
        self.count.lost += since.total;
        self.lost = lost;
        let open: Vec<_> = self
            .model
            .sessions
            .iter()
            .map(|session| session.id)
            .collect();
        for id in open {
            self.sessions.entry(id).or_default().lost += since.total;
        }
        self.tell(Body::Lost {
            total: since.total,
            by_kind: since.named(),
        });
        self.reconcile();
    }

    /// Finds in /proc what events would have told that did not come.
    pub(super) fn reconcile(&mut self) {
        let before = sys::boot_time();
        match self.seed() {
            Ok(living) => self.forget_vanished(&living, before),
            Err(error) => {
                tracing::error!("{error}: what was lost stays unknown until the next look")
            }
        }
    }

    /// Processes that were known before a look at /proc and were not found by it have exited.
    pub(super) fn forget_vanished(&mut self, living: &HashSet<u32>, before: u64) {
        self.source_catches_up();
        let gone: Vec<Key> = self
            .model
            .tree
            .iter()
            .filter(|node| node.key.start < before && !living.contains(&node.key.pid))
            .map(|node| node.key)
            .collect();
        for key in gone {
            // A row that could not be read is not one that is not there: unknown is never dead.
            let dead = self
                .procfs
                .glance(key)
                .is_ok_and(|glance| glance == Glance::Gone);
            if dead {
                self.exited_unseen(key);
            }
        }
    }

    /// Reads what is in the ring without looking for losses again.
    pub(super) fn source_catches_up(&mut self) {
        let told = std::mem::replace(&mut self.lost.total, u64::MAX);
        self.drain();
        self.lost.total = told;
    }

    pub(super) fn exited_unseen(&mut self, key: Key) {
        let kind = EventKind::Exit {
            key,
            parent: None,
            ended: Ended::Unknown,
            peak_rss: 0,
        };
        self.apply(&Event {
            time: sys::boot_time(),
            provenance: Provenance::Inferred,
            kind,
        });
    }

    /// Takes note of the ends that pidfds tell of.
    pub(super) fn confirm(&mut self) {
        loop {
            let (ready, unrecorded) = self.follow.reaper.confirm_ended();
            if ready == 0 {
                return;
            }
            for key in unrecorded {
                // The exit's record is written before the pidfd can tell of it: it is there, or it is lost.
                self.drain();
                if self.model.tree.get(key).is_some() {
                    self.exited_unseen(key);
                }
                self.follow.reaper.ended_unrecorded(key);
            }
        }
    }

    /// Looks up in /proc who has the orphans of which the kernel's record did not come.
    pub(super) fn find_adopters(&mut self) {
        for child in std::mem::take(&mut self.follow.parentless) {
            let node = self.model.tree.get(child);
            let Some(node) = node.filter(|node| node.parent.is_none()) else {
                continue;
            };
            let old_parent = node.orphaned.map(|orphaned| orphaned.old_parent);
            let Ok(Glance::Alive { parent }) = self.procfs.glance(child) else {
                continue;
            };
            let Some(adopter) = self.model.tree.by_pid(parent).map(|node| node.key) else {
                // It still has the parent that is on its way out. The next look will tell.
                self.follow.parentless.push(child);
                continue;
            };
            let kind = EventKind::Reparent {
                child,
                old_parent,
                adopter: Some(adopter),
            };
            self.apply(&Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        }
    }
}
