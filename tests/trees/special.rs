//! Trees that need a scenario of their own.

use std::process::{Command, Stdio};
use std::sync::LazyLock;

use libtest_mimic::Trial;

use super::{CONFIG, ScenarioEntry, ScenarioRun, SourceKind, checks, trial};
use crate::cgroup::Cgroup;
use crate::daemon::Event;
use crate::world::{World, eventually};

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("agents-leader-thread-first", leader_thread_first),
    ("out-of-scope", out_of_scope),
    ("run-killed", run_killed),
    ("run-killed-at-once", run_killed_at_once),
];

/// Scenarios that need [tmux](has_tmux).
pub const IN_TMUX: &[ScenarioEntry] = &[("tmux", tmux)];

/// Scenarios that need a cgroup.
pub const IN_A_CGROUP: &[ScenarioEntry] = &[
    ("run-with-cgroup-killed", run_with_cgroup_killed),
    ("cgroup-scope", cgroup_scope),
];

/// Returns the test of a hook. Only eBPF sees `nohup` of a process that was just started.
pub fn hook_on_ebpf() -> Trial {
    let run = || ScenarioRun::run(SourceKind::Ebpf, "session-end-hook", session_end_hook);
    trial("enforce", "session-end-hook", run)
}

/// Returns whether tmux is installed. Prints a message once if not.
pub fn has_tmux() -> bool {
    static HAS: LazyLock<bool> = LazyLock::new(|| {
        let mut tmux = Command::new("tmux");
        let status = tmux.arg("-V").stdout(Stdio::null()).status();
        if let Err(why) = &status {
            eprintln!(
                "tmux cannot be started here, so the tests of trees in it are left out: {why}"
            );
        }
        status.is_ok()
    });
    *HAS
}

/// The session of an agent whose leader thread exits stays open until its last thread exits.
fn leader_thread_first(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    world.launch(
        "claude",
        "agent",
        "agent",
        &["leaf=sleep".into(), "die=leader-first".into()],
    );
    world.await_processes("leaf", 1);
    let agent = world.await_processes("agent", 1)[0];
    view.await_seen(&world, &["agent", "leaf"]);
    world.open_gate("die-agent");
    world.await_processes("leaderless", 1);
    // The probe starts after the thread's exit, so a wrong event for the thread would already have been reported.
    world.launch("worker", "middle", "probe", &["sleep".into()]);
    let probe = world.await_processes("probe", 1)[0];
    let second = world
        .daemon()
        .events()
        .iter()
        .any(|e| e.is("session.root_exit", agent));
    assert!(
        probe.is_alive() && !second,
        "the exit of a thread was reported as the agent's exit"
    );
    world.assert_alive(&["agent", "leaf"]);
    world.open_gate("die-leaderless");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 1);
    if let Some(events) = view.stop(&mut world, &["probe"]) {
        checks::assert_root_exit(&world, &events, "agent", (Some(3), None));
    }
}

/// A hook at the end of the session leaves an upload in the background: by itself, through `nohup`, and in a session of
/// its own. Each is reaped only at the end of its time, and a server that listens by then is not.
fn session_end_hook(view: &ScenarioRun) {
    const AGE_NS: u64 = 10_000_000_000;
    let config = format!(
        "{CONFIG}
        [[rule]]\nname = \"unattended-commands\"\naction = \"reap\"\nafter = \"10s\"\nsession = \"ok\"
        attended = false\ndetached = true
        [[rule]]\nname = \"unattended-servers\"\naction = \"reap\"\nafter = \"1min\"\nsession = \"ok\"
        attended = false\nlistening = true
        [[rule]]\nname = \"young\"\naction = \"reap\"\nuntil_age = \"10s\"\nsession = \"ok\""
    );
    let mut world = World::new(true);
    view.watch(&mut world, &config);
    let worker = "{dir}/bin/worker test-process";
    // The others are up when the agent exits, and the upload is young.
    let hook = format!(
        "{worker} listen server {{dir}} & nohup {worker} sleep hidden {{dir}} & setsid {worker} sleep own {{dir}} & \
         until [ $(grep -cE '^(server|hidden|own) ' {{dir}}/report) -ge 3 ]; do sleep 0.1; done; \
         {worker} sleep upload {{dir}} &"
    );
    let hook = format!("die=shell {hook}").replace(' ', "+");
    world.launch("claude", "agent", "agent", &[hook]);
    world.await_processes("agent", 1);
    world.open_gate("die-agent");
    let uploads = [
        ("upload", "young"),
        ("hidden", "unattended-commands"),
        ("own", "unattended-commands"),
    ];
    for (role, rule) in uploads {
        let key = world.process(role);
        world.await_event("an upload waits", |e| {
            e.is("decision", key)
                && (e.decision.as_deref(), e.rule.as_deref()) == (Some("wait"), Some(rule))
        });
    }
    let exit = world.await_event("the agent's exit", |e| e.event == "session.root_exit");
    let server = world.process("server");
    world.await_event("the server waits", |e| {
        e.is("decision", server) && e.rule.as_deref() == Some("unattended-servers")
    });
    view.await_gone(&world, &["upload", "hidden", "own"]);
    let events = view.stop(&mut world, &["server"]);
    for event in events.iter().flatten().filter(|e| e.event == "signal") {
        // At an age, or that long after the agent's exit.
        let start = event.start_ns().expect("a start").min(exit.time_boot_ns);
        let lived = event.time_boot_ns - start;
        assert!(lived >= AGE_NS, "signalled after {lived} ns: {event:?}");
    }
}

