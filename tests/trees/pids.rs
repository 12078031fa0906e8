//! Scenarios in a PID namespace of their own: the test chooses the next pid there, and no process of the host takes it.

use std::process::{Command, Output};

use super::source_support::SourceSupport;
use super::{CONFIG, ScenarioEntry, ScenarioRun};
use crate::world::World;

pub const SCENARIOS: &[ScenarioEntry] = &[
    ("recycled-pid", |view| capsule(view, "recycled-pid")),
    ("daemon-in-a-pid-namespace", |view| {
        view.exempt("other", "double");
        capsule(view, "plain");
    }),
];

/// Scenarios that run inside the namespace.
pub const INSIDE: &[ScenarioEntry] = &[("recycled-pid", recycled), ("plain", plain)];

/// Number of processes that must reuse the pid of a member in the same clock tick.
const WANTED: usize = 30;

/// Runs a test as the init process of a new PID namespace. `words` are the test's name, and the source of a scenario.
pub fn run_in_namespace(words: &[&str]) -> Output {
    let this = std::env::current_exe().expect("this program's path");
    let mut command = Command::new(this);
    command.args(["test-process", "run-in-pid-namespace", "capsule", "/"]);
    command.args(words).output().expect("run the capsule")
}

/// Runs a scenario of [`INSIDE`], or `windows`, in a new PID namespace.
pub(super) fn capsule(view: &ScenarioRun, scenario: &str) {
    let output = run_in_namespace(&[scenario, view.source.name()]);
    let errors = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    if let SourceSupport::Unsupported(_) = view.support {
        let said = "the daemon ended with exit status: 3";
        assert!(
            errors.contains(said),
            "in the PID namespace, {status}:\n{errors}"
        );
    } else {
        assert!(
            status.success(),
            "in the PID namespace, {status}:\n{errors}"
        );
    }
}

/// A process that reuses a member's pid in the same tick is not signalled.
fn recycled(view: &ScenarioRun) {
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let daemon = world.daemon().pid().to_string();
    world.launch(
        "worker",
        "recycler",
        "recycler",
        &[daemon, WANTED.to_string()],
    );
    world.await_processes("recycler", 1);
    let rounds = std::fs::read_to_string(world.dir().join("rounds")).expect("the number of rounds");
    let rounds: usize = rounds.parse().expect("a number");
    view.await_closed(&world, rounds);
    // Each process reports itself some time after its start.
    world.await_processes("successor", rounds);
    world.assert_alive(&["successor"]);
    view.stop(&mut world, &["recycler"]);
    // Pid and tick are those of a member, so only the birth parent distinguishes them.
    let recycler = world.process("recycler").pid.to_string();
    for e in crate::daemon::signals(world.dir()) {
        let parent = e
            .birth_parent_id
            .as_deref()
            .and_then(|id| id.rsplit('-').next());
        assert_ne!(
            parent,
            Some(recycler.as_str()),
            "a successor was signalled: {e:?}"
        );
    }
}

/// The common scenario with a daemon whose pids differ from the host's.
fn plain(view: &ScenarioRun) {
    let row = super::Scenario::new(
        "plain",
        &[
            super::ProcessSpec::child("leaf", "sleep"),
            super::ProcessSpec::detached("other", "double setsid"),
        ],
    );
    row.through(view.source).run(super::Mode::Enforce, drop);
}
