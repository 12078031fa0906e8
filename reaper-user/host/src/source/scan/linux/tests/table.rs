//! Tables made by hand and at random: what is told of them, and that it makes the same tree.

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

/// A process as the kernel has it: start in ticks, parent, what it runs.
type Process = (u64, u32, &'static str);
type Processes = BTreeMap<u32, Process>;

fn key(pid: u32, start: u64) -> ProcessKey {
    let start = start * TICK_NS;
    ProcessKey { pid, start }
}

fn glimpse(pid: u32, (start, parent, program): Process) -> StatRow {
    let mut print = ImageFingerprint::default();
    print.comm[..program.len()].copy_from_slice(program.as_bytes());
    print.exec[0] = u64::from(program.as_bytes()[0]);
    let key = key(pid, start);
    StatRow {
        key,
        parent,
        fingerprint: print,
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

/// A pass: what is told. `unread` are those of whom no row can be had, `fresh` those in the tick of their birth.
fn pass(table: &mut ScanTable, all: &Processes, unread: &[u32], fresh: &[u32]) -> Vec<EventKind> {
    table.begin();
    for (pid, process) in all {
        table.list(glimpse(*pid, *process), fresh.contains(pid));
    }
    let found = table.compare(|_| false);
    let wanted = found.wanted().into_iter();
    let rows = wanted
        .filter(|pid| !unread.contains(pid))
        .map(|pid| row(pid, all[&pid]))
        .collect();
    let mut told = Vec::new();
    table.emit_changes(found, rows, |kind| told.push(kind));
    told
}

/// In short.
fn words(told: &[EventKind]) -> Vec<String> {
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
    told.iter().map(word).collect()
}

fn said(table: &mut ScanTable, all: &Processes) -> Vec<String> {
    words(&pass(table, all, &[], &[]))
}

/// A shell (2) of init's with a child (3) that has one (4), told of.
fn seeded() -> (ScanTable, Processes) {
    let all = [
        (1, (1, 0, "init")),
        (2, (2, 1, "sh")),
        (3, (3, 2, "make")),
        (4, (4, 3, "cc")),
    ];
    let (all, mut table) = (Processes::from(all), ScanTable::default());
    let told = said(&mut table, &all);
    assert_eq!(
        told,
        ["seen 1 of 0", "seen 2 of 1", "seen 3 of 2", "seen 4 of 3"]
    );
    (table, all)
}

#[test]
fn what_stays_as_it_is_tells_nothing() {
    let (mut table, all) = seeded();
    assert!(said(&mut table, &all).is_empty());
}

#[test]
fn births_are_told_in_their_order_and_parents_first() {
    let (mut table, mut all) = seeded();
    // The last pid was reached in between: the child has the lower one.
    all.insert(9, (5, 4, "sh"));
    all.insert(5, (5, 9, "ls"));
    all.insert(7, (6, 1, "daemon"));
    all.insert(6, (7, 2, "date"));
    let told = said(&mut table, &all);
    assert_eq!(
        told,
        ["seen 9 of 4", "seen 5 of 9", "seen 7 of 1", "seen 6 of 2"]
    );
}

#[test]
fn who_runs_another_program_is_told_to_have_and_who_has_another_name_is_seen_anew() {
    let (mut table, mut all) = seeded();
    all.insert(4, (4, 3, "ld"));
    assert_eq!(said(&mut table, &all), ["exec 4"]);
    // The same first letter is the same exec here.
    all.insert(4, (4, 3, "lx"));
    assert_eq!(said(&mut table, &all), ["seen 4 of 3"]);
    assert!(said(&mut table, &all).is_empty());
}

#[test]
fn who_runs_another_program_is_told_to_before_what_it_has_borne() {
    let (mut table, mut all) = seeded();
    let (pid, (start, parent, _)) = all.last_key_value().map(|(pid, of)| (*pid, *of)).unwrap();
    all.insert(pid, (start, parent, "wall"));
    all.insert(pid + 1, (start + 50, pid, "user"));
    let said = said(&mut table, &all);
    assert_eq!(
        said,
        [format!("exec {pid}"), format!("seen {} of {pid}", pid + 1)]
    );
}

#[test]
fn what_one_has_borne_that_cannot_be_read_waits_for_it_but_not_for_ever() {
    let (mut table, mut all) = seeded();
    let (pid, (start, parent, _)) = all.last_key_value().map(|(pid, of)| (*pid, *of)).unwrap();
    all.insert(pid, (start, parent, "wall"));
    all.insert(pid + 1, (start + 50, pid, "user"));
    let child = format!("seen {} of {pid}", pid + 1);
    let mut waited = 0;
    while words(&pass(&mut table, &all, &[pid], &[])) != [child.clone()] {
        waited += 1;
        assert!(waited < 100, "it waits for ever");
    }
    assert!(waited > 3);
    assert_eq!(said(&mut table, &all), [format!("exec {pid}")]);
}

#[test]
fn exits_come_before_adoptions_and_childrens_before_their_parents() {
    let (mut table, mut all) = seeded();
    all.insert(5, (5, 4, "as"));
    said(&mut table, &all);
    all.remove(&3);
    all.remove(&4);
    all.insert(5, (5, 1, "as"));
    let told = said(&mut table, &all);
    assert_eq!(told, ["exit 4", "exit 3", "5 from 4 to 1"]);
}

#[test]
fn who_is_found_with_an_adopter_is_told_of_while_its_makers_are_known() {
    let (mut table, mut all) = seeded();
    all.remove(&4);
    all.insert(6, (6, 1, "daemon"));
    assert_eq!(said(&mut table, &all), ["seen 6 of 1", "exit 4"]);
}

#[test]
fn a_pid_that_was_given_away_again_is_two_processes() {
    let (mut table, mut all) = seeded();
    all.insert(3, (9, 1, "make"));
    all.insert(4, (4, 1, "cc"));
    let told = said(&mut table, &all);
    assert_eq!(told, ["exit 3", "seen 3 of 1", "4 from 3 to 1"]);
    // And it is not the new one who was its parent.
    let (mut table, mut all) = seeded();
    all.insert(3, (9, 1, "make"));
    all.insert(4, (4, 1, "cc"));
    let told = pass(&mut table, &all, &[], &[]);
    let old = told.iter().find_map(|kind| match kind {
        EventKind::Reparent { old_parent, .. } => *old_parent,
        _ => None,
    });
    assert_eq!(old, Some(key(3, 3)));
}

#[test]
fn in_the_tick_of_its_birth_nobody_is_told_of() {
    let (mut table, mut all) = seeded();
    all.insert(5, (9, 3, "predecessor"));
    assert!(pass(&mut table, &all, &[], &[5]).is_empty());
    // It has gone, and another got its pid, all within the tick.
    all.insert(5, (9, 1, "successor"));
    let told = pass(&mut table, &all, &[], &[]);
    let [EventKind::Discovered(seen)] = &told[..] else {
        panic!("{:?}", words(&told));
    };
    assert_eq!((seen.parent, &seen.image.comm[..]), (1, &b"successor"[..]));
    // The end of one who is known is told all the same.
    all.insert(4, (9, 1, "young"));
    assert_eq!(words(&pass(&mut table, &all, &[], &[4])), ["exit 4"]);
    assert_eq!(said(&mut table, &all), ["seen 4 of 1"]);
}

#[test]
fn what_cannot_be_read_is_found_again_and_is_no_exit() {
    let (mut table, mut all) = seeded();
    all.insert(5, (5, 4, "as"));
    all.insert(4, (4, 3, "ld"));
    assert!(pass(&mut table, &all, &[4, 5], &[]).is_empty());
    assert_eq!(said(&mut table, &all), ["exec 4", "seen 5 of 4"]);
    // Nor is anybody told of without its parent.
    all.insert(6, (6, 1, "sh"));
    all.insert(7, (7, 6, "ls"));
    all.insert(8, (8, 7, "ls"));
    all.remove(&4);
    all.insert(5, (5, 6, "as"));
    assert_eq!(words(&pass(&mut table, &all, &[6], &[])), ["exit 4"]);
    let told = ["seen 6 of 1", "seen 7 of 6", "seen 8 of 7", "5 from ? to 6"];
    assert_eq!(said(&mut table, &all), told);
    // Listed, and no more than that.
    table.begin();
    for pid in all.keys() {
        table.keep(*pid);
    }
    assert!(table.compare(|_| false).gone.is_empty());
    // Given up half-way.
    table.begin();
    assert!(said(&mut table, &all).is_empty());
}

#[test]
fn whose_parent_is_still_listed_is_an_orphan_once_that_is_gone() {
    let (mut table, mut all) = seeded();
    // Its parent was looked at just before it died.
    all.insert(4, (4, 1, "cc"));
    assert!(said(&mut table, &all).is_empty());
    all.remove(&3);
    assert_eq!(said(&mut table, &all), ["exit 3", "4 from 3 to 1"]);
    // But if it stays, so be it.
    let (mut table, mut all) = seeded();
    all.insert(4, (4, 1, "cc"));
    assert!(said(&mut table, &all).is_empty());
    assert_eq!(said(&mut table, &all), ["4 from 3 to 1"]);
    assert!(said(&mut table, &all).is_empty());
}

#[test]
fn whose_end_somebody_else_tells_is_not_gone_before_that() {
    let (mut table, mut all) = seeded();
    all.remove(&4);
    table.begin();
    for (pid, process) in &all {
        table.list(glimpse(*pid, *process), false);
    }
    let found = table.compare(|of| of == key(4, 4));
    assert!(found.gone.is_empty());
    table.emit_changes(found, vec![], |_| panic!("nothing"));
    let ended = |key| HashMap::from_iter([(key, ExitStatus::Unknown)]);
    table.emit_exits(&ended(key(4, 5)), drop);
    assert_eq!(table.parent(key(4, 4)), Some(3), "another has not exited");
    table.emit_exits(&ended(key(4, 4)), drop);
    assert!(said(&mut table, &all).is_empty());
}

#[test]
fn loops_end() {
    let keys = [key(1, 1), key(2, 1), key(3, 1)];
    let ordered = parents_first(&keys, |key| Some(key.pid % 3 + 1));
    assert_eq!(ordered.len(), 3);
}

/// Something that happens between two passes, to the nth of those who live.
#[derive(Clone, Debug)]
enum Act {
    Fork(usize),
    /// With this pid, if it is free.
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

fn play(acts: &[Act]) {
    let mut all = Processes::from([(1, (0, 0, "init")), (2, (1, 1, "subreaper"))]);
    let mut table = ScanTable::default();
    let mut model = Model::new(Ruleset::default(), Scope::default(), u32::MAX);
    let (mut now, mut next) = (2, 3);
    let mut look = |all: &Processes, unread: &[u32], fresh: &[u32], now: u64| {
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
            Act::Exit(who) => {
                let who = nth(&all, *who);
                if who > 2 {
                    let below = |all: &Processes, mut pid: u32| {
                        while pid > 2 {
                            pid = all[&pid].1;
                        }
                        pid
                    };
                    let adopter = below(&all, who);
                    all.remove(&who);
                    let orphans = all.values_mut().filter(|(_, parent, _)| *parent == who);
                    orphans.for_each(|orphan| orphan.1 = adopter);
                }
            }
            Act::Exec(who, program) => {
                let who = nth(&all, *who);
                all.entry(who).and_modify(|of| of.2 = program);
            }
            Act::Pass { unread, fresh } => {
                let young = all.iter().filter(|(_, of)| *fresh && of.0 == now);
                let young: Vec<u32> = young.map(|(pid, _)| *pid).collect();
                look(&all, unread, &young, now);
                now += 1;
            }
            Act::ForkAs(..) => {}
        }
    }
    let tree = look(&all, &[], &[], now + 1);
    let expected: BTreeMap<u32, _> = all
        .iter()
        .map(|(pid, (start, parent, program))| {
            let parent = (*parent != 0).then_some(*parent);
            (*pid, (start * TICK_NS, parent, program.to_string()))
        })
        .collect();
    assert_eq!(tree, expected);
    assert!(look(&all, &[], &[], now + 2) == expected);
}

/// Pid, start, parent and program of a process as the tree has it.
fn of(node: &reaper_model::Node) -> (u32, (u64, Option<u32>, String)) {
    let program = String::from_utf8(node.image.comm.clone()).unwrap();
    let parent = node.parent.map(|parent| parent.pid);
    (node.key.pid, (node.key.start, parent, program))
}

proptest! {
    #[test]
    fn what_is_told_makes_the_tree_that_there_is(acts in prop::collection::vec(act(), 0..60)) {
        play(&acts);
    }
}
