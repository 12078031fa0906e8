//! Trees that change faster than anybody looks.

use std::collections::BTreeSet;

use super::{CONFIG, ScenarioEntry, ScenarioRun, checks};
use crate::daemon::Event;
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("handover", handover),
    ("two-threads-give-away", two_threads_give_away),
];

/// A grace that outlasts the test, so that only the limit of births can end the tree.
const PATIENT: &str = "grace = \"10min\"\nkill_timeout = \"10s\"\n";

/// All of the tree is ended, if it must be, and nobody else.
fn end(view: &ScenarioRun, world: &mut World) -> Option<Vec<Event>> {
    view.await_closed(world, 1);
    if view.ends_all() {
        world.await_only_canaries();
    }
    view.stop(world, &[])
}

/// A process that ignores SIGTERM and has handed over before any signal can reach it does not get the whole
/// grace to do so.
fn handover(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, PATIENT);
    // More than it comes to, so that it is at it until it is ended; where nobody ends it, it goes on for no longer than
    // need be.
    let births = if view.ends_all() { 20_000 } else { 500 };
    let relay = format!("relay=handover+{births}");
    world.launch("claude", "agent", "agent", &[relay]);
    let agent = world.await_processes("agent", 1)[0];
    let relay = world.await_processes("relay", 1)[0];
    view.await_seen(&world, &["agent", "relay"]);
    world.open_gate("handover");
    if view.ends_all() {
        world.await_event("it has handed over", |e| e.is("exit", relay));
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
        .expect("the agent's end");
    let after = &events[gone..];
    let births = after
        .iter()
        .filter(|e| e.event == "fork" && e.session_id.is_some());
    let births = births.count();
    assert!(births < 1000, "{births} births after the agent's end");
    let closed = events.iter().filter(|e| e.event == "session.close").count();
    assert_eq!(closed, 1, "times that the session was closed");
}

/// Two threads of a process that give their children away at once: all of these are known for orphans, and nobody
/// else is told to have gone.
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
    let told: Vec<&Event> = events.iter().filter(|e| e.event == "reparent").collect();
    for e in &told {
        assert!(
            !e.is_about(canary),
            "the canary was told to have gone: {e:?}"
        );
        assert!(
            e.old_parent_id.is_some() && e.birth_parent_id == e.old_parent_id,
            "somebody else's child was told to have gone: {e:?}"
        );
    }
    let ids = |which: &dyn Fn(&&Event) -> bool| -> BTreeSet<String> {
        events
            .iter()
            .filter(which)
            .filter_map(|e| e.entity_id.clone())
            .collect()
    };
    let parents = ids(&|e| givers.iter().any(|who| e.is("fork", *who)));
    assert_eq!(parents.len(), rounds, "givers that were told");
    let children = ids(&|e| {
        let parent = e.birth_parent_id.as_ref();
        e.event == "fork" && parent.is_some_and(|id| parents.contains(id))
    });
    assert_eq!(children.len(), 2 * rounds * CHILDREN, "their children");
    // Who adopts it may go untold where the other thread has given it away before; that it is an orphan may not.
    let orphans = ids(&|e| e.event == "orphan");
    let missing = children.difference(&orphans).count();
    assert_eq!(missing, 0, "children that were not told to be orphans");
    assert!(!told.is_empty(), "nobody was told to have gone");
}
