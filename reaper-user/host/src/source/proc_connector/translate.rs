//! Translates messages of the connector to events, with what /proc adds to them.
//!
//! Each message is translated at once. Where the program of an exec cannot be read in time, the exec is reported without
//! it, and once more, with the same time, when it has been read: the model then settles what the process has forked since.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::glimpse::{Glimpses, Numbers, State};
use super::parse::ConnectorEvent;
use crate::source::ProcessTable;
use crate::source::procfs::{ProcessReading, Procfs, ProcfsError};
use crate::sys;
use crate::workers::{Job, Size, Workers};
use reaper_model::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};

type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Number of further attempts to read a program, and of programs for which they are made.
pub const TRIES: u32 = 3;
pub const UNREAD_MAX: usize = 1024;
/// Delay between two of these attempts, in ns. The reason may be a lack of open files, which other threads have to close.
pub const RETRY_NS: u64 = 40_000_000;
/// Time limit for all attempts of one call: signals, timers and requests wait for it.
const RETRIES_MAX: Duration = Duration::from_millis(20);
/// Threads that read programs: one, since each read is waited for. A stuck one is replaced, up to `most`; then no program is
/// read until a read returns.
const READERS: Size = Size {
    idle: 1,
    threads: 1,
    most: 16,
    of_owner: 16,
};

/// Knows the living processes, so that an end that leaves nothing in /proc is that of one with a name.
pub struct Translator {
    procfs: Procfs,
    /// A command line is read from the process's memory, which can block forever.
    readers: Workers,
    /// Time limit for the read of a program.
    pub(super) patience: Duration,
    glimpses: Glimpses,
    known: Map<u32, TrackedProcess>,
    /// Execs whose program could not be read in time.
    unread: Vec<Unread>,
    /// Number of exits that may have happened and could not be verified.
    missed: u64,
}

/// An exec whose program is still to be read.
struct Unread {
    key: ProcessKey,
    /// Time of the exec, in ns since boot.
    time: u64,
    /// The process whose unread program this one runs, which it has not executed itself.
    copy_of: Option<ProcessKey>,
    /// Number of attempts left.
    tries: u32,
    /// Time of the next one, in ns of CLOCK_MONOTONIC.
    at: u64,
}

/// Where events go, and whether a process that has just been read has run another program since the message that is being
/// translated: then that may be what was read. True also if messages were lost meanwhile. The kernel reports an exec a
/// moment after /proc shows the new program (`exec_binprm` in fs/exec.c); a debugger can make that moment long, and then
/// the answer is false.
pub struct Output<'a> {
    pub has_moved_on: &'a mut dyn FnMut(u32) -> bool,
    pub sink: &'a mut dyn FnMut(Event),
}

/// What is known of a living process.
#[derive(Clone, Copy, Debug)]
struct TrackedProcess {
    /// The start is a whole tick where no fork was told.
    key: ProcessKey,
    /// What the kernel has numbered it by at its fork; 0 if that is not known.
    number: u64,
    /// Unknown until something told or needed them.
    uids: Option<Uids>,
    /// Its first thread has exited, and others went on: the end of any can be its own.
    half_dead: bool,
    /// How the last thread that was asked about ended.
    status: Option<u32>,
    /// Its program will not be known.
    unknown: bool,
    /// A survey has not found it any more.
    gone: bool,
}

impl Translator {
    /// Waits no longer than so for one process's program.
    pub fn new(procfs: Procfs, numbers: Numbers, patience: Duration) -> Translator {
        Translator {
            glimpses: Glimpses::new(&procfs, numbers),
            readers: Workers::new("programs", READERS),
            patience,
            procfs,
            known: Map::default(),
            unread: Vec::new(),
            missed: 0,
        }
    }

