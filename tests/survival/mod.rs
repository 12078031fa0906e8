//! What happens when the service dies, falls behind, or finds something in its place.

mod arming;
mod away;
mod gaps;
mod keeps;
mod kernel;
mod killed;
mod lost;
mod pins;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::daemon::{self, Event};
use crate::proc::ProcessKey;
use crate::trees::trial;
use crate::world::{TempDir, World, eventually};

type SurvivalScenario = (&'static str, fn());

/// Who has nothing to do with any agent.
const OUTSIDERS: [&str; 3] = ["launcher", "canary", "canary-orphan"];

pub fn trials() -> Vec<Trial> {
    let scenarios = killed::STORIES
        .iter()
        .chain(arming::STORIES)
        .chain(away::STORIES)
        .chain(gaps::STORIES)
        .chain(keeps::STORIES)
        .chain(lost::STORIES)
        .chain(pins::STORIES);
    let trials = scenarios.map(|(name, scenario)| trial("survival", name, scenario));
    trials.chain(kernel::trials()).collect()
}

/// Those that take minutes.
pub fn soaks() -> Vec<Trial> {
    let scenarios = killed::SOAKS.iter();
    scenarios
        .map(|(name, scenario)| trial("soak", name, scenario))
        .collect()
}

/// Those of the proc connector.
pub fn through_connector() -> Vec<Trial> {
    let scenarios = gaps::CONNECTOR_SCENARIOS
        .iter()
        .chain(lost::CONNECTOR_SCENARIOS);
    scenarios
        .map(|(name, scenario)| trial("survival", name, scenario))
        .collect()
}

/// A BPF file system of a test's own, which is gone when this is dropped, with all that is pinned there.
struct Bpffs(TempDir);

impl Bpffs {
    fn new() -> Bpffs {
        let dir = TempDir::new();
        let bpf = Some("bpf");
        mount(bpf, dir.path(), bpf, MsFlags::empty(), None::<&str>).expect("mount a bpffs");
        Bpffs(dir)
    }

    /// The pin directory.
    fn dir(&self) -> PathBuf {
        self.0.path().join("reaper")
    }

    /// What is pinned for the one scope there, by name.
    fn pinned(&self) -> Vec<PathBuf> {
        let scopes = listed(&self.dir());
        let [scope] = scopes.as_slice() else {
            panic!("scopes there: {scopes:?}")
        };
        listed(scope)
    }

    /// The one entry for the scope whose name begins like this.
    fn one(&self, beginning: &str) -> PathBuf {
        let all = self.pinned();
        let found = all
            .iter()
            .filter(|path| name_of(path).starts_with(beginning));
        match found.collect::<Vec<_>>().as_slice() {
            [one] => one.to_path_buf(),
            _ => panic!("not one {beginning}*: {all:?}"),
        }
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Links go with the last reference: also where another mount namespace has a copy of this mount.
        let _ = fs::remove_dir_all(self.dir());
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

fn listed(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// A world whose daemon pins what it has.
struct PinnedWorld {
    world: World,
    /// After the daemon and the trees.
    pins: Bpffs,
}

impl PinnedWorld {
    /// The daemon is ready.
    fn new(config: &str, more: &[&str]) -> PinnedWorld {
        let mut life = PinnedWorld {
            world: World::new(true),
            pins: Bpffs::new(),
        };
        life.watch(config, more);
        life
    }

    fn watch(&mut self, config: &str, more: &[&str]) {
        let pins = self.pins.dir();
        let place = ["--pin-dir", pins.to_str().expect("a path in UTF-8")];
        self.world.start_daemon(config, &[&place, more].concat());
    }

    /// An agent with these children ([`Stage::spawn`](crate::process)), once it and all of `processes` are up.
    fn agent(&mut self, role: &str, children: &[&str], processes: &[&str]) -> ProcessKey {
        let children: Vec<String> = children.iter().map(|child| child.to_string()).collect();
        self.world.launch("claude", "agent", role, &children);
        processes
            .iter()
            .for_each(|role| drop(self.world.await_processes(role, 1)));
        self.world.await_processes(role, 1)[0]
    }

    /// Waits until the daemon has heard of these agents: their coming wakes it no sooner than need be.
    fn await_sessions(&self, roles: &[&str]) {
        for role in roles {
            let who = self.world.process(role);
            self.world
                .await_event("a session", |e| e.is("session.open", who));
        }
    }

    /// Waits until so many sessions are closed.
    fn await_closed(&self, n: usize) {
        eventually(&format!("{n} sessions closed"), || {
            let events = self.world.daemon().events();
            let closed = events.iter().filter(|e| e.event == "session.close");
            (closed.count() >= n).then_some(())
        });
    }

    /// All that the daemons have said, one after the other.
    fn stream(&self) -> Vec<Event> {
        daemon::whole_stream(self.world.dir())
    }

    /// Waits until nobody is left but the outsiders and those of the roles in `spared`, who all must live.
    fn await_left(&self, spared: &[&str]) {
        let spared: Vec<&str> = OUTSIDERS.iter().chain(spared).copied().collect();
        eventually("nobody left who is due", || {
            let everybody = self.world.all_processes();
            let (stay, gone): (Vec<_>, Vec<_>) = everybody
                .into_iter()
                .partition(|(role, _)| spared.contains(&role.as_str()));
            let stay: HashSet<ProcessKey> = stay.into_iter().map(|(_, id)| id).collect();
            let nobody = self.world.living().iter().all(|s| stay.contains(&s.id));
            (nobody && !gone.iter().any(|(_, id)| id.is_alive())).then_some(())
        });
        self.world.assert_alive(&spared);
    }

    /// Ends the daemon once it has written that each process was signalled or has ended, but for the outsiders
    /// and the roles in `spared`: none of those was signalled. Gives the last daemon's events.
    fn end(&mut self, spared: &[&str]) -> Vec<Event> {
        let spared: Vec<&str> = OUTSIDERS.iter().chain(spared).copied().collect();
        let everybody = self.world.all_processes();
        let (kept, ended): (Vec<_>, Vec<_>) = everybody
            .into_iter()
            .partition(|(role, _)| spared.contains(&role.as_str()));
        eventually("all ends are in the stream", || {
            let stream = self.stream();
            let ends = ["signal", "outcome", "exit"];
            let told = by_pid(&stream, |e| ends.contains(&e.event.as_str()));
            let is_told = |who: ProcessKey| {
                told.get(&who.pid)
                    .is_some_and(|all| all.iter().any(|e| e.is_about(who)))
            };
            ended.iter().all(|(_, who)| is_told(*who)).then_some(())
        });
        let last = self.world.stop();
        let stream = self.stream();
        let signalled = by_pid(&stream, |e| e.event == "signal");
        for (role, who) in kept {
            let mine = signalled.get(&who.pid).into_iter().flatten();
            let signal = mine.copied().find(|e| e.is_about(who));
            assert!(
                signal.is_none(),
                "'{role}' ({who:?}) was signalled: {signal:?}"
            );
        }
        last
    }
}

/// The events that `which` picks, by the process that they are about.
fn by_pid(stream: &[Event], which: impl Fn(&Event) -> bool) -> HashMap<i32, Vec<&Event>> {
    let mut all: HashMap<i32, Vec<&Event>> = HashMap::new();
    for event in stream.iter().filter(|e| which(e)) {
        if let Some(pid) = event.pid {
            all.entry(pid).or_default().push(event);
        }
    }
    all
}

/// Numbers that nobody can foresee, unless `REAPER_TEST_SEED` is set.
struct Dice(u64);

impl Dice {
    fn new() -> Dice {
        let seed = std::env::var("REAPER_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let now = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |t| t.as_nanos() as u64)
        };
        let seed = seed.unwrap_or_else(now);
        crate::report::add(&format!("--- the dice: REAPER_TEST_SEED={seed}"));
        Dice(seed)
    }

    /// A number below `n`: splitmix64.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}
