//! Tests of what happens while no service runs.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{PinnedWorld, SurvivalScenario};
use crate::cli::ask_json;
use crate::daemon::Event;
use crate::trees::OWN_RULES;

pub const SCENARIOS: &[SurvivalScenario] = &[
    ("down-for-ten-seconds", down_for_ten_seconds),
    ("relaunch-while-down", relaunch_while_down),
];

/// While no service runs, agents start and exit, and their children fork and daemonise. The next service handles all of it.
fn down_for_ten_seconds() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.agent(
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
    test.agent("exits", &children, &["stubborn", "keeper"]);
    test.agent("stays", &["stays-leaf=sleep"], &["stays-leaf"]);
    test.await_sessions(&["killed", "exits", "stays"]);
    // The service has written its sessions to the pinned maps before it answers this request.
    ask_json(&test.world, &["status"]);
    test.world.kill_daemon();
    let end = Instant::now() + Duration::from_secs(10);
    test.world.open_gate("go");
    test.world.await_processes("apart", 1);
    test.agent(
        "new",
        &["new-leaf=sleep", "busy=busy+300"],
        &["new-leaf", "busy"],
    );
    test.agent("comes", &["comes-leaf=double+setsid"], &["comes-leaf"]);
    test.world.await_processes("brood", 100);
    ["killed", "new"]
        .iter()
        .for_each(|role| test.world.kill(role));
    test.world.open_gate("die-exits");
    sleep(end.saturating_duration_since(Instant::now()));
    // Only a service reaps these. The probes may have signalled others, which `survival::kernel-reap` tests.
    let living = ["apart", "stubborn", "new-leaf", "brood"];
    test.world.assert_alive(&living);
    test.world.restart_daemon(&[]);
    let living = ["stays", "stays-leaf", "comes", "comes-leaf", "keeper"];
    test.await_only(&living);
    ["stays", "comes"]
        .iter()
        .for_each(|role| test.world.kill(role));
    test.await_only(&["keeper"]);
    test.end(&["keeper"]);
    let resumed = test
        .stream()
        .iter()
        .filter(|e| e.event == "session.resume")
        .count();
    assert_eq!(resumed, 3, "number of resumed sessions");
}

/// A root exits normally while no service runs. The next service makes its child the root.
fn relaunch_while_down() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let args = [
        "leaf=sleep",
        "second=as:claude+agent+second-leaf=sleep",
        "die=exit+0",
    ];
    test.world
        .launch("worker", "terminal", "terminal", &args.map(String::from));
    let processes = ["terminal", "agent", "leaf", "second", "second-leaf"];
    processes
        .iter()
        .for_each(|role| drop(test.world.await_processes(role, 1)));
    test.await_sessions(&["agent", "second"]);
    test.world.kill_daemon();
    test.world.open_gate("die-agent");
    test.world.await_gone(&["agent"]);
    test.world.restart_daemon(&[]);
    let second = test.world.process("second");
    test.world
        .await_event("a relaunch", |e| e.is("session.relaunch", second));
    test.agent("sentinel", &["orphan=double+setsid"], &[]);
    test.world.await_processes("orphan", 1);
    test.world.kill("sentinel");
    test.world.await_gone(&["orphan"]);
    test.world.assert_alive(&processes[2..]);
    let kept = [
        test.world.process("leaf"),
        second,
        test.world.process("second-leaf"),
    ];
    let signalled = |e: &&Event| e.event == "signal" && kept.iter().any(|key| e.is_about(*key));
    let stream = test.stream();
    let signal = stream.iter().find(signalled);
    assert!(
        signal.is_none(),
        "a member of the continued session was signalled: {signal:?}"
    );
    test.world.kill("second");
    test.await_only(&["terminal"]);
    test.end(&["terminal"]);
}