    /// Translates what happened at a time since boot.
    pub fn take(&mut self, time: u64, what: ConnectorEvent, out: &mut Output<'_>) {
        match what {
            ConnectorEvent::Fork { parent, child } => self.fork(time, parent, child, out),
            ConnectorEvent::Exec { process } => self.exec(time, process, out),
            ConnectorEvent::Uids {
                thread,
                process,
                uids,
            } => {
                // The C library changes those of all threads; the first one's are the process's.
                if thread == process {
                    self.change_uids(time, process, uids, out);
                }
            }
            ConnectorEvent::Exit {
                thread,
                process,
                status,
                parent,
            } => self.exit(time, thread, process, status, parent, out),
            ConnectorEvent::Answer { .. } | ConnectorEvent::Other => {}
        }
    }

    /// Tries again to read the programs that could not be read in time. `now` is monotonic. Returns the number of those
    /// that are left.
    pub fn retry(&mut self, now: u64, out: &mut Output<'_>) -> usize {
        let began = Instant::now();
        for mut unread in std::mem::take(&mut self.unread) {
            let Unread { key, time, .. } = unread;
            if self
                .known
                .get(&key.pid)
                .is_none_or(|known| known.key != key)
            {
                continue;
            }
            if let Some(maker) = unread.copy_of {
                if self.unread.iter().any(|unread| unread.key == maker) {
                    self.unread.push(unread);
                    continue;
                }
                // The program of the maker has been read, and the model gives it to the copies.
                let known = self
                    .known
                    .get(&maker.pid)
                    .filter(|known| known.key == maker);
                if known.is_some_and(|known| !known.unknown) {
                    continue;
                }
            }
            if unread.at > now || began.elapsed() > RETRIES_MAX {
                self.unread.push(unread);
                continue;
            }
            match self.read(key, out) {
                Some(seen) => self.report_exec(time, key, seen, out),
                None if unread.tries > 1 => {
                    unread.tries -= 1;
                    unread.at = now.saturating_add(RETRY_NS);
                    self.unread.push(unread);
                }
                None => self.report_exec(time, key, None, out),
            }
        }
        self.unread.len()
    }

    /// Reports the exec of a program that will not be read any more, so that what the process has forked since belongs
    /// where the process does.
    fn give_up(&mut self, key: ProcessKey, out: &mut Output<'_>) {
        let at = self.unread.iter().position(|unread| unread.key == key);
        if let Some(Unread { time, copy_of, .. }) = at.map(|at| self.unread.remove(at))
            && copy_of.is_none()
        {
            self.report_exec(time, key, None, out);
        }
    }

    fn set_unknown(&mut self, key: ProcessKey, unknown: bool) {
        if let Some(process) = self.known.get_mut(&key.pid) {
            process.unknown = unknown;
        }
    }

    /// Returns the number of exits since the last call that could not be verified.
    pub fn take_missed(&mut self) -> u64 {
        std::mem::take(&mut self.missed)
    }

    /// Puts what is known right by /proc: at the beginning, and after a loss. Who is gone is told of by whoever looks for
    /// what was lost, or by an end that is still to be read: only the next survey forgets them.
    ///
    /// # Errors
    /// /proc cannot be listed.
    pub fn survey(&mut self) -> Result<(), ProcfsError> {
        let pids = self.procfs.pids()?;
        let glimpses = &mut self.glimpses;
        self.known.retain(|pid, known| {
            match glimpses.state(known.key, known.number) {
                State::Lives { leader_dead } => known.half_dead = leader_dead,
                State::Gone => {
                    let found = glimpses.glimpse(*pid).ok().flatten();
                    let replaced = found.is_some_and(|found| !found.over);
                    if std::mem::replace(&mut known.gone, true) || replaced {
                        return false;
                    }
                }
                State::Unknown | State::Hidden => {}
            }
            true
        });
        for pid in pids {
            self.meet(pid, u64::MAX);
        }
        Ok(())
    }

