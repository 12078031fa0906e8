//! Reference model: random process trees with a simple record of their sessions.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::world::{INIT, USER, image};
use crate::event::{Event, EventKind, ExitStatus, ProcEntry, ProcessKey, Provenance, TICK_NS};

pub const PROGRAMS: [&str; 6] = ["claude", "codex", "tmux", "apt", "npm", "bash"];

/// A random action of a living process.
#[derive(Clone, Copy, Debug)]
pub struct Act {
    action: u8,
    /// Index of the process, modulo the number of processes.
    process: u8,
    /// Program of an exec, or kind of an exit status.
    variant: u8,
}

pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = (any::<u8>(), any::<u8>(), any::<u8>());
    prop::collection::vec(
        act.prop_map(|(action, process, variant)| Act {
            action,
            process,
            variant,
        }),
        1..120,
    )
}

/// A living process.
#[derive(Clone, Debug)]
pub struct Proc {
    pub key: ProcessKey,
    pub parent: ProcessKey,
    pub program: &'static str,
    /// Root of its session, then that of the session around it, and so on.
    roots: Vec<ProcessKey>,
}

/// Living processes, and the events so far.
#[derive(Default)]
pub struct Truth {
    pub live: BTreeMap<ProcessKey, Proc>,
    /// Processes that have exited.
    exited: BTreeSet<ProcessKey>,
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
        truth.fork(INIT, INIT, "bash", vec![]);
        acts.iter().for_each(|act| truth.act(*act));
        truth
    }

    fn act(&mut self, act: Act) {
        let at = usize::from(act.process) % self.live.len();
        let Some(process) = self.live.values().nth(at).cloned() else {
            return;
        };
        match act.action % 8 {
            0..=2 => {
                let Proc {
                    key,
                    program,
                    roots,
                    ..
                } = process;
                self.fork(key, key, program, roots);
            }
            // A fork with `CLONE_PARENT`.
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
                self.fork(parent, key, program, roots);
            }
            4 | 5 => self.exec(process, PROGRAMS[usize::from(act.variant) % PROGRAMS.len()]),
            _ if self.live.len() > 1 => self.exit(&process, act.variant),
            _ => {}
        }
    }

    fn report(&mut self, kind: EventKind) {
        self.now += 1_000_000;
        let time = self.now;
        let provenance = Provenance::Kernel;
        self.events.push(Event {
            time,
            provenance,
            kind,
        });
    }

    fn fork(
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
        self.report(EventKind::Fork {
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
        let is_root = self.is_root(key);
        match program {
            "tmux" if is_root => return,
            "tmux" => roots.clear(),
            "claude" | "codex" if !is_root => roots.insert(0, key),
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
        self.report(EventKind::Exec {
            key,
            parent: Some(parent),
            uids: USER,
            pidfd_inode: 0,
            image: image(program, 0),
            membership: None,
        });
    }

    fn is_root(&self, key: ProcessKey) -> bool {
        self.live[&key].roots.first() == Some(&key)
    }

    fn exit(&mut self, process: &Proc, variant: u8) {
        let key = process.key;
        self.live.remove(&key);
        self.exited.insert(key);
        let status = match variant % 2 {
            0 => ExitStatus::Exited(0),
            _ => ExitStatus::Signalled {
                signal: 9,
                core: false,
            },
        };
        self.report(EventKind::Exit {
            key,
            parent: None,
            exit_status: status,
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
            self.report(EventKind::Reparent {
                child,
                old_parent: Some(key),
                adopter: Some(INIT),
                membership: None,
            });
        }
    }

    /// Returns the living processes whose root, or the root of an outer session, has exited.
    pub fn due(&self) -> BTreeSet<ProcessKey> {
        let is_due = |process: &&Proc| process.roots.iter().any(|root| self.exited.contains(root));
        self.live
            .values()
            .filter(is_due)
            .map(|process| process.key)
            .collect()
    }

    /// Returns the row of a scan for a process.
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

/// Returns the pids of agents and of all processes that descend from one.
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
            // The model uses the parent if it does not know the creator because of lost events.
            && (below.contains(&creator.pid) || parent.is_some_and(|p| below.contains(&p.pid)))
        {
            below.insert(child.pid);
        }
    }
    below
}
