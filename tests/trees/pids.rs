//! What needs a pid namespace of its own: the next pid is chosen there, and no other process of the machine takes
//! it.

use std::process::Command;

use super::{CONFIG, judge};
use crate::world::{World, eventually};

pub const STORIES: &[(&str, fn())] = &[
    ("recycled-pid", || capsule("recycled-pid")),
    ("daemon-in-a-pid-namespace", || capsule("plain")),
];

/// The stories as they run inside.
pub const INSIDE: &[(&str, fn())] = &[("recycled-pid", recycled), ("plain", plain)];

/// Successors with pid and tick of a member.
const WANTED: usize = 30;

/// Runs one of [`INSIDE`] in a pid namespace.
fn capsule(story: &str) {
    let this = std::env::current_exe().expect("this program's path");
    let output = Command::new(this)
        .args(["actor", "capsule", "capsule", "/", story])
        .output();
    let output = output.expect("run the capsule");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "in the pid namespace, {}:\n{errors}",
        output.status
    );
}

/// A process that has got the pid of a member, in the clock tick in which that began, is not signalled.
fn recycled() {
    let mut world = World::new(true);
    world.watch(CONFIG, &[]);
    let daemon = world.daemon().pid().to_string();
    world.order(
        "worker",
        "recycler",
        "recycler",
        &[daemon, WANTED.to_string()],
    );
    world.await_cast("recycler", 1);
    let rounds = std::fs::read_to_string(world.dir().join("rounds")).expect("the number of rounds");
    let rounds: usize = rounds.parse().expect("a number");
    eventually("every session is closed", || {
        let closed = world
            .daemon()
            .events()
            .iter()
            .filter(|e| e.event == "session.close")
            .count();
        (closed >= rounds).then_some(())
    });
    // Each reports itself in its own time.
    world.await_cast("successor", rounds);
    world.assert_alive(&["successor", "recycler", "canary", "stray"]);
    let events = world.stop();
    judge::sound(&world, &events);
    // Pid and tick are those of a member: what tells them apart is who bore them.
    let recycler = world.one("recycler").pid.to_string();
    for e in events.iter().filter(|e| e.event == "signal") {
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

/// The common story where the daemon's pids are not the machine's.
fn plain() {
    let row = super::Scenario::new(
        "plain",
        &[
            super::Part::child("leaf", "sleep"),
            super::Part::detached("other", "double setsid"),
        ],
    );
    row.play(super::Mode::Enforce, drop);
}
