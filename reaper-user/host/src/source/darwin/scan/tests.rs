//! Tests of the scan for macOS with a simulated kernel, which run on any system.

mod mac;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use proptest::prelude::*;

use super::Scan;
use crate::source::Source;
use crate::source::scan::ScanOptions;
use crate::sys::kinfo::KinfoProc;
use mac::{MS, Mac, Shared};
use reaper_model::Tree;
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey};

/// A scan of a simulated system, and the process tree that its events build.
struct World {
    mac: Rc<RefCell<Mac>>,
    scan: Scan<Shared>,
    tree: Tree,
}

impl World {
    /// Creates a world with pid 1, a shell (10) and an agent (20).
    fn new() -> World {
        // No start is a whole tick, which would count as inexact.
        let mac = Mac {
            now: MS / 1000,
            ..Mac::default()
        };
        let mac = Rc::new(RefCell::new(mac));
        let scan = Scan::of(Shared(Rc::clone(&mac)), &ScanOptions::default());
        let mut w = World {
            mac,
            scan,
            tree: Tree::default(),
        };
        w.with(|mac| {
            mac.fork(1, 0);
            mac.fork(10, 1);
            mac.exec(10, "zsh");
            mac.fork(20, 10);
            mac.exec(20, "claude");
        });
        w.drain();
        w
    }

    fn with(&self, change: impl FnOnce(&mut Mac)) {
        change(&mut self.mac.borrow_mut());
    }

    /// Drains the scan and returns the events.
    fn drain(&mut self) -> Vec<EventKind> {
        let mut events = Vec::new();
        let tree = &mut self.tree;
        self.scan.drain(&mut |event: Event| {
            tree.apply(&event, &mut Vec::new());
            events.push(event.kind);
        });
        events
    }

    /// Drains the scan, runs the next pass and returns the events of both.
    fn after_a_pass(&mut self) -> Vec<EventKind> {
        let mut events = self.drain();
        self.with(|mac| mac.now += mac.wakes_in.as_nanos() as u64);
        events.extend(self.drain());
        events
    }

    fn key(&self, pid: u32) -> ProcessKey {
        let mac = self.mac.borrow();
        ProcessKey {
            pid,
            start: mac.all[&pid].info.began * 1000,
        }
    }

    fn program(&self, key: ProcessKey) -> &[u8] {
        &self.tree.get(key).expect("a process").image.comm
    }
}

fn exits(events: &[EventKind]) -> Vec<(u32, ExitStatus)> {
    let exit = |kind: &EventKind| match kind {
        EventKind::Exit {
            key,
            exit_status: ended,
            ..
        } => Some((key.pid, *ended)),
        _ => None,
    };
    events.iter().filter_map(exit).collect()
}

#[test]
fn pre_existing_processes_are_reported_and_watched() {
    let mut w = World::new();
    let (shell, agent) = (w.key(10), w.key(20));
    assert_eq!(w.tree.get(agent).unwrap().parent, Some(shell));
    assert_eq!(w.program(agent), b"claude");
    assert_eq!(w.mac.borrow().watched.len(), 3);
    assert!(w.scan.confirms_identity(agent));
    // One more pass finds processes forked before their parents were watched. Then passes are rare.
    assert!(w.after_a_pass().is_empty() && w.after_a_pass().is_empty());
    assert_eq!(w.mac.borrow().wakes_in, ScanOptions::default().max_interval);
}

#[test]
fn fork_and_exec_trigger_a_pass() {
    let mut w = World::new();
    w.after_a_pass();
    w.with(|mac| mac.fork(30, 20));
    assert!(w.drain().is_empty(), "the kernel reports no child");
    assert!(w.mac.borrow().wakes_in <= ScanOptions::default().min_interval);
    w.after_a_pass();
    let child = w.key(30);
    assert_eq!(w.tree.get(child).unwrap().birth_parent, Some(w.key(20)));
    assert_eq!(w.program(child), b"claude");
    w.with(|mac| mac.exec(30, "node"));
    let events = w.after_a_pass();
    assert!(
        events
            .iter()
            .any(|kind| matches!(kind, EventKind::Exec { key, .. } if *key == child))
    );
    assert_eq!(w.program(child), b"node");
}

