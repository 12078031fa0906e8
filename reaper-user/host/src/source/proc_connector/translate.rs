//! From what the connector tells, and what /proc adds to it, to events: who is who, and when one is gone.

pub(super) mod again;
pub(super) mod held;
pub(super) mod unread;

use std::time::Duration;

use hashbrown::HashMap;

use super::aside::Aside;
use super::glimpse::{Glimpses, Numbers, State};
use super::parse::ConnectorEvent;
use crate::source::procfs::{ProcessReading, Procfs, ProcfsError};
use held::{HasMovedOn, Held, Out};
use reaper_model::event::{
    Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};
use unread::{Doubted, Unread};

type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Knows the living processes, so that an end that leaves nothing in /proc is that of one with a name.
pub struct Translator {
    procfs: Procfs,
    pub(super) programs: Aside,
    glimpses: Glimpses,
    known: Map<u32, TrackedProcess>,
    /// Whose programs could not be read in time: makers before their copies.
    unread: Vec<Unread>,
    held: Held,
    /// Who may have ended, and could not be read.
    doubted: Vec<Doubted>,
    /// How many of these have been given up.
    missed: u64,
}

/// What is known of a living process.
#[derive(Clone, Copy, Debug)]
struct TrackedProcess {
    /// The start is a whole tick where no fork was told.
    key: ProcessKey,
    /// The pid of who made it; `None` where no fork was told.
    maker: Option<u32>,
    /// What the kernel has numbered it by at its fork; 0 if that is not known.
    number: u64,
    /// Unknown until something told or needed them.
    uids: Option<Uids>,
    /// Its first thread has exited, and others went on: the end of any can be its own.
    half_dead: bool,
    /// How the last thread that was asked about ended.
    status: Option<u32>,
    /// What it runs could not be read in time.
    unknown: bool,
    /// A survey has not found it any more.
    gone: bool,
}

impl Translator {
    /// Waits no longer than so for one process's program.
    pub fn new(procfs: Procfs, numbers: Numbers, patience: Duration) -> Translator {
        Translator {
            glimpses: Glimpses::new(&procfs, numbers),
            programs: Aside::new(procfs.clone(), patience),
            procfs,
            known: Map::default(),
            unread: Vec::new(),
            held: Held::default(),
            doubted: Vec::new(),
            missed: 0,
        }
    }

    /// Takes in one thing that happened at a time since boot.
    pub fn take(
        &mut self,
        time: u64,
        what: ConnectorEvent,
        has_moved_on: HasMovedOn<'_>,
        sink: &mut impl FnMut(Event),
    ) {
        self.through(has_moved_on, sink, |this, out| match what {
            ConnectorEvent::Fork { parent, child } => this.fork(time, parent, child, out),
            ConnectorEvent::Exec { process } => this.exec(time, process, out),
            ConnectorEvent::Uids {
                thread,
                process,
                uids,
            } => {
                // The C library changes those of all threads; the first one's are the process's.
                if thread == process {
                    this.change_uids(time, process, uids, out);
                }
            }
            ConnectorEvent::Exit {
                thread,
                process,
                status,
                parent,
            } => this.exit(time, thread, process, status, parent, out),
            ConnectorEvent::Answer { .. } | ConnectorEvent::Other => {}
        });
    }

