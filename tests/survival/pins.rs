//! What may be found where the pins belong.
//!
//! A bpffs cannot be filled up: it takes no quota, and memory is its only bound.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::{Bpffs, PinnedWorld, SurvivalScenario, listed};
use crate::cli::reaper;
use crate::trees::OWN_RULES;
use crate::world::World;

pub const STORIES: &[SurvivalScenario] = &[
    ("no-bpffs", no_bpffs),
    ("pins-removed-under-it", pins_removed),
    ("read-only-bpffs", read_only),
    ("foreign-pin", foreign_pin),
    ("another-thing", another_thing),
    ("half-a-set-of-maps", half_a_set_of_maps),
    ("half-a-set-of-probes", half_a_set_of_probes),
    ("probes-of-other-maps", probes_of_other_maps),
    ("killed-while-upgrading", killed_while_upgrading),
    ("two-services", two_services),
];

/// What was said on standard error is one line, with all of these words in it.
fn assert_says(world: &World, words: &[&str]) {
    let said = fs::read_to_string(world.dir().join("stderr")).expect("read what was said");
    assert_eq!(said.lines().count(), 1, "not one line:\n{said}");
    for word in words {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
}

/// It does what it is there for.
fn assert_reaps(life: &mut PinnedWorld) {
    life.agent(
        "agent",
        &["leaf=sleep", "apart=double+setsid"],
        &["leaf", "apart"],
    );
    life.world.kill("agent");
    life.await_left(&[]);
    life.world
        .await_event("the session is closed", |e| e.event == "session.close");
    let said = life.world.stop();
    crate::trees::checks::assert_well_formed(&life.world, &said);
}

/// Who removes the pins of a service at work takes nothing from it while it lives.
fn pins_removed() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    fs::remove_dir_all(life.pins.dir()).expect("remove all that is pinned");
    assert_reaps(&mut life);
}

fn no_bpffs() {
    let mut life = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let place = life.world.dir().join("pins");
    let place = place.to_str().expect("a path in UTF-8");
    life.world.start_daemon(OWN_RULES, &["--pin-dir", place]);
    assert_says(&life.world, &[place, "mount"]);
    assert_reaps(&mut life);
    assert!(!Path::new(place).exists(), "a directory is left");
}

fn read_only() {
    let mut life = PinnedWorld {
        world: World::new(true),
        pins: Bpffs::new(),
    };
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    let none = None::<&str>;
    mount(none, life.pins.0.path(), none, flags, none).expect("make the bpffs read-only");
    life.watch(OWN_RULES, &[]);
    let place = life.pins.dir();
    assert_says(
        &life.world,
        &[place.to_str().expect("a path in UTF-8"), "Read-only"],
    );
    assert_reaps(&mut life);
}

/// A map of another kind than is expected is left where it is.
fn foreign_pin() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.world.kill_daemon();
    let members = life.pins.one("maps-").join("MEMBERS");
    fs::remove_file(&members).expect("remove a pin");
    fs::hard_link(members.with_file_name("DROPS"), &members).expect("pin another map there");
    let pinned = listed(&life.pins.one("maps-"));
    life.world.restart_daemon(&[]);
    assert_says(
        &life.world,
        &[members.to_str().expect("a path in UTF-8"), "another kind"],
    );
    assert_reaps(&mut life);
    assert_eq!(
        listed(&life.pins.one("maps-")),
        pinned,
        "what was not its own"
    );
}

/// So is what is no map of this program.
fn another_thing() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.world.kill_daemon();
    let maps = life.pins.one("maps-");
    fs::remove_file(maps.join("NAMES")).expect("remove a pin");
    let other = maps.join("OTHER");
    fs::hard_link(maps.join("DROPS"), &other).expect("pin another map there");
    let pinned = listed(&maps);
    life.world.restart_daemon(&[]);
    assert_says(&life.world, &[other.to_str().expect("a path in UTF-8")]);
    assert_reaps(&mut life);
    assert_eq!(listed(&maps), pinned, "what was not its own");
}

/// An agent of before and one of now, and what was said of it in one line. Then nothing is left.
fn goes_on(life: &mut PinnedWorld, words: &[&str]) {
    life.world.restart_daemon(&[]);
    match words {
        [] => assert_silent(&life.world),
        words => assert_says(&life.world, words),
    }
    life.pins.one("maps-");
    life.pins.one("probes-");
    life.world.kill("before");
    assert_reaps(life);
    assert!(
        !life.pins.dir().exists(),
        "left: {:?}",
        listed(&life.pins.dir())
    );
}