    /// These have been told of by another source, and go by the same names from now on: they may be known to the ns.
    pub fn take_over(&mut self, keys: impl Iterator<Item = ProcessKey>) {
        for key in keys {
            let known = self.known.get(&key.pid).copied();
            if let Some(known) = known.filter(|known| known.key.has_same_tick(key)) {
                self.known.insert(key.pid, TrackedProcess { key, ..known });
                for unread in &mut self.unread {
                    if unread.key == known.key {
                        unread.key = key;
                    }
                    unread.copy_of = unread
                        .copy_of
                        .map(|of| if of == known.key { key } else { of });
                }
            }
        }
    }

    /// Whether this very process lives: by the number that it had at its fork where the kernel gives them, and
    /// otherwise by what /proc has to the tick.
    pub fn lives(&mut self, key: ProcessKey) -> bool {
        matches!(self.state(key), State::Lives { .. })
    }

    fn state(&mut self, key: ProcessKey) -> State {
        let known = self.known.get(&key.pid);
        let known = known.filter(|known| known.key.has_same_tick(key));
        let number = known.map_or(0, |known| known.number);
        self.glimpses.state(key, number)
    }

    fn fork(&mut self, time: u64, parent: u32, child: u32, out: &mut Output<'_>) {
        let born = self
            .glimpses
            .newborn(child)
            .filter(|born| born.start <= time);
        let known = self.known.get(&child).copied();
        // Found in /proc before its fork was read. If it has gone since, the times have to tell.
        let found = known.map(|known| known.key).filter(|key| {
            let after = time.checked_sub(key.start);
            let is = match &born {
                Some(born) => born.start == key.start,
                None => after.is_some_and(|after| after < 2 * TICK_NS),
            };
            is && key.exact_start().is_none()
        });
        let tick = born.as_ref().map(|born| born.start);
        let tick = tick.or_else(|| found.map(|key| key.start));
        let key = ProcessKey {
            pid: child,
            // The kernel takes the time of the event a moment after that of the start, perhaps in the next tick.
            start: tick.map_or(time, |tick| time.min(tick.saturating_add(TICK_NS - 1))),
        };
        let outdated = known.is_some_and(|known| known.key.start > time);
        if let Some(known) = known.filter(|_| !outdated && found.is_none()) {
            // Who had the pid before is gone, though nobody has told so.
            self.give_up(known.key, out);
            self.known.remove(&child);
            (out.sink)(ended(time, Provenance::Inferred, &known, None));
        }
        let parent = self.key_of(parent, time);
        let maker = parent.and_then(|parent| self.known.get(&parent.pid).copied());
        let own = born.as_ref().and_then(|born| born.uids);
        let uids = own.or_else(|| maker?.uids);
        let unknown = maker.is_some_and(|maker| maker.unknown);
        // That of a successor is no use.
        let number = born.as_ref().filter(|_| !outdated);
        let number = number.map_or(0, |born| born.number);
        if !outdated {
            let process = TrackedProcess {
                number,
                uids,
                unknown,
                ..TrackedProcess::new(key)
            };
            self.known.insert(child, process);
        }
        (out.sink)(Event {
            time,
            provenance: Provenance::Kernel,
            kind: EventKind::Fork {
                child: key,
                parent,
                creator: parent,
                uids: uids.unwrap_or_default(),
                pidfd_inode: number,
                namespace_init: born.as_ref().is_some_and(|born| born.namespace_init),
                membership: None,
            },
        });
        // It runs the program of its parent, which it may still show.
        if unknown && !outdated && born.is_some() {
            self.report_program(time, key, out);
        }
        let is_unread = |of: &ProcessKey| self.unread.iter().any(|unread| unread.key == *of);
        if let Some(maker) = parent.filter(is_unread).filter(|_| !outdated)
            && self.unread.len() < UNREAD_MAX
        {
            self.unread.push(Unread {
                key,
                time,
                copy_of: Some(maker),
                tries: TRIES,
                at: 0,
            });
        }
    }

    fn exec(&mut self, time: u64, pid: u32, out: &mut Output<'_>) {
        let Some(key) = self.key_of(pid, time) else {
            return;
        };
        // A thread that runs a program becomes the first one.
        if let Some(process) = self.known.get_mut(&pid) {
            (process.half_dead, process.status) = (false, None);
        }
        self.give_up(key, out);
        // Most that are gone need no thread to say so.
        match self.state(key) {
            State::Gone => self.report_exec(time, key, None, out),
            _ => self.report_program(time, key, out),
        }
    }

