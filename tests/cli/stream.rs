//! Tests of the file of `--events` that cannot be written for a while, or is renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use super::reaper;
use crate::daemon;
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, eventually};

pub fn privileged() -> Vec<Trial> {
    vec![trial(
        "cli",
        "events_continue_after_full_disk_and_rotation",
        full_disk_and_rotation,
    )]
}

/// File system of 64 KiB, unmounted on drop.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf) -> Disk {
        fs::create_dir(&at).expect("create a directory");
        let (kind, options) = (Some("tmpfs"), Some("size=64k,mode=755"));
        mount(kind, &at, kind, MsFlags::empty(), options).expect("mount a small file system");
        Disk(at)
    }

    fn fill(&self) {
        let mut filler = File::create(self.0.join("filler")).expect("create a file");
        while filler.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// Process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lines that a full disk has no room for are counted. The others are whole, and go to the file of that name.
fn full_disk_and_rotation() {
    let dir = TempDir::new();
    let disk = Disk::mount(dir.path().join("disk"));
    let path = disk.0.join("events.jsonl");
    let scope = Command::new("sleep").arg("600").spawn();
    let scope = Killed(scope.expect("start a process"));
    let pid = scope.0.id().to_string();
    let mut arguments = daemon::arguments(dir.path(), Some(&pid), CONFIG, &["--observe"]);
    let events = arguments.iter().position(|word| word == "--events");
    arguments[events.expect("the option") + 1] = path.display().to_string();
    let _daemon = Killed(daemon::spawn(dir.path(), &arguments));
    eventually("the daemon is ready", || {
        lines(&path)
            .iter()
            .find(|line| line["event"] == "ready")
            .cloned()
    });

    disk.fill();
    // The first line may have been written in part, and is then kept.
    let status = eventually("lines cannot be written", || {
        ask(dir.path(), &["config", "reload"]);
        Some(ask_status(dir.path())).filter(|status| status["stream_dropped"].as_u64() > Some(2))
    });
    assert!(status["stream_error"].is_string(), "{status}");
    let said = ask(dir.path(), &["status"]);
    assert!(
        said.contains("cannot be written now: no space left"),
        "{said}"
    );
    fs::remove_file(disk.0.join("filler")).expect("remove the file");
    let dropped = eventually("the loss is in the stream", || {
        ask(dir.path(), &["config", "reload"]);
        let mut lines = lines(&path).into_iter();
        lines.find(|line| line["event"] == "dropped")
    });
    let status = ask_status(dir.path());
    assert_eq!(status["stream_error"], Value::Null);
    assert_eq!(dropped["dropped_by"], "file");
    assert_eq!(dropped["count"], status["stream_dropped"]);
    let number = |line: &Value| line["seq"].as_u64().expect("a number");
    let written = lines(&path);
    let last = written.last().map(number).expect("a line");
    let lost = dropped["count"].as_u64().expect("a number");
    assert_eq!(written.len() as u64 + lost, last, "{written:?}");

    fs::rename(&path, disk.0.join("events.jsonl.1")).expect("rename the file");
    ask(dir.path(), &["config", "reload"]);
    let first = eventually("a new file is written", || lines(&path).first().cloned());
    assert_eq!(number(&first), last + 1);
}

/// Returns the lines of a stream, which must all be JSON, but for an incomplete last line.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    whole
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// Sends a request to the service in a directory, and returns the answer.
fn ask(dir: &Path, words: &[&str]) -> String {
    let entries = fs::read_dir(dir.join("run")).expect("list the runtime directory");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let socket = paths.find(|path| path.extension().is_some_and(|end| end == "sock"));
    let socket = socket.expect("a socket").display().to_string();
    let said = reaper(dir, &[words, &["--socket", &socket]].concat());
    assert_eq!(said.code, Some(0), "{words:?}: {}", said.err);
    said.out
}

fn ask_status(dir: &Path) -> Value {
    serde_json::from_str(&ask(dir, &["status", "--json"])).expect("JSON")
}
