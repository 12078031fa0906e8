//! Tests of what the probes do without the service: filter processes without an agent, and send signals.

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
        eprintln!("survival::kernel-reap is ignored: this kernel cannot send signals from BPF");
    }
    vec![
        trial("survival", "filter", filter),
        trial("survival", "killed-on-fork", killed_on_fork),
        trial("survival", "killed-on-exec", killed_on_exec),
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

/// Returns whether a check of `reaper doctor` has passed.
fn doctor_says(name: &str) -> bool {
    let output = Command::new(REAPER).args(["doctor", "--json"]).output();
    let output = output.expect("run reaper doctor");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let checks = report["checks"].as_array().cloned().unwrap_or_default();
    checks
        .iter()
        .any(|check| check["name"] == name && check["ok"] == true)
}

/// The probes filter processes without an agent, unless `events` is `all`.
fn filter() {
    let mut world = World::new(true);
    world.observe_all("events = \"all\"\n");
    assert!(
        knows_untracked(&world),
        "a process is missing although `events` is `all`"
    );
    world.stop();
    world.observe_all("");
    // A reconciliation scan can discover the process, so the test retries. Other agents on the host can cause such a
    // scan.
    eventually("an untracked process is filtered", || {
        (!knows_untracked(&world)).then_some(())
    });
    world.stop();
}

/// Returns whether the daemon knows a new process that no agent started. The daemon reads all records before it answers.
fn knows_untracked(world: &World) -> bool {
    let mut untracked = Command::new("sleep").arg("600").spawn().expect("run sleep");
    let tree = ask_json(world, &["tree", "--all"]);
    untracked.kill().expect("kill sleep");
    untracked.wait().expect("wait for sleep");
    find(&tree, untracked.id().cast_signed()).is_some()
}

/// Returns the signals of this name that a probe sent.
fn by_kernel<'a>(stream: &'a [Event], signal: &'a str) -> impl Iterator<Item = &'a Event> {
    let from_kernel =
        move |e: &&Event| e.event == "signal" && e.sent_by.as_deref() == Some("kernel");
    stream
        .iter()
        .filter(from_kernel)
        .filter(move |e| e.signal.as_deref() == Some(signal))
}

/// Limit on the number of trees until a probe kills a process.
const TREES: usize = 20;

/// A probe kills members that fork once the escalation has reached SIGKILL.
fn killed_on_fork() {
    assert_killed_by_probe("fork-bomb-on-term", |_, _| true);
}

/// A probe also kills them when they execute another program.
fn killed_on_exec() {
    assert_killed_by_probe("exec-chain-on-term", |stream, killed| {
        let same = |e: &&Event| e.event == "exec" && e.entity_id == killed.entity_id;
        let mut execs = stream.iter().filter(same);
        execs.any(|exec| exec.time_boot_ns == killed.time_boot_ns)
    });
}

/// Asserts that a probe kills a process, by a signal event for which `is_expected` is true.
///
/// Kills agents with 40 processes of this behaviour, one after the other, until that happens.
fn assert_killed_by_probe(behaviour: &str, is_expected: impl Fn(&[Event], &Event) -> bool) {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let bombs = format!("bomb*40={behaviour}");
    let children = [&bombs[..], "keeper=as:test-keeper+sleep"];
    let killed = (1..=TREES).any(|round| {
        let role = format!("agent-{round}");
        test.agent(&role, &children, &[]);
        test.world.await_processes("keeper", round);
        test.world.await_processes("bomb", 40 * round);
        test.world.kill(&role);
        test.await_only(&["keeper"]);
        let closed = |e: &&Event| e.event == "session.close";
        eventually("the session is closed", || {
            (test.world.daemon().events().iter().filter(closed).count() >= round).then_some(())
        });
        let stream = test.world.daemon().events();
        by_kernel(&stream, "SIGKILL").any(|killed| is_expected(&stream, killed))
    });
    assert!(killed, "no process was killed by a probe");
    test.end(&["keeper"]);
}

/// A probe sends the first SIGTERM to members that no rule can keep. All other members are left to the service.
fn kernel_reap() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let children = [
        "leaf=sleep",
        "apart=setsid",
        "stubborn=ignore-term",
        "shell=parent+tool+sleep",
        "keeper=as:test-keeper+parent+under+sleep",
        "wall=as:test-wall+parent+user+sleep",
        "nobody=other-uid+sleep",
    ];
    let kept = ["keeper", "under", "wall", "user", "nobody"];
    let plain = ["leaf", "apart", "stubborn", "shell"];
    let agent = test.agent("agent", &children, &[&kept[..], &plain, &["tool"]].concat());
    test.await_sessions(&["agent"]);
    // Once the facts are known, the service clears the members for the probes before it answers the next request.
    let root = test.world.process("agent").pid.to_string();
    eventually("the facts of the agent are known", || {
        let facts = &ask_json(&test.world, &["explain", &root])["facts"];
        ["keep_marker", "unit"]
            .iter()
            .all(|fact| !facts[fact].is_null())
            .then_some(())
    });
    ask_json(&test.world, &["status"]);
    assert!(
        agent.signal(Signal::SIGKILL),
        "the agent could not be killed"
    );
    test.await_only(&kept);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    let stream = test.end(&kept);
    for role in plain {
        let key = test.world.process(role);
        let first = stream.iter().find(|e| e.is("signal", key));
        let first = first.unwrap_or_else(|| panic!("no signal for '{role}'"));
        let (by, signal) = (first.sent_by.as_deref(), first.signal.as_deref());
        assert_eq!(
            (by, signal),
            (Some("kernel"), Some("SIGTERM")),
            "first signal to '{role}'"
        );
    }
    let plain = plain.map(|role| test.world.process(role));
    let other = by_kernel(&stream, "SIGTERM").find(|e| !plain.iter().any(|key| e.is_about(*key)));
    assert!(
        other.is_none(),
        "a probe signalled another process: {other:?}"
    );
}

