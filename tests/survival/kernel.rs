//! What the probes do by themselves: leave out processes without an agent, and signal.

use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::PinnedWorld;
use crate::cli::{ask_json, find};
use crate::daemon::{Event, REAPER};
use crate::trees::{OWN_RULES, trial};
use crate::world::{World, eventually};

pub fn trials() -> Vec<Trial> {
    let kills = doctor_says("kills in the kernel");
    if !kills {
        eprintln!("this kernel cannot signal by itself: survival::kernel-reap is left out");
    }
    vec![
        trial("survival", "filter", filter),
        trial("survival", "condemned", condemned),
        trial("survival", "condemned-at-exec", condemned_at_exec),
        trial("survival", "kernel-reap", kernel_reap).with_ignored_flag(!kills),
        trial("survival", "overwritten-marker", overwritten_marker),
        trial(
            "survival",
            "server-of-a-quick-agent",
            server_of_a_quick_agent,
        ),
        trial("survival", "deep-chain", deep_chain),
    ]
}

/// Whether `reaper doctor` has found this.
fn doctor_says(name: &str) -> bool {
    let output = Command::new(REAPER).args(["doctor", "--json"]).output();
    let output = output.expect("run reaper doctor");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let checks = report["checks"].as_array().cloned().unwrap_or_default();
    checks
        .iter()
        .any(|check| check["name"] == name && check["ok"] == true)
}

/// The probes leave out processes without an agent, unless all events are asked for.
fn filter() {
    let mut world = World::new(true);
    world.observe_all("events = \"all\"\n");
    assert!(knows_foreign(&world), "all events are asked for");
    world.stop();
    world.observe_all("");
    // A look at the process table, which other agents on the host bring about, finds one or the other.
    eventually("a process is left out", || {
        (!knows_foreign(&world)).then_some(())
    });
    world.stop();
}

/// Whether the daemon knows a new process that no agent has started. It answers by all that the probes have sent.
fn knows_foreign(world: &World) -> bool {
    let mut foreign = Command::new("sleep").arg("600").spawn().expect("run sleep");
    let tree = ask_json(world, &["tree", "--all"]);
    foreign.kill().expect("end sleep");
    foreign.wait().expect("end sleep");
    find(&tree, foreign.id().cast_signed()).is_some()
}

/// Signals of this name that the kernel has sent by itself.
fn by_kernel<'a>(stream: &'a [Event], signal: &'a str) -> impl Iterator<Item = &'a Event> {
    let ours = move |e: &&Event| e.event == "signal" && e.sent_by.as_deref() == Some("kernel");
    stream
        .iter()
        .filter(ours)
        .filter(move |e| e.signal.as_deref() == Some(signal))
}

/// Trees that may be ended before any of them is killed as it forks.
const BOMBS: usize = 20;

/// A bomb that forks on in spite of SIGTERM is killed as it forks, once it has come to SIGKILL.
fn condemned() {
    killed_by_kernel("fork-bomb-on-term", |_, _| true);
}

/// So is one that runs another program with each fork, as it does that.
fn condemned_at_exec() {
    killed_by_kernel("exec-chain-on-term", |stream, killed| {
        let same = |e: &&Event| e.event == "exec" && e.entity_id == killed.entity_id;
        let mut execs = stream.iter().filter(same);
        execs.any(|exec| exec.time_boot_ns == killed.time_boot_ns)
    });
}

/// Forty that play this are ended, until the kernel has killed one `as_it` should be.
fn killed_by_kernel(play: &str, as_it: impl Fn(&[Event], &Event) -> bool) {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let bombs = format!("bomb*40={play}");
    let children = [&bombs[..], "keeper=as:test-keeper+sleep"];
    let killed = (1..=BOMBS).any(|round| {
        let role = format!("agent-{round}");
        life.agent(&role, &children, &[]);
        life.world.await_processes("keeper", round);
        life.world.await_processes("bomb", 40 * round);
        life.world.kill(&role);
        life.await_left(&["keeper"]);
        let closed = |e: &&Event| e.event == "session.close";
        eventually("the session is closed", || {
            (life.world.daemon().events().iter().filter(closed).count() >= round).then_some(())
        });
        let stream = life.world.daemon().events();
        by_kernel(&stream, "SIGKILL").any(|killed| as_it(&stream, killed))
    });
    assert!(killed, "nobody was killed by the kernel");
    life.end(&["keeper"]);
}

