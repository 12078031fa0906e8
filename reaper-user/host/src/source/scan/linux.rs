//! Event source that scans /proc. It needs no privileges.
//!
//! A pass reads one file of each process and compares it with the last reported state ([`super::table`]). The interval
//! between passes depends on activity ([`super::interval`]). Pidfds report the exits of watched processes without a pass.
//!
//! # Identity
//! /proc shows start times in ticks of 10 ms, and a pid can be reused within one tick. Therefore a process is reported
//! only after the tick of its start has ended. From then on, pid and tick identify the last process that started in the
//! tick, because a later one has a later tick. A pidfd holds each watched process from then on, and it may be signalled
//! only through this pidfd ([`Source::confirms_identity`]).

mod pidfds;
mod read;
#[cfg(test)]
mod tests;
mod unread;

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::error::ScanError;
use super::interval::{PassResult, ScanOptions, ScanSchedule};
use super::table::ScanTable;
use crate::advice::Advised as _;
use crate::source::ProcessTable;
use crate::source::drained::{Drained, Malformation};
use crate::source::error::SourceError;
use crate::source::event_source::Source;
use crate::source::kind::SourceKind;
use crate::source::procfs::{Procfs, ProcfsError};
use crate::sys;
use crate::sys::pidfd::{self, Pidfd};
use pidfds::{WatchedProcess, watched_as};
use read::{Reader, ScanReading};
use reaper_model::event::{Event, EventKind, ProcEntry, ProcessKey, Provenance, TICK_NS};
use unread::UnreadTracker;

/// Time limit for reading a new or changed process in full.
#[cfg(not(test))]
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// Longer in tests, because a busy machine may delay a reader and no test depends on this limit.
#[cfg(test)]
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Id of the timer in the epoll set. The other ids are pids, which are smaller.
const TIMER_TOKEN: u64 = u64::MAX;

/// Source that scans /proc.
pub struct Scan {
    reader: Reader,
    procfs: Procfs,
    table: ScanTable,
    schedule: ScanSchedule,
    /// Processes whose exits matter, by pid.
    watched: HashMap<u32, WatchedProcess>,
    /// Number of watched processes with a pidfd.
    held_count: usize,
    /// Limit on `held_count`.
    held_max: usize,
    epoll: Epoll,
    timer: TimerFd,
    /// Time to which the timer is set, in ns of CLOCK_MONOTONIC.
    timer_due_ns: u64,
    /// Pids of processes that the last pass could not read, or that are new or changed and could not be read in full.
    unread: HashSet<u32>,
    unread_tracker: UnreadTracker,
    /// Pids whose `stat` file could not be parsed. This is reported once until the process exits.
    malformed: HashSet<u32>,
    /// Whether the last pass failed, which has been logged.
    is_failing: bool,
    /// Time in ns since boot: processes that started earlier have been reported, except unreadable ones.
    last_scan: u64,
    /// Error of a system that refuses all pidfds.
    pidfd_refused: Option<Errno>,
    /// Last error of opening a pidfd, while some watched process lacks one.
    pidfd_missing: Option<Errno>,
}

impl Scan {
    /// Opens /proc. The first [`Source::drain`] reports the pre-existing processes.
    ///
    /// If the system refuses pidfds, only passes find exits, and no process can be signalled.
    ///
    /// # Errors
    /// /proc is not mounted or belongs to another pid namespace, or no file can be opened.
    pub fn open(options: &ScanOptions) -> Result<Scan, ScanError> {
        sys::non_initial_pid_namespace().map_err(ScanError::Proc)?;
        Scan::of(Path::new("/proc"), options)
    }

