//! What holds whatever happens: random lives of random trees, told truly, twice, with gaps, out of order.

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

fn told(own_pid: u32, events: &[Event]) -> Model {
    let mut model = Model::new(rules(), Scope::default(), own_pid);
    for event in events {
        model.apply(event, &mut Vec::new());
        assert_consistent(&model);
    }
    model
}

/// By exact key, which is what the pids of a truth stand for: none of them is used twice.
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
    fn who_is_due_is_who_truly_is(acts in acts()) {
        let truth = Truth::of(&acts, 100);
        let model = told(OWN_PID, &truth.events);
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
        let (once, twice) = (told(OWN_PID, &events), told(OWN_PID, &doubled));
        // A whole life told again brings no exec of the past back into force but the last one.
        if at_once {
            prop_assert_eq!(decisions(&once), decisions(&twice));
        } else {
            prop_assert_eq!(once.tree.len(), twice.tree.len());
        }
    }

    #[test]
    fn trees_that_have_nothing_in_common_do_not_mind_each_other(
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
        let mut apart = decisions(&told(OWN_PID, &a));
        apart.extend(decisions(&told(OWN_PID, &b)));
        prop_assert_eq!(decisions(&told(OWN_PID, &mixed)), apart);
    }

    /// The probes were attached before anything happened, and /proc was read somewhere on the way.
    #[test]
    fn a_look_at_proc_on_the_way_makes_nobody_due_who_is_not(
        acts in acts(),
        looked in 0..120_usize,
        drained in 0..600_usize,
    ) {
        let before = Truth::of(&acts[..looked.min(acts.len())], 100);
        let truth = Truth::of(&acts, 100);
        let drained = drained.min(before.events.len());
        let mut events = truth.events[..drained].to_vec();
        let mut rows: Vec<_> = before.live.values().collect();
        rows.sort_by_key(|process| process.key.pid);
        events.extend(rows.into_iter().map(|process| before.row(process)));
        events.extend_from_slice(&truth.events[drained..]);
        let model = told(OWN_PID, &events);
        prop_assert_eq!(model.tree.len(), truth.live.len());
        // What the table shows of a parent may be what it became after its child was born.
        prop_assert!(due(&model).is_subset(&below_agents(&truth.events)));
        prop_assert!(pids(&truth.due()).is_subset(&due(&model)) || drained < before.events.len());
        if drained == before.events.len() {
            prop_assert_eq!(due(&model), pids(&truth.due()));
        }
    }

    /// Events doubled, dropped and out of order: nothing panics, what was never a member is not reaped.
    #[test]
    fn damage_reaps_no_stranger(
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
            let EventKind::Discovered(seen) = &mut row.kind else { unreachable!() };
            seen.kernel_thread = true;
            events.insert(0, row);
        }
        let model = told(own, &events);
        // A lost exec may have been that of a boundary, so only lineage counts here.
        let lineage = below_agents(&truth.events);
        for node in model.tree.iter() {
            if model.decide(node.key).verdict == Verdict::Reap {
                prop_assert!(lineage.contains(&node.key.pid), "{} is a stranger", node.key);
                prop_assert!(node.key.pid > 1 && node.key.pid != own && !node.kernel_thread);
                let mut above = model.tree.by_pid(own).and_then(|own| own.parent);
                for _ in 0..model.tree.len() {
                    prop_assert_ne!(above, Some(node.key), "an ancestor of this program");
                    above = above.and_then(|key| model.tree.get(key)?.parent);
                }
            }
        }
    }

    /// Events about nobody in particular: keys that contradict each other in every way.
    #[test]
    fn nonsense_is_survived(events in prop::collection::vec(nonsense(), 0..200)) {
        let mut model = told(3, &events);
        for node in model.tree.iter() {
            let reaped = model.decide(node.key).verdict == Verdict::Reap;
            prop_assert!(!reaped || node.key.pid > 1 && node.key.pid != 3 && !node.kernel_thread);
            let session = model.wanted_membership(node.key).and_then(|mark| mark.session);
            prop_assert_eq!(session.is_some(), node.state.member.session.is_some());
        }
        model.finish_restore(&mut Vec::new());
        let before: BTreeSet<ProcessKey> = model.tree.iter().map(|node| node.key).collect();
        let foreign: BTreeSet<ProcessKey> = before.iter().copied().filter(|key| model.is_untracked(*key)).collect();
        model.forget_untracked();
        assert_consistent(&model);
        let after = model.tree.iter().map(|node| node.key).collect();
        prop_assert_eq!(&before - &foreign, after);
    }
}

fn nonsense() -> impl Strategy<Value = Event> {
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
        (key(), any::<bool>()).prop_map(|(key, own_accord)| EventKind::Exit {
            key,
            parent: None,
            exit_status: if own_accord {
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
                    opened_at: 0,
                    exited: gone.map(|at| (at, ExitStatus::Unknown)),
                    was_signalled: false,
                    is_evaluated: false,
                }))
            }),
    ];
    let mark = (maybe(), 0..1024_u32).prop_map(|(session, flags)| Membership { session, flags });
    let kind = (kind, prop::option::of(mark)).prop_map(|(mut kind, told)| {
        match &mut kind {
            EventKind::Fork {
                membership: mark, ..
            }
            | EventKind::Exec {
                membership: mark, ..
            }
            | EventKind::Exit {
                membership: mark, ..
            }
            | EventKind::Reparent {
                membership: mark, ..
            }
            | EventKind::Move {
                membership: mark, ..
            }
            | EventKind::Discovered(ProcEntry {
                membership: mark, ..
            }) => *mark = told,
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

/// What is remembered of the dead is bounded, however many there are and however they descend.
#[test]
fn the_dead_are_forgotten() {
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
        // The chain moves on: each dies when it has a child, but for the agent.
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
    // With the end of the chain, its story goes.
    w.dies_by_signal(last);
    assert!(w.model.tree.kept()[0] <= 16_384);
    w.dies_by_signal(agent);
    assert_eq!(w.model.sessions.iter().count(), 0);
}
