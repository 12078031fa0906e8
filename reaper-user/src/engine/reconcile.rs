//! The process table against what is known: whoever is new is taken in, whoever is gone has ended.
//!
//! One way for all who look at the whole table: at the start, after a gap, where another source has taken over, and
//! where marks were written too late for some.

use hashbrown::HashSet;

use super::Engine;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance};

/// The differences between a survey and the model.
pub struct Reconciled {
    /// Number of processes that no event had reported.
    pub found: u64,
    /// Number of processes whose exit no event had reported.
    pub gone: u64,
}

impl Engine {
    /// Takes in rows of the process table, parents before their children, so that membership finds its
    /// way down. Gives how many processes were not known.
    pub(super) fn apply_entries(&mut self, rows: Vec<ProcEntry>) -> u64 {
        let mut found = 0;
        for row in rows {
            let key = row.key;
            let known = self.model.tree.get(key).is_some();
            // It may have gone since it was looked at, and been told of.
            if !known && self.is_late(key) {
                continue;
            }
            self.apply(&Event {
                time: self.kernel.clock.boot_time(),
                provenance: Provenance::Procfs,
                kind: EventKind::Discovered(row),
            });
            found += u64::from(!known && self.model.tree.get(key).is_some());
        }
        found
    }

    /// Whether a process that is not known has gone by now.
    fn is_late(&self, key: ProcessKey) -> bool {
        self.ready
            && self
                .kernel
                .processes
                .probe(key)
                .is_ok_and(|glance| glance == Liveness::Gone)
    }

    /// Processes that were known before a look at /proc and were not found by it have exited. Gives how many.
    pub(super) fn apply_missing(&mut self, living: &HashSet<u32>, before: u64) -> u64 {
        let gone: Vec<ProcessKey> = self
            .model
            .tree
            .iter()
            .filter(|node| node.key.start < before && !living.contains(&node.key.pid))
            .map(|node| node.key)
            .collect();
        let mut count = 0;
        for key in gone {
            // A row that could not be read is not one that is not there: unknown is never dead.
            let dead = self
                .kernel
                .processes
                .probe(key)
                .is_ok_and(|glance| glance == Liveness::Gone);
            if dead && self.model.tree.get(key).is_some() {
                self.exited_unseen(key, Provenance::Procfs);
                count += 1;
            }
        }
        count
    }

    /// The end of a process that nobody told of, and how that came to be known. Of a root's the probe may have left word.
    pub(super) fn exited_unseen(&mut self, key: ProcessKey, provenance: Provenance) {
        let first_root = self
            .model
            .sessions
            .by_root(key)
            .map(|session| session.first_root);
        let seen = first_root.and_then(|first_root| self.source.maps()?.root_exit(first_root));
        // One that was before the root began was of the one before it.
        let (time, ended) = match seen.filter(|exit| exit.time_ns > key.start) {
            Some(exit) => (
                exit.time_ns,
                super::map_sync::exit_status_from_wait(exit.status),
            ),
            None => (self.kernel.clock.boot_time(), ExitStatus::Unknown),
        };
        self.apply(&Event {
            time,
            provenance,
            kind: EventKind::Exit {
                key,
                parent: None,
                exit_status: ended,
                peak_rss: 0,
                membership: None,
            },
        });
    }
}
