//! What finds no room, and what is read long after it was told.

use nix::sys::signal::Signal;

use super::{PinnedWorld, SurvivalScenario};
use crate::proc::ProcessKey;
use crate::trees::OWN_RULES;

pub const STORIES: &[SurvivalScenario] = &[
    ("fork-bomb-with-a-tiny-ring", || overrun("ebpf")),
    ("births-lost-with-a-tiny-ring", || births_lost("ebpf")),
    ("members-full", members_full),
    ("server-before-the-agent", || server_first("ebpf")),
];

/// The same where the proc connector's socket has no room for more.
pub const CONNECTOR_SCENARIOS: &[SurvivalScenario] = &[
    ("fork-bomb-with-a-small-socket", || {
        overrun("proc-connector")
    }),
    ("births-lost-with-a-small-socket", || {
        births_lost("proc-connector")
    }),
    ("server-before-the-agent", || server_first("proc-connector")),
];

/// An agent that has a leaf, somebody who has thousands of children when told to, and one who is kept, with a source
/// that has little room.
fn crowded(source: &str, many: &str) -> PinnedWorld {
    let config = format!("ring_size = \"64 KiB\"\n{OWN_RULES}");
    let mut life = PinnedWorld::new(&config, &["--source", source]);
    let children = ["leaf=sleep", many, "keeper=as:test-keeper+sleep"];
    let who = many.split('=').next().expect("a role");
    life.agent("agent", &children, &["leaf", who, "keeper"]);
    life.await_sessions(&["agent"]);
    life
}

/// What `meanwhile` does is read afterwards, as far as there is room for it.
fn unread(life: &mut PinnedWorld, meanwhile: impl FnOnce(&mut PinnedWorld)) {
    let daemon = daemon(life);
    assert!(
        daemon.signal(Signal::SIGSTOP),
        "the daemon could not be stopped"
    );
    meanwhile(life);
    assert!(daemon.signal(Signal::SIGCONT), "the daemon could not go on");
}

/// Thousands of records are lost, the agent's end among them.
fn overrun(source: &str) {
    let mut life = crowded(source, "bomb=later+go+swarm+swarm+2000");
    unread(&mut life, |life| {
        life.world.open_gate("go");
        life.world.await_processes("brood", 1500);
        life.world.kill("agent");
        life.world.await_processes("brood", 2000);
    });
    life.await_left(&["keeper"]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    life.world.stop();
    assert_gap(&life, "records_lost");
}

/// Who was born while records were lost is found, and ended when the agent is, however much later.
fn births_lost(source: &str) {
    let mut life = crowded(source, "shell=later+go+bomb+swarm+1200");
    unread(&mut life, |life| {
        life.world.open_gate("go");
        life.world.await_processes("bomb", 1);
        life.world.await_processes("brood", 1200);
    });
    life.world
        .await_event("the gap is closed", |e| e.event == "gap.close");
    life.world.kill("agent");
    life.await_left(&["keeper"]);
    life.await_closed(1);
    life.world.stop();
    assert_gap(&life, "records_lost");
}

/// The map has no room for all members: those are told of, and ended all the same.
fn members_full() {
    let mut life = PinnedWorld::new(&format!("max_members = 1024\n{OWN_RULES}"), &[]);
    life.agent(
        "agent",
        &["leaf=sleep", "swarm=swarm+1500"],
        &["leaf", "swarm"],
    );
    life.world.await_processes("brood", 1500);
    life.world
        .await_event("a full map", |e| e.event == "member_map.full");
    life.world.kill("agent");
    life.await_left(&[]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    life.world.stop();
    assert_gap(&life, "member_map_full");
}

/// `server & exec claude`, of which all is read when the agent runs: what the shell has started is not the agent's.
fn server_first(source: &str) {
    let mut life = PinnedWorld::new(OWN_RULES, &["--source", source]);
    unread(&mut life, |life| {
        let dir = life.world.dir().display().to_string();
        let script = format!(
            "{dir}/bin/worker test-process sleep server {dir} &
             exec {dir}/node_modules/.bin/claude test-process agent agent {dir} leaf=sleep"
        );
        std::fs::write(format!("{dir}/script"), script).expect("write a script");
        life.world.spawn("shell", &format!("run sh {dir}/script"));
        for role in ["server", "agent", "leaf"] {
            life.world.await_processes(role, 1);
        }
    });
    life.await_sessions(&["agent"]);
    life.world.kill("agent");
    life.await_left(&["server"]);
    life.await_closed(1);
    life.end(&["server"]);
}

fn daemon(life: &PinnedWorld) -> ProcessKey {
    let pid = life.world.daemon().pid();
    crate::proc::stat(pid).expect("the daemon").id
}

/// A gap was told of and closed, and nobody was signalled for whom it was not.
fn assert_gap(life: &PinnedWorld, reason: &str) {
    let stream = life.stream();
    let find = |name: &str| stream.iter().find(|e| e.event == name);
    let open = find("gap.open").expect("a gap is opened");
    assert_eq!(open.reason.as_deref(), Some(reason), "{open:?}");
    assert!(open.lost > Some(0), "how much is missing: {open:?}");
    let closed = find("gap.close").expect("the gap is closed");
    assert!(open.seq < closed.seq, "closed before it was opened");
    for role in super::OUTSIDERS.iter().chain(&["keeper"]) {
        for who in life.world.processes(role) {
            assert!(
                !stream.iter().any(|e| e.is("signal", who)),
                "'{role}' was signalled"
            );
        }
    }
}
