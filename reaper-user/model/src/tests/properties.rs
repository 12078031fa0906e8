//! Properties of the model with random process trees, whose events are reported correctly, twice, with gaps, or out of
//! order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::truth::{PROGRAMS, Truth, acts, below_agents, pids};
use super::world::{INIT, OWN_PID, USER, World, assert_consistent, image, rules};
use crate::event::{
    Event, EventKind, ExitStatus, Membership, ProcEntry, ProcessKey, Provenance, RestoredSession,
    TICK_NS, Uids,
};
use crate::policy::Verdict;
use crate::{Model, Scope};

fn model_of(own_pid: u32, events: &[Event]) -> Model {
    let mut model = Model::new(rules(), Scope::default(), own_pid);
    for event in events {
        model.apply(event, &mut Vec::new());
        assert_consistent(&model);
    }
    model
}

/// Returns the pids of due processes. A [`Truth`] uses no pid twice.
fn due(model: &Model) -> BTreeSet<u32> {
    let due = model
        .tree
        .iter()
        .filter(|node| model.decide(node.key).due.is_some());
    due.map(|node| node.key.pid).collect()
}

fn reaped(model: &Model) -> BTreeSet<u32> {
    let keys = model.tree.iter().map(|node| node.key);
    let reaped = keys.filter(|key| model.decide(*key).verdict == Verdict::Reap);
    reaped.map(|key| key.pid).collect()
}

