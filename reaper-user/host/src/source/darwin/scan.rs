//! Event source for macOS that combines events of the kernel (kqueue) with passes over the process table.
//!
//! The scan watches every process. An exit is an event by itself. A fork or exec triggers a pass, which finds the new
//! processes and programs. Without activity, only rare passes run, for processes that could not be watched.
//!
//! The kernel stores the birth parent of each process, whichever process has adopted it since. So a process that lost its
//! parent before a pass found it can still be attributed, if the birth parent was ever seen.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use super::births::{Birth, Births};
use crate::source::drained::{Drained, Malformation};
use crate::source::error::SourceError;
use crate::source::event_source::Source;
use crate::source::kind::SourceKind;
use crate::source::scan::interval::{PassResult, ScanOptions, ScanSchedule};
use crate::source::scan::table::{ImageFingerprint, ScanTable, StatRow};
use crate::sys;
use crate::sys::kinfo::{Identity, KinfoProc};
use reaper_model::event::{Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance};

/// Number of exited processes whose keys are kept, for children that are found later.
const EXITED_MAX: usize = 4096;

/// Interface to the kernel, which tests simulate on any system.
pub trait Kernel: AsFd {
    /// Error of reading the process table.
    type Error: Display;

    /// Returns the time of CLOCK_MONOTONIC, in ns.
    fn now(&self) -> u64;

    /// Returns the time since boot, in ns.
    fn boot_time(&self) -> u64;

    /// Returns all processes, zombies included, and the number of malformed rows.
    ///
    /// # Errors
    /// The table cannot be read.
    fn rows(&mut self) -> Result<(Vec<KinfoProc>, usize), Self::Error>;

    /// Returns the key of a listed process.
    fn key(&self, process: &KinfoProc) -> ProcessKey;

    /// Reads a living process in full; `None` if it has exited.
    fn proc_entry(&self, process: &KinfoProc) -> Option<ProcEntry>;

    /// Returns the identity of the living process that has a pid.
    fn identity(&self, pid: u32) -> Option<Identity>;

    /// Returns the identity of the process or zombie that has a pid.
    fn identity_of_any(&self, pid: u32) -> Option<Identity>;

    /// Requests events of the process that has a pid, and drops queued ones of an earlier process. Returns whether the
    /// kernel agrees.
    fn watch(&mut self, pid: u32) -> bool;

    /// Returns the events since the last call.
    fn read_events(&mut self) -> Vec<KernelEvent>;

    /// Sets the timer that makes the descriptor readable once `time` has passed. Returns whether that succeeded.
    fn wake_in(&mut self, time: Duration) -> bool;
}

/// Event of a watched process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// The process has exited.
    Exit {
        /// Pid of the process.
        pid: u32,
        /// Wait status; `None` if it is hidden from this user.
        status: Option<u32>,
    },
    /// The process has forked, or run another program.
    Change {
        /// Pid of the process.
        pid: u32,
        /// Whether it has run another program.
        exec: bool,
    },
}

/// Source that scans the process table and receives events of the kernel.
pub struct Scan<K> {
    kernel: K,
    table: ScanTable,
    schedule: ScanSchedule,
    /// Watched processes by pid.
    watched: HashMap<u32, Watched>,
    /// Keys by the kernel's unique id, also of some exited processes.
    keys: HashMap<u64, ProcessKey>,
    /// Unique ids in `keys` of exited processes, oldest first.
    exited: VecDeque<u64>,
    /// Time to which the timer is set, in ns of CLOCK_MONOTONIC.
    timer_due_ns: u64,
    /// Processes that the last pass did not find although the kernel had reported no exit.
    missing: HashSet<ProcessKey>,
    /// Pids of changed processes that the last pass could not read in full.
    unread: HashSet<u32>,
    /// Highest number of malformed rows in a pass. So many have been reported.
    malformed: usize,
    /// Whether the last pass failed, which has been logged.
    is_failing: bool,
    /// Time in ns since boot: processes that started earlier have been reported.
    last_scan: u64,
}

