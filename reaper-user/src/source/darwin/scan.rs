//! Events made of what the kernel tells (kqueue) and of passes over the process table.
//!
//! Every process is watched: its exit is an event by itself, and its fork or exec asks for a pass, which finds who was born
//! and what runs. Nothing is done while nothing happens but a pass now and then, for what could not be watched.
//!
//! The kernel has for each process whom it was born to, whoever has adopted it since; so one that was left by its maker
//! before anybody looked still belongs to that, if the maker was ever seen.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;
use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};

use super::births::{Birth, Births};
use super::kinfo::Process;
use super::table::{ProcfsError, all, key, rows, seen};
use crate::model::event::{Ended, Event, EventKind, Key, Provenance, Seen};
use crate::source::scan::Options;
use crate::source::scan::pace::{Found, Pace};
use crate::source::scan::table::{Glimpse, Print, Table, exit, parents_first};
use crate::source::{Drained, Flaw};
use crate::sys;
use crate::sys::darwin::{self, Identity};
use crate::sys::pidfd::no_word_of;

/// Of how many that have exited the names are remembered, for children that are found later.
const PAST_MAX: usize = 4096;
/// What the timer is called.
const TIMER: usize = 1;

/// Why processes cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    #[error(transparent)]
    Table(#[from] ProcfsError),
    #[error("cannot wait for processes to end: {0}; raise the limit of open files")]
    Wait(#[source] Errno),
}

/// See the module.
pub struct Scan {
    queue: Kqueue,
    table: Table,
    pace: Pace,
    /// By pid.
    watched: HashMap<u32, Watched>,
    /// By what the kernel calls them, which they are known by also when they are gone.
    names: HashMap<u64, Key>,
    /// Those of `names` that are gone, the oldest first.
    past: VecDeque<u64>,
    /// When the next pass is due as the timer has it.
    armed: u64,
    /// Those who were not there any more in the last pass, though the kernel had not told that they have exited.
    missing: HashSet<Key>,
    /// Who has changed and could not be read in full at the last pass.
    unread: HashSet<u32>,
    /// How many rows could not be understood in a pass at most: so many have been told of.
    flawed: usize,
    /// It has been said that passes fail.
    failing: bool,
    /// Who was born by then has been told of, in ns since boot.
    looked: u64,
}

/// One of whom the kernel tells.
struct Watched {
    key: Key,
    identity: Identity,
    /// How many times it has told of an exec.
    execs: u64,
    /// Whether it does tell: not of one that may not be watched.
    told: bool,
}

impl Scan {
    /// Watches nobody yet; who is there is told by the first [`Scan::drain`].
    ///
    /// # Errors
    /// There is no room for another open file, or the process table cannot be read.
    pub fn open(options: &Options) -> Result<Scan, ScanError> {
        all()?;
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut scan = Scan {
            queue: Kqueue::new().map_err(ScanError::Wait)?,
            table: Table::default(),
            pace: Pace::new(
                nanoseconds(options.min_interval),
                nanoseconds(options.max_interval),
            ),
            watched: HashMap::new(),
            names: HashMap::new(),
            past: VecDeque::new(),
            armed: u64::MAX,
            missing: HashSet::new(),
            unread: HashSet::new(),
            flawed: 0,
            failing: false,
            looked: 0,
        };
        scan.arm();
        Ok(scan)
    }

    /// What the kernel has told, and, if it is time, a pass over the process table.
    pub fn drain(&mut self, mut sink: impl FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let mut tell = |kind| {
            drained.records += 1;
            sink(Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        };
        self.listen(&mut tell);
        if self.pace.due() <= sys::monotonic() {
            let flawed = self.pass(&mut tell);
            drained.malformed = flawed as u64;
            drained.flaw = (flawed > 0).then_some(Flaw::Row);
        }
        self.arm();
        drained
    }

    /// Who was born by then and lives has been told of, in ns since boot; 0: no pass has come to an end.
    pub fn looked(&self) -> u64 {
        self.looked
    }

    /// The next pass comes after the shortest interval, unless they fail.
    pub fn look_soon(&mut self) {
        if !self.failing {
            self.pace.stir();
            self.arm();
        }
    }

    /// The next [`Scan::drain`] looks at all processes: what it tells is no older than this call.
    pub fn look_now(&mut self) {
        self.pace.at_once();
    }

    /// Everything matters now (a ladder is open): passes come as fast as they may.
    pub fn set_ladders(&mut self, open: bool) {
        self.pace.press(open);
        self.arm();
    }

    /// The kernel tells of the ends of all whom it lets be watched: nothing has to be asked for.
    pub fn follow(&mut self, _: Key, _: bool) {}

    /// Nobody has to be held.
    pub fn starved(&self) -> Option<Errno> {
        None
    }

    /// Whether the process is still the one that has been told of under this key, as of a pass that did not fail.
    pub fn vouches(&self, key: Key) -> bool {
        if self.failing || self.unread.contains(&key.pid) {
            return false;
        }
        let watched = self.watched.get(&key.pid);
        watched.is_some_and(|watched| watched.key == key)
    }

    /// Takes in what the kernel has told.
    fn listen(&mut self, tell: &mut impl FnMut(EventKind)) {
        let mut ended = HashMap::new();
        let nothing = event(
            0,
            EventFilter::EVFILT_USER,
            EvFlags::empty(),
            FilterFlag::empty(),
        );
        let mut events = [nothing; 64];
        loop {
            let none = Some(libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            });
            let count = match self.queue.kevent(&[], &mut events, none) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(error) => {
                    tracing::error!("what the kernel tells of processes cannot be read: {error}");
                    0
                }
            };
            for told in &events[..count.min(events.len())] {
                if told
                    .filter()
                    .is_ok_and(|filter| filter == EventFilter::EVFILT_PROC)
                {
                    ended.extend(self.told(told));
                }
            }
            if count < events.len() {
                break;
            }
        }
        if ended.is_empty() {
            return;
        }
        let mut keys: Vec<Key> = ended.keys().copied().collect();
        keys.sort_by_key(|key| (key.start, key.pid));
        // Nobody is orphaned who is gone.
        let order = parents_first(&keys, |key| self.table.parent(key));
        for key in order.into_iter().rev() {
            self.table.remove(key);
            self.forget(key.pid);
            tell(exit(
                key,
                ended.get(&key).copied().unwrap_or(Ended::Unknown),
            ));
        }
        self.pace.hurry(sys::monotonic());
    }

    /// Takes in what was told of one; gives its end, if that is what it was.
    fn told(&mut self, told: &KEvent) -> Option<(Key, Ended)> {
        let pid = u32::try_from(told.ident()).ok()?;
        let watched = self.watched.get_mut(&pid)?;
        let what = told.fflags();
        if what.contains(FilterFlag::NOTE_EXIT) {
            let status = u32::try_from(told.data()).ok();
            let told = what.contains(FilterFlag::NOTE_EXITSTATUS);
            let ended = status.filter(|_| told).map(Ended::from_wait_status);
            return Some((watched.key, ended.unwrap_or(Ended::Unknown)));
        }
        watched.execs += u64::from(what.contains(FilterFlag::NOTE_EXEC));
        self.pace.stir();
        None
    }

    /// Looks at all processes, and tells what is other than it was. Gives how many more rows than before could not be
    /// understood.
    fn pass(&mut self, tell: &mut impl FnMut(EventKind)) -> usize {
        let (began, before) = (sys::monotonic(), self.flawed);
        let now = sys::boot_time();
        let unsettled = match self.look_at_all(tell) {
            Ok(unsettled) => {
                (self.failing, self.looked) = (false, now);
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
        self.pace.passed(began, sys::monotonic(), Found::Peace);
        if unsettled {
            self.pace.stir();
        }
        self.flawed - before
    }

    /// Gives whether another pass is to follow soon.
    fn look_at_all(&mut self, tell: &mut impl FnMut(EventKind)) -> Result<bool, ProcfsError> {
        let (processes, flawed) = rows()?;
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
            let glimpse = glimpse(process, self.watched.get(&process.pid));
            self.table.list(glimpse, false);
            living.insert(process.pid, process);
        }
        // Also of those whose pid is another's by now.
        self.listen(tell);
        let (watched, before) = (&self.watched, std::mem::take(&mut self.missing));
        let missing = RefCell::new(HashSet::new());
        // Of whom the kernel tells, but not for ever: one may have been on its way out when it was asked.
        let held = |key: Key| {
            let told = watched.get(&key.pid);
            let told = told.is_some_and(|watched| watched.key == key && watched.told);
            told && !before.contains(&key) && missing.borrow_mut().insert(key)
        };
        let differences = self.table.compare(held);
        self.missing = missing.into_inner();
        unsettled |= differences.unsettled || !self.missing.is_empty();
        let wanted = differences.wanted();
        self.unread = wanted.iter().copied().collect();
        let rows = wanted.into_iter().filter_map(|pid| seen(living.get(&pid)?));
        let rows: Vec<Seen> = rows.collect();
        for row in &rows {
            self.unread.remove(&row.key.pid);
        }
        let gone = differences.gone.clone();
        let new: HashSet<Key> = differences.new.iter().map(|new| new.key).collect();
        let mut rest = Vec::new();
        self.table.take_in(differences, rows, |kind| match kind {
            EventKind::Seen(row) if new.contains(&row.key) => {
                births.0.push(born(row, &self.watched, &self.names));
            }
            kind => rest.push(kind),
        });
        births.tell(&mut *tell);
        rest.into_iter().for_each(&mut *tell);
        gone.into_iter().for_each(|key| self.forget(key.pid));
        let living = |pid| self.watched.get(&pid).map(|watched| watched.key);
        births.tell_adoptions(living, tell);
        Ok(unsettled)
    }

    /// One that has come and exited since the last pass may have made others, and is not known yet.
    fn find_zombie(&mut self, process: &Process) -> Option<Birth> {
        let key = key(process);
        let identity = darwin::identity_of_any(process.pid).ok()?;
        if self.names.contains_key(&identity.unique) {
            return None;
        }
        let maker = self.names.get(&identity.parent).copied();
        self.names.insert(identity.unique, key);
        self.remember(identity.unique);
        Some(Birth {
            key,
            maker,
            uids: process.uids,
            parent: process.parent,
            row: None,
        })
    }

    /// Has the kernel tell of a process from now on; whether it did not yet.
    fn watch(&mut self, process: &Process) -> bool {
        let (key, pid) = (key(process), process.pid);
        if self.watched.get(&pid).is_some_and(|known| known.key == key) {
            return false;
        }
        self.forget(pid);
        let Ok(identity) = darwin::identity(pid) else {
            return true;
        };
        let told = self.ask(pid);
        // Asked by pid, it may be of another by now: then that one is found by the next pass.
        if darwin::identity(pid) == Ok(identity) {
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

    /// Asks the kernel to tell of whoever has the pid; how it ends it tells only of those whom this user may signal.
    fn ask(&self, pid: u32) -> bool {
        // What is still to be told of one that had the pid before would be told as if it were of this one.
        let _ = self.queue.kevent(&[no_word_of(pid)], &mut [], None);
        let all = FilterFlag::NOTE_EXIT | FilterFlag::NOTE_FORK | FilterFlag::NOTE_EXEC;
        let asked = [all | FilterFlag::NOTE_EXITSTATUS, all]
            .into_iter()
            .any(|what| {
                let flags = EvFlags::EV_ADD | EvFlags::EV_CLEAR;
                let asked = event(pid as usize, EventFilter::EVFILT_PROC, flags, what);
                self.queue.kevent(&[asked], &mut [], None).is_ok()
            });
        if !asked {
            tracing::debug!("pid {pid}: the kernel does not tell of it");
        }
        asked
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
        let left = due.saturating_sub(sys::monotonic()).div_ceil(1000).max(1);
        let mut timer = KEvent::new(
            TIMER,
            EventFilter::EVFILT_TIMER,
            EvFlags::EV_ADD | EvFlags::EV_ONESHOT,
            FilterFlag::NOTE_USECONDS,
            isize::try_from(left).unwrap_or(isize::MAX),
            0,
        );
        match self
            .queue
            .kevent(std::slice::from_mut(&mut timer), &mut [], None)
        {
            Ok(_) => self.armed = due,
            Err(error) => {
                tracing::error!("the next look at the processes cannot be timed: {error}")
            }
        }
    }
}

impl AsFd for Scan {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

/// A short look at a process.
fn glimpse(process: &Process, watched: Option<&Watched>) -> Glimpse {
    let mut comm = [0; 16];
    let shown = process.comm.len().min(comm.len());
    comm[..shown].copy_from_slice(&process.comm[..shown]);
    // Of one that is not watched its name has to tell.
    let watched = watched.filter(|watched| watched.told);
    Glimpse {
        key: key(process),
        parent: process.parent,
        print: Print {
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
fn born(row: Seen, watched: &HashMap<u32, Watched>, names: &HashMap<u64, Key>) -> Birth {
    let watched = watched.get(&row.key.pid).filter(|of| of.key == row.key);
    let maker = watched.and_then(|watched| names.get(&watched.identity.parent));
    Birth {
        key: row.key,
        maker: maker.filter(|maker| maker.pid != row.parent).copied(),
        uids: row.uids,
        parent: row.parent,
        row: Some(row),
    }
}

fn event(ident: usize, filter: EventFilter, flags: EvFlags, what: FilterFlag) -> KEvent {
    KEvent::new(ident, filter, flags, what, 0, 0)
}
