//! Coming, going, and being replaced: what is pinned is there whole or not at all.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Bpffs, Dice, PinnedWorld, SurvivalScenario, listed};
use crate::cli::{OBJECT, reaper};
use crate::daemon;
use crate::trees::OWN_RULES;
use crate::world::World;

pub const STORIES: &[SurvivalScenario] = &[
    ("leave-pinned", leave_pinned),
    ("clean-stop-unpins", clean_stop_unpins),
    ("killed-while-arming", killed_while_arming),
    ("upgrade-while-it-forks", upgrade),
    ("unpin", unpin),
    ("unpin-from-the-mount-point", unpin_from_the_mount_point),
];

/// Nobody is there when the agent dies, and the next one knows.
fn leave_pinned() {
    let mut life = PinnedWorld::new(OWN_RULES, &["--leave-pinned"]);
    life.agent(
        "agent",
        &["leaf=sleep", "apart=double+setsid"],
        &["leaf", "apart"],
    );
    let said = life.world.stop();
    let left = said.last().and_then(|e| e.pin_dir.clone());
    let left = PathBuf::from(left.expect("where it was left armed"));
    assert_eq!(listed(&left), life.pins.pinned(), "what is pinned");
    life.world.kill("agent");
    life.world.restart_daemon(&[]);
    let ready = life.world.await_event("ready", |e| e.event == "ready");
    assert_eq!(ready.resumed, Some(true), "whether it was taken up");
    life.await_left(&[]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    life.end(&[]);
    let resumed = life.stream().iter().any(|e| e.event == "session.resume");
    assert!(resumed, "the session was not taken up");
}

/// Nothing is left where it was not asked for.
fn clean_stop_unpins() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.pins.one("maps-");
    life.pins.one("probes-");
    life.agent("agent", &["leaf=sleep"], &["leaf"]);
    life.world.stop();
    assert!(
        !life.pins.dir().exists(),
        "left: {:?}",
        listed(&life.pins.dir())
    );
    life.world.assert_alive(&["agent", "leaf", "canary"]);
    life.world.restart_daemon(&[]);
    life.world.kill("agent");
    life.await_left(&[]);
    let said = life.world.stop();
    assert!(
        !said.iter().any(|e| e.event == "session.resume"),
        "what was left is taken up"
    );
}

/// Half of what there is to pin is in nobody's way.
fn killed_while_arming() {
    let mut dice = Dice::new();
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.world.stop();
    for round in 0..40 {
        let mut daemon = daemon::spawn(life.world.dir(), life.world.arguments());
        sleep(Duration::from_millis(dice.below(160)));
        if round % 2 == 0 {
            kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM).expect("stop it");
            sleep(Duration::from_millis(dice.below(20)));
        }
        // It may have ended already.
        let _ = daemon.kill();
        daemon.wait().expect("wait for the daemon");
    }
    life.world.restart_daemon(&[]);
    let stderr = fs::read_to_string(life.world.dir().join("stderr")).expect("read what was said");
    assert_eq!(stderr, "", "there were complaints");
    life.agent("agent", &["leaf=sleep"], &["leaf"]);
    life.world.kill("agent");
    life.await_left(&[]);
    life.world.stop();
    assert!(
        !life.pins.dir().exists(),
        "left: {:?}",
        listed(&life.pins.dir())
    );
}

/// Probes of another object take over from those that are at work, while processes are born: of each it is told.
fn upgrade() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let mut object = fs::read(OBJECT).expect("read the shipped object");
    object.push(0);
    let other = life.world.dir().join("other.o");
    fs::write(&other, object).expect("write the other object");
    let other = ["--bpf-object", other.to_str().expect("a path in UTF-8")];
    let probes = life.pins.one("probes-");
    life.agent("agent", &["busy=busy+6000", "leaf=sleep"], &["leaf"]);
    life.world.await_processes("brood", 20);
    // After a stop that leaves it armed, and after none.
    life.world.kill_daemon();
    life.world.restart_daemon(&["--leave-pinned"]);
    life.world.stop();
    life.world.restart_daemon(&other);
    assert_ne!(
        life.pins.one("probes-"),
        probes,
        "the probes are those of before"
    );
    life.world.kill_daemon();
    life.world.restart_daemon(&[]);
    assert_eq!(
        life.pins.one("probes-"),
        probes,
        "the probes are those of the other object"
    );
    let before = life.world.processes("brood").len();
    life.world.await_processes("brood", before + 20);
    life.world.kill("agent");
    life.await_left(&[]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    life.end(&[]);
    let stream = life.stream();
    for who in life.world.processes("brood") {
        assert!(
            stream.iter().any(|e| e.is("fork", who)),
            "the birth of {who:?} was missed"
        );
    }
}

/// Removes what any version has pinned, but not from under a daemon, and nothing that is somebody else's.
fn unpin() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let pins = life.pins.dir();
    let unpin = |life: &PinnedWorld| {
        let place = pins.to_str().expect("a path in UTF-8");
        reaper(life.world.dir(), &["unpin", "--pin-dir", place])
    };
    let said = unpin(&life);
    assert_eq!(said.code, Some(4), "{}{}", said.out, said.err);
    let holder = life.world.daemon().pid().to_string();
    assert!(
        said.err.contains(&holder),
        "{holder} is not named: {}",
        said.err
    );
    life.pins.one("maps-");
    life.world.kill_daemon();
    // What another version has: these, under other names.
    for (ours, theirs) in [("maps-", "maps-99"), ("probes-", "probes-deadbeef")] {
        let ours = life.pins.one(ours);
        fs::rename(&ours, ours.with_file_name(theirs)).expect("rename pins");
    }
    // Of somebody else: in a scope's place it is in the way, elsewhere it is none of reaper's business.
    let kept = listed(&pins)[0].join("kept");
    fs::create_dir(&kept).expect("make a directory");
    let mine = pins.join("mine");
    fs::create_dir(&mine).expect("make a directory");
    let said = unpin(&life);
    assert_eq!(said.code, Some(1), "{}{}", said.out, said.err);
    let named = kept.display().to_string();
    assert!(
        said.err.contains(&named),
        "{named} is not named: {}",
        said.err
    );
    assert!(kept.exists(), "what is somebody else's was removed");
    fs::remove_dir(&kept).expect("remove the directory");
    let said = unpin(&life);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert_eq!(listed(&pins), std::slice::from_ref(&mine), "what is left");
    fs::remove_dir(&mine).expect("remove the directory");
    let said = unpin(&life);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert!(!pins.exists(), "the empty directory is left");
}

/// The pin directory may be the mount point, which stays.
fn unpin_from_the_mount_point() {
    let mut life = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let place = life.pins.0.path().to_owned();
    let pins = place.to_str().expect("a path in UTF-8");
    // The kernel may have put something there itself.
    let empty = listed(&place);
    for stop in [false, true] {
        life.world.start_daemon(OWN_RULES, &["--pin-dir", pins]);
        assert_eq!(listed(&place).len(), empty.len() + 1, "a scope is there");
        if stop {
            life.world.stop();
        } else {
            life.world.kill_daemon();
            let said = reaper(life.world.dir(), &["unpin", "--pin-dir", pins]);
            assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
        }
        assert_eq!(listed(&place), empty, "what is left");
    }
}
