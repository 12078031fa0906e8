//! Events made of what the kernel tells (kqueue) and of passes over the process table.
//!
//! Every process is watched: its exit is an event by itself, and its fork or exec asks for a pass, which finds who was born
//! and what runs. Nothing is done while nothing happens but a pass now and then, for what could not be watched.
//!
//! The kernel has for each process whom it was born to, whoever has adopted it since; so one that was left by its maker
//! before anybody looked still belongs to that, if the maker was ever seen.

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

/// Of how many that have exited the names are remembered, for children that are found later.
const PAST_MAX: usize = 4096;
/// What there is of the system, so that what is made of it can be tried elsewhere.
pub trait Kernel: AsFd {
    /// Why the table cannot be read.
    type Error: Display;

    /// Of the monotonic clock, in ns.
    fn now(&self) -> u64;

    /// In ns since boot.
    fn boot_time(&self) -> u64;

    /// All processes, zombies included, and how many rows of the table could not be understood.
    ///
    /// # Errors
    /// They cannot be listed.
    fn rows(&mut self) -> Result<(Vec<KinfoProc>, usize), Self::Error>;

    fn key(&self, process: &KinfoProc) -> ProcessKey;

    /// A living process in full; `None` if it is gone by now.
    fn proc_entry(&self, process: &KinfoProc) -> Option<ProcEntry>;

    /// Who has the pid, if anybody who lives does.
    fn identity(&self, pid: u32) -> Option<Identity>;

    /// The same, also of one that has exited and is not waited for.
    fn identity_of_any(&self, pid: u32) -> Option<Identity>;

    /// Asks to be told of whoever has the pid, and not of who had it before; whether that is done.
    fn watch(&mut self, pid: u32) -> bool;

    /// What has been told since this was asked last.
    fn read_events(&mut self) -> Vec<KernelEvent>;

    /// Its descriptor is readable after this time, unless another is named before; whether that could be had.
    fn wake_in(&mut self, time: Duration) -> bool;
}

/// What is told of one that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// With its status as wait(2) has it, unless that is kept from this user.
    Exit { pid: u32, status: Option<u32> },
    /// It has forked, or run another program.
    Change { pid: u32, exec: bool },
}

/// See the module.
pub struct Scan<K> {
    kernel: K,
    table: ScanTable,
    pace: ScanSchedule,
    /// By pid.
    watched: HashMap<u32, Watched>,
    /// By what the kernel calls them, which they are known by also when they are gone.
    names: HashMap<u64, ProcessKey>,
    /// Those of `names` that are gone, the oldest first.
    past: VecDeque<u64>,
    /// When the next pass is due as the timer has it.
    armed: u64,
    /// Those who were not there any more in the last pass, though the kernel had not told that they have exited.
    missing: HashSet<ProcessKey>,
    /// Who has changed and could not be read in full at the last pass.
    unread: HashSet<u32>,
    /// How many rows could not be understood in a pass at most: so many have been told of.
    flawed: usize,
    /// It has been said that passes fail.
    failing: bool,
    /// Who was born by then has been told of, in ns since boot.
    last_scan: u64,
}

/// One of whom the kernel tells.
struct Watched {
    key: ProcessKey,
    identity: Identity,
    /// How many times it has told of an exec.
    execs: u64,
    /// Whether it does tell: not of one that may not be watched.
    told: bool,
}

impl<K: Kernel> Scan<K> {
    /// Watches nobody yet; who is there is told by the first [`Source::drain`].
    pub(super) fn of(kernel: K, options: &ScanOptions) -> Scan<K> {
        let mut scan = Scan {
            kernel,
            table: ScanTable::default(),
            pace: ScanSchedule::new(
                sys::nanoseconds(options.min_interval),
                sys::nanoseconds(options.max_interval),
            ),
            watched: HashMap::new(),
            names: HashMap::new(),
            past: VecDeque::new(),
            armed: u64::MAX,
            missing: HashSet::new(),
            unread: HashSet::new(),
            flawed: 0,
            failing: false,
            last_scan: 0,
        };
        scan.arm();
        scan
    }