fn decisions(model: &Model) -> BTreeMap<ProcessKey, crate::policy::Decision> {
    let keys = model.tree.iter().map(|node| node.key);
    keys.map(|key| (key, model.decide(key))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn due_members_match_the_reference_model(acts in acts()) {
        let truth = Truth::of(&acts, 100);
        let model = model_of(OWN_PID, &truth.events);
        prop_assert_eq!(model.tree.len(), truth.live.len());
        prop_assert_eq!(due(&model), pids(&truth.due()));
        prop_assert!(reaped(&model).is_subset(&pids(&truth.due())));
    }

    #[test]
    fn doubled_events_change_no_decision(acts in acts(), at_once in any::<bool>()) {
        let events = Truth::of(&acts, 100).events;
        let doubled = if at_once {
            events.iter().flat_map(|event| [event.clone(), event.clone()]).collect()
        } else {
            [&events[..], &events[..]].concat()
        };
        let (once, twice) = (model_of(OWN_PID, &events), model_of(OWN_PID, &doubled));
        // If the whole history is repeated, old execs apply again, so only the processes are compared.
        if at_once {
            prop_assert_eq!(decisions(&once), decisions(&twice));
        } else {
            prop_assert_eq!(once.tree.len(), twice.tree.len());
        }
    }

    #[test]
    fn unrelated_trees_do_not_affect_each_other(
        a in acts(),
        b in acts(),
        order in prop::collection::vec(any::<bool>(), 600),
    ) {
        let (a, b) = (Truth::of(&a, 100).events, Truth::of(&b, 100_000).events);
        let (mut left, mut right) = (a.iter().peekable(), b.iter().peekable());
        let mut mixed = vec![];
        for first in order.iter().cycle() {
            let next = if *first { left.next() } else { right.next() };
            mixed.extend(next.cloned());
            if left.peek().is_none() && right.peek().is_none() {
                break;
            }
            if left.peek().is_none() || right.peek().is_none() {
                mixed.extend(left.by_ref().cloned());
                mixed.extend(right.by_ref().cloned());
                break;
            }
        }
        let mut apart = decisions(&model_of(OWN_PID, &a));
        apart.extend(decisions(&model_of(OWN_PID, &b)));
        prop_assert_eq!(decisions(&model_of(OWN_PID, &mixed)), apart);
    }

    /// The probes are attached from the start, and /proc is scanned once in between.
    #[test]
    fn scan_between_events_makes_no_wrong_process_due(
        acts in acts(),
        scanned in 0..120_usize,
        drained in 0..600_usize,
    ) {
        let before = Truth::of(&acts[..scanned.min(acts.len())], 100);
        let truth = Truth::of(&acts, 100);
        let drained = drained.min(before.events.len());
        let mut events = truth.events[..drained].to_vec();
        let mut rows: Vec<_> = before.live.values().collect();
        rows.sort_by_key(|process| process.key.pid);
        events.extend(rows.into_iter().map(|process| before.row(process)));
        events.extend_from_slice(&truth.events[drained..]);
        let model = model_of(OWN_PID, &events);
        prop_assert_eq!(model.tree.len(), truth.live.len());
        // The scan may show a program that a parent executed after it had forked its child.
        prop_assert!(due(&model).is_subset(&below_agents(&truth.events)));
        prop_assert!(pids(&truth.due()).is_subset(&due(&model)) || drained < before.events.len());
        if drained == before.events.len() {
            prop_assert_eq!(due(&model), pids(&truth.due()));
        }
    }

    /// Events are doubled, dropped and out of order. Nothing panics, and only descendants of agents are reaped.
    #[test]
    fn damaged_events_reap_no_unrelated_process(
        acts in acts(),
        damage in prop::collection::vec((0..8_u8, any::<prop::sample::Index>()), 600),
        own in any::<prop::sample::Index>(),
        thread in any::<prop::sample::Index>(),
    ) {
        let truth = Truth::of(&acts, 100);
        let all: Vec<u32> = (101..=truth.next_pid).collect();
        let (own, thread) = (*own.get(&all), *thread.get(&all));
        let mut events = vec![];
        for (event, (damage, other)) in truth.events.iter().zip(damage.iter().cycle()) {
            match damage {
                0 => {}
                1 => events.extend([event.clone(), event.clone()]),
                2 => events.extend([event.clone(), other.get(&truth.events).clone()]),
                3 => events.insert(events.len().saturating_sub(1), event.clone()),
                _ => events.push(event.clone()),
            }
        }
        let kernel_thread = truth.live.values().find(|process| process.key.pid == thread);
        if let Some(process) = kernel_thread {
            let mut row = truth.row(process);
            let EventKind::Discovered(entry) = &mut row.kind else { unreachable!() };
            entry.kernel_thread = true;
            events.insert(0, row);
        }
        let model = model_of(own, &events);
        // A lost exec may have been that of a boundary, so only the lineage is checked.
        let lineage = below_agents(&truth.events);
        for node in model.tree.iter() {
            if model.decide(node.key).verdict == Verdict::Reap {
                prop_assert!(lineage.contains(&node.key.pid), "{} descends from no agent", node.key);
                prop_assert!(node.key.pid > 1 && node.key.pid != own && !node.kernel_thread);
                let mut above = model.tree.by_pid(own).and_then(|own| own.parent);
                for _ in 0..model.tree.len() {
                    prop_assert_ne!(above, Some(node.key), "an ancestor of the service");
                    above = above.and_then(|key| model.tree.get(key)?.parent);
                }
            }
        }
    }

    /// Random events, whose keys contradict each other.
    #[test]
    fn random_events_never_panic(events in prop::collection::vec(random_event(), 0..200)) {
        let mut model = model_of(3, &events);
        for node in model.tree.iter() {
            let reaped = model.decide(node.key).verdict == Verdict::Reap;
            prop_assert!(!reaped || node.key.pid > 1 && node.key.pid != 3 && !node.kernel_thread);
            let session = model.wanted_membership(node.key).and_then(|membership| membership.session);
            prop_assert_eq!(session.is_some(), node.state.member.session.is_some());
        }
        model.finish_restore(&mut Vec::new());
        let before: BTreeSet<ProcessKey> = model.tree.iter().map(|node| node.key).collect();
        let untracked: BTreeSet<ProcessKey> = before.iter().copied().filter(|key| model.is_untracked(*key)).collect();
        model.forget_untracked();
        assert_consistent(&model);
        let after = model.tree.iter().map(|node| node.key).collect();
        prop_assert_eq!(&before - &untracked, after);
    }
}

fn random_event() -> impl Strategy<Value = Event> {
    let key = || {
        (0..6_u32, 0..4_u64).prop_map(|(pid, start)| ProcessKey {
            pid,
            start: start * TICK_NS / 2,
        })
    };
    let maybe = move || prop::option::of(key());
    let program = || prop::sample::select(&PROGRAMS[..]).prop_map(|name| image(name, 1));
    let kind = prop_oneof![
        (key(), maybe(), maybe(), any::<bool>()).prop_map(|(child, parent, creator, init)| {
            EventKind::Fork {
                child,
                parent,
                creator,
                uids: Uids::default(),
                pidfd_inode: 0,
                namespace_init: init,
                membership: None,
            }
        }),
        (key(), any::<u64>()).prop_map(|(key, cgroup_id)| EventKind::Move {
            key,
            cgroup_id,
            membership: None
        }),
        (key(), maybe(), program()).prop_map(|(key, parent, image)| EventKind::Exec {
            key,
            parent,
            uids: Uids::default(),
            pidfd_inode: 0,
            image,
            membership: None
        }),
        (key(), any::<bool>()).prop_map(|(key, exited_normally)| EventKind::Exit {
            key,
            parent: None,
            exit_status: if exited_normally {
                ExitStatus::Exited(0)
            } else {
                ExitStatus::Unknown
            },
            peak_rss: 0,
            membership: None
        }),
        (key(), maybe(), maybe()).prop_map(|(child, old_parent, adopter)| {
            EventKind::Reparent {
                child,
                old_parent,
                adopter,
                membership: None,
            }
        }),
        (key(), 0..6_u32, program(), any::<[bool; 2]>()).prop_map(
            |(key, parent, image, [a, b])| {
                let exact = key.start.is_multiple_of(TICK_NS * 3 / 2);
                let start = key.start - key.start % TICK_NS;
                EventKind::Discovered(ProcEntry {
                    read_at: key.start % 100,
                    exact,
                    pidfd_inode: 0,
                    membership: None,
                    key: if exact {
                        key
                    } else {
                        ProcessKey { start, ..key }
                    },
                    parent,
                    uids: Uids::default(),
                    image,
                    kernel_thread: a,
                    namespace_init: b,
                })
            }
        ),
        (key(), 0..20_u8).prop_map(|(key, signal)| EventKind::SignalSent { key, signal }),
        (
            key(),
            key(),
            [maybe(), maybe()],
            program(),
            prop::option::of(0..100_u64)
        )
            .prop_map(|(first_root, root, [outer, parent], program, gone)| {
                EventKind::Restored(Box::new(RestoredSession {
                    first_root,
                    root,
                    outer,
                    parent,
                    tty: 1,
                    rule: String::from_utf8_lossy(&program.comm).into(),
                    uids: Uids::default(),
                    cgroup_id: 0,
                    unit_hash: 0,
                    opened_at: 0,
                    exited: gone.map(|at| (at, ExitStatus::Unknown)),
                    was_signalled: false,
                    is_evaluated: false,
                }))
            }),
    ];
    let membership =
        (maybe(), 0..1024_u32).prop_map(|(session, flags)| Membership { session, flags });
    let kind = (kind, prop::option::of(membership)).prop_map(|(mut kind, entry)| {
        match &mut kind {
            EventKind::Fork { membership, .. }
            | EventKind::Exec { membership, .. }
            | EventKind::Exit { membership, .. }
            | EventKind::Reparent { membership, .. }
            | EventKind::Move { membership, .. }
            | EventKind::Discovered(ProcEntry { membership, .. }) => *membership = entry,
            EventKind::SignalSent { .. } | EventKind::Restored(_) => {}
        }
        kind
    });
    let provenance =
        prop::sample::select(&[Provenance::Kernel, Provenance::Procfs, Provenance::Inferred][..]);
    (kind, provenance, 0..100_u64).prop_map(|(kind, provenance, time)| Event {
        time,
        provenance,
        kind,
    })
}

/// The number of remembered exited processes is bounded, whatever their number and descent.
#[test]
fn memory_for_exited_processes_is_bounded() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let mut last = agent;
    for n in 0..40_000_u32 {
        let child = ProcessKey {
            pid: 1000 + n,
            start: w.now + 1_000_000,
        };
        let time = child.start;
        let fork = EventKind::Fork {
            child,
            parent: Some(last),
            creator: Some(last),
            uids: USER,
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        };
        let exit = EventKind::Exit {
            key: last,
            parent: None,
            exit_status: ExitStatus::Exited(0),
            peak_rss: 0,
            membership: None,
        };
        // Each process except the agent exits when it has a child.
        let kinds = [Some(fork), (last != agent).then_some(exit)];
        for kind in kinds.into_iter().flatten() {
            w.now = time;
            let provenance = Provenance::Kernel;
            w.model.apply(
                &Event {
                    time,
                    provenance,
                    kind,
                },
                &mut Vec::new(),
            );
        }
        last = child;
    }
    let kept = w.model.tree.kept();
    assert!(kept[0] <= 16_384 && kept[1] <= 2 * 16_384 + 1, "{kept:?}");
    assert!(kept[2] <= 1024 && kept[3] <= 1024, "{kept:?}");
    assert!(w.is_member(last));
    // The last process of the chain exits, and its history is dropped.
    w.kill(last);
    assert!(w.model.tree.kept()[0] <= 16_384);
    w.kill(agent);
    assert_eq!(w.model.sessions.iter().count(), 0);
}
