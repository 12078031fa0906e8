//! Looks at the process table again and again: for where nobody tells what happens, and needs no privilege.
//!
//! A pass reads one file of each process and compares it with what it read before ([`super::table`]); how often is up to what
//! happens ([`super::interval`]). The ends of those who matter are told by pidfds, without a pass.
//!
//! # Who is who
//! /proc has starts in ticks of 10 ms, in which a pid can be given away and taken again. Nobody is told of before the
//! tick of its birth is over: whoever has that pid and that tick from then on is the last one who was born so, and a
//! successor has another tick. And who matters is held by a pidfd from then on, by which alone it may be signalled
//! ([`Source::confirms_identity`]).

mod late;
mod pidfds;
mod read;
#[cfg(test)]
mod tests;

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
use crate::source::ProcessTable;
use crate::source::drained::{Drained, Malformation};
use crate::source::error::SourceError;
use crate::source::event_source::Source;
use crate::source::kind::SourceKind;
use crate::source::procfs::{Procfs, ProcfsError};
use crate::sys;
use crate::sys::pidfd::{self, Pidfd};
use late::UnreadTracker;
use pidfds::{WatchedProcess, watched_as};
use read::{Reader, ScanReading};
use reaper_model::event::{Event, EventKind, ProcEntry, ProcessKey, Provenance, TICK_NS};

/// How long a pass waits for a look at somebody new.
#[cfg(not(test))]
const PATIENCE: Duration = Duration::from_millis(100);
/// Longer in tests: none of them has anybody who cannot be read in time, and a busy machine may keep a reader for longer.
#[cfg(test)]
const PATIENCE: Duration = Duration::from_secs(10);

/// What the timer is called in the epoll set; pids are smaller.
const TIMER: u64 = u64::MAX;

/// See the module.
pub struct Scan {
    reader: Reader,
    procfs: Procfs,
    table: ScanTable,
    pace: ScanSchedule,
    /// By pid.
    watched: HashMap<u32, WatchedProcess>,
    /// How many of those are held, and may be at most.
    held: usize,
    held_max: usize,
    epoll: Epoll,
    timer: TimerFd,
    /// What the timer is set to.
    armed: u64,
    /// Who was there at the last pass and could not be read, or has changed and could not be read in full.
    unread: HashSet<u32>,
    late: UnreadTracker,
    /// Whose files could not be understood, which has been told, and who have not gone since.
    flawed: HashSet<u32>,
    /// It has been said that passes fail.
    failing: bool,
    /// Who was born by then has been told of, but for those who cannot be read at all, in ns since boot.
    last_scan: u64,
    /// Why there are no pidfds to be had at all, and why there were none for some when last asked for.
    refused: Option<Errno>,
    starved: Option<Errno>,
}

impl Scan {
    /// Opens /proc; what is there is told by the first [`Source::drain`].
    ///
    /// Where the system has no pidfds to give, the ends of processes are found by looking alone, and no signal can be
    /// sent to any of them.
    ///
    /// # Errors
    /// /proc is not there, or not that of this pid namespace, or there is no room for open files.
    pub fn open(options: &ScanOptions) -> Result<Scan, ScanError> {
        sys::non_initial_pid_namespace().map_err(ScanError::Proc)?;
        Scan::of(Path::new("/proc"), options)
    }