/// A known process.
struct Watched {
    key: ProcessKey,
    identity: Identity,
    /// Number of execs that the kernel has reported.
    execs: u64,
    /// Whether the kernel reports its events. It refuses that for some processes.
    is_reported: bool,
}

impl<K: Kernel> Scan<K> {
    /// Creates a scan. The first [`Source::drain`] reports and watches pre-existing processes.
    pub(super) fn of(kernel: K, options: &ScanOptions) -> Scan<K> {
        let mut scan = Scan {
            kernel,
            table: ScanTable::default(),
            schedule: ScanSchedule::new(
                sys::nanoseconds(options.min_interval),
                sys::nanoseconds(options.max_interval),
            ),
            watched: HashMap::new(),
            keys: HashMap::new(),
            exited: VecDeque::new(),
            timer_due_ns: u64::MAX,
            missing: HashSet::new(),
            unread: HashSet::new(),
            malformed: 0,
            is_failing: false,
            last_scan: 0,
        };
        scan.set_timer();
        scan
    }

    /// Emits the exits that the kernel has reported, and forgets these processes. Counts reported execs. Exits, forks
    /// and execs of known processes move the next pass forward.
    fn apply_kernel_events(&mut self, emit: &mut impl FnMut(EventKind)) {
        let mut ended = HashMap::new();
        for event in self.kernel.read_events() {
            ended.extend(self.apply_event(event));
        }
        if ended.is_empty() {
            return;
        }
        self.table.emit_exits(&ended, emit);
        ended.keys().for_each(|key| self.forget(key.pid));
        self.schedule.on_exit(self.kernel.now());
    }

    /// Returns the process and its status if the event is an exit. Otherwise counts an exec, moves the next pass
    /// forward, and returns `None`. Ignores events of unknown processes.
    fn apply_event(&mut self, event: KernelEvent) -> Option<(ProcessKey, ExitStatus)> {
        match event {
            KernelEvent::Exit { pid, status } => {
                let key = self.watched.get(&pid)?.key;
                Some((
                    key,
                    status.map_or(ExitStatus::Unknown, ExitStatus::from_wait_status),
                ))
            }
            KernelEvent::Change { pid, exec } => {
                self.watched.get_mut(&pid)?.execs += u64::from(exec);
                self.schedule.on_activity();
                None
            }
        }
    }

