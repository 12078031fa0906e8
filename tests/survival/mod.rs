//! Tests of a service that is killed, loses events or its source, or finds unexpected pins.

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

/// Roles outside of all agents' trees.
const OUTSIDERS: [&str; 3] = ["launcher", "canary", "canary-orphan"];

pub fn trials() -> Vec<Trial> {
    let scenarios = killed::SCENARIOS
        .iter()
        .chain(arming::SCENARIOS)
        .chain(away::SCENARIOS)
        .chain(gaps::SCENARIOS)
        .chain(keeps::SCENARIOS)
        .chain(lost::SCENARIOS)
        .chain(pins::SCENARIOS);
    let trials = scenarios.map(|(name, scenario)| trial("survival", name, scenario));
    trials.chain(kernel::trials()).collect()
}

/// Returns the tests that take minutes.
pub fn soaks() -> Vec<Trial> {
    let scenarios = killed::SOAKS.iter();
    scenarios
        .map(|(name, scenario)| trial("soak", name, scenario))
        .collect()
}

/// Returns the tests that use the proc connector.
pub fn through_connector() -> Vec<Trial> {
    let scenarios = gaps::CONNECTOR_SCENARIOS
        .iter()
        .chain(lost::CONNECTOR_SCENARIOS);
    scenarios
        .map(|(name, scenario)| trial("survival", name, scenario))
        .collect()
}

/// BPF file system of one test. It is removed with all its pins on drop.
struct Bpffs(TempDir);

impl Bpffs {
    fn new() -> Bpffs {
        let dir = TempDir::new();
        let bpf = Some("bpf");
        mount(bpf, dir.path(), bpf, MsFlags::empty(), None::<&str>).expect("mount a bpffs");
        Bpffs(dir)
    }

    /// Returns the pin directory.
    fn dir(&self) -> PathBuf {
        self.0.path().join("reaper")
    }

    /// Returns the entries of the only scope, by name.
    fn pinned(&self) -> Vec<PathBuf> {
        let scopes = listed(&self.dir());
        let [scope] = scopes.as_slice() else {
            panic!("not exactly one scope: {scopes:?}")
        };
        listed(scope)
    }