/// A daemon with an agent, and then without the daemon.
fn crashed() -> PinnedWorld {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.agent("before", &["before-leaf=sleep"], &["before-leaf"]);
    life.world.kill_daemon();
    life
}

fn assert_silent(world: &World) {
    let said = fs::read_to_string(world.dir().join("stderr")).expect("read what was said");
    assert_eq!(said, "", "there were complaints");
}

/// What is left of maps is of no use, and in nobody's way.
fn half_a_set_of_maps() {
    for left in [6, 0] {
        let mut life = crashed();
        let maps = life.pins.one("maps-");
        for map in &listed(&maps)[left..] {
            fs::remove_file(map).expect("remove a pin");
        }
        goes_on(&mut life, &["maps-", "lacks the map", "replacing all maps"]);
    }
}

/// Probes some of which are gone are none.
fn half_a_set_of_probes() {
    for left in [5, 1, 0] {
        let mut life = crashed();
        let probes = life.pins.one("probes-");
        for pin in &listed(&probes)[left..] {
            fs::remove_file(pin).expect("remove a pin");
        }
        goes_on(&mut life, &["probes-", "attaching all again"]);
    }
    // Another thing in a link's place.
    let mut life = crashed();
    let probes = life.pins.one("probes-");
    let link = probes.join("sched_process_exec");
    fs::remove_file(&link).expect("remove a pin");
    fs::hard_link(life.pins.one("maps-").join("NAMES"), &link).expect("pin a map there");
    goes_on(&mut life, &["probes-", "attaching all again"]);
}

/// Probes that write into maps which nobody can reach any more are at work for nobody.
fn probes_of_other_maps() {
    let mut life = crashed();
    fs::remove_dir_all(life.pins.one("maps-")).expect("remove the maps");
    goes_on(&mut life, &[]);

    // The next one was killed when it had pinned the new maps.
    let mut life = crashed();
    let probes = life.pins.one("probes-");
    let kept = life.pins.0.path().join("kept");
    fs::rename(&probes, &kept).expect("keep the probes");
    fs::remove_dir_all(life.pins.one("maps-")).expect("remove the maps");
    life.world.restart_daemon(&[]);
    life.world.kill_daemon();
    let maps = life.pins.one("maps-");
    fs::remove_dir_all(&probes).expect("remove the new probes");
    fs::rename(&kept, &probes).expect("put the old ones there");
    goes_on(&mut life, &[]);
    assert!(!maps.exists(), "the maps are left");
}

/// What an upgrade was about to remove is at work or gone, and the one that comes next has its own.
fn killed_while_upgrading() {
    let mut life = crashed();
    let probes = life.pins.one("probes-");
    let aside = probes.with_file_name("new-no-probes-deadbeef");
    fs::rename(&probes, &aside).expect("set the probes aside");
    fs::remove_file(&listed(&aside)[0]).expect("remove a pin");
    life.world.restart_daemon(&[]);
    assert_silent(&life.world);
    life.pins.one("probes-");
    assert!(!aside.exists(), "what was to be removed is left");
    let before = inodes(&probes);
    life.world.kill_daemon();
    life.world.restart_daemon(&[]);
    assert_eq!(inodes(&probes), before, "probes at work were replaced");
    life.world.kill_daemon();
    goes_on(&mut life, &[]);
}

/// The pins in a directory, each of which has its number.
fn inodes(dir: &Path) -> Vec<u64> {
    let pins = listed(dir);
    let inode = |pin: &PathBuf| fs::symlink_metadata(pin).expect("a pin").ino();
    pins.iter().map(inode).collect()
}

/// Two that do not know of each other's lock meet at the pins.
fn two_services() {
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    let launcher = life.world.process("launcher").pid.to_string();
    let pins = life.pins.dir().display().to_string();
    let place = ["--pin-dir", &pins, "--runtime-dir", "other"];
    let second = [&["daemon", "--scope", &launcher][..], &place].concat();
    let said = reaper(life.world.dir(), &second);
    assert_eq!(said.code, Some(4), "{}{}", said.out, said.err);
    assert_eq!(
        said.err.trim_end().lines().count(),
        1,
        "not one line: {}",
        said.err
    );
    let first = life.world.daemon().pid().to_string();
    assert!(
        said.err.contains(&first),
        "{first} is not named: {}",
        said.err
    );
    assert_reaps(&mut life);
}