    /// Scans all processes and emits the differences. Returns the number of malformed rows beyond those reported before.
    fn pass(&mut self, emit: &mut impl FnMut(EventKind)) -> usize {
        let (began, before) = (self.kernel.now(), self.malformed);
        let now = self.kernel.boot_time();
        let unsettled = match self.scan_all(emit) {
            Ok(unsettled) => {
                (self.is_failing, self.last_scan) = (false, now);
                unsettled
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(
                        "cannot scan the processes: {error}; trying again; new processes are unknown until that works"
                    );
                }
                true
            }
        };
        // From now on the kernel reports forks and execs. So the next pass may be far off.
        self.schedule
            .on_pass_end(began, self.kernel.now(), PassResult::Idle);
        if unsettled {
            self.schedule.on_activity();
        }
        self.malformed - before
    }

    /// Scans all processes and emits the differences. Returns whether another pass must follow soon.
    fn scan_all(&mut self, emit: &mut impl FnMut(EventKind)) -> Result<bool, K::Error> {
        let (processes, malformed) = self.kernel.rows()?;
        self.malformed = self.malformed.max(malformed);
        self.table.begin();
        let mut living = HashMap::with_capacity(processes.len());
        let mut births = Births::default();
        // Processes may have forked before they were watched. Then another pass must follow.
        let mut unsettled = false;
        for process in processes.iter().filter(|process| !process.is_kernel) {
            if process.is_zombie() {
                births.0.extend(self.find_zombie(process));
                continue;
            }
            unsettled |= self.watch(process);
            let key = self.kernel.key(process);
            let stat_row = stat_row(key, process, self.watched.get(&process.pid));
            self.table.list(stat_row, false);
            living.insert(process.pid, process);
        }
        // Before the comparison, so that the exit of a process whose pid was reused comes from the kernel's event.
        self.apply_kernel_events(emit);
        let (watched, before) = (&self.watched, std::mem::take(&mut self.missing));
        let missing = RefCell::new(HashSet::new());
        // The kernel will report the exit of a watched process. But if the process was already exiting when it was
        // watched, no report comes, so the second pass that misses it takes it as gone.
        let held = |key: ProcessKey| {
            let known = watched.get(&key.pid);
            let known = known.is_some_and(|known| known.key == key && known.is_reported);
            known && !before.contains(&key) && missing.borrow_mut().insert(key)
        };
        let differences = self.table.compare(held);
        self.missing = missing.into_inner();
        unsettled |= differences.unsettled || !self.missing.is_empty();
        let wanted = differences.wanted();
        self.unread = wanted.iter().copied().collect();
        let rows = wanted
            .into_iter()
            .filter_map(|pid| self.kernel.proc_entry(living.get(&pid)?));
        let rows: Vec<ProcEntry> = rows.collect();
        for row in &rows {
            self.unread.remove(&row.key.pid);
        }
        let gone = differences.gone.clone();
        let new: HashSet<ProcessKey> = differences.new.iter().map(|new| new.key).collect();
        let (mut programs, mut rest) = (Vec::new(), Vec::new());
        self.table
            .emit_changes(differences, rows, |kind| match kind {
                EventKind::Discovered(row) if new.contains(&row.key) => {
                    births.0.push(birth(row, &self.watched, &self.keys));
                }
                kind @ (EventKind::Exec { .. } | EventKind::Discovered(_)) => programs.push(kind),
                kind => rest.push(kind),
            });
        // A process that has become a boundary is one for its new children, so programs come before new processes.
        programs.into_iter().for_each(&mut *emit);
        births.emit(&mut *emit);
        rest.into_iter().for_each(&mut *emit);
        gone.into_iter().for_each(|key| self.forget(key.pid));
        let living = |pid| self.watched.get(&pid).map(|watched| watched.key);
        births.emit_adoptions(living, emit);
        Ok(unsettled)
    }

    /// Returns a zombie as a new process; `None` if it is known or its identity cannot be read. It may be the birth
    /// parent of other new processes.
    fn find_zombie(&mut self, process: &KinfoProc) -> Option<Birth> {
        let key = self.kernel.key(process);
        let identity = self.kernel.identity_of_any(process.pid)?;
        if self.keys.contains_key(&identity.unique) {
            return None;
        }
        let birth_parent = self.keys.get(&identity.parent).copied();
        self.keys.insert(identity.unique, key);
        self.remember(identity.unique);
        Some(Birth {
            key,
            birth_parent,
            uids: process.uids,
            parent: process.parent,
            row: None,
        })
    }

    /// Watches a process. Returns false if it was watched already, so that nothing can have been missed.
    fn watch(&mut self, process: &KinfoProc) -> bool {
        let (key, pid) = (self.kernel.key(process), process.pid);
        if self.watched.get(&pid).is_some_and(|known| known.key == key) {
            return false;
        }
        self.forget(pid);
        let Some(identity) = self.kernel.identity(pid) else {
            return true;
        };
        let is_reported = self.kernel.watch(pid);
        if !is_reported {
            tracing::debug!("pid {pid}: the kernel does not report its events");
        }
        // If the pid was reused meanwhile, the next pass finds the new process.
        if self.kernel.identity(pid) == Some(identity) {
            let execs = 0;
            let watched = Watched {
                key,
                identity,
                execs,
                is_reported,
            };
            self.keys.insert(identity.unique, key);
            self.watched.insert(pid, watched);
        }
        true
    }

    /// Removes a process that has exited. Its key is kept until [`EXITED_MAX`] others have exited.
    fn forget(&mut self, pid: u32) {
        if let Some(watched) = self.watched.remove(&pid) {
            self.remember(watched.identity.unique);
        }
    }

    /// Adds the unique id of an exited process to those whose keys are kept, and drops the oldest beyond
    /// [`EXITED_MAX`].
    fn remember(&mut self, gone: u64) {
        self.exited.push_back(gone);
        while self.exited.len() > EXITED_MAX {
            let oldest = self.exited.pop_front();
            oldest.and_then(|unique| self.keys.remove(&unique));
        }
    }

    /// Sets the timer to the next pass.
    fn set_timer(&mut self) {
        let due = self.schedule.due();
        if due == self.timer_due_ns {
            return;
        }
        let left = due.saturating_sub(self.kernel.now());
        if self.kernel.wake_in(Duration::from_nanos(left)) {
            self.timer_due_ns = due;
        }
    }
}