    /// Returns the only entry of the scope whose name starts with `prefix`.
    fn one(&self, prefix: &str) -> PathBuf {
        let all = self.pinned();
        let found = all.iter().filter(|path| name_of(path).starts_with(prefix));
        match found.collect::<Vec<_>>().as_slice() {
            [one] => one.to_path_buf(),
            _ => panic!("not exactly one {prefix}*: {all:?}"),
        }
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Not by the unmount alone: a copy of this mount in another mount namespace keeps the pins.
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

/// World whose daemon pins its maps and probes.
struct PinnedWorld {
    world: World,
    /// Declared last, so that it is dropped after the daemon.
    pins: Bpffs,
}

impl PinnedWorld {
    /// Starts the daemon and waits until it is ready.
    fn new(config: &str, more: &[&str]) -> PinnedWorld {
        let mut test = PinnedWorld {
            world: World::new(true),
            pins: Bpffs::new(),
        };
        test.watch(config, more);
        test
    }

    fn watch(&mut self, config: &str, more: &[&str]) {
        let pins = self.pins.dir();
        let place = ["--pin-dir", pins.to_str().expect("a path in UTF-8")];
        self.world.start_daemon(config, &[&place, more].concat());
    }

    /// Starts an agent with these children and waits for it and for the roles in `processes`. Returns the agent.
    fn agent(&mut self, role: &str, children: &[&str], processes: &[&str]) -> ProcessKey {
        let children: Vec<String> = children.iter().map(|child| child.to_string()).collect();
        self.world.launch("claude", "agent", role, &children);
        processes
            .iter()
            .for_each(|role| drop(self.world.await_processes(role, 1)));
        self.world.await_processes(role, 1)[0]
    }

    /// Waits until the daemon has opened the sessions of these agents. Their exec does not wake the daemon at once.
    fn await_sessions(&self, roles: &[&str]) {
        for role in roles {
            let agent = self.world.process(role);
            self.world
                .await_event("a session", |e| e.is("session.open", agent));
        }
    }

    /// Waits until `n` sessions are closed.
    fn await_closed(&self, n: usize) {
        eventually(&format!("{n} sessions closed"), || {
            let events = self.world.daemon().events();
            let closed = events.iter().filter(|e| e.event == "session.close");
            (closed.count() >= n).then_some(())
        });
    }

    /// Returns the events of all daemons so far, in order.
    fn stream(&self) -> Vec<Event> {
        daemon::whole_stream(self.world.dir())
    }

    /// Waits until only the outsiders and the processes with these roles live. All of those must live.
    fn await_only(&self, roles: &[&str]) {
        let roles: Vec<&str> = OUTSIDERS.iter().chain(roles).copied().collect();
        eventually("every process that is due has exited", || {
            let all = self.world.all_processes();
            let (stay, gone): (Vec<_>, Vec<_>) = all
                .into_iter()
                .partition(|(role, _)| roles.contains(&role.as_str()));
            let stay: HashSet<ProcessKey> = stay.into_iter().map(|(_, id)| id).collect();
            let alone = self.world.living().iter().all(|s| stay.contains(&s.id));
            (alone && !gone.iter().any(|(_, id)| id.is_alive())).then_some(())
        });
        self.world.assert_alive(&roles);
    }

    /// Stops the daemon and returns the last daemon's events.
    ///
    /// Waits first until the stream has a signal, an outcome or an exit of each process, except the outsiders and the roles
    /// in `kept`. Asserts that none of those was signalled.
    fn end(&mut self, kept: &[&str]) -> Vec<Event> {
        let kept: Vec<&str> = OUTSIDERS.iter().chain(kept).copied().collect();
        let all = self.world.all_processes();
        let (kept, ended): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|(role, _)| kept.contains(&role.as_str()));
        eventually("all exits are in the stream", || {
            let stream = self.stream();
            let ends = ["signal", "outcome", "exit"];
            let reported = by_pid(&stream, |e| ends.contains(&e.event.as_str()));
            let is_reported = |key: ProcessKey| {
                reported
                    .get(&key.pid)
                    .is_some_and(|all| all.iter().any(|e| e.is_about(key)))
            };
            ended.iter().all(|(_, key)| is_reported(*key)).then_some(())
        });
        let last = self.world.stop();
        let stream = self.stream();
        let signalled = by_pid(&stream, |e| e.event == "signal");
        for (role, key) in kept {
            let of_it = signalled.get(&key.pid).into_iter().flatten();
            let signal = of_it.copied().find(|e| e.is_about(key));
            assert!(
                signal.is_none(),
                "'{role}' ({key:?}) was signalled: {signal:?}"
            );
        }
        last
    }
}

/// Returns the events for which `which` is true, by pid.
fn by_pid(stream: &[Event], which: impl Fn(&Event) -> bool) -> HashMap<i32, Vec<&Event>> {
    let mut all: HashMap<i32, Vec<&Event>> = HashMap::new();
    for event in stream.iter().filter(|e| which(e)) {
        if let Some(pid) = event.pid {
            all.entry(pid).or_default().push(event);
        }
    }
    all
}

/// Random number generator, seeded by `REAPER_TEST_SEED` or the time. The report of a failure contains the seed.
struct Rng(u64);

impl Rng {
    fn new() -> Rng {
        let seed = std::env::var("REAPER_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let now = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |t| t.as_nanos() as u64)
        };
        let seed = seed.unwrap_or_else(now);
        crate::report::add(&format!("--- random seed: REAPER_TEST_SEED={seed}"));
        Rng(seed)
    }

    /// Returns a number below `n` (splitmix64).
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}