#[test]
fn exits_are_reported_at_once_and_children_first() {
    let mut w = World::new();
    w.with(|mac| {
        mac.fork(30, 20);
        mac.fork(40, 30);
        mac.fork(50, 20);
    });
    w.after_a_pass();
    let (agent, orphan) = (w.key(20), w.key(50));
    w.with(|mac| {
        mac.exit(20, 9);
        mac.exit(30, 0x300);
        mac.exit(40, 0);
    });
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    let events = exits(&w.drain());
    assert_eq!(
        events,
        [
            (40, ExitStatus::Exited(0)),
            (30, ExitStatus::Exited(3)),
            (20, killed)
        ]
    );
    assert!(w.mac.borrow().wakes_in <= Duration::from_millis(5));
    w.after_a_pass();
    let node = w.tree.get(orphan).unwrap();
    assert_eq!(node.parent, Some(w.key(1)));
    assert_eq!(node.orphaned.map(|from| from.old_parent), Some(agent));
}

#[test]
fn birth_parent_is_known_if_it_was_seen_or_is_a_zombie() {
    for (parent_seen, waited_for, known) in [
        (true, true, true),
        (false, false, true),
        (false, true, false),
    ] {
        let mut w = World::new();
        w.with(|mac| mac.fork(30, 20));
        if parent_seen {
            w.after_a_pass();
        }
        w.with(|mac| {
            mac.fork(40, 30);
            match waited_for {
                true => mac.exit(30, 0),
                false => mac.end(30, 0),
            }
        });
        w.after_a_pass();
        let orphan = w.tree.get(w.key(40)).unwrap();
        assert_eq!(orphan.parent, Some(w.key(1)));
        let parent = orphan.birth_parent.map(|parent| parent.pid);
        assert_eq!(
            parent,
            Some(if known { 30 } else { 1 }),
            "{parent_seen} {waited_for}"
        );
        assert_eq!(orphan.orphaned.is_some(), known);
    }
}

#[test]
fn exec_comes_before_new_children() {
    let mut w = World::new();
    w.with(|mac| {
        mac.exec(20, "tmux");
        mac.fork(30, 20);
    });
    let events = w.after_a_pass();
    let (agent, child) = (w.key(20), w.key(30));
    let exec = events
        .iter()
        .position(|kind| matches!(kind, EventKind::Exec { key, .. } if *key == agent));
    let birth = events
        .iter()
        .position(|kind| matches!(kind, EventKind::Discovered(row) if row.key == child));
    assert!(exec.is_some() && exec < birth, "{events:?}");
}

#[test]
fn reused_pid_is_two_processes() {
    let mut w = World::new();
    w.with(|mac| mac.fork(30, 20));
    w.after_a_pass();
    let first = w.key(30);
    w.with(|mac| {
        mac.exit(30, 0);
        mac.fork(30, 10);
    });
    let second = w.key(30);
    w.scan.scan_now();
    w.drain();
    assert!(w.tree.get(first).is_none());
    assert_eq!(w.tree.get(second).unwrap().parent, Some(w.key(10)));
    assert!(!w.scan.confirms_identity(first) && w.scan.confirms_identity(second));
    assert_eq!(
        exits(&w.after_a_pass()),
        [],
        "the exit of the first process is not one of the second"
    );
}