    /// Does what tells of something, and then tells what need not wait any more.
    fn through(
        &mut self,
        has_moved_on: HasMovedOn<'_>,
        sink: &mut impl FnMut(Event),
        work: impl FnOnce(&mut Translator, &mut Out<'_>),
    ) {
        let mut held = std::mem::take(&mut self.held);
        work(
            self,
            &mut Out {
                held: &mut held,
                has_moved_on,
                sink,
            },
        );
        held.release(|key, time| self.awaits(key, time), sink);
        self.held = held;
    }

    /// Whether some of what was taken in waits to be told.
    pub fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    /// Puts what is known right by /proc: at the beginning, and after a loss. Who is gone is told of by whoever looks for
    /// what was lost, or by an end that is still to be read: only the next survey forgets them.
    ///
    /// # Errors
    /// /proc cannot be listed.
    pub fn survey(&mut self) -> Result<(), ProcfsError> {
        let pids = self.procfs.pids()?;
        for known in self
            .known
            .values()
            .copied()
            .collect::<Vec<TrackedProcess>>()
        {
            let pid = known.key.pid;
            match self.glimpses.state(known.key, known.number) {
                State::Lives { leader_dead } => {
                    let half_dead = leader_dead;
                    self.known
                        .insert(pid, TrackedProcess { half_dead, ..known });
                }
                State::Gone => {
                    let found = self.glimpses.glimpse(pid).ok().flatten();
                    let replaced = found.is_some_and(|found| !found.over);
                    if known.gone || replaced {
                        self.known.remove(&pid);
                    } else {
                        self.known.insert(
                            pid,
                            TrackedProcess {
                                gone: true,
                                ..known
                            },
                        );
                    }
                }
                State::Unknown | State::Hidden => {}
            }
        }
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

    fn fork(&mut self, time: u64, parent: u32, child: u32, out: &mut Out<'_>) {
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
            self.known.remove(&child);
            out.tell(ended(time, Provenance::Inferred, &known, None));
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
                maker: parent.map(|parent| parent.pid),
                number,
                uids,
                unknown,
                ..TrackedProcess::new(key)
            };
            self.known.insert(child, process);
        }
        out.tell(Event {
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
        // It runs what its maker ran, which it may still be there to tell.
        if unknown && !outdated && !self.await_as_copy(time, key, parent, out) && born.is_some() {
            self.tell_program(time, key, false, out);
        }
    }

    fn exec(&mut self, time: u64, pid: u32, out: &mut Out<'_>) {
        let Some(key) = self.key_of(pid, time) else {
            return;
        };
        // A thread that runs a program becomes the first one.
        if let Some(process) = self.known.get_mut(&pid) {
            (process.half_dead, process.status) = (false, None);
        }
        // Nobody will know any more what it ran before.
        self.unread.retain(|unread| unread.key != key);
        // Most that are gone need no thread to say so.
        let gone = self.state(key) == State::Gone;
        self.tell_program(time, key, gone, out);
    }

    /// Tells which program a process runs by now. Where that cannot be read any more it is unknown: nothing that was
    /// known of the last one holds for it, nor for whom it has forked since.
    fn tell_program(&mut self, time: u64, key: ProcessKey, gone: bool, out: &mut Out<'_>) {
        let found = match gone {
            true => None,
            false => self.programs.look(key.pid),
        };
        let doubtful = found.is_none() && !gone;
        let seen = found.and_then(|found| match found {
            // Whoever it forked before it ran the next one is none of that one's.
            ProcessReading::Alive(seen)
                if seen.key.has_same_tick(key) && !out.has_moved_on(key.pid) =>
            {
                Some(seen)
            }
            // Of what it runs by now, as of whoever has the pid by now, events of its own tell.
            _ => None,
        });
        self.tell(time, key, seen, out);
        if doubtful {
            self.await_program(key, time, out);
        }
    }

    fn tell(&mut self, time: u64, key: ProcessKey, seen: Option<ProcEntry>, out: &mut Out<'_>) {
        let (uids, parent, image) = match seen {
            Some(seen) => (
                Some(seen.uids),
                self.key_of(seen.parent, seen.read_at),
                Some(seen.image),
            ),
            None => (None, None, None),
        };
        let Some(process) = self.known.get_mut(&key.pid) else {
            return;
        };
        process.uids = uids.or(process.uids);
        process.unknown = image.is_none();
        let image = image.unwrap_or_default();
        out.tell(Event {
            time,
            provenance: Provenance::Kernel,
            kind: EventKind::Exec {
                key,
                parent,
                uids: process.uids.unwrap_or_default(),
                pidfd_inode: 0,
                image,
                membership: None,
            },
        });
    }

    /// The model learns of new user ids by a row of the process table.
    fn change_uids(&mut self, time: u64, pid: u32, uids: Uids, out: &mut Out<'_>) {
        let Some(key) = self.key_of(pid, time) else {
            return;
        };
        let Some(process) = self.known.get_mut(&pid) else {
            return;
        };
        if process.uids.replace(uids) == Some(uids) {
            return;
        }
        let Some(ProcessReading::Alive(mut seen)) = self.programs.look(pid) else {
            return;
        };
        // The exec tells of them too.
        if seen.key.has_same_tick(key) && !out.has_moved_on(pid) {
            (seen.key, seen.exact) = (key, key.exact_start().is_some());
            out.tell(Event {
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
        out: &mut Out<'_>,
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
            (found.start <= time).then(|| TrackedProcess::new(found.key(pid)))
        };
        let Some(process) = known.or_else(lost) else {
            return;
        };
        match self.glimpses.state(process.key, process.number) {
            State::Gone => {
                self.known.remove(&pid);
                let mut event = ended(time, Provenance::Kernel, &process, Some(status));
                if let EventKind::Exit { parent: of, .. } = &mut event.kind {
                    *of = self.known.get(&parent).map(|parent| parent.key);
                }
                return out.tell(event);
            }
            State::Unknown => self.doubt(process.key),
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
        if let Some(found) = found.filter(|found| found.start <= time && !found.over) {
            let process = TrackedProcess {
                half_dead: found.leader_dead,
                ..TrackedProcess::new(found.key(pid))
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
            maker: None,
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
