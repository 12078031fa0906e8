//! Tests of start, stop and upgrade of the service: the pins are either complete or absent.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Bpffs, PinnedWorld, Rng, SurvivalScenario, listed};
use crate::cli::{OBJECT, reaper};
use crate::daemon::{self, Event};
use crate::trees::OWN_RULES;
use crate::world::World;

pub const SCENARIOS: &[SurvivalScenario] = &[
    ("leave-pinned", leave_pinned),
    ("clean-stop-unpins", clean_stop_unpins),
    ("handed-over-in-escalation", handed_over),
    ("stopped-in-escalation", stopped),
    ("killed-while-arming", killed_while_arming),
    ("upgrade-while-it-forks", upgrade),
    ("unpin", unpin),
    ("unpin-from-the-mount-point", unpin_from_the_mount_point),
];

/// An agent exits while no service runs. The next service resumes its session and reaps its tree.
fn leave_pinned() {
    let mut test = PinnedWorld::new(OWN_RULES, &["--leave-pinned"]);
    test.agent(
        "agent",
        &["leaf=sleep", "apart=double+setsid"],
        &["leaf", "apart"],
    );
    let events = test.world.stop();
    let pin_dir = events.last().and_then(|e| e.pin_dir.clone());
    let pin_dir = PathBuf::from(pin_dir.expect("the pin directory in the last event"));
    assert_eq!(listed(&pin_dir), test.pins.pinned(), "the pins");
    test.world.kill("agent");
    test.world.restart_daemon(&[]);
    let ready = test.world.await_event("ready", |e| e.event == "ready");
    assert_eq!(ready.resumed, Some(true), "the pins were not reused");
    test.await_only(&[]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    test.end(&[]);
    let resumed = test.stream().iter().any(|e| e.event == "session.resume");
    assert!(resumed, "the session was not resumed");
}

/// A normal stop removes the pins, and the next service does not resume the session.
fn clean_stop_unpins() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.pins.one("maps-");
    test.pins.one("probes-");
    test.agent("agent", &["leaf=sleep"], &["leaf"]);
    test.world.stop();
    assert!(
        !test.pins.dir().exists(),
        "left: {:?}",
        listed(&test.pins.dir())
    );
    test.world.assert_alive(&["agent", "leaf", "canary"]);
    test.world.restart_daemon(&[]);
    test.world.kill("agent");
    test.await_only(&[]);
    let events = test.world.stop();
    assert!(
        !events.iter().any(|e| e.event == "session.resume"),
        "a session was resumed"
    );
}

/// A service is stopped by SIGUSR2 between SIGTERM and SIGKILL, as for a restart. The next one sends SIGKILL.
fn handed_over() {
    let mut test = in_escalation();
    let events = test.world.stop_by(Signal::SIGUSR2);
    let end = events.last().expect("a summary");
    assert!(end.pin_dir.is_some(), "the pins are gone: {end:?}");
    test.world.assert_alive(&["stubborn"]);
    test.world.restart_daemon(&[]);
    test.await_only(&[]);
    test.end(&[]);
    let killed = |e: &Event| e.signal.as_deref() == Some("SIGKILL");
    assert!(test.stream().iter().any(killed), "SIGKILL was not sent");
}

/// A service that is stopped between SIGTERM and SIGKILL first sends SIGKILL, and then removes the pins.
fn stopped() {
    let mut test = in_escalation();
    let events = test.world.stop_by(Signal::SIGTERM);
    test.await_only(&[]);
    let end = events.last().expect("a summary");
    assert_eq!((&end.pin_dir, end.failed), (&None, Some(0)));
    assert!(!test.pins.dir().exists(), "left: {:?}", test.pins.dir());
}

/// Returns a world in which a process that ignores SIGTERM has had it.
fn in_escalation() -> PinnedWorld {
    let config = OWN_RULES.replace("200ms", "3s");
    let mut test = PinnedWorld::new(&config, &[]);
    test.agent("agent", &["stubborn=ignore-term"], &["stubborn"]);
    test.world.kill("agent");
    let stubborn = test.world.process("stubborn");
    test.world
        .await_event("SIGTERM", |e| e.is("signal", stubborn));
    test
}

