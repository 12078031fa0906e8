//! Translates messages of the connector to events, completed by facts from /proc.
//!
//! Each message is translated at once. If the program of an exec cannot be read in time, the exec is reported without
//! it. Once the program has been read, the exec is reported again with the same time. The model then corrects the
//! membership of the process and of the children that it has forked since.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::identity::{IdentityReader, InodeReader, State};
use super::parse::ConnectorEvent;
use crate::advice::Advised as _;
use crate::source::ProcessTable;
use crate::source::procfs::{ProcessReading, Procfs, ProcfsError};
use crate::sys;
use crate::workers::{Job, Size, Workers};
use reaper_model::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};

type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Number of further attempts to read a program.
pub const ATTEMPTS: u32 = 3;
/// Number of programs that can wait for a further attempt.
pub const UNREAD_MAX: usize = 1024;
/// Delay between two attempts, in ns. The cause may be a lack of file descriptors, which other threads must close first.
pub const RETRY_DELAY_NS: u64 = 40_000_000;
/// Time limit for all attempts of one call: signals, timers and requests wait for it.
const RETRY_TIME_MAX: Duration = Duration::from_millis(20);
/// Threads that read programs: one, because the translator waits for each read. A stuck thread is replaced, up to `max_threads`
/// threads. Then no program is read until a read returns.
const READERS: Size = Size {
    idle: 1,
    threads: 1,
    max_threads: 16,
    max_per_owner: 16,
};

/// Translator of messages, with a table of the living processes.
///
/// The table provides the key of a process that has exited and left nothing in /proc.
pub struct Translator {
    procfs: Procfs,
    /// Threads for reads that can block forever: a command line is read from the process's memory.
    readers: Workers,
    /// Time limit for the read of a program.
    pub(super) read_timeout: Duration,
    identities: IdentityReader,
    /// Living processes by pid.
    known: Map<u32, TrackedProcess>,
    /// Execs whose program could not be read in time.
    unread: Vec<Unread>,
    /// Number of reported exits that /proc could neither confirm nor refute.
    unverified_exits: u64,
}

/// An exec whose program is still to be read.
struct Unread {
    key: ProcessKey,
    /// Time of the exec, in ns since boot.
    time: u64,
    /// Parent whose unread program this process runs, if it has executed none itself. Such a copy is only reported if
    /// the parent's program stays unknown.
    copy_of: Option<ProcessKey>,
    /// Number of attempts left.
    attempts_left: u32,
    /// Time of the next attempt, in ns of CLOCK_MONOTONIC.
    retry_at_ns: u64,
}

/// Connections of the translator to the inbox and to the engine.
pub struct Output<'a> {
    /// Returns whether a process may have run another program since the message that is being translated.
    ///
    /// If so, a program that was just read may be the later one. Also returns true if messages were lost meanwhile. The
    /// kernel reports an exec a moment after /proc shows the new program (`exec_binprm` in fs/exec.c). A debugger can
    /// prolong that moment, and then the answer is wrongly false.
    pub may_have_execed: &'a mut dyn FnMut(u32) -> bool,
    /// Receives the events.
    pub sink: &'a mut dyn FnMut(Event),
}

/// A living process.
#[derive(Clone, Copy, Debug)]
struct TrackedProcess {
    /// Key whose start is a whole tick unless a fork event was received.
    key: ProcessKey,
    /// Inode number of its pidfds, read at its fork; 0 if unknown.
    pidfd_inode: u64,
    /// User ids, as far as they have been read or reported.
    uids: Option<Uids>,
    /// Whether its leader has exited while other threads run: then the exit of any thread can end the process.
    leader_exited: bool,
    /// Wait status of the last thread whose exit was checked.
    status: Option<u32>,
    /// Whether its program could not be read and will not be read any more.
    program_unknown: bool,
    /// Whether the last reconciliation did not find it.
    missing: bool,
}

impl Translator {
    /// Creates a translator. `read_timeout` limits the read of one program.
    pub fn new(procfs: Procfs, inodes: InodeReader, read_timeout: Duration) -> Translator {
        Translator {
            identities: IdentityReader::new(&procfs, inodes),
            readers: Workers::new("programs", READERS),
            read_timeout,
            procfs,
            known: Map::default(),
            unread: Vec::new(),
            unverified_exits: 0,
        }
    }