    fn of(root: &Path, options: &ScanOptions) -> Result<Scan, ScanError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(ScanError::Wait)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(ScanError::Wait)?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, TIMER_TOKEN);
        epoll.add(&timer, event).map_err(ScanError::Wait)?;
        let [min, max] = [options.min_interval, options.max_interval].map(sys::nanoseconds);
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(now, _)| now);
        let mut scan = Scan {
            reader: Reader::open(root).map_err(ScanError::List)?,
            procfs: Procfs::new(root),
            table: ScanTable::default(),
            schedule: ScanSchedule::new(min, max),
            watched: HashMap::new(),
            held_count: 0,
            // The other half is left for pidfds of processes that are signalled, and for other files.
            held_max: usize::try_from(files / 2).unwrap_or(usize::MAX),
            epoll,
            timer,
            timer_due_ns: 0,
            unread: HashSet::new(),
            unread_tracker: UnreadTracker::default(),
            malformed: HashSet::new(),
            is_failing: false,
            last_scan: 0,
            pidfd_refused: pidfd::probe().err().map(|pidfd_refused| pidfd_refused.0),
            pidfd_missing: None,
        };
        scan.set_timer();
        Ok(scan)
    }

    /// Scans all processes and emits the differences. Returns the pids whose `stat` file could not be parsed for the
    /// first time.
    fn pass(&mut self, emit: &mut impl FnMut(EventKind)) -> Vec<u32> {
        let (began, now) = (sys::monotonic(), sys::boot_time());
        let mut malformed = Vec::new();
        let found = match self.scan_all(now, &mut malformed, emit) {
            Ok(found) => {
                self.is_failing = false;
                let reader = &mut self.reader;
                let unread = self.unread.iter().copied();
                let unread = unread.filter(|pid| reader.read_row(*pid) != ScanReading::Gone);
                if !self.unread_tracker.on_pass(unread) {
                    self.last_scan = now.saturating_sub(TICK_NS);
                }
                found
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(
                        "cannot scan the processes: {error}; trying again; new processes are unknown until that works"
                    );
                }
                PassResult::Unchanged
            }
        };
        self.schedule.on_pass_end(began, sys::monotonic(), found);
        malformed
    }

    /// Reads all processes and emits the differences, unless reading fails. `now` is in ns since boot.
    ///
    /// Adds pids whose `stat` file could not be parsed for the first time to `malformed`. Returns whether anything has
    /// changed that concerns watched processes.
    fn scan_all(
        &mut self,
        now: u64,
        malformed: &mut Vec<u32>,
        emit: &mut impl FnMut(EventKind),
    ) -> Result<PassResult, PassError> {
        let Scan {
            reader,
            table,
            unread,
            malformed: before,
            ..
        } = self;
        let (mut still, mut exhausted) = (HashSet::new(), None);
        unread.clear();
        table.begin();
        let listed = reader.pass(|pid, reading| {
            // A malformed file is reported once, even if it can be parsed from time to time.
            if reading != ScanReading::Gone && before.contains(&pid) {
                still.insert(pid);
            }
            match reading {
                ScanReading::Alive(stat) => {
                    table.list(stat, stat.key.start.saturating_add(TICK_NS) > now)
                }
                ScanReading::Kernel | ScanReading::Gone => {}
                ScanReading::Unreadable(errno) => {
                    if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
                        exhausted = Some(errno);
                    }
                    unread.insert(pid);
                    table.mark_present(pid);
                }
                ScanReading::Malformed => {
                    if still.insert(pid) {
                        malformed.push(pid);
                    }
                    unread.insert(pid);
                    table.mark_present(pid);
                }
            }
        });
        match listed {
            Ok(()) => *before = still,
            Err(_) => before.extend(still),
        }
        listed?;
        exhausted.map_or(Ok(()), Err)?;
        // Before the comparison, so that the exit of a process whose pid was reused comes from its pidfd.
        let ended = self.emit_exits(emit);
        let watched = &self.watched;
        let is_held = |key| watched_as(watched, key).is_some_and(WatchedProcess::is_held);
        let differences = self.table.compare(is_held);
        let is_watched = |pid: u32| self.watched.contains_key(&pid);
        let found = if ended || differences.unsettled || differences.concerns(is_watched) {
            PassResult::Changed
        } else if self.watched.is_empty() && differences.new.is_empty() {
            PassResult::Idle
        } else {
            PassResult::Unchanged
        };
        let wanted = differences.wanted();
        self.unread.extend(&wanted);
        let rows = self.read_rows(wanted)?;
        for row in &rows {
            self.unread.remove(&row.key.pid);
        }
        let gone = differences.gone.clone();
        self.table.emit_changes(differences, rows, emit);
        for key in gone {
            if watched_as(&self.watched, key).is_some() {
                self.release(key.pid);
            }
        }
        self.open_missing_pidfds();
        Ok(found)
    }

    /// Reads processes in full, including the inode numbers of their pidfds. Leaves out those that cannot be read
    /// within [`READ_TIMEOUT`].
    fn read_rows(&self, pids: Vec<u32>) -> Result<Vec<ProcEntry>, PassError> {
        if pids.is_empty() {
            return Ok(Vec::new());
        }
        // The pidfd is opened before the row is read. The start tick in the row had ended before that, so both are of
        // the same process.
        let inode = |pid: &u32| Some((*pid, Pidfd::open(*pid).ok()?.unique_inode()?));
        let inodes: HashMap<u32, u64> = pids.iter().filter_map(inode).collect();
        let mut rows = self.procfs.snapshot_within(READ_TIMEOUT, pids)?.rows;
        for row in &mut rows {
            row.pidfd_inode = inodes.get(&row.key.pid).copied().unwrap_or(0);
        }
        Ok(rows)
    }

    /// Sets the timer to the next pass.
    fn set_timer(&mut self) {
        // 0 would disarm the timer. A time in the past fires it at once.
        let due = self.schedule.due().max(1);
        // A due pass that an exit has delayed needs the timer again: the engine waits for edges, and the timer has fired.
        if due == self.timer_due_ns && due > sys::monotonic() {
            return;
        }
        let at = TimeSpec::nanoseconds(i64::try_from(due).unwrap_or(i64::MAX));
        let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME;
        match self.timer.set(Expiration::OneShot(at), flags) {
            Ok(()) => self.timer_due_ns = due,
            Err(errno) => {
                tracing::error!(
                    "cannot set the timer for the next scan: {errno}; new processes and exits may be noticed late"
                )
            }
        }
    }
}