/// A tmux server that the agent started does not belong to its session. A user has a pane in that server.
fn tmux(view: &ScenarioRun) {
    let socket = "reaper-real";
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let worker = world.dir().join("bin/worker");
    let start = format!(
        "run env TMUX_TMPDIR={0} tmux -L {socket} -f /dev/null new-session -d",
        world.dir().display()
    );
    let pane = format!(
        "{} test-process sleep user {}",
        worker.display(),
        world.dir().display()
    );
    let tmux = format!("client={start} {pane}").replace(' ', "+");
    world.launch("claude", "agent", "agent", &[tmux, "leaf=sleep".into()]);
    ["agent", "leaf", "user"]
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
    let user = world.process("user");
    view.await_seen(&world, &["agent", "leaf"]);
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 1);
    let server = eventually("the tmux server", || crate::proc::stat(user.pid)).parent;
    let stopped = view.stop(&mut world, &["user"]);
    let touched = |e: &Event| e.event == "signal" && e.pid == Some(server);
    let signals = crate::daemon::signals(world.dir());
    assert!(!signals.iter().any(touched), "tmux was signalled");
    if let Some(events) = stopped {
        let wall = |e: &Event| e.event == "boundary" && e.rule.as_deref() == Some("tmux");
        assert!(events.iter().any(wall), "membership did not stop at tmux");
    }
}

/// The service reaps the tree of a killed `reaper run`.
fn run_killed(view: &ScenarioRun) {
    kill_run(view, World::new(true), "run");
}

/// The same for a command in its own cgroup, which is not a systemd unit.
fn run_with_cgroup_killed(view: &ScenarioRun) {
    let cgroup = Cgroup::new("");
    let world = World::new(true);
    cgroup.take(world.process("launcher"));
    kill_run(view, world, "run --cgroup");
}

fn kill_run(view: &ScenarioRun, mut world: World, how: &str) {
    view.watch(&mut world, CONFIG);
    let (dir, reaper) = (world.dir().display().to_string(), crate::daemon::REAPER);
    let tree = format!("{dir}/bin/worker test-process parent top {dir} under setsid");
    world.spawn("runner", &format!("run {reaper} {how} -- {tree}"));
    for role in ["top", "under"] {
        let key = world.await_processes(role, 1)[0];
        let file = std::fs::read_to_string(format!("/proc/{}/cgroup", key.pid));
        let inside = file.is_ok_and(|file| file.contains("/reaper-run-"));
        assert_eq!(inside, how.contains("--cgroup"), "{role}");
    }
    let runner = world.process("runner");
    world.await_event("the run is recognised", |e| {
        e.is("session.open", runner) && e.agent.as_deref() == Some("reaper-run")
    });
    view.await_seen(&world, &["top", "under"]);
    world.kill("runner");
    view.await_gone(&world, &["top", "under"]);
    view.await_closed(&world, 1);
    view.end(world, &[]);
}

/// A `reaper run` is killed. However soon that happens after its start, the service reaps its tree.
fn run_killed_at_once(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let dir = world.dir().display().to_string();
    let script = format!(
        "for n in 0 1 2 3 4; do for wait in 0 0.0005 0.001 0.002 0.003 0.005; do
            {reaper} run -- {dir}/bin/worker test-process parent top {dir} under setsid &
            sleep $wait
            kill -KILL $!
        done; done",
        reaper = crate::daemon::REAPER,
    );
    std::fs::write(world.dir().join("script"), script).expect("write a script");
    world.spawn("runner", &format!("run sh {dir}/script"));
    world.await_processes("runner", 1);
    world.await_gone(&["runner"]);
    if view.ends_all() {
        world.await_only_canaries();
    }
    view.end(world, &[]);
}

/// An agent outside of the scope is neither reported nor touched.
fn out_of_scope(view: &ScenarioRun) {
    let mut other = World::new(true);
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    for world in [&mut other, &mut world] {
        world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
        world.await_processes("agent", 1);
    }
    view.await_seen(&world, &["agent", "leaf"]);
    other.kill("agent");
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    view.await_closed(&world, 1);
    other.assert_alive(&["leaf"]);
    let outsiders = [other.process("agent"), other.process("leaf")];
    let of_them = |e: &Event| outsiders.iter().any(|key| e.is_about(*key));
    let reported = world.daemon().events().iter().any(of_them);
    assert!(!reported, "an event about a process outside of the scope");
    view.end(world, &[]);
}

/// A cgroup as scope covers the processes in it and in the cgroups below it.
fn cgroup_scope(view: &ScenarioRun) {
    let cgroup = Cgroup::new("");
    let mut world = World::new(true);
    world.watch_scope(
        cgroup.path().to_str().expect("a path in UTF-8"),
        CONFIG,
        &view.source_arguments(),
    );
    world.launch(
        "claude",
        "agent",
        "outsider",
        &["outsiders-leaf=sleep".into()],
    );
    world.await_processes("outsider", 1);
    cgroup.take(world.process("launcher"));
    world.launch(
        "claude",
        "agent",
        "agent",
        &["leaf=sleep".into(), "other=double+setsid".into()],
    );
    ["agent", "leaf", "other"]
        .iter()
        .for_each(|role| drop(world.await_processes(role, 1)));
    view.await_seen(&world, &["agent", "leaf"]);
    world.kill("outsider");
    world.kill("agent");
    view.await_gone(&world, &["leaf"]);
    if !view.exempt("other", "double") {
        view.await_gone(&world, &["other"]);
    }
    view.await_closed(&world, 1);
    view.end(world, &["outsiders-leaf"]);
}
