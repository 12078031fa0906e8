//! Registries in a simulated /proc: which files count, and which are refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;

const OLD: &str = "4a28933f-46b2-4a2b-9061-21982e33bea2";
const PID: u32 = 17007;
/// A uid without a home directory.
const UID_WITHOUT_HOME: u32 = 61_011;
/// Start time in ticks.
const START: u64 = 227_093;

struct World {
    dir: tempfile::TempDir,
}

impl World {
    /// Creates a process whose root directory has a home with an empty registry.
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let world = World { dir };
        for path in [
            "root/home/ann/.claude/sessions",
            "root/home/ann/.claude/daemon",
        ] {
            fs::create_dir_all(world.path(path)).unwrap();
        }
        world
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn registry_path(&self, path: &str) -> PathBuf {
        self.path("root/home/ann/.claude").join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.registry_path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self) -> Option<Conversations> {
        self.read_as(b"HOME=/home/ann\0", &process(false))
    }

    fn read_as(&self, environ: &[u8], process: &RegistryProcess) -> Option<Conversations> {
        let registry = registry();
        let mut found = Conversations::default();
        let directory = RegistryDir::of(&registry, environ, UID_WITHOUT_HOME)?;
        directory.read(&registry, self.dir.path(), process, &mut found)?;
        Some(found)
    }
}

fn process(nested: bool) -> RegistryProcess {
    RegistryProcess {
        pid: PID,
        start: START,
        uid: nix::unistd::geteuid().as_raw(),
        nested,
    }
}

fn registry() -> Registry {
    let names = |all: &[&str]| all.iter().map(|name| (*name).into()).collect();
    Registry {
        directory_variable: Some("CLAUDE_CONFIG_DIR".into()),
        directory: ".claude".into(),
        files: names(&["sessions/{pid}.json", "daemon/roster.json"]),
        process: vec![
            ("pid".into(), "procStart".into()),
            ("replPid".into(), "replProcStart".into()),
        ],
        job: names(&["jobId", "short"]),
        adopted: names(&["jobs/{job}/adopt.json"]),
    }
}

fn session_file(start: u64) -> String {
    format!(r#"{{"pid":{PID},"procStart":"{start}","sessionId":"{OLD}","jobId":"22ab6b57"}}"#)
}

#[test]
fn own_file_names_the_conversation() {
    let world = World::new();
    world.write("sessions/17007.json", &session_file(START));
    let found = world.read().unwrap();
    assert!(found.registered.contains(OLD) && found.inherited.is_empty());
}

#[test]
fn shared_file_counts_for_the_process_that_an_entry_names() {
    let entry = |pid: u32, start: u64, id: &str| {
        format!(
            r#"{{"pid":16971,"procStart":"227065","replPid":{pid},"replProcStart":"{start}",
                "dispatch":{{"short":"x","launch":{{"sessionId":"/h/{id}.jsonl"}}}}}}"#
        )
    };
    let other = OLD.replace("4a28", "ffff");
    let roster = format!(
        r#"{{"supervisorPid":16964,"workers":{{"a":{},"b":{}}}}}"#,
        entry(PID, START, OLD),
        entry(PID + 1, START, &other),
    );
    let world = World::new();
    world.write("daemon/roster.json", &roster);
    let found = world.read().unwrap();
    assert!(found.registered.contains(OLD) && !found.registered.contains(&other));
}

#[test]
fn file_of_an_earlier_process_with_this_pid_is_ignored() {
    let world = World::new();
    world.write("sessions/17007.json", &session_file(START - 1));
    assert_eq!(world.read(), Some(Conversations::default()));
}

#[test]
fn job_lists_the_processes_that_it_takes_over() {
    let world = World::new();
    world.write("sessions/17007.json", &session_file(START));
    let shells =
        r#"{"shells":[{"pid":16148,"procStart":"223007"},{"pid":16152,"procStart":"223018"}]}"#;
    world.write("jobs/22ab6b57/adopt.json", shells);
    let key = |pid, ticks: u64| ProcessKey {
        pid,
        start: ticks * TICK_NS,
    };
    let expected = [key(16148, 223_007), key(16152, 223_018)];
    assert_eq!(world.read().unwrap().adopted, expected);
    let nested = world.read_as(b"HOME=/home/ann\0", &process(true)).unwrap();
    assert!(nested.adopted.is_empty(), "ids of another pid namespace");
}

#[test]
fn missing_registry_is_empty() {
    let world = World::new();
    assert_eq!(world.read(), Some(Conversations::default()));
    fs::remove_dir_all(world.registry_path("")).unwrap();
    assert_eq!(world.read(), Some(Conversations::default()));
}

#[test]
fn directory_is_the_one_that_the_agent_uses() {
    let world = World::new();
    fs::create_dir_all(world.path("root/srv/c/sessions")).unwrap();
    fs::write(
        world.path("root/srv/c/sessions/17007.json"),
        session_file(START),
    )
    .unwrap();
    let environ = b"HOME=/home/ann\0CLAUDE_CONFIG_DIR=/srv/c\0";
    let found = world.read_as(environ, &process(false)).unwrap();
    assert!(found.registered.contains(OLD));
    assert_eq!(world.read_as(b"PATH=/bin\0", &process(false)), None);
}

#[test]
fn damaged_large_or_odd_file_is_unreadable() {
    let world = World::new();
    let file = world.registry_path("sessions/17007.json");
    for text in ["", "{", "[1,", "\u{0}"] {
        fs::write(&file, text).unwrap();
        assert_eq!(world.read(), None, "{text:?}");
    }
    fs::write(&file, vec![b' '; FILE_MAX as usize + 1]).unwrap();
    assert_eq!(world.read(), None, "too large");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(world.read(), None, "a directory");
    fs::remove_dir(&file).unwrap();
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(world.read(), None, "a FIFO without a writer");
}

#[test]
fn symbolic_links_in_the_registry_are_not_followed() {
    let world = World::new();
    world.write("elsewhere.json", &session_file(START));
    let file = world.registry_path("sessions/17007.json");
    symlink(world.registry_path("elsewhere.json"), &file).unwrap();
    assert_eq!(world.read(), None);
    fs::remove_file(&file).unwrap();
    fs::rename(world.registry_path("sessions"), world.registry_path("real")).unwrap();
    symlink("real", world.registry_path("sessions")).unwrap();
    assert_eq!(world.read(), None);
}

#[test]
fn file_of_another_user_is_unreadable() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let world = World::new();
    world.write("sessions/17007.json", &session_file(START));
    let file = world.registry_path("sessions/17007.json");
    std::os::unix::fs::chown(file, Some(65534), None).unwrap();
    assert_eq!(world.read(), None);
}