    /// Reports the program that a process runs. Where that cannot be read any more it is unknown: nothing that was
    /// known of the last one holds for the process, nor for its children since. Where it cannot be read yet, there will be
    /// another attempt.
    fn report_program(&mut self, time: u64, key: ProcessKey, out: &mut Output<'_>) {
        if let Some(seen) = self.read(key, out) {
            return self.report_exec(time, key, seen, out);
        }
        if self.unread.len() == UNREAD_MAX {
            return self.report_exec(time, key, None, out);
        }
        self.emit_exec(time, key, None, Image::unread(), out);
        self.set_unknown(key, false);
        self.unread.push(Unread {
            key,
            time,
            copy_of: None,
            tries: TRIES,
            at: 0,
        });
    }

    /// Reads a process that is known by this key. Returns `None` if it is there and cannot be read, or not in time;
    /// `Some(None)` if it has exited or runs another program by now: events of its own report that.
    fn read(&mut self, key: ProcessKey, out: &mut Output<'_>) -> Option<Option<ProcEntry>> {
        Some(match self.read_in_time(key.pid)? {
            ProcessReading::Alive(seen)
                if seen.key.has_same_tick(key) && !(out.has_moved_on)(key.pid) =>
            {
                Some(seen)
            }
            _ => None,
        })
    }

    /// Reads a process on a worker thread, within the time limit.
    fn read_in_time(&self, pid: u32) -> Option<ProcessReading> {
        if !self.readers.has_room() {
            return None;
        }
        let procfs = self.procfs.clone();
        let (send, found) = channel();
        let wanted = Arc::new(());
        let job = Job {
            owner: 0,
            id: u64::from(pid),
            is_urgent: false,
            wanted: Arc::downgrade(&wanted),
            work: Box::new(move |_| {
                // The engine waits for this thread, and would wait long for one of normal priority on a busy machine.
                sys::raise_priority();
                let read = procfs.read(pid).inspect_err(|e| tracing::debug!("{e}"));
                // Nothing receives it after the time limit.
                let _ = send.send(read.ok());
            }),
        };
        if let Err(error) = self.readers.submit(job) {
            tracing::error!("cannot start a thread to read /proc: {error}");
            return None;
        }
        let found = found.recv_timeout(self.patience);
        if found.is_err() {
            self.readers.replace_stuck(0, None);
        }
        found.ok()?
    }

    /// Reports an exec with what was read of the process afterwards, if it was read.
    fn report_exec(
        &mut self,
        time: u64,
        key: ProcessKey,
        seen: Option<ProcEntry>,
        out: &mut Output<'_>,
    ) {
        let parent = seen
            .as_ref()
            .and_then(|seen| self.key_of(seen.parent, seen.read_at));
        if let Some(process) = self.known.get_mut(&key.pid) {
            process.uids = seen.as_ref().map(|seen| seen.uids).or(process.uids);
            process.unknown = seen.is_none();
        }
        let image = seen.map(|seen| seen.image).unwrap_or_default();
        self.emit_exec(time, key, parent, image, out);
    }

    fn emit_exec(
        &self,
        time: u64,
        key: ProcessKey,
        parent: Option<ProcessKey>,
        image: impl Into<Arc<Image>>,
        out: &mut Output<'_>,
    ) {
        let uids = self.known.get(&key.pid).and_then(|process| process.uids);
        (out.sink)(Event {
            time,
            provenance: Provenance::Kernel,
            kind: EventKind::Exec {
                key,
                parent,
                uids: uids.unwrap_or_default(),
                pidfd_inode: 0,
                image: image.into(),
                membership: None,
            },
        });
    }

