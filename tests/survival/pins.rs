//! Tests of unexpected contents of the pin directory.
//!
//! A full bpffs is not tested: it has no quota, and only memory limits it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::{Bpffs, PinnedWorld, SurvivalScenario, listed};
use crate::cli::reaper;
use crate::trees::OWN_RULES;
use crate::world::World;

pub const SCENARIOS: &[SurvivalScenario] = &[
    ("no-bpffs", no_bpffs),
    ("pins-removed-while-running", pins_removed),
    ("read-only-bpffs", read_only),
    ("pin-of-another-kind", pin_of_another_kind),
    ("unknown-pin", unknown_pin),
    ("incomplete-maps", incomplete_maps),
    ("incomplete-probes", incomplete_probes),
    ("probes-of-other-maps", probes_of_other_maps),
    ("killed-while-upgrading", killed_while_upgrading),
    ("two-services", two_services),
];

/// Asserts that standard error is a single line that contains all of these words.
fn assert_message(world: &World, words: &[&str]) {
    let stderr = fs::read_to_string(world.dir().join("stderr")).expect("read standard error");
    assert_eq!(stderr.lines().count(), 1, "not one line:\n{stderr}");
    for word in words {
        assert!(stderr.contains(word), "no '{word}' in: {stderr}");
    }
}

/// Asserts that the daemon reaps an agent's tree, and stops it.
fn assert_reaps(test: &mut PinnedWorld) {
    test.agent(
        "agent",
        &["leaf=sleep", "apart=double+setsid"],
        &["leaf", "apart"],
    );
    test.world.kill("agent");
    test.await_only(&[]);
    test.world
        .await_event("the session is closed", |e| e.event == "session.close");
    let events = test.world.stop();
    crate::trees::checks::assert_well_formed(&test.world, &events);
}

/// A running service does not need its pins.
fn pins_removed() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    fs::remove_dir_all(test.pins.dir()).expect("remove all pins");
    assert_reaps(&mut test);
}

fn no_bpffs() {
    let mut test = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let place = test.world.dir().join("pins");
    let place = place.to_str().expect("a path in UTF-8");
    test.world.start_daemon(OWN_RULES, &["--pin-dir", place]);
    assert_message(&test.world, &[place, "mount"]);
    assert_reaps(&mut test);
    assert!(!Path::new(place).exists(), "the directory was not removed");
}

fn read_only() {
    let mut test = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    let none = None::<&str>;
    mount(none, test.pins.0.path(), none, flags, none).expect("make the bpffs read-only");
    test.watch(OWN_RULES, &[]);
    let place = test.pins.dir();
    assert_message(
        &test.world,
        &[place.to_str().expect("a path in UTF-8"), "read-only"],
    );
    assert_reaps(&mut test);
}

/// A pinned map of an unexpected kind is reported and left in place.
fn pin_of_another_kind() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.world.kill_daemon();
    let members = test.pins.one("maps-").join("MEMBERS");
    fs::remove_file(&members).expect("remove a pin");
    fs::hard_link(members.with_file_name("DROPS"), &members).expect("pin another map there");
    let pinned = listed(&test.pins.one("maps-"));
    test.world.restart_daemon(&[]);
    assert_message(
        &test.world,
        &[members.to_str().expect("a path in UTF-8"), "another kind"],
    );
    assert_reaps(&mut test);
    assert_eq!(
        listed(&test.pins.one("maps-")),
        pinned,
        "a foreign pin was changed"
    );
}

/// An unknown pin is reported, not removed.
fn unknown_pin() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.world.kill_daemon();
    let maps = test.pins.one("maps-");
    fs::remove_file(maps.join("NAMES")).expect("remove a pin");
    let other = maps.join("OTHER");
    fs::hard_link(maps.join("DROPS"), &other).expect("pin another map there");
    let pinned = listed(&maps);
    test.world.restart_daemon(&[]);
    assert_message(&test.world, &[other.to_str().expect("a path in UTF-8")]);
    assert_reaps(&mut test);
    assert_eq!(listed(&maps), pinned, "a foreign pin was changed");
}

/// Restarts the daemon and asserts its message, which contains `words`; none if `words` is empty.
///
/// Asserts that it reaps the trees of an earlier and of a new agent, and leaves no pins.
fn assert_recovers(test: &mut PinnedWorld, words: &[&str]) {
    test.world.restart_daemon(&[]);
    match words {
        [] => assert_silent(&test.world),
        words => assert_message(&test.world, words),
    }
    test.pins.one("maps-");
    test.pins.one("probes-");
    test.world.kill("before");
    assert_reaps(test);
    assert!(
        !test.pins.dir().exists(),
        "left: {:?}",
        listed(&test.pins.dir())
    );
}

