//! Runs that wait for a slot of their group.

use nix::libc;
use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, Started};
use crate::proc;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("slots-of-killed-runs", killed_holder),
    ("slots-of-many-killed-runs", many_killed),
];

/// Starts a run that holds the only slot.
fn holder(place: &RunWorld, script: &str) -> Started {
    let script = format!("{script}; echo $$ > up; while :; do sleep 0.02; done");
    let words = ["--grace", "20s", "--limit", "x=1", "--", "sh", "-c"];
    let run = place.start(&[&words[..], &[&script]].concat());
    place.await_pid("up");
    run
}

/// Starts a detached run that waits for the slot.
fn queue(place: &RunWorld, name: &str, script: &str) {
    let words = ["run", "--detach", "--limit", "x=1", "--name", name, "--"];
    let said = place.ask(&[&words[..], &["sh", "-c", script, name]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// After the holder is killed, the waiting runs end its leftovers before one of them takes the slot. No other `reaper`
/// command runs.
fn killed_holder(place: &RunWorld) {
    let first = holder(place, "trap 'sleep 0.3; echo drained >> log; exit' TERM");
    for name in ["r1", "r2", "r3", "r4", "r5"] {
        queue(place, name, "echo $0 >> log");
    }
    let runs = place.ps(&[]);
    assert!(runs[1..].iter().all(|run| run["state"] == "waiting"));
    // A run is killed while it waits.
    let wrapper = runs.iter().find(|run| run["name"] == "r3");
    let wrapper = wrapper.and_then(|run| run["wrapper"]["pid"].as_u64());
    let wrapper = proc::stat(wrapper.expect("a pid"))
        .expect("the waiting run")
        .id;
    assert!(wrapper.signal(Signal::SIGKILL));
    first.signal(libc::SIGKILL);
    let log = place.await_content("log", |content| content.lines().count() == 5);
    let mut lines: Vec<_> = log.lines().collect();
    lines[1..].sort_unstable();
    assert_eq!(lines, ["drained", "r1", "r2", "r4", "r5"]);
}

/// Each run is killed in turn, and the next one takes the slot.
fn many_killed(place: &RunWorld) {
    let mut first = holder(place, "trap 'exit 0' TERM");
    let names: Vec<String> = (1..=20).map(|n| format!("r{n}")).collect();
    for name in &names {
        queue(
            place,
            name,
            "echo $0 >> log; kill -KILL $PPID; exec sleep 60",
        );
    }
    first.signal(libc::SIGTERM);
    assert_eq!(first.end(), 0);
    let log = place.await_content("log", |content| content.lines().count() == names.len());
    let mut lines: Vec<_> = log.lines().collect();
    lines.sort_unstable_by_key(|name| name[1..].parse::<u32>().ok());
    assert_eq!(lines, names);
}