    /// Translates a message of the connector, and passes the events that follow from it to `out`. Most exits of threads
    /// lead to none. `time` is in ns since boot.
    pub fn translate(&mut self, time: u64, what: ConnectorEvent, out: &mut Output<'_>) {
        match what {
            ConnectorEvent::Fork { parent, child } => self.fork(time, parent, child, out),
            ConnectorEvent::Exec { process } => self.exec(time, process, out),
            ConnectorEvent::Uids {
                thread,
                process,
                uids,
            } => {
                // The C library changes the ids of all threads. Those of the leader count for the process.
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

    /// Retries to read the programs that could not be read in time, and returns the number of those still unread.
    ///
    /// Tries each at most [`ATTEMPTS`] times, [`RETRY_DELAY_NS`] apart, and stops after [`RETRY_TIME_MAX`]. Reports the
    /// exec again once the program is read, or as unknown after the last attempt.
    ///
    /// `now` is in ns of CLOCK_MONOTONIC.
    pub fn retry(&mut self, now: u64, out: &mut Output<'_>) -> usize {
        let started = Instant::now();
        for mut unread in std::mem::take(&mut self.unread) {
            let Unread { key, time, .. } = unread;
            if self
                .known
                .get(&key.pid)
                .is_none_or(|known| known.key != key)
            {
                continue;
            }
            if let Some(original) = unread.copy_of {
                if self.unread.iter().any(|unread| unread.key == original) {
                    self.unread.push(unread);
                    continue;
                }
                // The program of the original has been read, and the model applies it to the copies.
                let known = self
                    .known
                    .get(&original.pid)
                    .filter(|known| known.key == original);
                if known.is_some_and(|known| !known.program_unknown) {
                    continue;
                }
            }
            if unread.retry_at_ns > now || started.elapsed() > RETRY_TIME_MAX {
                self.unread.push(unread);
                continue;
            }
            match self.read(key, out) {
                Some(seen) => self.report_exec(time, key, seen, out),
                None if unread.attempts_left > 1 => {
                    unread.attempts_left -= 1;
                    unread.retry_at_ns = now.saturating_add(RETRY_DELAY_NS);
                    self.unread.push(unread);
                }
                None => self.report_exec(time, key, None, out),
            }
        }
        self.unread.len()
    }

    /// Stops trying to read the program of a process, and reports its exec with an unknown program. Does nothing if no
    /// exec of the process waits for that.
    ///
    /// The model can then settle the membership of the process and of the children that it has forked since.
    fn give_up(&mut self, key: ProcessKey, out: &mut Output<'_>) {
        let at = self.unread.iter().position(|unread| unread.key == key);
        if let Some(Unread { time, copy_of, .. }) = at.map(|at| self.unread.remove(at))
            && copy_of.is_none()
        {
            self.report_exec(time, key, None, out);
        }
    }

    fn set_unknown(&mut self, key: ProcessKey, program_unknown: bool) {
        if let Some(process) = self.known.get_mut(&key.pid) {
            process.program_unknown = program_unknown;
        }
    }

    /// Returns the number of exits since the last call that could not be verified.
    pub fn take_unverified_exits(&mut self) -> u64 {
        std::mem::take(&mut self.unverified_exits)
    }

    /// Updates the table of living processes from /proc, at the start and after a loss.
    ///
    /// Reports no exits: the engine's reconciliation scan does, or exit messages that are still queued. Translating
    /// those needs the key, so an exited process is removed only if its pid is reused, or at the next reconciliation.
    ///
    /// # Errors
    /// /proc cannot be listed.
    pub fn reconcile(&mut self) -> Result<(), ProcfsError> {
        let pids = self.procfs.pids()?;
        let identities = &mut self.identities;
        self.known.retain(|pid, known| {
            match identities.state(known.key, known.pidfd_inode) {
                State::Lives { leader_exited } => known.leader_exited = leader_exited,
                State::Gone => {
                    let found = identities.read(*pid).ok().flatten();
                    let replaced = found.is_some_and(|found| !found.exited);
                    if std::mem::replace(&mut known.missing, true) || replaced {
                        return false;
                    }
                }
                State::Unknown | State::Hidden => {}
            }
            true
        });
        for pid in pids {
            self.add_from_proc(pid, u64::MAX);
        }
        Ok(())
    }

    /// Replaces keys by those under which the previous source reported the processes, which may be exact to the ns.
    /// Ignores a key unless a known process has the same pid and start tick.
    pub fn import_keys(&mut self, keys: impl Iterator<Item = ProcessKey>) {
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

    /// Returns whether the process with this key is alive.
    ///
    /// Compares the inode number of its pidfds if it was read at the fork, otherwise only the start tick in /proc.
    pub fn is_alive(&mut self, key: ProcessKey) -> bool {
        matches!(self.state(key), State::Lives { .. })
    }

    fn state(&mut self, key: ProcessKey) -> State {
        let known = self.known.get(&key.pid);
        let known = known.filter(|known| known.key.has_same_tick(key));
        let pidfd_inode = known.map_or(0, |known| known.pidfd_inode);
        self.identities.state(key, pidfd_inode)
    }

    /// Adds the child to the table and reports the fork, with facts of the child from /proc.
    ///
    /// If the table has an earlier process with the child's pid, reports its exit first. If the parent's program is
    /// unknown, reads the child's and reports it. If the parent's is still to be read, the child's is too.
    fn fork(&mut self, time: u64, parent: u32, child: u32, out: &mut Output<'_>) {
        let new = self
            .identities
            .read_new(child)
            .filter(|new| new.start <= time);
        let known = self.known.get(&child).copied();
        // Key under which /proc showed it before its fork message was read. If it has exited since, the times decide.
        let found = known.map(|known| known.key).filter(|key| {
            let after = time.checked_sub(key.start);
            let is_same = match &new {
                Some(new) => new.start == key.start,
                None => after.is_some_and(|after| after < 2 * TICK_NS),
            };
            is_same && key.exact_start().is_none()
        });
        let tick = new.as_ref().map(|new| new.start);
        let tick = tick.or_else(|| found.map(|key| key.start));
        let key = ProcessKey {
            pid: child,
            // The kernel takes the time of the event a moment after the start time, perhaps in the next tick.
            start: tick.map_or(time, |tick| time.min(tick.saturating_add(TICK_NS - 1))),
        };
        let outdated = known.is_some_and(|known| known.key.start > time);
        if let Some(known) = known.filter(|_| !outdated && found.is_none()) {
            // The previous process with this pid must have exited, although no exit was reported.
            self.give_up(known.key, out);
            self.known.remove(&child);
            (out.sink)(exit_event(time, Provenance::Inferred, &known, None));
        }
        let parent = self.key_of(parent, time);
        let parent_process = parent.and_then(|parent| self.known.get(&parent.pid).copied());
        let own = new.as_ref().and_then(|new| new.uids);
        let uids = own.or_else(|| parent_process?.uids);
        let program_unknown = parent_process.is_some_and(|process| process.program_unknown);
        // If a later process has the pid already, the inode is that of the later one.
        let pidfd_inode = new.as_ref().filter(|_| !outdated);
        let pidfd_inode = pidfd_inode.map_or(0, |new| new.pidfd_inode);
        if !outdated {
            let process = TrackedProcess {
                pidfd_inode,
                uids,
                program_unknown,
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
                pidfd_inode,
                namespace_init: new.as_ref().is_some_and(|new| new.namespace_init),
                membership: None,
            },
        });
        // It runs the program of its parent, which can be read from it if it has not exited.
        if program_unknown && !outdated && new.is_some() {
            self.report_program(time, key, out);
        }
        let is_unread = |of: &ProcessKey| self.unread.iter().any(|unread| unread.key == *of);
        if let Some(original) = parent.filter(is_unread).filter(|_| !outdated)
            && self.unread.len() < UNREAD_MAX
        {
            self.unread.push(Unread {
                key,
                time,
                copy_of: Some(original),
                attempts_left: ATTEMPTS,
                retry_at_ns: 0,
            });
        }
    }

    /// Reports an exec, with the program that /proc shows now. If the process has exited, the program is unknown. Does
    /// nothing if the process cannot be identified.
    fn exec(&mut self, time: u64, pid: u32, out: &mut Output<'_>) {
        let Some(key) = self.key_of(pid, time) else {
            return;
        };
        // A thread that calls exec becomes the leader.
        if let Some(process) = self.known.get_mut(&pid) {
            (process.leader_exited, process.status) = (false, None);
        }
        self.give_up(key, out);
        // For most exited processes this check saves the use of a worker thread.
        match self.state(key) {
            State::Gone => self.report_exec(time, key, None, out),
            _ => self.report_program(time, key, out),
        }
    }

    /// Reads the program of a process and reports it.
    ///
    /// If the process has exited or run another program, the program is reported as unknown. The facts of its previous
    /// program then no longer hold for it or its new children.
    ///
    /// If the read fails or takes too long, the exec is reported with an unread program, and the read is retried later.
    /// If [`UNREAD_MAX`] others wait already, the program is unknown.
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
            attempts_left: ATTEMPTS,
            retry_at_ns: 0,
        });
    }

