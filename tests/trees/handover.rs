//! Agents that exit with status 0 while another agent continues their conversation.

use std::fs;

use super::{CONFIG, ScenarioEntry, ScenarioRun};
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("conversation-resumed-by-argument", resumed_by_argument),
    ("conversation-resumed-by-registry", resumed_by_registry),
    ("conversation-that-ends", ends),
    ("conversation-of-a-killed-agent", killed),
];

const ID: &str = "4a28933f-46b2-4a2b-9061-21982e33bea2";
const OTHER_ID: &str = "113c8f3a-aa07-4beb-a7f0-268130753912";
const CLAUDE: &str = "node_modules/@anthropic-ai/claude-code/bin/claude.exe";

/// Starts an agent with a job that carries its conversation's marker and one without a marker.
fn with_agent(view: &ScenarioRun) -> World {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let job = format!("job=env:CLAUDE_CODE_SESSION_ID={ID}+setsid");
    start(
        &mut world,
        "agent",
        "claude",
        &[&job, "bare=env-i+sleep", "die=exit+0"],
    );
    ["job", "bare"]
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
    world
}

/// Starts an agent with a home directory below the test's directory.
fn start(world: &mut World, role: &str, program: &str, args: &[&str]) {
    let home = world.dir().join("home");
    let how = format!(
        "env:HOME={} as:{program} agent {}",
        home.display(),
        args.join(" ")
    );
    world.spawn(role, &how);
    world.await_processes(role, 1);
}

/// Asserts that the processes of an exited agent live until its successor is killed.
fn assert_continued(view: &ScenarioRun, world: World) {
    view.await_seen(&world, &["agent", "job", "bare", "worker", "tool"]);
    world.open_gate("die-agent");
    let worker = world.process("worker");
    world.await_event("the worker is the root", |e| {
        e.is("session.relaunch", worker)
    });
    world.assert_alive(&["job", "bare", "tool"]);
    world.kill("worker");
    view.await_gone(&world, &["job", "bare", "tool"]);
    view.await_closed(&world, 2);
    view.end(world, &[]);
}

fn resumed_by_argument(view: &ScenarioRun) {
    let mut world = with_agent(view);
    let transcript = format!("{{dir}}/{ID}.jsonl");
    let words = [CLAUDE, "--fork-session", "--resume", &transcript];
    world.provide("resumed", &words.map(String::from));
    start(&mut world, "worker", "resumed", &["tool=sleep"]);
    world.await_processes("tool", 1);
    assert_continued(view, world);
}

/// The agent's registry, not the command line, names the successor and the transcript that it resumes.
fn resumed_by_registry(view: &ScenarioRun) {
    let mut world = with_agent(view);
    start(&mut world, "worker", "claude", &["tool=sleep"]);
    world.await_processes("tool", 1);
    let worker = world.process("worker");
    let roster = format!(
        r#"{{"workers":{{"22ab6b57":{{"pid":{},"procStart":"{}","dispatch":{{"launch":{{"sessionId":"/h/{ID}.jsonl"}}}}}}}}}}"#,
        worker.pid, worker.ticks
    );
    let directory = world.dir().join("home/.claude/daemon");
    fs::create_dir_all(&directory).expect("create the registry");
    fs::write(directory.join("roster.json"), roster).expect("write the roster");
    assert_continued(view, world);
}

/// Another agent of the same kind has another conversation. The leftovers are reaped when no successor can appear any more.
fn ends(view: &ScenarioRun) {
    let mut world = with_agent(view);
    let tool = format!("tool=env:CLAUDE_CODE_SESSION_ID={OTHER_ID}+sleep");
    start(&mut world, "other", "claude", &[&tool]);
    world.await_processes("tool", 1);
    view.await_seen(&world, &["agent", "job", "bare", "other", "tool"]);
    world.open_gate("die-agent");
    view.await_gone(&world, &["agent", "job", "bare"]);
    view.await_closed(&world, 1);
    let job = world.process("job");
    let events = world.daemon().events().clone();
    let reasons = events.iter().filter(|e| e.is("decision", job));
    let reasons: Vec<_> = reasons.filter_map(|e| e.reason.as_deref()).collect();
    let waits = |reason: &&str| *reason == "successor_awaited";
    assert!(
        reasons.iter().any(waits),
        "no decision waited for a successor: {reasons:?}"
    );
    assert_eq!(reasons.last(), Some(&"root_exited"));
    view.end(world, &["other", "tool"]);
}

/// A killed agent has no successor, even if another agent resumes its conversation. If the source did not observe the exit
/// status, a successor is accepted.
fn killed(view: &ScenarioRun) {
    let mut world = with_agent(view);
    world.provide("resumed", &[CLAUDE, "--resume", ID].map(String::from));
    start(&mut world, "worker", "resumed", &["tool=sleep"]);
    world.await_processes("tool", 1);
    view.await_seen(&world, &["agent", "job", "bare", "worker", "tool"]);
    world.kill("agent");
    if view.is_fully_supported() {
        view.await_gone(&world, &["job", "bare"]);
        view.await_closed(&world, 1);
    } else if view.knows_agents() {
        let worker = world.process("worker");
        world.await_event("the session closes or has a successor", |e| {
            e.event == "session.close" || e.is("session.relaunch", worker)
        });
    }
    view.end(world, &["worker", "tool"]);
}
