//! Applies the differences between a scan and the model: new processes are added, and missing ones have exited.
//!
//! Used at the start, after a gap, after a source failover, and for memberships that were written too late.

use hashbrown::HashSet;

use super::Engine;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance};

/// Numbers of differences between a scan and the model.
pub struct Reconciled {
    /// Number of processes that no event had reported.
    pub found: u64,
    /// Number of processes whose exit no event had reported.
    pub exited: u64,
}

impl Engine {
    /// Adds scanned processes to the model, and updates known ones. Skips those that have exited since. Returns the
    /// number of processes that were unknown. `rows` must have parents before their children, so that children inherit
    /// the membership.
    pub(super) fn apply_entries(&mut self, rows: Vec<ProcEntry>) -> u64 {
        let mut found = 0;
        for row in rows {
            let key = row.key;
            let known = self.model.tree.get(key).is_some();
            // It may have exited after the scan read it, and its exit may have been applied already.
            if !known && self.has_exited_since(key) {
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

    /// Returns whether a process that is not in the model has exited since it was scanned. Not checked while the engine
    /// starts: the result is then false.
    fn has_exited_since(&self, key: ProcessKey) -> bool {
        self.ready
            && self
                .kernel
                .processes
                .probe(key)
                .is_ok_and(|liveness| liveness == Liveness::Gone)
    }

    /// Applies the exits of processes that are not in `living` (pids), if /proc confirms them. Only of those that
    /// started before `before`, in ns since boot. Returns their number.
    pub(super) fn apply_missing(&mut self, living: &HashSet<u32>, before: u64) -> u64 {
        let exited: Vec<ProcessKey> = self
            .model
            .tree
            .iter()
            .filter(|node| node.key.start < before && !living.contains(&node.key.pid))
            .map(|node| node.key)
            .collect();
        let mut count = 0;
        for key in exited {
            // A process that the scan could not read may be alive.
            let has_exited = self
                .kernel
                .processes
                .probe(key)
                .is_ok_and(|liveness| liveness == Liveness::Gone);
            if has_exited && self.model.tree.get(key).is_some() {
                self.exited_unseen(key, Provenance::Procfs);
                count += 1;
            }
        }
        count
    }

    /// Applies an exit that no event reported, with time and status from the map of root exits if they are there.
    /// Otherwise the time is the present, and the status unknown.
    pub(super) fn exited_unseen(&mut self, key: ProcessKey, provenance: Provenance) {
        let first_root = self
            .model
            .sessions
            .by_root(key)
            .map(|session| session.first_root);
        let recorded = first_root.and_then(|first_root| self.source.maps()?.root_exit(first_root));
        // An earlier exit is that of an earlier root of the session.
        let (time, exit_status) = match recorded.filter(|exit| exit.time_ns > key.start) {
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
                exit_status,
                peak_rss: 0,
                membership: None,
            },
        });
    }
}