/// The first signal comes from the kernel for those of whom no rule knows more; the others are decided about.
fn kernel_reap() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let children = [
        "leaf=sleep",
        "apart=setsid",
        "stubborn=ignore-term",
        "shell=parent+tool+sleep",
        "keeper=as:test-keeper+parent+under+sleep",
        "wall=as:test-wall+parent+user+sleep",
        "nobody=other-uid+sleep",
    ];
    let spared = ["keeper", "under", "wall", "user", "nobody"];
    let plain = ["leaf", "apart", "stubborn", "shell"];
    let agent = life.agent(
        "agent",
        &children,
        &[&spared[..], &plain, &["tool"]].concat(),
    );
    life.await_sessions(&["agent"]);
    // The probes hear of it before the service answers the next question.
    let root = life.world.process("agent").pid.to_string();
    eventually("what nothing spares is known", || {
        let facts = &ask_json(&life.world, &["explain", &root])["facts"];
        ["keep_marker", "unit"]
            .iter()
            .all(|fact| !facts[fact].is_null())
            .then_some(())
    });
    ask_json(&life.world, &["status"]);
    assert!(
        agent.signal(Signal::SIGKILL),
        "the agent could not be killed"
    );
    life.await_left(&spared);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    let stream = life.end(&spared);
    for role in plain {
        let who = life.world.process(role);
        let first = stream.iter().find(|e| e.is("signal", who));
        let first = first.unwrap_or_else(|| panic!("no signal for '{role}'"));
        let (by, signal) = (first.sent_by.as_deref(), first.signal.as_deref());
        assert_eq!(
            (by, signal),
            (Some("kernel"), Some("SIGTERM")),
            "to '{role}'"
        );
    }
    let plain = plain.map(|role| life.world.process(role));
    let other = by_kernel(&stream, "SIGTERM").find(|e| !plain.iter().any(|who| e.is_about(*who)));
    assert!(
        other.is_none(),
        "another was signalled by the kernel: {other:?}"
    );
}

/// Processes that overwrite their environment before /proc can be read.
const TITLED: usize = 8;

/// A process that overwrites its environment as soon as it runs is judged by the environment that it was started with.
fn overwritten_marker() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    // Few variables: without `bpf_loop`, the probe does not look through many.
    let marked = format!("marked*{TITLED}=env-i+env:REAPER_KEEP=1+title");
    let unmarked = format!("unmarked*{TITLED}=env-i+env:REAPER_KEEP=0+title");
    life.agent("agent", &[&marked, &unmarked], &[]);
    life.world.await_processes("marked", TITLED);
    life.world.await_processes("unmarked", TITLED);
    life.world.kill("agent");
    life.await_left(&["marked"]);
    life.end(&["marked"]);
}

/// How soon the agent of a server leaves.
const QUICK: Duration = Duration::from_millis(200);

/// A server that an agent without a terminal has started has its time, however soon that leaves in peace, and
/// whatever the kernel does by itself.
fn server_of_a_quick_agent() {
    let mut life = PinnedWorld::new("kernel_reap = \"auto\"\n", &[]);
    let children = ["server=listen", "leaf=sleep", "die=exit+0"];
    let begun = Instant::now();
    life.agent("agent", &children, &["server", "leaf"]);
    let server = life.world.process("server");
    std::thread::sleep(QUICK.saturating_sub(begun.elapsed()));
    life.world.open_gate("die-agent");
    let waits = |e: &Event| {
        let rule = e.rule.as_deref() == Some("asked-for-servers");
        e.is("decision", server) && e.decision.as_deref() == Some("wait") && rule
    };
    life.world.await_event("it is given time", waits);
    life.await_left(&["server"]);
    let why = ask_json(&life.world, &["explain", &server.pid.to_string()]);
    let for_s = why["process"]["decision"]["remaining_s"].as_u64();
    assert!(for_s.is_some_and(|s| (1..=600).contains(&s)), "{why}");
    life.end(&["server"]);
}

/// Processes, each the child of the one before.
const DEEP: usize = 1200;

/// A deep chain below an agent that leaves in peace is ended, though each of it might hold all the others.
fn deep_chain() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let chain = format!("upper=chain+{DEEP}+0");
    life.agent("agent", &[&chain, "die=exit+0"], &[]);
    life.world.await_processes("upper", DEEP);
    life.world.open_gate("die-agent");
    life.await_left(&[]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    life.end(&[]);
}