/// Starts a daemon and an agent, and kills the daemon.
fn crashed() -> PinnedWorld {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.agent("before", &["before-leaf=sleep"], &["before-leaf"]);
    test.world.kill_daemon();
    test
}

fn assert_silent(world: &World) {
    let stderr = fs::read_to_string(world.dir().join("stderr")).expect("read standard error");
    assert_eq!(stderr, "", "there were messages");
}

/// The service replaces an incomplete set of pinned maps.
fn incomplete_maps() {
    for left in [6, 0] {
        let mut test = crashed();
        let maps = test.pins.one("maps-");
        for map in &listed(&maps)[left..] {
            fs::remove_file(map).expect("remove a pin");
        }
        assert_recovers(
            &mut test,
            &["maps-", "the pinned map ", "creating new maps"],
        );
    }
}

/// The service replaces an incomplete set of pinned probes.
fn incomplete_probes() {
    for left in [5, 1, 0] {
        let mut test = crashed();
        let probes = test.pins.one("probes-");
        for pin in &listed(&probes)[left..] {
            fs::remove_file(pin).expect("remove a pin");
        }
        assert_recovers(&mut test, &["probes-", "attaching all again"]);
    }
    // A map instead of a link.
    let mut test = crashed();
    let probes = test.pins.one("probes-");
    let link = probes.join("sched_process_exec");
    fs::remove_file(&link).expect("remove a pin");
    fs::hard_link(test.pins.one("maps-").join("NAMES"), &link).expect("pin a map there");
    assert_recovers(&mut test, &["probes-", "attaching all again"]);
}

/// The service replaces pinned probes whose maps are not pinned any more.
fn probes_of_other_maps() {
    let mut test = crashed();
    fs::remove_dir_all(test.pins.one("maps-")).expect("remove the maps");
    assert_recovers(&mut test, &[]);

    // A service was killed after it had pinned new maps, and before it replaced the probes.
    let mut test = crashed();
    let probes = test.pins.one("probes-");
    let moved = test.pins.0.path().join("moved");
    fs::rename(&probes, &moved).expect("move the probes");
    fs::remove_dir_all(test.pins.one("maps-")).expect("remove the maps");
    test.world.restart_daemon(&[]);
    test.world.kill_daemon();
    let maps = test.pins.one("maps-");
    fs::remove_dir_all(&probes).expect("remove the new probes");
    fs::rename(&moved, &probes).expect("move the old probes back");
    assert_recovers(&mut test, &[]);
    assert!(!maps.exists(), "the maps were not removed");
}

/// An upgrade was interrupted. The next service removes the probes that the upgrade had renamed. It attaches its own
/// probes, and keeps them over a restart.
fn killed_while_upgrading() {
    let mut test = crashed();
    let probes = test.pins.one("probes-");
    let renamed = probes.with_file_name("new-no-probes-deadbeef");
    fs::rename(&probes, &renamed).expect("rename the probes");
    fs::remove_file(&listed(&renamed)[0]).expect("remove a pin");
    test.world.restart_daemon(&[]);
    assert_silent(&test.world);
    test.pins.one("probes-");
    assert!(!renamed.exists(), "the renamed probes were not removed");
    let before = inodes(&probes);
    test.world.kill_daemon();
    test.world.restart_daemon(&[]);
    assert_eq!(inodes(&probes), before, "complete probes were replaced");
    test.world.kill_daemon();
    assert_recovers(&mut test, &[]);
}

/// Returns the inode numbers of a directory's pins.
fn inodes(dir: &Path) -> Vec<u64> {
    let pins = listed(dir);
    let inode = |pin: &PathBuf| fs::symlink_metadata(pin).expect("a pin").ino();
    pins.iter().map(inode).collect()
}

/// A second daemon with another runtime directory, and so another lock, exits with code 4 at the pins.
fn two_services() {
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    let launcher = test.world.process("launcher").pid.to_string();
    let pins = test.pins.dir().display().to_string();
    let place = ["--pin-dir", &pins, "--runtime-dir", "other"];
    let second = [&["daemon", "--scope", &launcher][..], &place].concat();
    let said = reaper(test.world.dir(), &second);
    assert_eq!(said.code, Some(4), "{}{}", said.out, said.err);
    assert_eq!(
        said.err.trim_end().lines().count(),
        1,
        "not one line: {}",
        said.err
    );
    let first = test.world.daemon().pid().to_string();
    assert!(
        said.err.contains(&first),
        "{first} is not named: {}",
        said.err
    );
    assert_reaps(&mut test);
}