/// Number of processes of each kind that overwrite their environment.
const TITLED: usize = 8;

/// The environment at exec decides, even if the process overwrites it before the service can read /proc.
fn overwritten_marker() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    // Few variables, because a probe without `bpf_loop` reads only a few.
    let marked = format!("marked*{TITLED}=env-i+env:REAPER_KEEP=1+title");
    let unmarked = format!("unmarked*{TITLED}=env-i+env:REAPER_KEEP=0+title");
    test.agent("agent", &[&marked, &unmarked], &[]);
    test.world.await_processes("marked", TITLED);
    test.world.await_processes("unmarked", TITLED);
    test.world.kill("agent");
    test.await_only(&["marked"]);
    test.end(&["marked"]);
}

/// Minimum lifetime of the agent of a server.
const QUICK: Duration = Duration::from_millis(200);

/// A server of an agent without a terminal gets its delay, even if the agent exits normally after 200 ms, and with
/// `kernel_reap`.
fn server_of_a_quick_agent() {
    let mut test = PinnedWorld::new("kernel_reap = \"auto\"\n", &[]);
    let children = ["server=listen", "leaf=sleep", "die=exit+0"];
    let start = Instant::now();
    test.agent("agent", &children, &["server", "leaf"]);
    let server = test.world.process("server");
    std::thread::sleep(QUICK.saturating_sub(start.elapsed()));
    test.world.open_gate("die-agent");
    let waits = |e: &Event| {
        let rule = e.rule.as_deref() == Some("unattended-servers");
        e.is("decision", server) && e.decision.as_deref() == Some("wait") && rule
    };
    test.world.await_event("a decision to wait", waits);
    test.await_only(&["server"]);
    let reply = ask_json(&test.world, &["explain", &server.pid.to_string()]);
    let remaining_s = reply["process"]["decision"]["remaining_s"].as_u64();
    assert!(
        remaining_s.is_some_and(|s| (1..=60).contains(&s)),
        "{reply}"
    );
    test.end(&["server"]);
}

/// Number of processes in the chain, each the child of the previous one.
const DEPTH: usize = 1200;

/// A deep chain below an agent that exits normally is reaped. (After a normal exit, a keep of one process can extend to
/// all others, so each decision looks at the whole chain.)
fn deep_chain() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let chain = format!("upper=chain+{DEPTH}+0");
    test.agent("agent", &[&chain, "die=exit+0"], &[]);
    test.world.await_processes("upper", DEPTH);
    test.world.open_gate("die-agent");
    test.await_only(&[]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    test.end(&[]);
}
