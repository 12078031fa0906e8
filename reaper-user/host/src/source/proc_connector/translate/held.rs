//! What waits to be told until it is known what those run who have made whom it is about: it depends on that whose they
//! are. An agent that is found to be one only after its first child was told of would not have it for a member.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use reaper_model::event::{Event, EventKind, ProcessKey};

/// So much waits at most; then it is told as it is.
pub const HELD_MAX: usize = 4096;

/// Tells of a process that has just been looked at whether it has run another program since what is being taken in, so that
/// it may have been that which was seen; also where that was lost meanwhile. The kernel tells of an exec a moment after /proc
/// shows the new program (`exec_binprm` in fs/exec.c), and a debugger can make that moment long: then it says no.
pub type HasMovedOn<'a> = &'a mut dyn FnMut(u32) -> bool;

/// See the module.
#[derive(Default)]
pub struct Held {
    /// In the order in which it was told. At its head is a program.
    queue: VecDeque<Item>,
    /// How much of that is about each process, by pid, or about one that it is making: what it does next comes after it.
    about: Counts,
    /// How many of whom it has made are awaited: it may have handed over to one of these before its end.
    makers: Counts,
}

enum Item {
    Told(Event),
    /// What a process has run is told here.
    Program(Program),
}

struct Program {
    key: ProcessKey,
    maker: Option<u32>,
    /// When it has run it.
    time: u64,
    told: Option<Event>,
}

/// So many of each pid.
#[derive(Default)]
struct Counts(HashMap<u32, u32>);

impl Counts {
    fn add(&mut self, pids: [Option<u32>; 2]) {
        for pid in pids.into_iter().flatten() {
            *self.0.entry(pid).or_default() += 1;
        }
    }

    fn take(&mut self, pids: [Option<u32>; 2]) {
        for pid in pids.into_iter().flatten() {
            if let Entry::Occupied(mut count) = self.0.entry(pid) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    fn any(&self, pids: [Option<u32>; 2]) -> bool {
        let mut pids = pids.into_iter().flatten();
        pids.any(|pid| self.0.contains_key(&pid))
    }
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// It will be told what a process has run at a time, or [nobody awaits it](Held::release) any more.
    fn await_program(&mut self, key: ProcessKey, maker: Option<u32>, time: u64) {
        self.about.add([Some(key.pid), None]);
        self.makers.add([maker, None]);
        self.queue.push_back(Item::Program(Program {
            key,
            maker,
            time,
            told: None,
        }));
    }

    /// Where a program is to be told that is still awaited.
    fn place_of(&mut self, key: ProcessKey, time: u64) -> Option<&mut Option<Event>> {
        let mut all = self.queue.iter_mut();
        all.find_map(|item| match item {
            Item::Program(of) if (of.key, of.time) == (key, time) && of.told.is_none() => {
                Some(&mut of.told)
            }
            _ => None,
        })
    }

    fn tell(&mut self, event: Event, sink: &mut dyn FnMut(Event)) {
        let pids = subjects(&event.kind);
        let ends = matches!(event.kind, EventKind::Exit { .. });
        if self.is_empty() || !(self.about.any(pids) || ends && self.makers.any(pids)) {
            return sink(event);
        }
        let place = match event.kind {
            EventKind::Exec { key, .. } => self.place_of(key, event.time),
            _ => None,
        };
        match place {
            Some(place) => *place = Some(event),
            None => {
                self.about.add(pids);
                self.queue.push_back(Item::Told(event));
            }
        }
    }

    /// Tells what need not wait any more: all up to the first program that is still awaited.
    pub fn release(
        &mut self,
        is_awaited: impl Fn(ProcessKey, u64) -> bool,
        sink: &mut dyn FnMut(Event),
    ) {
        let awaits = |item: &mut Item| match item {
            Item::Program(of) => of.told.is_none() && is_awaited(of.key, of.time),
            Item::Told(_) => false,
        };
        loop {
            let full = self.queue.len() > HELD_MAX;
            let next = self.queue.pop_front_if(|item| full || !awaits(item));
            let told = match next {
                None => return,
                Some(Item::Told(event)) => {
                    self.about.take(subjects(&event.kind));
                    Some(event)
                }
                Some(Item::Program(of)) => {
                    self.about.take([Some(of.key.pid), None]);
                    self.makers.take([of.maker, None]);
                    of.told
                }
            };
            told.into_iter().for_each(&mut *sink);
        }
    }
}

/// The pids of whom it is about, and of their makers.
fn subjects(told: &EventKind) -> [Option<u32>; 2] {
    match told {
        EventKind::Fork { child, parent, .. } => {
            [Some(child.pid), parent.as_ref().map(|parent| parent.pid)]
        }
        EventKind::Exec { key, .. } | EventKind::Exit { key, .. } => [Some(key.pid), None],
        EventKind::Discovered(seen) => [Some(seen.key.pid), None],
        // This source tells nothing else.
        _ => [None, None],
    }
}

/// Where what happened is told to, while it is taken in.
pub struct Out<'a> {
    pub held: &'a mut Held,
    pub has_moved_on: HasMovedOn<'a>,
    pub sink: &'a mut dyn FnMut(Event),
}

impl Out<'_> {
    /// Tells it now, or when it need not wait any more.
    pub fn tell(&mut self, event: Event) {
        self.held.tell(event, self.sink);
    }

    /// See [`Held`].
    pub fn await_program(&mut self, key: ProcessKey, maker: Option<u32>, time: u64) {
        self.held.await_program(key, maker, time);
    }

    /// Whether what is told next of it is told in its place.
    pub fn has_place(&mut self, key: ProcessKey, time: u64) -> bool {
        self.held.place_of(key, time).is_some()
    }

    /// See [`HasMovedOn`].
    pub fn has_moved_on(&mut self, pid: u32) -> bool {
        (self.has_moved_on)(pid)
    }
}
