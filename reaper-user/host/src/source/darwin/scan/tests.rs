//! The scan of macOS on a system of its own making, so that what it makes of the kernel's word is tried anywhere.

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

/// A scan of such a system, and the tree that comes of it.
struct World {
    mac: Rc<RefCell<Mac>>,
    scan: Scan<Shared>,
    tree: Tree,
}

impl World {
    /// With pid 1, a shell 10 and an agent 20.
    fn new() -> World {
        // No start is a whole tick, as if it were of a clock that knows no more.
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

    /// What is told now.
    fn drain(&mut self) -> Vec<EventKind> {
        let mut told = Vec::new();
        let tree = &mut self.tree;
        self.scan.drain(&mut |event: Event| {
            tree.apply(&event, &mut Vec::new());
            told.push(event.kind);
        });
        told
    }

    /// What is told by when the next pass is over.
    fn after_a_pass(&mut self) -> Vec<EventKind> {
        let mut told = self.drain();
        self.with(|mac| mac.now += mac.wakes_in.as_nanos() as u64);
        told.extend(self.drain());
        told
    }

    fn key(&self, pid: u32) -> ProcessKey {
        let mac = self.mac.borrow();
        ProcessKey {
            pid,
            start: mac.all[&pid].process.began * 1000,
        }
    }

    fn program(&self, key: ProcessKey) -> &[u8] {
        &self.tree.get(key).expect("a process").image.comm
    }
}

fn exits(told: &[EventKind]) -> Vec<(u32, ExitStatus)> {
    let exit = |kind: &EventKind| match kind {
        EventKind::Exit {
            key,
            exit_status: ended,
            ..
        } => Some((key.pid, *ended)),
        _ => None,
    };
    told.iter().filter_map(exit).collect()
}

#[test]
fn who_is_there_is_told_at_first_and_watched() {
    let mut w = World::new();
    let (shell, agent) = (w.key(10), w.key(20));
    assert_eq!(w.tree.get(agent).unwrap().parent, Some(shell));
    assert_eq!(w.program(agent), b"claude");
    assert_eq!(w.mac.borrow().watched.len(), 3);
    assert!(w.scan.confirms_identity(agent));
    // One more pass for what was forked before the kernel was asked, and then peace.
    assert!(w.after_a_pass().is_empty() && w.after_a_pass().is_empty());
    assert_eq!(w.mac.borrow().wakes_in, ScanOptions::default().max_interval);
}

#[test]
fn word_of_a_fork_and_of_an_exec_brings_the_next_pass_on() {
    let mut w = World::new();
    w.after_a_pass();
    w.with(|mac| mac.fork(30, 20));
    assert!(w.drain().is_empty(), "the kernel does not say who was born");
    assert!(w.mac.borrow().wakes_in <= ScanOptions::default().min_interval);
    w.after_a_pass();
    let child = w.key(30);
    assert_eq!(w.tree.get(child).unwrap().birth_parent, Some(w.key(20)));
    assert_eq!(w.program(child), b"claude");
    w.with(|mac| mac.exec(30, "node"));
    let told = w.after_a_pass();
    assert!(
        told.iter()
            .any(|kind| matches!(kind, EventKind::Exec { key, .. } if *key == child))
    );
    assert_eq!(w.program(child), b"node");
}

#[test]
fn ends_are_told_at_once_the_children_s_first_and_the_orphans_after_them() {
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
    let told = exits(&w.drain());
    assert_eq!(
        told,
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
fn lineage_outlives_a_maker_that_was_seen_or_is_a_zombie_and_no_other() {
    for (maker_seen, waited_for, known) in [
        (true, true, true),
        (false, false, true),
        (false, true, false),
    ] {
        let mut w = World::new();
        w.with(|mac| mac.fork(30, 20));
        if maker_seen {
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
        let maker = orphan.birth_parent.map(|maker| maker.pid);
        assert_eq!(
            maker,
            Some(if known { 30 } else { 1 }),
            "{maker_seen} {waited_for}"
        );
        assert_eq!(orphan.orphaned.is_some(), known);
    }
}

#[test]
fn who_runs_another_program_is_told_to_before_what_it_has_borne() {
    let mut w = World::new();
    w.with(|mac| {
        mac.exec(20, "tmux");
        mac.fork(30, 20);
    });
    let told = w.after_a_pass();
    let (agent, child) = (w.key(20), w.key(30));
    let exec = told
        .iter()
        .position(|kind| matches!(kind, EventKind::Exec { key, .. } if *key == agent));
    let birth = told
        .iter()
        .position(|kind| matches!(kind, EventKind::Discovered(row) if row.key == child));
    assert!(exec.is_some() && exec < birth, "{told:?}");
}

#[test]
fn a_pid_that_is_another_s_by_now_is_two_processes() {
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
        "the first one's end is not the second's"
    );
}

#[test]
fn of_whom_the_kernel_tells_nothing_the_passes_do() {
    let mut w = World::new();
    w.with(|mac| {
        mac.refused.insert(30);
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
fn nobody_is_vouched_for_while_the_table_cannot_be_read() {
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
fn one_that_cannot_be_read_is_looked_for_again() {
    let mut w = World::new();
    w.with(|mac| {
        mac.hidden.insert(30);
        mac.fork(30, 20);
    });
    w.after_a_pass();
    let child = w.key(30);
    assert!(w.tree.get(child).is_none() && !w.scan.confirms_identity(child));
    w.with(|mac| mac.hidden.clear());
    w.scan.scan_now();
    w.drain();
    assert_eq!(w.tree.get(child).unwrap().parent, Some(w.key(20)));
}

#[derive(Clone, Debug)]
enum Deed {
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
    Look,
}

fn deed() -> impl Strategy<Value = Deed> {
    let one = any::<prop::sample::Index>;
    prop_oneof![
        3 => one().prop_map(|of| Deed::Fork { of }),
        2 => (one(), any::<bool>()).prop_map(|(of, program)| Deed::Exec { of, program }),
        3 => one().prop_map(|of| Deed::Exit { of }),
        2 => Just(Deed::Look),
    ]
}

proptest! {
    /// Pids are given away again at once, which is the worst that can be.
    #[test]
    fn whatever_happened_a_last_look_has_it_right(deeds in prop::collection::vec(deed(), 0..40)) {
        let mut w = World::new();
        for deed in deeds {
            let others: Vec<u32> = w.mac.borrow().all.keys().copied().filter(|pid| *pid > 1).collect();
            let one = |of: &prop::sample::Index| (!others.is_empty()).then(|| *of.get(&others));
            match &deed {
                Deed::Fork { of } => {
                    let parent = one(of).unwrap_or(1);
                    let free = (30..).find(|pid| !others.contains(pid)).unwrap();
                    w.with(|mac| mac.fork(free, parent));
                }
                Deed::Exec { of, program } => {
                    let program = if *program { "node" } else { "sh" };
                    one(of).into_iter().for_each(|pid| w.with(|mac| mac.exec(pid, program)));
                }
                Deed::Exit { of } => one(of).into_iter().for_each(|pid| w.with(|mac| mac.exit(pid, 0))),
                Deed::Look => drop(w.after_a_pass()),
            }
        }
        // One for what is new, and two for what has to be seen twice.
        for _ in 0..3 {
            w.scan.scan_now();
            w.drain();
        }
        let mac = w.mac.borrow();
        for one in mac.all.values() {
            let KinfoProc { pid, parent, comm, began, .. } = &one.process;
            let node = w.tree.get(ProcessKey { pid: *pid, start: began * 1000 });
            prop_assert!(node.is_some(), "{pid} is not known");
            let node = node.unwrap();
            prop_assert_eq!(node.parent.map_or(0, |key| key.pid), *parent, "parent of {}", pid);
            prop_assert_eq!(&node.image.comm, comm, "program of {}", pid);
        }
        prop_assert_eq!(w.tree.len(), mac.all.len());
    }
}
