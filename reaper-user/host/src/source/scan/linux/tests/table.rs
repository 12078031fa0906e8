//! Tests of the events that a table emits, and that these events build the right process tree.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;
use proptest::prelude::*;

use crate::source::scan::table::{ImageFingerprint, ScanTable, StatRow, parents_first};
use reaper_model::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};
use reaper_model::ruleset::Ruleset;
use reaper_model::{Model, Scope};

/// Start in ticks, parent and program of a process.
type Process = (u64, u32, &'static str);
type Processes = BTreeMap<u32, Process>;

fn key(pid: u32, start: u64) -> ProcessKey {
    let start = start * TICK_NS;
    ProcessKey { pid, start }
}

fn stat_row(pid: u32, (start, parent, program): Process) -> StatRow {
    let mut fingerprint = ImageFingerprint::default();
    fingerprint.comm[..program.len()].copy_from_slice(program.as_bytes());
    fingerprint.exec[0] = u64::from(program.as_bytes()[0]);
    let key = key(pid, start);
    StatRow {
        key,
        parent,
        fingerprint,
    }
}

fn row(pid: u32, (start, parent, program): Process) -> ProcEntry {
    ProcEntry {
        read_at: start * TICK_NS + TICK_NS,
        key: key(pid, start),
        exact: false,
        pidfd_inode: 0,
        membership: None,
        parent,
        uids: Uids::default(),
        image: Arc::new(Image {
            comm: program.into(),
            exe: format!("/bin/{program}").into(),
            ..Image::default()
        }),
        kernel_thread: false,
        namespace_init: false,
    }
}

/// Runs a pass and returns its events. No row can be read of the processes in `unread`. The start ticks of those in `fresh`
/// have not ended.
fn pass(table: &mut ScanTable, all: &Processes, unread: &[u32], fresh: &[u32]) -> Vec<EventKind> {
    table.begin();
    for (pid, process) in all {
        table.list(stat_row(*pid, *process), fresh.contains(pid));
    }
    let found = table.compare(|_| false);
    let wanted = found.wanted().into_iter();
    let rows = wanted
        .filter(|pid| !unread.contains(pid))
        .map(|pid| row(pid, all[&pid]))
        .collect();
    let mut events = Vec::new();
    table.emit_changes(found, rows, |kind| events.push(kind));
    events
}

/// Returns the events in short form.
fn short(events: &[EventKind]) -> Vec<String> {
    let pid = |key: Option<ProcessKey>| key.map_or("?".into(), |key| key.pid.to_string());
    let word = |kind: &EventKind| match kind {
        EventKind::Discovered(seen) => format!("seen {} of {}", seen.key.pid, seen.parent),
        EventKind::Exec { key, .. } => format!("exec {}", key.pid),
        EventKind::Exit { key, .. } => format!("exit {}", key.pid),
        EventKind::Reparent {
            child,
            old_parent,
            adopter,
            ..
        } => format!(
            "{} from {} to {}",
            child.pid,
            pid(*old_parent),
            pid(*adopter)
        ),
        other => format!("{other:?}"),
    };
    events.iter().map(word).collect()
}

fn events_of(table: &mut ScanTable, all: &Processes) -> Vec<String> {
    short(&pass(table, all, &[], &[]))
}

/// Returns a table whose four processes have been reported. They are init (1), a shell (2), its child (3) and a
/// grandchild (4).
fn seeded() -> (ScanTable, Processes) {
    let all = [
        (1, (1, 0, "init")),
        (2, (2, 1, "sh")),
        (3, (3, 2, "make")),
        (4, (4, 3, "cc")),
    ];
    let (all, mut table) = (Processes::from(all), ScanTable::default());
    let events = events_of(&mut table, &all);
    assert_eq!(
        events,
        ["seen 1 of 0", "seen 2 of 1", "seen 3 of 2", "seen 4 of 3"]
    );
    (table, all)
}

#[test]
fn unchanged_processes_emit_nothing() {
    let (mut table, all) = seeded();
    assert!(events_of(&mut table, &all).is_empty());
}

#[test]
fn new_processes_come_in_order_of_start_and_parents_first() {
    let (mut table, mut all) = seeded();
    // The pids have wrapped around: the child has a lower pid than its parent.
    all.insert(9, (5, 4, "sh"));
    all.insert(5, (5, 9, "ls"));
    all.insert(7, (6, 1, "daemon"));
    all.insert(6, (7, 2, "date"));
    let events = events_of(&mut table, &all);
    assert_eq!(
        events,
        ["seen 9 of 4", "seen 5 of 9", "seen 7 of 1", "seen 6 of 2"]
    );
}

#[test]
fn exec_emits_exec_and_new_name_emits_discovered() {
    let (mut table, mut all) = seeded();
    all.insert(4, (4, 3, "ld"));
    assert_eq!(events_of(&mut table, &all), ["exec 4"]);
    // The first letter identifies the exec.
    all.insert(4, (4, 3, "lx"));
    assert_eq!(events_of(&mut table, &all), ["seen 4 of 3"]);
    assert!(events_of(&mut table, &all).is_empty());
}

#[test]
fn exec_comes_before_new_children() {
    let (mut table, mut all) = seeded();
    let (pid, (start, parent, _)) = all.last_key_value().map(|(pid, of)| (*pid, *of)).unwrap();
    all.insert(pid, (start, parent, "wall"));
    all.insert(pid + 1, (start + 50, pid, "user"));
    let events = events_of(&mut table, &all);
    assert_eq!(
        events,
        [format!("exec {pid}"), format!("seen {} of {pid}", pid + 1)]
    );
}

#[test]
fn new_children_of_an_unreadable_process_are_held_back() {
    let (mut table, mut all) = seeded();
    let (pid, (start, parent, _)) = all.last_key_value().map(|(pid, of)| (*pid, *of)).unwrap();
    all.insert(pid, (start, parent, "wall"));
    all.insert(pid + 1, (start + 50, pid, "user"));
    let child = format!("seen {} of {pid}", pid + 1);
    let mut waited = 0;
    while short(&pass(&mut table, &all, &[pid], &[])) != [child.clone()] {
        waited += 1;
        assert!(waited < 100, "the child is held back forever");
    }
    assert!(waited > 3);
    assert_eq!(events_of(&mut table, &all), [format!("exec {pid}")]);
}

#[test]
fn exits_come_before_reparenting_and_children_before_parents() {
    let (mut table, mut all) = seeded();
    all.insert(5, (5, 4, "as"));
    events_of(&mut table, &all);
    all.remove(&3);
    all.remove(&4);
    all.insert(5, (5, 1, "as"));
    let events = events_of(&mut table, &all);
    assert_eq!(events, ["exit 4", "exit 3", "5 from 4 to 1"]);
}

#[test]
fn adopted_new_process_comes_before_the_exit_of_its_parent() {
    let (mut table, mut all) = seeded();
    all.remove(&4);
    all.insert(6, (6, 1, "daemon"));
    assert_eq!(events_of(&mut table, &all), ["seen 6 of 1", "exit 4"]);
}

#[test]
fn reused_pid_is_two_processes() {
    let (mut table, mut all) = seeded();
    all.insert(3, (9, 1, "make"));
    all.insert(4, (4, 1, "cc"));
    let events = events_of(&mut table, &all);
    assert_eq!(events, ["exit 3", "seen 3 of 1", "4 from 3 to 1"]);
    // The old parent is the first process with the pid.
    let (mut table, mut all) = seeded();
    all.insert(3, (9, 1, "make"));
    all.insert(4, (4, 1, "cc"));
    let events = pass(&mut table, &all, &[], &[]);
    let old = events.iter().find_map(|kind| match kind {
        EventKind::Reparent { old_parent, .. } => *old_parent,
        _ => None,
    });
    assert_eq!(old, Some(key(3, 3)));
}

#[test]
fn process_is_not_reported_in_the_tick_of_its_start() {
    let (mut table, mut all) = seeded();
    all.insert(5, (9, 3, "predecessor"));
    assert!(pass(&mut table, &all, &[], &[5]).is_empty());
    // It has exited, and another process got its pid, all within the tick.
    all.insert(5, (9, 1, "successor"));
    let events = pass(&mut table, &all, &[], &[]);
    let [EventKind::Discovered(seen)] = &events[..] else {
        panic!("{:?}", short(&events));
    };
    assert_eq!((seen.parent, &seen.image.comm[..]), (1, &b"successor"[..]));
    // The exit of the reported process with the pid does not wait for the tick.
    all.insert(4, (9, 1, "young"));
    assert_eq!(short(&pass(&mut table, &all, &[], &[4])), ["exit 4"]);
    assert_eq!(events_of(&mut table, &all), ["seen 4 of 1"]);
}

#[test]
fn unreadable_process_is_retried_and_is_no_exit() {
    let (mut table, mut all) = seeded();
    all.insert(5, (5, 4, "as"));
    all.insert(4, (4, 3, "ld"));
    assert!(pass(&mut table, &all, &[4, 5], &[]).is_empty());
    assert_eq!(events_of(&mut table, &all), ["exec 4", "seen 5 of 4"]);
    // New processes are not reported before their parent.
    all.insert(6, (6, 1, "sh"));
    all.insert(7, (7, 6, "ls"));
    all.insert(8, (8, 7, "ls"));
    all.remove(&4);
    all.insert(5, (5, 6, "as"));
    assert_eq!(short(&pass(&mut table, &all, &[6], &[])), ["exit 4"]);
    let events = ["seen 6 of 1", "seen 7 of 6", "seen 8 of 7", "5 from ? to 6"];
    assert_eq!(events_of(&mut table, &all), events);
    // Processes that are only listed have not exited.
    table.begin();
    for pid in all.keys() {
        table.mark_present(*pid);
    }
    assert!(table.compare(|_| false).gone.is_empty());
    // An abandoned pass changes nothing.
    table.begin();
    assert!(events_of(&mut table, &all).is_empty());
}

#[test]
fn reparenting_waits_for_the_exit_of_a_listed_parent() {
    let (mut table, mut all) = seeded();
    // Its parent was listed just before it exited.
    all.insert(4, (4, 1, "cc"));
    assert!(events_of(&mut table, &all).is_empty());
    all.remove(&3);
    assert_eq!(events_of(&mut table, &all), ["exit 3", "4 from 3 to 1"]);
    // The next pass confirms it although the parent is still listed.
    let (mut table, mut all) = seeded();
    all.insert(4, (4, 1, "cc"));
    assert!(events_of(&mut table, &all).is_empty());
    assert_eq!(events_of(&mut table, &all), ["4 from 3 to 1"]);
    assert!(events_of(&mut table, &all).is_empty());
}

#[test]
fn held_process_is_not_gone_before_its_exit_is_reported() {
    let (mut table, mut all) = seeded();
    all.remove(&4);
    table.begin();
    for (pid, process) in &all {
        table.list(stat_row(*pid, *process), false);
    }
    let found = table.compare(|of| of == key(4, 4));
    assert!(found.gone.is_empty());
    table.emit_changes(found, vec![], |_| panic!("nothing"));
    let ended = |key| HashMap::from_iter([(key, ExitStatus::Unknown)]);
    table.emit_exits(&ended(key(4, 5)), drop);
    assert_eq!(table.parent(key(4, 4)), Some(3), "another's exit");
    table.emit_exits(&ended(key(4, 4)), drop);
    assert!(events_of(&mut table, &all).is_empty());
}

#[test]
fn parents_first_ends_on_loops() {
    let keys = [key(1, 1), key(2, 1), key(3, 1)];
    let ordered = parents_first(&keys, |key| Some(key.pid % 3 + 1));
    assert_eq!(ordered.len(), 3);
}

/// A change between two passes. The number selects a living process.
#[derive(Clone, Debug)]
enum Act {
    Fork(usize),
    /// Forks a child with this pid, if it is free.
    ForkAs(usize, u32),
    Exit(usize),
    Exec(usize, &'static str),
    Pass {
        unread: Vec<u32>,
        fresh: bool,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let unread = prop::collection::vec(2u32..40, 0..4);
    prop_oneof![
        6 => any::<usize>().prop_map(Act::Fork),
        3 => (any::<usize>(), 2u32..40).prop_map(|(nth, pid)| Act::ForkAs(nth, pid)),
        5 => any::<usize>().prop_map(Act::Exit),
        3 => (any::<usize>(), prop_oneof![Just("sh"), Just("cc"), Just("sleep")])
            .prop_map(|(nth, program)| Act::Exec(nth, program)),
        4 => (unread, any::<bool>()).prop_map(|(unread, fresh)| Act::Pass { unread, fresh }),
    ]
}

fn run_acts(acts: &[Act]) {
    let mut all = Processes::from([(1, (0, 0, "init")), (2, (1, 1, "subreaper"))]);
    let mut table = ScanTable::default();
    let mut model = Model::new(Ruleset::default(), Scope::default(), u32::MAX);
    let (mut now, mut next) = (2, 3);
    let mut scan = |all: &Processes, unread: &[u32], fresh: &[u32], now: u64| {
        for mut kind in pass(&mut table, all, unread, fresh) {
            if let EventKind::Discovered(seen) = &mut kind {
                seen.read_at = now * TICK_NS;
            }
            let event = Event {
                time: now * TICK_NS,
                provenance: Provenance::Procfs,
                kind,
            };
            model.apply(&event, &mut Vec::new());
        }
        model.tree.iter().map(of).collect::<BTreeMap<_, _>>()
    };
    let nth = |all: &Processes, nth: usize| *all.keys().nth(nth % all.len()).unwrap();
    for act in acts {
        match act {
            Act::Fork(parent) => {
                let parent = nth(&all, *parent);
                next += 1;
                all.insert(100 + next, (now, parent, all[&parent].2));
            }
            Act::ForkAs(parent, pid) if !all.contains_key(pid) => {
                let parent = nth(&all, *parent);
                all.insert(*pid, (now, parent, all[&parent].2));
            }
            Act::Exit(process) => {
                let pid = nth(&all, *process);
                if pid > 2 {
                    let below = |all: &Processes, mut pid: u32| {
                        while pid > 2 {
                            pid = all[&pid].1;
                        }
                        pid
                    };
                    let adopter = below(&all, pid);
                    all.remove(&pid);
                    let orphans = all.values_mut().filter(|(_, parent, _)| *parent == pid);
                    orphans.for_each(|orphan| orphan.1 = adopter);
                }
            }
            Act::Exec(process, program) => {
                let pid = nth(&all, *process);
                all.entry(pid).and_modify(|of| of.2 = program);
            }
            Act::Pass { unread, fresh } => {
                let young = all.iter().filter(|(_, of)| *fresh && of.0 == now);
                let young: Vec<u32> = young.map(|(pid, _)| *pid).collect();
                scan(&all, unread, &young, now);
                now += 1;
            }
            Act::ForkAs(..) => {}
        }
    }
    let tree = scan(&all, &[], &[], now + 1);
    let expected: BTreeMap<u32, _> = all
        .iter()
        .map(|(pid, (start, parent, program))| {
            let parent = (*parent != 0).then_some(*parent);
            (*pid, (start * TICK_NS, parent, program.to_string()))
        })
        .collect();
    assert_eq!(tree, expected);
    assert!(scan(&all, &[], &[], now + 2) == expected);
}

/// Returns pid, start, parent and program of a process in the tree.
fn of(node: &reaper_model::Node) -> (u32, (u64, Option<u32>, String)) {
    let program = String::from_utf8(node.image.comm.clone()).unwrap();
    let parent = node.parent.map(|parent| parent.pid);
    (node.key.pid, (node.key.start, parent, program))
}

proptest! {
    #[test]
    fn events_build_the_tree_of_the_living_processes(acts in prop::collection::vec(act(), 0..60)) {
        run_acts(&acts);
    }
}