    /// Reads the process with this key.
    ///
    /// Returns `None` if the read fails or takes too long. Returns `Some(None)` if the process has exited or may run
    /// another program, which further messages report.
    fn read(&mut self, key: ProcessKey, out: &mut Output<'_>) -> Option<Option<ProcEntry>> {
        Some(match self.read_in_time(key.pid)? {
            ProcessReading::Alive(seen)
                if seen.key.has_same_tick(key) && !(out.may_have_execed)(key.pid) =>
            {
                Some(seen)
            }
            _ => None,
        })
    }

    /// Reads a process on a worker thread, within the time limit. Returns `None` if that fails, takes too long, or if
    /// stuck reads occupy all threads.
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
                // The engine waits for this thread. On a busy machine a thread of normal priority would take long.
                sys::raise_priority();
                let read = procfs.read(pid).inspect_err(|e| tracing::debug!("{e}"));
                // After the time limit the receiver is gone.
                let _ = send.send(read.ok());
            }),
        };
        if let Err(error) = self.readers.submit(job) {
            tracing::error!(
                "cannot start a thread to read process {pid}: {}; trying again; until then its program is unknown",
                error.advised()
            );
            return None;
        }
        let found = found.recv_timeout(self.read_timeout);
        if found.is_err() {
            self.readers.replace_stuck(0, None);
        }
        found.ok()?
    }

    /// Reports an exec with the entry that was read after it. Without an entry, the program is unknown. Records the
    /// uids of the entry in the table.
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
            process.program_unknown = seen.is_none();
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

    /// Records new user ids and reports them, as a row of the process table. Reports nothing if the ids are the same,
    /// or if an exec will report them.
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
        // If its program is still unread, the pending exec will report the ids.
        if self.unread.iter().any(|unread| unread.key == key) {
            return;
        }
        // If it has run another program, that exec will report the ids.
        if let Some(Some(mut seen)) = self.read(key, out) {
            (seen.key, seen.exact) = (key, key.exact_start().is_some());
            (out.sink)(Event {
                time: seen.read_at,
                provenance: Provenance::Procfs,
                kind: EventKind::Discovered(seen),
            });
        }
    }

    /// Checks in /proc whether the exit of a thread has ended its process, and if so, reports the exit of the process.
    ///
    /// Otherwise keeps at most the status. Counts an exit that /proc neither confirms nor refutes as unverified.
    fn exit(
        &mut self,
        time: u64,
        thread: u32,
        pid: u32,
        status: u32,
        parent: u32,
        out: &mut Output<'_>,
    ) {
        let is_leader = thread == pid;
        let known = self.known.get(&pid).copied();
        let may_be_last = match &known {
            // Most exiting threads leave other threads behind. A later process with the pid is not concerned.
            Some(known) => known.key.start <= time && (is_leader || known.leader_exited),
            None => is_leader,
        };
        if !may_be_last {
            return;
        }
        // The fork of a process that is not in the table was lost.
        let find_untracked = || {
            let found = self.identities.read(pid).ok()??;
            (found.key.start <= time).then(|| TrackedProcess::new(found.key))
        };
        let Some(process) = known.or_else(find_untracked) else {
            return;
        };
        match self.identities.state(process.key, process.pidfd_inode) {
            State::Gone => {
                self.give_up(process.key, out);
                self.known.remove(&pid);
                let mut event = exit_event(time, Provenance::Kernel, &process, Some(status));
                if let EventKind::Exit { parent: of, .. } = &mut event.kind {
                    *of = self.known.get(&parent).map(|parent| parent.key);
                }
                return (out.sink)(event);
            }
            // Counted as lost, so that a reconciliation scan finds out whether it has exited.
            State::Unknown => self.unverified_exits += 1,
            State::Lives { .. } | State::Hidden => {}
        }
        let process = TrackedProcess {
            leader_exited: true,
            status: Some(status),
            ..process
        };
        self.known.insert(pid, process);
    }

    /// Returns the key of the process with this pid, which is added from /proc if the table lacks it. Returns `None` if
    /// /proc has none either, or if it started after `time`.
    fn key_of(&mut self, pid: u32, time: u64) -> Option<ProcessKey> {
        if !self.known.contains_key(&pid) {
            self.add_from_proc(pid, time);
        }
        let key = self.known.get(&pid)?.key;
        (key.start <= time).then_some(key)
    }

    /// Adds the process that has the pid in /proc to the table, unless the table has one or it started after `time`.
    fn add_from_proc(&mut self, pid: u32, time: u64) {
        if pid == 0 || self.known.contains_key(&pid) {
            return;
        }
        let found = self.identities.read(pid).ok().flatten();
        if let Some(found) = found.filter(|found| found.key.start <= time && !found.exited) {
            let process = TrackedProcess {
                leader_exited: found.leader_exited,
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
            pidfd_inode: 0,
            uids: None,
            leader_exited: false,
            status: None,
            program_unknown: false,
            missing: false,
        }
    }
}

/// Returns the event of an exit. Without a `status` (as in wait(2)), it has the last one recorded in the table.
fn exit_event(
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
