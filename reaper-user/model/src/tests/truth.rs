//! Random lives of random trees, with the simplest possible account of who truly belongs to whom.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::world::{INIT, USER, image};
use crate::event::{Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance, TICK_NS};

pub const PROGRAMS: [&str; 6] = ["claude", "codex", "tmux", "apt", "npm", "bash"];

/// One thing that happens to one of the living.
#[derive(Clone, Copy, Debug)]
pub struct Act {
    what: u8,
    who: u8,
    how: u8,
}

pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = (any::<u8>(), any::<u8>(), any::<u8>());
    prop::collection::vec(
        act.prop_map(|(what, who, how)| Act { what, who, how }),
        1..120,
    )
}

/// A process as it truly is.
#[derive(Clone, Debug)]
pub struct Proc {
    pub key: ProcessKey,
    pub parent: ProcessKey,
    pub program: &'static str,
    /// The root of its session, then that of the session that one is nested in, and so on.
    roots: Vec<ProcessKey>,
}

/// What truly happens, with the simplest possible account of who belongs to whom.
#[derive(Default)]
pub struct Truth {
    pub live: BTreeMap<ProcessKey, Proc>,
    /// Roots that have exited.
    gone: BTreeSet<ProcessKey>,
    pub events: Vec<Event>,
    pub now: u64,
    pub next_pid: u32,
}

impl Truth {
    pub fn of(acts: &[Act], first_pid: u32) -> Truth {
        let mut truth = Truth {
            now: 1_000_000_000,
            next_pid: first_pid,
            ..Truth::default()
        };
        truth.born(INIT, INIT, "bash", vec![]);
        acts.iter().for_each(|act| truth.act(*act));
        truth
    }

    fn act(&mut self, act: Act) {
        let at = usize::from(act.who) % self.live.len();
        let Some(process) = self.live.values().nth(at).cloned() else {
            return;
        };
        match act.what % 8 {
            0..=2 => {
                let Proc {
                    key,
                    program,
                    roots,
                    ..
                } = process;
                self.born(key, key, program, roots);
            }
            // CLONE_PARENT
            3 => {
                let Proc {
                    key,
                    parent,
                    program,
                    roots,
                } = process;
                let parent = if self.live.contains_key(&parent) {
                    parent
                } else {
                    INIT
                };
                self.born(parent, key, program, roots);
            }
            4 | 5 => self.exec(process, PROGRAMS[usize::from(act.how) % PROGRAMS.len()]),
            _ if self.live.len() > 1 => self.exit(&process, act.how),
            _ => {}
        }
    }

    fn tell(&mut self, kind: EventKind) {
        self.now += 1_000_000;
        let time = self.now;
        let provenance = Provenance::Kernel;
        self.events.push(Event {
            time,
            provenance,
            kind,
        });
    }

    fn born(
        &mut self,
        parent: ProcessKey,
        creator: ProcessKey,
        program: &'static str,
        roots: Vec<ProcessKey>,
    ) {
        self.next_pid += 1;
        let key = ProcessKey {
            pid: self.next_pid,
            start: self.now + 1_000_000,
        };
        self.live.insert(
            key,
            Proc {
                key,
                parent,
                program,
                roots,
            },
        );
        self.tell(EventKind::Fork {
            child: key,
            parent: Some(parent),
            creator: Some(creator),
            uids: USER,
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        });
    }

    fn exec(&mut self, process: Proc, program: &'static str) {
        let Proc {
            key,
            parent,
            mut roots,
            ..
        } = process;
        let was_root = self.was_root(key);
        match program {
            "tmux" if was_root => return,
            "tmux" => roots.clear(),
            "claude" | "codex" if !was_root => roots.insert(0, key),
            _ => {}
        }
        self.live.insert(
            key,
            Proc {
                key,
                parent,
                program,
                roots,
            },
        );
        self.tell(EventKind::Exec {
            key,
            parent: Some(parent),
            uids: USER,
            pidfd_inode: 0,
            image: image(program, 0),
            membership: None,
        });
    }

    fn was_root(&self, key: ProcessKey) -> bool {
        self.live[&key].roots.first() == Some(&key)
    }

    fn exit(&mut self, process: &Proc, how: u8) {
        let key = process.key;
        self.live.remove(&key);
        self.gone.insert(key);
        let ended = match how % 2 {
            0 => ExitStatus::Exited(0),
            _ => ExitStatus::Signalled {
                signal: 9,
                core: false,
            },
        };
        self.tell(EventKind::Exit {
            key,
            parent: None,
            exit_status: ended,
            peak_rss: 0,
            membership: None,
        });
        let children: Vec<ProcessKey> = self
            .live
            .values()
            .filter(|child| child.parent == key)
            .map(|child| child.key)
            .collect();
        for child in children {
            self.live.get_mut(&child).unwrap().parent = INIT;
            self.tell(EventKind::Reparent {
                child,
                old_parent: Some(key),
                adopter: Some(INIT),
                membership: None,
            });
        }
    }

    /// The living whose root, or a root further out, is gone.
    pub fn due(&self) -> BTreeSet<ProcessKey> {
        let is_due = |process: &&Proc| process.roots.iter().any(|root| self.gone.contains(root));
        self.live
            .values()
            .filter(is_due)
            .map(|process| process.key)
            .collect()
    }

    pub fn row(&self, process: &Proc) -> Event {
        let ProcessKey { pid, start } = process.key;
        let start = start - start % TICK_NS;
        Event {
            time: self.now,
            provenance: Provenance::Procfs,
            kind: EventKind::Discovered(ProcEntry {
                read_at: self.now,
                exact: false,
                pidfd_inode: 0,
                membership: None,
                key: ProcessKey { pid, start },
                parent: process.parent.pid,
                uids: USER,
                image: image(process.program, 0),
                kernel_thread: false,
                namespace_init: false,
            }),
        }
    }
}

pub fn pids(keys: &BTreeSet<ProcessKey>) -> BTreeSet<u32> {
    keys.iter().map(|key| key.pid).collect()
}

/// Pids of agents, and of what was ever made by one or by its descendants.
pub fn below_agents(events: &[Event]) -> BTreeSet<u32> {
    let agents = events.iter().filter_map(|event| match &event.kind {
        EventKind::Exec { key, image, .. }
            if [&b"claude"[..], b"codex"].contains(&&image.comm[..]) =>
        {
            Some(key.pid)
        }
        _ => None,
    });
    let mut below: BTreeSet<u32> = agents.collect();
    for event in events {
        if let EventKind::Fork { child, creator: Some(creator), parent, .. } = event.kind
            // Of a creator that is unknown because of a loss only the parent is left.
            && (below.contains(&creator.pid) || parent.is_some_and(|p| below.contains(&p.pid)))
        {
            below.insert(child.pid);
        }
    }
    below
}