/// A service starts after others were stopped or killed at a random moment of their start.
fn killed_while_arming() {
    let mut rng = Rng::new();
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.world.stop();
    for round in 0..40 {
        let mut daemon = daemon::spawn(test.world.dir(), test.world.arguments());
        sleep(Duration::from_millis(rng.below(160)));
        if round % 2 == 0 {
            kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM).expect("stop it");
            sleep(Duration::from_millis(rng.below(20)));
        }
        // The daemon may have exited already.
        let _ = daemon.kill();
        daemon.wait().expect("wait for the daemon");
    }
    test.world.restart_daemon(&[]);
    let stderr = fs::read_to_string(test.world.dir().join("stderr")).expect("read standard error");
    assert_eq!(stderr, "", "there were messages");
    test.agent("agent", &["leaf=sleep"], &["leaf"]);
    test.world.kill("agent");
    test.await_only(&[]);
    test.world.stop();
    assert!(
        !test.pins.dir().exists(),
        "left: {:?}",
        listed(&test.pins.dir())
    );
}

/// A service with another BPF object replaces the attached probes while processes fork, and no fork event is lost.
fn upgrade() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let mut object = fs::read(OBJECT).expect("read the shipped object");
    object.push(0);
    let other = test.world.dir().join("other.o");
    fs::write(&other, object).expect("write the other object");
    let other = ["--bpf-object", other.to_str().expect("a path in UTF-8")];
    let probes = test.pins.one("probes-");
    test.agent("agent", &["busy=busy+6000", "leaf=sleep"], &["leaf"]);
    test.world.await_processes("brood", 20);
    // The first upgrade follows a stop with `--leave-pinned`, the second a kill.
    test.world.kill_daemon();
    test.world.restart_daemon(&["--leave-pinned"]);
    test.world.stop();
    test.world.restart_daemon(&other);
    assert_ne!(
        test.pins.one("probes-"),
        probes,
        "the probes were not replaced"
    );
    test.world.kill_daemon();
    test.world.restart_daemon(&[]);
    assert_eq!(
        test.pins.one("probes-"),
        probes,
        "the probes were not replaced"
    );
    let before = test.world.processes("brood").len();
    test.world.await_processes("brood", before + 20);
    test.world.kill("agent");
    test.await_only(&[]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    test.end(&[]);
    let stream = test.stream();
    for key in test.world.processes("brood") {
        assert!(
            stream.iter().any(|e| e.is("fork", key)),
            "no fork event of {key:?}"
        );
    }
}

/// `reaper unpin` removes every version's pins. It removes no foreign files, and refuses while a daemon runs.
fn unpin() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let pins = test.pins.dir();
    let unpin = |test: &PinnedWorld| {
        let place = pins.to_str().expect("a path in UTF-8");
        reaper(test.world.dir(), &["unpin", "--pin-dir", place])
    };
    let said = unpin(&test);
    assert_eq!(said.code, Some(4), "{}{}", said.out, said.err);
    let holder = test.world.daemon().pid().to_string();
    assert!(
        said.err.contains(&holder),
        "{holder} is not named: {}",
        said.err
    );
    test.pins.one("maps-");
    test.world.kill_daemon();
    // Pins of other versions have other names.
    for (ours, theirs) in [("maps-", "maps-99"), ("probes-", "probes-deadbeef")] {
        let ours = test.pins.one(ours);
        fs::rename(&ours, ours.with_file_name(theirs)).expect("rename pins");
    }
    // Foreign directories: one in a scope's directory, which cannot be removed then, and one elsewhere, which does not
    // matter.
    let foreign = listed(&pins)[0].join("foreign");
    fs::create_dir(&foreign).expect("create a directory");
    let other = pins.join("other");
    fs::create_dir(&other).expect("create a directory");
    let said = unpin(&test);
    assert_eq!(said.code, Some(1), "{}{}", said.out, said.err);
    let named = foreign.display().to_string();
    assert!(
        said.err.contains(&named),
        "{named} is not named: {}",
        said.err
    );
    assert!(foreign.exists(), "a foreign directory was removed");
    fs::remove_dir(&foreign).expect("remove the directory");
    let said = unpin(&test);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert_eq!(listed(&pins), std::slice::from_ref(&other), "the rest");
    fs::remove_dir(&other).expect("remove the directory");
    let said = unpin(&test);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert!(!pins.exists(), "the empty directory was not removed");
}

/// The pin directory can be the mount point, which is not removed.
fn unpin_from_the_mount_point() {
    let mut test = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let place = test.pins.0.path().to_owned();
    let pins = place.to_str().expect("a path in UTF-8");
    // A new bpffs can contain entries of the kernel.
    let empty = listed(&place);
    for stop in [false, true] {
        test.world.start_daemon(OWN_RULES, &["--pin-dir", pins]);
        assert_eq!(listed(&place).len(), empty.len() + 1, "no scope");
        if stop {
            test.world.stop();
        } else {
            test.world.kill_daemon();
            let said = reaper(test.world.dir(), &["unpin", "--pin-dir", pins]);
            assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
        }
        assert_eq!(listed(&place), empty, "the rest");
    }
}