    /// Takes in what the kernel has told.
    fn listen(&mut self, tell: &mut impl FnMut(EventKind)) {
        let mut ended = HashMap::new();
        for told in self.kernel.read_events() {
            ended.extend(self.told(told));
        }
        if ended.is_empty() {
            return;
        }
        self.table.emit_exits(&ended, tell);
        ended.keys().for_each(|key| self.forget(key.pid));
        self.pace.on_exit(self.kernel.now());
    }

    /// Takes in what was told of one; gives its end, if that is what it was.
    fn told(&mut self, told: KernelEvent) -> Option<(ProcessKey, ExitStatus)> {
        match told {
            KernelEvent::Exit { pid, status } => {
                let key = self.watched.get(&pid)?.key;
                Some((
                    key,
                    status.map_or(ExitStatus::Unknown, ExitStatus::from_wait_status),
                ))
            }
            KernelEvent::Change { pid, exec } => {
                self.watched.get_mut(&pid)?.execs += u64::from(exec);
                self.pace.on_activity();
                None
            }
        }
    }

    /// Looks at all processes, and tells what is other than it was. Gives how many more rows than before could not be
    /// understood.
    fn pass(&mut self, tell: &mut impl FnMut(EventKind)) -> usize {
        let (began, before) = (self.kernel.now(), self.flawed);
        let now = self.kernel.boot_time();
        let unsettled = match self.look_at_all(tell) {
            Ok(unsettled) => {
                (self.failing, self.last_scan) = (false, now);
                unsettled
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!("cannot look at the processes: {error}; trying again");
                }
                true
            }
        };
        // Whoever forks or runs another program from now on, the kernel tells of.
        self.pace
            .on_pass_end(began, self.kernel.now(), PassResult::Idle);
        if unsettled {
            self.pace.on_activity();
        }
        self.flawed - before
    }

    /// Gives whether another pass is to follow soon.
    fn look_at_all(&mut self, tell: &mut impl FnMut(EventKind)) -> Result<bool, K::Error> {
        let (processes, flawed) = self.kernel.rows()?;
        self.flawed = self.flawed.max(flawed);
        self.table.begin();
        let mut living = HashMap::with_capacity(processes.len());
        let mut births = Births::default();
        // Before the kernel was asked to tell of them they may have forked.
        let mut unsettled = false;
        for process in processes.iter().filter(|process| !process.is_kernel) {
            if process.is_zombie() {
                births.0.extend(self.find_zombie(process));
                continue;
            }
            unsettled |= self.watch(process);
            let key = self.kernel.key(process);
            let glimpse = glimpse(key, process, self.watched.get(&process.pid));
            self.table.list(glimpse, false);
            living.insert(process.pid, process);
        }
        // Also of those whose pid is another's by now.
        self.listen(tell);
        let (watched, before) = (&self.watched, std::mem::take(&mut self.missing));
        let missing = RefCell::new(HashSet::new());
        // Of whom the kernel tells, but not for ever: one may have been on its way out when it was asked.
        let held = |key: ProcessKey| {
            let told = watched.get(&key.pid);
            let told = told.is_some_and(|watched| watched.key == key && watched.told);
            told && !before.contains(&key) && missing.borrow_mut().insert(key)
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
                    births.0.push(born(row, &self.watched, &self.names));
                }
                kind @ (EventKind::Exec { .. } | EventKind::Discovered(_)) => programs.push(kind),
                kind => rest.push(kind),
            });
        // Whoever is a boundary by now is one to those whom it has borne.
        programs.into_iter().for_each(&mut *tell);
        births.tell(&mut *tell);
        rest.into_iter().for_each(&mut *tell);
        gone.into_iter().for_each(|key| self.forget(key.pid));
        let living = |pid| self.watched.get(&pid).map(|watched| watched.key);
        births.tell_adoptions(living, tell);
        Ok(unsettled)
    }

    /// One that has come and exited since the last pass may have made others, and is not known yet.
    fn find_zombie(&mut self, process: &KinfoProc) -> Option<Birth> {
        let key = self.kernel.key(process);
        let identity = self.kernel.identity_of_any(process.pid)?;
        if self.names.contains_key(&identity.unique) {
            return None;
        }
        let maker = self.names.get(&identity.parent).copied();
        self.names.insert(identity.unique, key);
        self.remember(identity.unique);
        Some(Birth {
            key,
            birth_parent: maker,
            uids: process.uids,
            parent: process.parent,
            row: None,
        })
    }

    /// Has the kernel tell of a process from now on; whether it did not yet.
    fn watch(&mut self, process: &KinfoProc) -> bool {
        let (key, pid) = (self.kernel.key(process), process.pid);
        if self.watched.get(&pid).is_some_and(|known| known.key == key) {
            return false;
        }
        self.forget(pid);
        let Some(identity) = self.kernel.identity(pid) else {
            return true;
        };
        let told = self.kernel.watch(pid);
        if !told {
            tracing::debug!("pid {pid}: the kernel does not tell of it");
        }
        // Asked by pid, it may be of another by now: then that one is found by the next pass.
        if self.kernel.identity(pid) == Some(identity) {
            let execs = 0;
            let watched = Watched {
                key,
                identity,
                execs,
                told,
            };
            self.names.insert(identity.unique, key);
            self.watched.insert(pid, watched);
        }
        true
    }

    /// It is gone, or another has its pid. Its name is remembered for a while.
    fn forget(&mut self, pid: u32) {
        if let Some(watched) = self.watched.remove(&pid) {
            self.remember(watched.identity.unique);
        }
    }

    fn remember(&mut self, gone: u64) {
        self.past.push_back(gone);
        while self.past.len() > PAST_MAX {
            let oldest = self.past.pop_front();
            oldest.and_then(|unique| self.names.remove(&unique));
        }
    }

    /// Sets the timer to the next pass.
    fn arm(&mut self) {
        let due = self.pace.due();
        if due == self.armed {
            return;
        }
        let left = due.saturating_sub(self.kernel.now());
        if self.kernel.wake_in(Duration::from_nanos(left)) {
            self.armed = due;
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
        let mut tell = |kind| {
            drained.records += 1;
            sink(Event {
                time,
                provenance: Provenance::Procfs,
                kind,
            });
        };
        self.listen(&mut tell);
        if self.pace.due() <= self.kernel.now() {
            let flawed = self.pass(&mut tell);
            drained.malformed = flawed as u64;
            drained.malformation = (flawed > 0).then_some(Malformation::Row);
        }
        self.arm();
        drained
    }

    /// As of a pass that did not fail.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        if self.failing || self.unread.contains(&key.pid) {
            return false;
        }
        let watched = self.watched.get(&key.pid);
        watched.is_some_and(|watched| watched.key == key)
    }

    fn scan_now(&mut self) {
        self.pace.at_once();
    }

    /// The next pass comes after the shortest interval, unless passes fail.
    fn scan_soon(&mut self) {
        if !self.failing {
            self.pace.on_activity();
            self.arm();
        }
    }

    /// Returns 0 if no pass has ended yet.
    fn last_scan(&self) -> Option<u64> {
        Some(self.last_scan)
    }

    /// Passes come as fast as they may while an escalation is open.
    fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        self.pace.set_escalating(open);
        self.arm();
        Ok(())
    }
}

impl<K: Kernel> AsFd for Scan<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kernel.as_fd()
    }
}

/// A short look at a process.
fn glimpse(key: ProcessKey, process: &KinfoProc, watched: Option<&Watched>) -> StatRow {
    let mut comm = [0; 16];
    let shown = process.comm.len().min(comm.len());
    comm[..shown].copy_from_slice(&process.comm[..shown]);
    // Of one that is not watched its name has to tell.
    let watched = watched.filter(|watched| watched.told);
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

/// What is to be told of one that is found.
fn born(
    row: ProcEntry,
    watched: &HashMap<u32, Watched>,
    names: &HashMap<u64, ProcessKey>,
) -> Birth {
    let watched = watched.get(&row.key.pid).filter(|of| of.key == row.key);
    let maker = watched.and_then(|watched| names.get(&watched.identity.parent));
    Birth {
        key: row.key,
        birth_parent: maker.filter(|maker| maker.pid != row.parent).copied(),
        uids: row.uids,
        parent: row.parent,
        row: Some(row),
    }
}
