//! What happens while no service is there.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{PinnedWorld, SurvivalScenario};
use crate::cli::ask_json;
use crate::daemon::Event;
use crate::trees::OWN_RULES;

pub const STORIES: &[SurvivalScenario] = &[
    ("down-for-ten-seconds", down_for_ten_seconds),
    ("relaunch-while-down", relaunch_while_down),
];

/// Agents die, come, come and die; their children fork and daemonise. All of it is found on return.
fn down_for_ten_seconds() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.agent(
        "killed",
        &[
            "leaf=sleep",
            "trap=trap",
            "later=later+go+apart+double+setsid",
        ],
        &["leaf", "later"],
    );
    let children = [
        "stubborn=ignore-term",
        "keeper=as:test-keeper+sleep",
        "die=exit+3",
    ];
    life.agent("exits", &children, &["stubborn", "keeper"]);
    life.agent("stays", &["stays-leaf=sleep"], &["stays-leaf"]);
    life.await_sessions(&["killed", "exits", "stays"]);
    // It leaves word of them for the next one after it has told of them, and before it answers.
    ask_json(&life.world, &["status"]);
    life.world.kill_daemon();
    let back = Instant::now() + Duration::from_secs(10);
    life.world.open_gate("go");
    life.world.await_processes("apart", 1);
    life.agent(
        "new",
        &["new-leaf=sleep", "busy=busy+300"],
        &["new-leaf", "busy"],
    );
    life.agent("comes", &["comes-leaf=double+setsid"], &["comes-leaf"]);
    life.world.await_processes("brood", 100);
    ["killed", "new"]
        .iter()
        .for_each(|role| life.world.kill(role));
    life.world.open_gate("die-exits");
    sleep(back.saturating_duration_since(Instant::now()));
    // Nobody was there to end these; what the kernel ends by itself is another scenario.
    let living = ["apart", "stubborn", "new-leaf", "brood"];
    life.world.assert_alive(&living);
    life.world.restart_daemon(&[]);
    let stay = ["stays", "stays-leaf", "comes", "comes-leaf", "keeper"];
    life.await_left(&stay);
    ["stays", "comes"]
        .iter()
        .for_each(|role| life.world.kill(role));
    life.await_left(&["keeper"]);
    life.end(&["keeper"]);
    let resumed = life
        .stream()
        .iter()
        .filter(|e| e.event == "session.resume")
        .count();
    assert_eq!(resumed, 3, "sessions that were taken up");
}

/// A root that leaves of its own accord hands the session over to its child, though nobody looks.
fn relaunch_while_down() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let args = [
        "leaf=sleep",
        "second=as:claude+agent+second-leaf=sleep",
        "die=exit+0",
    ];
    life.world
        .launch("worker", "terminal", "terminal", &args.map(String::from));
    let processes = ["terminal", "agent", "leaf", "second", "second-leaf"];
    processes
        .iter()
        .for_each(|role| drop(life.world.await_processes(role, 1)));
    life.await_sessions(&["agent", "second"]);
    life.world.kill_daemon();
    life.world.open_gate("die-agent");
    life.world.await_gone(&["agent"]);
    life.world.restart_daemon(&[]);
    let second = life.world.process("second");
    life.world
        .await_event("a relaunch", |e| e.is("session.relaunch", second));
    life.agent("sentinel", &["orphan=double+setsid"], &[]);
    life.world.await_processes("orphan", 1);
    life.world.kill("sentinel");
    life.world.await_gone(&["orphan"]);
    life.world.assert_alive(&processes[2..]);
    let kept = [
        life.world.process("leaf"),
        second,
        life.world.process("second-leaf"),
    ];
    let signalled = |e: &&Event| e.event == "signal" && kept.iter().any(|who| e.is_about(*who));
    let stream = life.stream();
    let signal = stream.iter().find(signalled);
    assert!(signal.is_none(), "the session goes on: {signal:?}");
    life.world.kill("second");
    life.await_left(&["terminal"]);
    life.end(&["terminal"]);
}
