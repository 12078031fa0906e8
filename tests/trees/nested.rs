//! More than one agent.

use super::{CONFIG, judge};
use crate::cli::told;
use crate::daemon::Event;
use crate::world::{World, eventually};

type Story = (&'static str, fn());

pub const STORIES: &[Story] = &[
    ("side-by-side", side_by_side),
    ("inner-agent-alone", inner_alone),
    ("agent-below-a-boundary-alone", below_a_boundary),
    ("relaunch", relaunch),
    ("sub-agent-that-is-no-relaunch", sub_agent),
];

const WALL: &str = "grace = \"500ms\"\n[[boundary]]\nname = \"my-wall\"\ncomm = \"test-wall\"\n";

/// The usual agent with these arguments, and everybody up.
fn play(world: &mut World, via: Option<&str>, args: &[&str], cast: &[&str]) {
    let args: Vec<String> = args.iter().map(|a| a.to_string()).collect();
    match via {
        Some(play) => world.order("worker", play, play, &args),
        None => world.order("claude", "agent", "agent", &args),
    }
    cast.iter().for_each(|role| drop(world.await_cast(role, 1)));
}

fn await_closed(world: &World, n: usize) {
    eventually(&format!("{n} sessions closed"), || {
        let closed = world
            .daemon()
            .events()
            .iter()
            .filter(|e| e.event == "session.close")
            .count();
        (closed >= n).then_some(())
    });
}

fn end(mut world: World) -> Vec<Event> {
    world.assert_alive(&["launcher", "canary", "stray"]);
    let events = world.stop();
    judge::sound(&world, &events);
    events
}

/// Two agents of one kind: the end of one is none of the other's business.
fn side_by_side() {
    let mut world = World::new(true);
    world.watch(CONFIG, &[]);
    play(&mut world, None, &["leaf=sleep"], &["agent", "leaf"]);
    world.order("claude", "agent", "other", &["others-leaf=sleep".into()]);
    ["other", "others-leaf"]
        .iter()
        .for_each(|role| drop(world.await_cast(role, 1)));
    world.kill("agent");
    world.await_gone(&["leaf"]);
    await_closed(&world, 1);
    world.assert_alive(&["other", "others-leaf"]);
    world.kill("other");
    world.await_gone(&["others-leaf"]);
    await_closed(&world, 2);
    end(world);
}

/// The inner session ends alone.
fn inner_alone() {
    let mut world = World::new(true);
    world.watch(CONFIG, &[]);
    let inner = "inner=as:claude+agent+inner-leaf=sleep";
    play(
        &mut world,
        None,
        &["leaf=sleep", inner],
        &["agent", "leaf", "inner", "inner-leaf"],
    );
    let inner = world.one("inner");
    let open = world.await_event("the inner session", |e| e.is("session.open", inner));
    assert!(
        open.outer_session_id.is_some(),
        "the inner session has no outer one"
    );
    world.kill("inner");
    world.await_gone(&["inner-leaf"]);
    await_closed(&world, 1);
    world.assert_alive(&["agent", "leaf"]);
    world.kill("agent");
    world.await_gone(&["leaf"]);
    await_closed(&world, 2);
    end(world);
}

/// Below a boundary an agent is on its own again.
fn below_a_boundary() {
    let mut world = World::new(true);
    world.watch(WALL, &[]);
    let wall = "wall=as:test-wall+parent+second+as:claude+agent+second-leaf=sleep";
    play(
        &mut world,
        None,
        &["leaf=sleep", wall],
        &["agent", "leaf", "wall", "second", "second-leaf"],
    );
    let second = world.one("second");
    let open = world.await_event("the second session", |e| e.is("session.open", second));
    assert_eq!(
        open.outer_session_id, None,
        "the session below the boundary has an outer one"
    );
    world.kill("agent");
    world.await_gone(&["leaf"]);
    await_closed(&world, 1);
    world.assert_alive(&["wall", "second", "second-leaf"]);
    world.kill("second");
    world.await_gone(&["second-leaf"]);
    await_closed(&world, 2);
    world.assert_alive(&["wall"]);
    end(world);
}

/// A child of the same kind in the same terminal that has something else to read from was started by the agent for its
/// own ends, and goes with it when that leaves of its own accord.
fn sub_agent() {
    let mut world = World::new(true);
    world.watch(CONFIG, &[]);
    let args = [
        "leaf=sleep",
        "second=no-input+as:claude+agent+second-leaf=sleep",
        "die=exit+0",
    ];
    play(
        &mut world,
        Some("terminal"),
        &args,
        &["terminal", "agent", "leaf", "second", "second-leaf"],
    );
    // What they read from is looked for ahead of any need.
    for role in ["agent", "second"] {
        let pid = world.one(role).pid.to_string();
        eventually("what it reads from is known", || {
            let input = told(&world, &["explain", &pid])["facts"]["terminal_input"].as_bool();
            input.inspect(|input| assert_eq!(*input, role == "agent"))
        });
    }
    world.open("die-agent");
    world.await_gone(&["agent", "leaf", "second", "second-leaf"]);
    world.assert_alive(&["terminal"]);
    let events = end(world);
    assert!(!events.iter().any(|e| e.event == "session.relaunch"));
}

/// A root that leaves of its own accord hands the session to its child of the same kind in the same terminal.
fn relaunch() {
    let mut world = World::new(true);
    world.watch(CONFIG, &[]);
    let args = [
        "leaf=sleep",
        "second=as:claude+agent+second-leaf=sleep",
        "die=exit+0",
    ];
    play(
        &mut world,
        Some("terminal"),
        &args,
        &["terminal", "agent", "leaf", "second", "second-leaf"],
    );
    world.open("die-agent");
    let (agent, second) = (world.one("agent"), world.one("second"));
    world.await_event("the agent's exit", |e| e.is("exit", agent));
    world.await_event("a relaunch", |e| e.event == "session.relaunch");
    world.assert_alive(&["second", "second-leaf", "leaf"]);
    world.kill("second");
    world.await_gone(&["leaf", "second-leaf"]);
    await_closed(&world, 2);
    world.assert_alive(&["terminal"]);
    let events = end(world);
    let judged = events
        .iter()
        .any(|e| e.is("decision", second) && e.decision.as_deref() == Some("reap"));
    assert!(!judged, "the new root was to be reaped");
}