impl Source for Scan {
    fn kind(&self) -> SourceKind {
        SourceKind::Scan
    }

    /// Passes on the exits that pidfds report and, if a pass is due, the changes in the process table.
    ///
    /// Exits delay a due pass for a few milliseconds, so that the engine can act on them first.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let mut emit = |kind| {
            drained.records += 1;
            sink(Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        };
        let busy = self.emit_exits(&mut emit);
        let ordered = self.schedule.due() == 0;
        if ordered || self.schedule.is_due(sys::monotonic(), busy) {
            let malformed = self.pass(&mut emit);
            drained.malformed = malformed.len() as u64;
            drained.malformation = malformed.last().copied().map(Malformation::Stat);
        }
        self.set_timer();
        drained
    }

    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        self.is_confirmed(key)
    }

    fn watch_exit(&mut self, key: ProcessKey, wanted: bool) {
        self.set_exit_watch(key, wanted);
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

    /// Returns 0 before the first complete scan.
    fn last_scan(&self) -> Option<u64> {
        Some(self.last_scan)
    }

    fn pidfd_error(&self) -> Option<Errno> {
        self.pidfd_refused.or(self.pidfd_missing)
    }

    /// Makes passes come as fast as the cost allows while an escalation is open.
    fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        self.schedule.set_escalating(open);
        self.set_timer();
        Ok(())
    }
}

impl AsFd for Scan {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

/// Error that ends a pass.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error("cannot read /proc: {}", .0.advised())]
    List(#[from] nix::Error),
    #[error(transparent)]
    Read(#[from] ProcfsError),
}

/// Rounds the start of a key down to a tick, as /proc shows it.
fn tick(key: ProcessKey) -> ProcessKey {
    ProcessKey {
        start: key.start - key.start % TICK_NS,
        ..key
    }
}