#[test]
fn passes_find_changes_of_unwatchable_processes() {
    let mut w = World::new();
    w.with(|mac| {
        mac.unwatchable.insert(30);
        mac.fork(30, 20);
    });
    w.after_a_pass();
    let child = w.key(30);
    w.with(|mac| mac.exec(30, "sudo"));
    w.scan.scan_now();
    w.drain();
    assert_eq!(w.program(child), b"sudo");
    w.with(|mac| mac.exit(30, 0x100));
    assert!(w.drain().is_empty());
    w.scan.scan_now();
    assert_eq!(exits(&w.drain()), [(30, ExitStatus::Unknown)]);
}

#[test]
fn no_process_is_confirmed_while_the_table_is_unreadable() {
    let mut w = World::new();
    let agent = w.key(20);
    w.with(|mac| mac.fails = true);
    w.scan.scan_now();
    assert!(w.drain().is_empty() && !w.scan.confirms_identity(agent));
    w.with(|mac| mac.fails = false);
    w.after_a_pass();
    assert!(w.scan.confirms_identity(agent));
}

#[test]
fn unreadable_process_is_retried() {
    let mut w = World::new();
    w.with(|mac| {
        mac.unreadable.insert(30);
        mac.fork(30, 20);
    });
    w.after_a_pass();
    let child = w.key(30);
    assert!(w.tree.get(child).is_none() && !w.scan.confirms_identity(child));
    w.with(|mac| mac.unreadable.clear());
    w.scan.scan_now();
    w.drain();
    assert_eq!(w.tree.get(child).unwrap().parent, Some(w.key(20)));
}

#[derive(Clone, Debug)]
enum Act {
    Fork {
        of: prop::sample::Index,
    },
    Exec {
        of: prop::sample::Index,
        program: bool,
    },
    Exit {
        of: prop::sample::Index,
    },
    Pass,
}

fn act() -> impl Strategy<Value = Act> {
    let process = any::<prop::sample::Index>;
    prop_oneof![
        3 => process().prop_map(|of| Act::Fork { of }),
        2 => (process(), any::<bool>()).prop_map(|(of, program)| Act::Exec { of, program }),
        3 => process().prop_map(|of| Act::Exit { of }),
        2 => Just(Act::Pass),
    ]
}

proptest! {
    /// Worst case: pids are reused at once.
    #[test]
    fn last_passes_find_the_tree_after_any_changes(acts in prop::collection::vec(act(), 0..40)) {
        let mut w = World::new();
        for act in acts {
            let others: Vec<u32> = w.mac.borrow().all.keys().copied().filter(|pid| *pid > 1).collect();
            let process = |of: &prop::sample::Index| (!others.is_empty()).then(|| *of.get(&others));
            match &act {
                Act::Fork { of } => {
                    let parent = process(of).unwrap_or(1);
                    let free = (30..).find(|pid| !others.contains(pid)).unwrap();
                    w.with(|mac| mac.fork(free, parent));
                }
                Act::Exec { of, program } => {
                    let program = if *program { "node" } else { "sh" };
                    process(of).into_iter().for_each(|pid| w.with(|mac| mac.exec(pid, program)));
                }
                Act::Exit { of } => process(of).into_iter().for_each(|pid| w.with(|mac| mac.exit(pid, 0))),
                Act::Pass => drop(w.after_a_pass()),
            }
        }
        // One pass for new processes, and two for changes that a second pass must confirm.
        for _ in 0..3 {
            w.scan.scan_now();
            w.drain();
        }
        let mac = w.mac.borrow();
        for process in mac.all.values() {
            let KinfoProc { pid, parent, comm, began, .. } = &process.info;
            let node = w.tree.get(ProcessKey { pid: *pid, start: began * 1000 });
            prop_assert!(node.is_some(), "{pid} is not known");
            let node = node.unwrap();
            prop_assert_eq!(node.parent.map_or(0, |key| key.pid), *parent, "parent of {}", pid);
            prop_assert_eq!(&node.image.comm, comm, "program of {}", pid);
        }
        prop_assert_eq!(w.tree.len(), mac.all.len());
    }
}
