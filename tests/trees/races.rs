//! Trees that change faster than a reader can follow.

use std::collections::BTreeSet;

use super::{CONFIG, ScenarioEntry, ScenarioRun, checks};
use crate::daemon::Event;
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("handover", handover),
    ("two-threads-give-away", two_threads_give_away),
];

/// Config with a grace period that outlasts the test, so that only the limit on births can end the tree.
const PATIENT: &str = "grace = \"10min\"\nkill_timeout = \"10s\"\n";

/// Asserts that the whole tree is reaped, if the source supports it, and that the canaries live.
fn end(view: &ScenarioRun, world: &mut World) -> Option<Vec<Event>> {
    view.await_closed(world, 1);
    if view.ends_all() {
        world.await_only_canaries();
    }
    view.stop(world, &[])
}

/// A chain of processes that ignore SIGTERM, each of which forks the next one and exits before a signal arrives, ends
/// before the grace period.
fn handover(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, PATIENT);
    // More births than it reaches before it is reaped. Where it is not reaped, few, so that it ends soon.
    let births = if view.ends_all() { 20_000 } else { 500 };
    let relay = format!("relay=handover+{births}");
    world.launch("claude", "agent", "agent", &[relay]);
    let agent = world.await_processes("agent", 1)[0];
    let relay = world.await_processes("relay", 1)[0];
    view.await_seen(&world, &["agent", "relay"]);
    world.open_gate("handover");
    if view.ends_all() {
        world.await_event("the first process has exited", |e| e.is("exit", relay));
    } else {
        world.await_gone(&["relay"]);
    }
    world.kill("agent");
    let Some(events) = end(view, &mut world) else {
        return;
    };
    checks::assert_root_exit(&world, &events, "agent", (None, Some("SIGKILL")));
    let gone = events
        .iter()
        .position(|e| e.is("session.root_exit", agent))
        .expect("the agent's exit");
    let after = &events[gone..];
    let births = after
        .iter()
        .filter(|e| e.event == "fork" && e.session_id.is_some());
    let births = births.count();
    assert!(births < 1000, "{births} births after the agent's exit");
    let closed = events.iter().filter(|e| e.event == "session.close").count();
    assert_eq!(closed, 1, "session.close events");
}

/// Two threads with children exit at the same time. All children of their process are reported as orphans, and no other
/// process is.
fn two_threads_give_away(view: &ScenarioRun) {
    const CHILDREN: usize = 100;
    let rounds = 10;
    let mut world = World::new(true);
    view.watch(&mut world, &format!("{CONFIG}events = \"all\"\n"));
    let givers = format!("givers=two-thread-parents+{rounds}+{CHILDREN}");
    world.launch("claude", "agent", "agent", &[givers]);
    ["agent", "givers"]
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
    assert_eq!(world.processes("giver").len(), rounds, "givers");
    view.await_seen(&world, &["agent", "givers"]);
    world.open_gate("die-agent");
    let Some(events) = end(view, &mut world) else {
        return;
    };
    let canary = world.process("canary");
    let givers = world.processes("giver");
    checks::assert_root_exit(&world, &events, "agent", (Some(0), None));
    let reparented: Vec<&Event> = events.iter().filter(|e| e.event == "reparent").collect();
    for e in &reparented {
        assert!(
            !e.is_about(canary),
            "the canary was reported as reparented: {e:?}"
        );
        assert!(
            e.old_parent_id.is_some() && e.birth_parent_id == e.old_parent_id,
            "another process's child was reported as reparented: {e:?}"
        );
    }
    let ids = |which: &dyn Fn(&&Event) -> bool| -> BTreeSet<String> {
        events
            .iter()
            .filter(which)
            .filter_map(|e| e.entity_id.clone())
            .collect()
    };
    let parents = ids(&|e| givers.iter().any(|key| e.is("fork", *key)));
    assert_eq!(parents.len(), rounds, "givers that were reported");
    let children = ids(&|e| {
        let parent = e.birth_parent_id.as_ref();
        e.event == "fork" && parent.is_some_and(|id| parents.contains(id))
    });
    assert_eq!(children.len(), 2 * rounds * CHILDREN, "their children");
    // The adopter may be missing if the other thread's exit moved the child first. The orphan event may not.
    let orphans = ids(&|e| e.event == "orphan");
    let missing = children.difference(&orphans).count();
    assert_eq!(missing, 0, "children without an orphan event");
    assert!(!reparented.is_empty(), "no reparent event");
}
