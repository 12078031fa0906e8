//! Tests of `reaper unpin` where no daemon has pinned anything.

use std::fs;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{CommandOutput, reaper, run};
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::TempDir;

/// Returns the tests that need no root.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "unpin-nothing", nothing),
        trial("cli", "unpin-no-bpffs", no_bpffs),
    ]
}

/// Returns the tests that mount a bpffs.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "unpin-empty", empty),
        trial("cli", "unpin-foreign", foreign),
    ]
}

/// A missing pin directory is no failure.
fn nothing() {
    let dir = TempDir::new();
    let pins = dir.path().join("pins");
    let pins = pins.to_str().expect("a path in UTF-8");
    let said = reaper(dir.path(), &["unpin", "--pin-dir", pins]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.out.starts_with("Nothing is pinned") && said.out.contains(pins),
        "{}",
        said.out
    );
    fs::write(dir.path().join("c.toml"), format!("pin_dir = {pins:?}\n"))
        .expect("write the configuration");
    let said = reaper(dir.path(), &["unpin", "--config", "c.toml", "--json"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let report: Value = serde_json::from_str(&said.out).expect("unpin --json gives JSON");
    assert_eq!(report, json!({"pin_dir": pins, "scopes": [], "entries": 0}));
}

/// Files outside of a bpffs are not removed.
fn no_bpffs() {
    let dir = TempDir::new();
    let file = dir.path().join("pins/host/file");
    fs::create_dir_all(file.parent().expect("a path with a parent")).expect("create a directory");
    fs::write(&file, "mine").expect("write a file");
    let said = reaper(dir.path(), &["unpin", "--pin-dir", "pins"]);
    assert_eq!(said.code, Some(2), "{}{}", said.out, said.err);
    assert_eq!(
        said.err.trim_end().lines().count(),
        1,
        "not one line: {}",
        said.err
    );
    let pins = dir.path().join("pins").display().to_string();
    assert!(
        said.err.contains(&pins),
        "the directory is not named: {}",
        said.err
    );
    assert_eq!(fs::read(&file).expect("read the file"), b"mine");
}

/// Runs `before` in a new bpffs, then `reaper unpin` on its directory `reaper`, then `after`.
fn on_bpffs(dir: &Path, before: &str, after: &str) -> CommandOutput {
    let script = format!(
        "mkdir b && mount -t bpf bpf b && cd b && {before} || exit 99
        \"$0\" unpin --pin-dir \"$PWD/reaper\"
        status=$?
        {after}
        exit $status"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, REAPER]);
    run(dir, command.current_dir(dir))
}

fn empty() {
    let dir = TempDir::new();
    let said = on_bpffs(dir.path(), "mkdir reaper", "ls reaper");
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert!(said.out.starts_with("Nothing is pinned"), "{}", said.out);
}

/// `unpin` does not follow symbolic links in the pin directory.
fn foreign() {
    for before in [
        "mkdir -p reaper other/kept && ln -s ../other reaper/host",
        "mkdir -p reaper/host other/kept && ln -s ../../other reaper/host/MEMBERS",
    ] {
        let dir = TempDir::new();
        let said = on_bpffs(dir.path(), before, "ls other");
        assert_ne!(said.code, Some(99), "no bpffs: {}", said.err);
        assert!(
            said.out.lines().any(|line| line == "kept"),
            "{before}: {}{}",
            said.out,
            said.err
        );
    }
}