    /// The model learns of new user ids by a row of the process table.
    fn change_uids(&mut self, time: u64, pid: u32, uids: Uids, out: &mut Output<'_>) {
        let Some(key) = self.key_of(pid, time) else {
            return;
        };
        let Some(process) = self.known.get_mut(&pid) else {
            return;
        };
        if process.uids.replace(uids) == Some(uids) {
            return;
        }
        // The exec reports them too, if its program is still to be read.
        if self.unread.iter().any(|unread| unread.key == key) {
            return;
        }
        // If it has run another program, the exec reports them too.
        if let Some(Some(mut seen)) = self.read(key, out) {
            (seen.key, seen.exact) = (key, key.exact_start().is_some());
            (out.sink)(Event {
                time: seen.read_at,
                provenance: Provenance::Procfs,
                kind: EventKind::Discovered(seen),
            });
        }
    }

    fn exit(
        &mut self,
        time: u64,
        thread: u32,
        pid: u32,
        status: u32,
        parent: u32,
        out: &mut Output<'_>,
    ) {
        let first = thread == pid;
        let known = self.known.get(&pid).copied();
        let asks = match &known {
            // Most threads leave others behind, and whoever has the pid since then goes on.
            Some(known) => known.key.start <= time && (first || known.half_dead),
            None => first,
        };
        if !asks {
            return;
        }
        // Of one that is not known the fork was lost.
        let lost = || {
            let found = self.glimpses.glimpse(pid).ok()??;
            (found.key.start <= time).then(|| TrackedProcess::new(found.key))
        };
        let Some(process) = known.or_else(lost) else {
            return;
        };
        match self.glimpses.state(process.key, process.number) {
            State::Gone => {
                self.give_up(process.key, out);
                self.known.remove(&pid);
                let mut event = ended(time, Provenance::Kernel, &process, Some(status));
                if let EventKind::Exit { parent: of, .. } = &mut event.kind {
                    *of = self.known.get(&parent).map(|parent| parent.key);
                }
                return (out.sink)(event);
            }
            // Whether it has exited is to be found out like what was lost.
            State::Unknown => self.missed += 1,
            State::Lives { .. } | State::Hidden => {}
        }
        let process = TrackedProcess {
            half_dead: true,
            status: Some(status),
            ..process
        };
        self.known.insert(pid, process);
    }

    /// The key of a process that was there at a time.
    fn key_of(&mut self, pid: u32, time: u64) -> Option<ProcessKey> {
        if !self.known.contains_key(&pid) {
            self.meet(pid, time);
        }
        let key = self.known.get(&pid)?.key;
        (key.start <= time).then_some(key)
    }

    /// Takes in a process that was there at a time, as /proc has it, unless it is known.
    fn meet(&mut self, pid: u32, time: u64) {
        if pid == 0 || self.known.contains_key(&pid) {
            return;
        }
        let found = self.glimpses.glimpse(pid).ok().flatten();
        if let Some(found) = found.filter(|found| found.key.start <= time && !found.over) {
            let process = TrackedProcess {
                half_dead: found.leader_dead,
                ..TrackedProcess::new(found.key)
            };
            self.known.insert(pid, process);
        }
    }

    #[cfg(test)]
    pub(super) fn key(&self, pid: u32) -> Option<ProcessKey> {
        self.known.get(&pid).map(|known| known.key)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

impl TrackedProcess {
    fn new(key: ProcessKey) -> TrackedProcess {
        TrackedProcess {
            key,
            number: 0,
            uids: None,
            half_dead: false,
            status: None,
            unknown: false,
            gone: false,
        }
    }
}

/// The end of a process.
fn ended(
    time: u64,
    provenance: Provenance,
    process: &TrackedProcess,
    status: Option<u32>,
) -> Event {
    let status = status.or(process.status);
    Event {
        time,
        provenance,
        kind: EventKind::Exit {
            key: process.key,
            parent: None,
            exit_status: status.map_or(ExitStatus::Unknown, ExitStatus::from_wait_status),
            peak_rss: 0,
            membership: None,
        },
    }
}
