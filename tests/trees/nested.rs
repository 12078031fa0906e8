//! Trees with more than one agent.

use super::{CONFIG, ScenarioEntry, ScenarioRun};
use crate::cli::ask_json;
use crate::daemon::Event;
use crate::world::{World, eventually};

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("side-by-side", side_by_side),
    ("inner-agent-alone", inner_alone),
    ("agent-below-a-boundary-alone", below_a_boundary),
    ("relaunch", relaunch),
    ("sub-agent-that-is-no-relaunch", sub_agent),
];

const WALL: &str = "grace = \"200ms\"\nkill_timeout = \"10s\"\n\
    [[boundary]]\nname = \"my-wall\"\ncomm = \"test-wall\"\n";

/// Starts an agent with these arguments and waits for these roles.
fn play(world: &mut World, via: Option<&str>, args: &[&str], processes: &[&str]) {
    let args: Vec<String> = args.iter().map(|a| a.to_string()).collect();
    match via {
        Some(play) => world.launch("worker", play, play, &args),
        None => world.launch("claude", "agent", "agent", &args),
    }
    processes
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
}

/// Two agents of one kind: the exit of one does not touch the other's tree.
fn side_by_side(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    play(&mut world, None, &["leaf=sleep"], &["agent", "leaf"]);
    world.launch("claude", "agent", "other", &["others-leaf=sleep".into()]);
    ["other", "others-leaf"]
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
    view.await_seen(&world, &["agent", "leaf", "other", "others-leaf"]);
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 1);
    world.assert_alive(&["other", "others-leaf"]);
    world.kill("other");
    view.await_gone(&world, &["others-leaf"]);
    view.await_closed(&world, 2);
    view.end(world, &[]);
}

/// A nested agent exits first: only its session closes.
fn inner_alone(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let inner = "inner=as:claude+agent+inner-leaf=sleep";
    play(
        &mut world,
        None,
        &["leaf=sleep", inner],
        &["agent", "leaf", "inner", "inner-leaf"],
    );
    let inner = world.process("inner");
    let open = world.await_event("the inner session", |e| e.is("session.open", inner));
    assert!(
        open.outer_session_id.is_some(),
        "the nested session has no outer session"
    );
    view.await_seen(&world, &["agent", "leaf", "inner-leaf"]);
    world.kill("inner");
    view.await_gone(&world, &["inner-leaf"]);
    view.await_closed(&world, 1);
    world.assert_alive(&["agent", "leaf"]);
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 2);
    view.end(world, &[]);
}

/// An agent below a boundary has a session that is not nested.
fn below_a_boundary(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, WALL);
    let wall = "wall=as:test-wall+parent+second+as:claude+agent+second-leaf=sleep";
    play(
        &mut world,
        None,
        &["leaf=sleep", wall],
        &["agent", "leaf", "wall", "second", "second-leaf"],
    );
    let second = world.process("second");
    let open = world.await_event("the second session", |e| e.is("session.open", second));
    assert_eq!(
        open.outer_session_id, None,
        "the session below the boundary has an outer session"
    );
    view.await_seen(&world, &["agent", "leaf", "second-leaf"]);
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 1);
    world.assert_alive(&["wall", "second", "second-leaf"]);
    world.kill("second");
    view.await_gone(&world, &["second-leaf"]);
    view.await_closed(&world, 2);
    view.end(world, &["wall"]);
}

/// Starts an agent in a terminal, with a leaf and a second agent. That one has a leaf too. A gate makes the first one
/// exit.
fn agent_with_second(view: &ScenarioRun, second: &str) -> World {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let seen = ["agent", "leaf", "second", "second-leaf"];
    let processes = [&["terminal"], &seen[..]].concat();
    let args = ["leaf=sleep", second, "die=exit+0"];
    play(&mut world, Some("terminal"), &args, &processes);
    view.await_seen(&world, &seen);
    world
}

/// A child of the same kind whose standard input is not the terminal is a sub-agent, not a relaunch. It is reaped when the
/// agent exits normally.
fn sub_agent(view: &ScenarioRun) {
    let world = agent_with_second(view, "second=no-input+as:claude+agent+second-leaf=sleep");
    // The service reads the standard input of agents before it needs the fact.
    for role in ["agent", "second"] {
        let pid = world.process(role).pid.to_string();
        eventually("its standard input is known", || {
            let input = ask_json(&world, &["explain", &pid])["facts"]["terminal_input"].as_bool();
            input.inspect(|input| assert_eq!(*input, role == "agent"))
        });
    }
    world.open_gate("die-agent");
    view.await_gone(&world, &["agent", "leaf", "second", "second-leaf"]);
    let relaunched = world
        .daemon()
        .events()
        .iter()
        .any(|e| e.event == "session.relaunch");
    assert!(!relaunched, "the sub-agent was treated as a relaunch");
    view.await_closed(&world, 2);
    view.end(world, &["terminal"]);
}

/// A root exits normally. Its child of the same kind in the same terminal becomes the root.
fn relaunch(view: &ScenarioRun) {
    let world = agent_with_second(view, "second=as:claude+agent+second-leaf=sleep");
    world.open_gate("die-agent");
    let (agent, second) = (world.process("agent"), world.process("second"));
    world.await_event("the agent's exit", |e| e.is("exit", agent));
    world.await_event("a relaunch", |e| e.event == "session.relaunch");
    world.assert_alive(&["second", "second-leaf", "leaf"]);
    world.kill("second");
    view.await_gone(&world, &["leaf", "second-leaf"]);
    view.await_closed(&world, 2);
    let due = |e: &Event| e.is("decision", second) && e.decision.as_deref() == Some("reap");
    let reaped = world.daemon().events().iter().any(due);
    assert!(!reaped, "the new root had a decision to reap");
    view.end(world, &["terminal"]);
}
