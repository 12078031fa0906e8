//! Runs that wait for a slot of their group.

use nix::libc;
use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, Started};
use crate::proc;

pub const STORIES: &[(&str, ScenarioFn)] = &[
    ("slots-of-killed-runs", killed_holder),
    ("slots-of-many-killed", many_killed),
];

/// One that has the only place.
fn holder(place: &RunWorld, script: &str) -> Started {
    let script = format!("{script}; echo $$ > up; while :; do sleep 0.02; done");
    let words = ["--grace", "20s", "--limit", "x=1", "--", "sh", "-c"];
    let run = place.start(&[&words[..], &[&script]].concat());
    place.await_pid("up");
    run
}

/// One more that waits, behind all that there are.
fn queue(place: &RunWorld, name: &str, script: &str) {
    let words = ["run", "--detach", "--limit", "x=1", "--name", name, "--"];
    let said = place.ask(&[&words[..], &["sh", "-c", script, name]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// All get the slot, and none before what a killed run has left is ended; nothing else looks for that meanwhile.
fn killed_holder(place: &RunWorld) {
    let first = holder(place, "trap 'sleep 0.3; echo drained >> log; exit' TERM");
    for name in ["r1", "r2", "r3", "r4", "r5"] {
        queue(place, name, "echo $0 >> log");
    }
    let runs = place.ps(&[]);
    assert!(runs[1..].iter().all(|run| run["state"] == "waiting"));
    // Another is killed while it waits.
    let wrapper = runs.iter().find(|run| run["name"] == "r3");
    let wrapper = wrapper.and_then(|run| run["wrapper"]["pid"].as_u64());
    let wrapper = proc::stat(wrapper.expect("a pid")).expect("it waits").id;
    assert!(wrapper.signal(Signal::SIGKILL));
    first.signal(libc::SIGKILL);
    let log = place.await_content("log", |said| said.lines().count() == 5);
    let mut lines: Vec<_> = log.lines().collect();
    lines[1..].sort_unstable();
    assert_eq!(lines, ["drained", "r1", "r2", "r4", "r5"]);
}

/// The run that is next learns of it each time.
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
    let log = place.await_content("log", |said| said.lines().count() == names.len());
    let mut lines: Vec<_> = log.lines().collect();
    lines.sort_unstable_by_key(|name| name[1..].parse::<u32>().ok());
    assert_eq!(lines, names);
}