    fn of(root: &Path, options: &ScanOptions) -> Result<Scan, ScanError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(ScanError::Wait)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(ScanError::Wait)?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, TIMER);
        epoll.add(&timer, event).map_err(ScanError::Wait)?;
        let [min, max] = [options.min_interval, options.max_interval].map(sys::nanoseconds);
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(now, _)| now);
        let mut scan = Scan {
            reader: Reader::open(root).map_err(ScanError::List)?,
            procfs: Procfs::new(root),
            table: ScanTable::default(),
            pace: ScanSchedule::new(min, max),
            watched: HashMap::new(),
            held: 0,
            // The rest is for those who are signalled.
            held_max: usize::try_from(files / 2).unwrap_or(usize::MAX),
            epoll,
            timer,
            armed: 0,
            unread: HashSet::new(),
            late: UnreadTracker::default(),
            flawed: HashSet::new(),
            failing: false,
            last_scan: 0,
            refused: pidfd::probe().err().map(|refused| refused.0),
            starved: None,
        };
        scan.arm();
        Ok(scan)
    }

    /// Looks at all processes, and tells what is other than it was. Gives who of them could not be understood for the
    /// first time.
    fn pass(&mut self, tell: &mut impl FnMut(EventKind)) -> Vec<u32> {
        let (began, now) = (sys::monotonic(), sys::boot_time());
        let mut flawed = Vec::new();
        let found = match self.look_at_all(now, &mut flawed, tell) {
            Ok(found) => {
                self.failing = false;
                let reader = &mut self.reader;
                let unread = self.unread.iter().copied();
                let unread = unread.filter(|pid| reader.look(*pid) != ScanReading::Gone);
                if !self.late.passed(unread) {
                    self.last_scan = now.saturating_sub(TICK_NS);
                }
                found
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!("cannot look at the processes: {error}; trying again");
                }
                PassResult::Unchanged
            }
        };
        self.pace.on_pass_end(began, sys::monotonic(), found);
        flawed
    }

    fn look_at_all(
        &mut self,
        now: u64,
        flawed: &mut Vec<u32>,
        tell: &mut impl FnMut(EventKind),
    ) -> Result<PassResult, PassError> {
        let Scan {
            reader,
            table,
            unread,
            flawed: before,
            ..
        } = self;
        let (mut still, mut exhausted) = (HashSet::new(), None);
        unread.clear();
        table.begin();
        let listed = reader.pass(|pid, look| {
            // One whose file can be understood now and then is told of once.
            if look != ScanReading::Gone && before.contains(&pid) {
                still.insert(pid);
            }
            match look {
                ScanReading::Alive(glimpse) => {
                    table.list(glimpse, glimpse.key.start.saturating_add(TICK_NS) > now)
                }
                ScanReading::Kernel | ScanReading::Gone => {}
                ScanReading::Unreadable(errno) => {
                    if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
                        exhausted = Some(errno);
                    }
                    unread.insert(pid);
                    table.keep(pid);
                }
                ScanReading::Malformed => {
                    if still.insert(pid) {
                        flawed.push(pid);
                    }
                    unread.insert(pid);
                    table.keep(pid);
                }
            }
        });
        match listed {
            Ok(()) => *before = still,
            Err(_) => before.extend(still),
        }
        listed?;
        exhausted.map_or(Ok(()), Err)?;
        // Also of those whose pid is another's by now.
        let ended = self.emit_exits(tell);
        let watched = &self.watched;
        let held = |key| watched_as(watched, key).is_some_and(WatchedProcess::is_held);
        let differences = self.table.compare(held);
        let matters = |pid: u32| self.watched.contains_key(&pid);
        let found = if ended || differences.unsettled || differences.concern(matters) {
            PassResult::Changed
        } else if self.watched.is_empty() && differences.new.is_empty() {
            PassResult::Idle
        } else {
            PassResult::Unchanged
        };
        let wanted = differences.wanted();
        self.unread.extend(&wanted);
        let rows = self.rows(wanted)?;
        for row in &rows {
            self.unread.remove(&row.key.pid);
        }
        let gone = differences.gone.clone();
        self.table.emit_changes(differences, rows, tell);
        for key in gone {
            if watched_as(&self.watched, key).is_some() {
                self.let_go(key.pid);
            }
        }
        self.hold_starved();
        Ok(found)
    }

    /// Reads some in full, with the numbers that the kernel has given them.
    fn rows(&self, pids: Vec<u32>) -> Result<Vec<ProcEntry>, PassError> {
        if pids.is_empty() {
            return Ok(Vec::new());
        }
        // Opened before the row is read: that has a tick that was over by then, so it is of the same process.
        let number = |pid: &u32| Some((*pid, Pidfd::open(*pid).ok()?.unique_inode()?));
        let numbers: HashMap<u32, u64> = pids.iter().filter_map(number).collect();
        let mut rows = self.procfs.snapshot_within(PATIENCE, pids)?.rows;
        for row in &mut rows {
            row.pidfd_inode = numbers.get(&row.key.pid).copied().unwrap_or(0);
        }
        Ok(rows)
    }

    /// Sets the timer to the next pass.
    fn arm(&mut self) {
        // One that lies behind would disarm it at 0.
        let due = self.pace.due().max(1);
        if due == self.armed {
            return;
        }
        let at = TimeSpec::nanoseconds(i64::try_from(due).unwrap_or(i64::MAX));
        let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME;
        match self.timer.set(Expiration::OneShot(at), flags) {
            Ok(()) => self.armed = due,
            Err(errno) => {
                tracing::error!("the next look at the processes cannot be timed: {errno}")
            }
        }
    }
}

impl Source for Scan {
    fn kind(&self) -> SourceKind {
        SourceKind::Scan
    }

    /// Passes on the exits that pidfds report and, if a pass is due, what has changed in the process table. What follows
    /// from the exits comes before the pass.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let mut tell = |kind| {
            drained.records += 1;
            sink(Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        };
        let busy = self.emit_exits(&mut tell);
        let ordered = self.pace.due() == 0;
        if ordered || self.pace.is_due(sys::monotonic(), busy) {
            let flawed = self.pass(&mut tell);
            drained.malformed = flawed.len() as u64;
            drained.malformation = flawed.last().copied().map(Malformation::Stat);
        }
        self.arm();
        drained
    }

    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        self.holds(key)
    }

    fn watch_exit(&mut self, key: ProcessKey, wanted: bool) {
        self.set_exit_watch(key, wanted);
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

    /// Returns 0 if there is no such time yet.
    fn last_scan(&self) -> Option<u64> {
        Some(self.last_scan)
    }

    fn pidfd_error(&self) -> Option<Errno> {
        self.refused.or(self.starved)
    }

    /// Passes come as fast as they may while an escalation is open.
    fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        self.pace.set_escalating(open);
        self.arm();
        Ok(())
    }
}

impl AsFd for Scan {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

/// Why a pass has come to nothing.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error("cannot list them: {0}")]
    List(#[from] nix::Error),
    #[error(transparent)]
    Read(#[from] ProcfsError),
}

/// A key as /proc has it.
fn tick(key: ProcessKey) -> ProcessKey {
    ProcessKey {
        start: key.start - key.start % TICK_NS,
        ..key
    }
}
