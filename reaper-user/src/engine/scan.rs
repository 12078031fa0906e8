//! Reconciliation scans: reads all processes from /proc, with what only the kernel's maps and tables contain.

use std::collections::HashMap;
use std::sync::Arc;

use hashbrown::HashSet;

use super::EngineError;
use reaper_host::kernel::{Clock, Kernel, ProcessTable};
use reaper_host::source::Source;
use reaper_host::source::probes::KernelReader;
use reaper_model::event::{Membership, ProcEntry, ProcessKey, TICK_NS};

/// Runner of reconciliation scans. It works on any thread.
pub struct Scanner {
    /// Reader of the kernel's maps and process table, if there are probes.
    kernel: Option<Box<dyn KernelReader>>,
    clock: Arc<dyn Clock>,
    processes: Arc<dyn ProcessTable>,
    /// Whether a process without an entry in the kernel's map is certainly not a member.
    complete: bool,
    /// Whether the source identifies processes by pid and start tick only.
    by_tick: bool,
}

/// Result of a reconciliation scan.
pub struct ScanResult {
    /// Processes that could be read, parents before their children. If the source identifies processes by tick only,
    /// without those that have just started.
    pub rows: Vec<ProcEntry>,
    /// Pids to scan, including those of unreadable processes: of all running processes, or of those in the map.
    pub pids: HashSet<u32>,
    /// Entries of the kernel's map of members.
    pub memberships: HashMap<ProcessKey, Membership>,
    /// Number of processes that could not be read.
    pub unreadable: u32,
    /// Start of the scan, in ns since boot. Processes that started later may be missing.
    pub began: u64,
}

/// Processes to scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanScope {
    All,
    /// Processes that are in the kernel's map of members.
    Members,
}

impl Scanner {
    /// Creates a scanner. `complete`: a process without an entry in the kernel's map is certainly not a member.
    ///
    /// # Errors
    /// A map cannot be shared with another thread.
    pub fn new(
        kernel: &Kernel,
        source: &dyn Source,
        complete: bool,
    ) -> Result<Scanner, EngineError> {
        let reader = source.probes().map(|probes| probes.reader());
        Ok(Scanner {
            kernel: reader.transpose()?,
            clock: Arc::clone(&kernel.clock),
            processes: Arc::clone(&kernel.processes),
            complete,
            by_tick: source.is_polling(),
        })
    }

    /// Reads the processes of `scope` from /proc, and adds what the kernel knows about each: its exact start, and
    /// whether it is a member. Takes tens of microseconds per process.
    ///
    /// # Errors
    /// The kernel does not list its processes, or no thread can be started to read them.
    pub fn scan(&self, scope: ScanScope) -> Result<ScanResult, EngineError> {
        let began = self.clock.boot_time();
        let read_memberships = || match &self.kernel {
            Some(reader) => reader.members(),
            None => HashMap::new(),
        };
        let before = read_memberships();
        let table = self.kernel.as_ref().map(|reader| reader.processes());
        let table = table.transpose()?.unwrap_or_default();
        let pids: HashSet<u32> = match scope {
            // The kernel's own table may be incomplete without notice.
            ScanScope::All => self.processes.pids()?.into_iter().collect(),
            ScanScope::Members => before.keys().map(|key| key.pid).collect(),
        };
        let table: HashMap<u32, _> = table.iter().map(|row| (row.key.pid, row)).collect();
        let snapshot = self.processes.snapshot_of(pids.iter().copied().collect())?;
        let unreadable = snapshot.unreadable;
        // Read last: each process that was scanned has its entry by now.
        let memberships = read_memberships();
        let mut rows = snapshot.parents_first();
        if self.by_tick {
            drop_uncertain(&mut rows);
        }
        for row in &mut rows {
            let listed = table.get(&row.key.pid);
            // Without the kernel's exact key, the map's entry could be that of a later process with the same pid.
            let Some(listed) = listed.filter(|listed| listed.key.has_same_tick(row.key)) else {
                continue;
            };
            row.key = listed.key;
            row.exact = true;
            row.pidfd_inode = listed.pidfd_inode;
            // A process that exited during the scan is in the earlier copy only.
            let membership = memberships.get(&row.key).or_else(|| before.get(&row.key));
            let untracked = (self.complete && row.key.start < began).then(Membership::default);
            row.membership = membership.copied().or(untracked);
        }
        Ok(ScanResult {
            rows,
            pids,
            memberships,
            unreadable,
            began,
        })
    }
}

/// Drops processes that were read before the clock tick of their start had ended, and their descendants.
///
/// Until then another process can get the same pid and start tick. The next scan finds the dropped ones. Without its
/// parent, the session of a child would be unknown. `rows` must have parents before their children.
fn drop_uncertain(rows: &mut Vec<ProcEntry>) {
    let mut dropped = HashSet::new();
    rows.retain(|row| {
        let is_uncertain = !row.exact && row.key.start + TICK_NS > row.read_at;
        let is_dropped = is_uncertain || dropped.contains(&row.parent);
        if is_dropped {
            dropped.insert(row.key.pid);
        }
        !is_dropped
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_model::event::{Image, Uids};

    fn row(pid: u32, parent: u32, tick: u64, at: u64) -> ProcEntry {
        ProcEntry {
            read_at: at,
            key: ProcessKey {
                pid,
                start: tick * TICK_NS,
            },
            exact: false,
            pidfd_inode: 0,
            membership: None,
            parent,
            uids: Uids::default(),
            image: Arc::new(Image::default()),
            kernel_thread: false,
            namespace_init: false,
        }
    }

    #[test]
    fn child_of_process_read_in_its_start_tick_is_dropped() {
        // The tick had ended when the child was read, but not when its parent was.
        let later = 8 * TICK_NS;
        let mut rows = vec![
            row(1, 0, 0, later),
            row(20, 1, 7, later - 1),
            row(30, 20, 7, later),
            row(40, 30, 7, later),
            row(50, 1, 7, later),
        ];
        drop_uncertain(&mut rows);
        let kept: Vec<u32> = rows.iter().map(|row| row.key.pid).collect();
        assert_eq!(kept, [1, 50]);
    }
}
