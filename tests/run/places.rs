//! Who waits for a place among the runs of a group.

use nix::libc;
use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, Started};
use crate::proc;

pub const STORIES: &[(&str, ScenarioFn)] = &[
    ("places-in-order", in_order),
    ("places-of-many-killed", many_killed),
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

/// First come, first served, and none before what a killed one has left is ended; nobody else looks for that meanwhile.
fn in_order(place: &RunWorld) {
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
    let log = place.await_content("log", |said| said.contains("r5"));
    assert_eq!(log, "drained\nr1\nr2\nr4\nr5\n");
}

/// Whoever is next learns of it each time.
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
    let log = place.await_content("log", |said| said.ends_with("r20\n"));
    assert_eq!(log.lines().collect::<Vec<_>>(), names);
}