impl<K: Kernel> Source for Scan<K> {
    fn kind(&self) -> SourceKind {
        SourceKind::Scan
    }

    /// Passes on what the kernel has reported and, if a pass is due, what has changed in the process table.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let time = self.kernel.boot_time();
        let mut emit = |kind| {
            drained.records += 1;
            sink(Event {
                time,
                provenance: Provenance::Procfs,
                kind,
            });
        };
        self.apply_kernel_events(&mut emit);
        if self.schedule.due() <= self.kernel.now() {
            let malformed = self.pass(&mut emit);
            drained.malformed = malformed as u64;
            drained.malformation = (malformed > 0).then_some(Malformation::Row);
        }
        self.set_timer();
        drained
    }

    /// Compares with the processes that are watched. Returns false if the last pass failed, or could not read this
    /// process.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        if self.is_failing || self.unread.contains(&key.pid) {
            return false;
        }
        let watched = self.watched.get(&key.pid);
        watched.is_some_and(|watched| watched.key == key)
    }

    fn scan_now(&mut self) {
        self.schedule.set_due_now();
    }

    /// The next pass comes after the shortest interval, unless passes fail.
    fn scan_soon(&mut self) {
        if !self.is_failing {
            self.schedule.on_activity();
            self.set_timer();
        }
    }

    /// Returns 0 before the first complete pass.
    fn last_scan(&self) -> Option<u64> {
        Some(self.last_scan)
    }

    /// Makes passes come as fast as the cost allows while an escalation is open.
    fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        self.schedule.set_escalating(open);
        self.set_timer();
        Ok(())
    }
}

impl<K: Kernel> AsFd for Scan<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kernel.as_fd()
    }
}

/// Converts a row of the kernel's table. `watched` is the entry of the process, if it has one.
fn stat_row(key: ProcessKey, process: &KinfoProc, watched: Option<&Watched>) -> StatRow {
    let mut comm = [0; 16];
    let shown = process.comm.len().min(comm.len());
    comm[..shown].copy_from_slice(&process.comm[..shown]);
    // Execs of a process that is not reported show only by its name.
    let watched = watched.filter(|watched| watched.is_reported);
    StatRow {
        key,
        parent: process.parent,
        fingerprint: ImageFingerprint {
            sid: 0,
            pgid: process.group,
            tty: process.terminal,
            comm,
            exec: watched.map_or([0; 2], |watched| {
                [watched.execs + 1, watched.identity.unique]
            }),
        },
    }
}

/// Converts a new living process. `keys` has the keys by unique id, from which the birth parent is looked up.
fn birth(
    row: ProcEntry,
    watched: &HashMap<u32, Watched>,
    keys: &HashMap<u64, ProcessKey>,
) -> Birth {
    let watched = watched.get(&row.key.pid).filter(|of| of.key == row.key);
    let birth_parent = watched.and_then(|watched| keys.get(&watched.identity.parent));
    Birth {
        key: row.key,
        birth_parent: birth_parent
            .filter(|birth_parent| birth_parent.pid != row.parent)
            .copied(),
        uids: row.uids,
        parent: row.parent,
        row: Some(row),
    }
}
