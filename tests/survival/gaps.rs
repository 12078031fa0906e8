//! Tests of lost records, of a full member map, and of records that are read late.

use nix::sys::signal::Signal;

use super::{PinnedWorld, SurvivalScenario};
use crate::proc::ProcessKey;
use crate::trees::OWN_RULES;

pub const SCENARIOS: &[SurvivalScenario] = &[
    ("fork-bomb-with-a-tiny-ring", || overrun("ebpf")),
    ("births-lost-with-a-tiny-ring", || births_lost("ebpf")),
    ("members-full", members_full),
    ("server-before-the-agent", || server_first("ebpf")),
];

/// Tests with the proc connector, whose socket buffer overflows.
pub const CONNECTOR_SCENARIOS: &[SurvivalScenario] = &[
    ("fork-bomb-with-a-small-socket", || {
        overrun("proc-connector")
    }),
    ("births-lost-with-a-small-socket", || {
        births_lost("proc-connector")
    }),
    ("server-before-the-agent", || server_first("proc-connector")),
];

/// Starts a daemon with a small buffer, and an agent with a leaf, a kept process and `forker`. That process forks
/// thousands of children when its gate opens.
fn with_small_buffer(source: &str, forker: &str) -> PinnedWorld {
    let config = format!("ring_size = \"64 KiB\"\n{OWN_RULES}");
    let mut test = PinnedWorld::new(&config, &["--source", source]);
    let children = ["leaf=sleep", forker, "keeper=as:test-keeper+sleep"];
    let role = forker.split('=').next().expect("a role");
    test.agent("agent", &children, &["leaf", role, "keeper"]);
    test.await_sessions(&["agent"]);
    test
}

/// Stops the daemon (SIGSTOP) while `meanwhile` runs. The daemon reads the events afterwards, as far as the buffer holds
/// them.
fn with_stopped_daemon(test: &mut PinnedWorld, meanwhile: impl FnOnce(&mut PinnedWorld)) {
    let daemon = daemon(test);
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    meanwhile(test);
    assert!(
        daemon.signal(Signal::SIGCONT),
        "the daemon could not be continued"
    );
}

/// An agent's tree is reaped even if thousands of records are lost. The agent's exit is among them.
fn overrun(source: &str) {
    let mut test = with_small_buffer(source, "bomb=later+go+swarm+swarm+2000");
    with_stopped_daemon(&mut test, |test| {
        test.world.open_gate("go");
        test.world.await_processes("brood", 1500);
        test.world.kill("agent");
        test.world.await_processes("brood", 2000);
    });
    test.await_only(&["keeper"]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    test.world.stop();
    assert_gap(&test, "records_lost");
}

/// Processes whose fork events were lost are discovered, and reaped when the agent exits later.
fn births_lost(source: &str) {
    let mut test = with_small_buffer(source, "shell=later+go+bomb+swarm+1200");
    with_stopped_daemon(&mut test, |test| {
        test.world.open_gate("go");
        test.world.await_processes("bomb", 1);
        test.world.await_processes("brood", 1200);
    });
    test.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    test.world.kill("agent");
    test.await_only(&["keeper"]);
    test.await_closed(1);
    test.world.stop();
    assert_gap(&test, "records_lost");
}

/// Members for which the member map has no space are reported as a gap, and reaped like the others.
fn members_full() {
    let mut test = PinnedWorld::new(&format!("max_members = 1024\n{OWN_RULES}"), &[]);
    test.agent(
        "agent",
        &["leaf=sleep", "swarm=swarm+1500"],
        &["leaf", "swarm"],
    );
    test.world.await_processes("brood", 1500);
    test.world
        .await_event("a full map", |e| e.event == "member_map.full");
    test.world.kill("agent");
    test.await_only(&[]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    test.world.stop();
    assert_gap(&test, "member_map_full");
}

/// `server & exec claude`: a process that the shell started before it executed the agent is no member, even if the service
/// reads all events only afterwards.
fn server_first(source: &str) {
    let mut test = PinnedWorld::new(OWN_RULES, &["--source", source]);
    with_stopped_daemon(&mut test, |test| {
        let dir = test.world.dir().display().to_string();
        let script = format!(
            "{dir}/bin/worker test-process sleep server {dir} &
             exec {dir}/node_modules/.bin/claude test-process agent agent {dir} leaf=sleep"
        );
        std::fs::write(format!("{dir}/script"), script).expect("write a script");
        test.world.spawn("shell", &format!("run sh {dir}/script"));
        for role in ["server", "agent", "leaf"] {
            test.world.await_processes(role, 1);
        }
    });
    test.await_sessions(&["agent"]);
    test.world.kill("agent");
    test.await_only(&["server"]);
    test.await_closed(1);
    test.end(&["server"]);
}

fn daemon(test: &PinnedWorld) -> ProcessKey {
    let pid = test.world.daemon().pid();
    crate::proc::stat(pid).expect("the daemon").id
}

/// Asserts that a gap was opened and closed, and that no outsider or kept process was signalled.
fn assert_gap(test: &PinnedWorld, reason: &str) {
    let stream = test.stream();
    let find = |name: &str| stream.iter().find(|e| e.event == name);
    let open = find("gap.open").expect("a gap is opened");
    assert_eq!(open.reason.as_deref(), Some(reason), "{open:?}");
    assert!(open.lost > Some(0), "no number of lost records: {open:?}");
    let closed = find("gap.close").expect("the gap is closed");
    assert!(open.seq < closed.seq, "closed before it was opened");
    for role in super::OUTSIDERS.iter().chain(&["keeper"]) {
        for key in test.world.processes(role) {
            assert!(
                !stream.iter().any(|e| e.is("signal", key)),
                "'{role}' was signalled"
            );
        }
    }
}
