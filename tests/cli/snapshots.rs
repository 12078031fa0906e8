//! Snapshots of what the commands print on a terminal of 80 columns. Each snapshot is a transcript of several commands.
//!
//! `INSTA_UPDATE=always cargo xtask test snapshots` writes them again.

mod agent;
mod mask;
mod service;
mod transcript;

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount};
use serde_json::Value;

use super::run;
use crate::daemon::REAPER;
use crate::trees::{run_in_namespace, trial};
use crate::world::{TempDir, link};
use mask::{Mask, VALUES};
use transcript::{SNAPSHOTS, Transcript};

/// Returns the tests that need neither root nor BPF.
pub fn trials() -> Vec<Trial> {
    vec![trial("cli", "output-fits-80-columns", widths)]
}

/// Tests in a PID namespace of their own: no process of the host is an ancestor there, no other service is found, and all pids
/// have five digits.
const INSIDE: &[(&str, fn())] = &[
    ("errors", errors),
    ("config", config),
    ("runs", runs),
    ("service", service::enforcing),
    ("observing-service", service::observing),
    ("server-with-time", service::server_with_time),
];

/// Returns the tests that need root and BPF.
pub fn privileged() -> Vec<Trial> {
    let inside = INSIDE.iter();
    inside
        .map(|(name, _)| snapshot(name, || capsule(name)))
        .collect()
}

/// Returns a test of a snapshot. It is ignored where the snapshots are absent, as in a virtual machine.
fn snapshot(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    let is_absent = !Path::new(SNAPSHOTS).is_dir();
    trial("cli", &format!("snapshots-{name}"), test).with_ignored_flag(is_absent)
}

fn capsule(name: &str) {
    let output = run_in_namespace(&[name]);
    let text = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&text)
    );
}

/// Runs a test of [`INSIDE`] as the init process of a new PID namespace.
pub fn in_pid_namespace(name: &str) {
    let (tmpfs, none) = (Some("tmpfs"), None::<&str>);
    mount(tmpfs, "/run", tmpfs, MsFlags::empty(), none).expect("hide the services of the host");
    let journals = "/var/lib/reaper";
    if Path::new(journals).exists() {
        mount(tmpfs, journals, tmpfs, MsFlags::empty(), none)
            .expect("hide the journals of the host");
    }
    fs::write("/proc/sys/kernel/ns_last_pid", "20000").expect("choose the next pid");
    let test = INSIDE.iter().find(|(n, _)| *n == name);
    test.unwrap_or_else(|| panic!("no test is named '{name}'"))
        .1();
}

/// Title and `reaper` arguments.
type Entry<'a> = (&'a str, &'a [&'a str]);

/// Usage errors, and commands without a service.
const ERRORS: &[Entry<'static>] = &[
    ("no command", &[]),
    ("no command, for a program", &["--json"]),
    ("JSON of which command", &["--json", "tree"]),
    ("a typo in a command", &["statsu"]),
    ("another program's command", &["kill", "4250"]),
    ("an unknown option", &["status", "--jso"]),
    ("no service", &["status", "--socket", "none.sock"]),
    ("the socket is a file", &["tree", "--socket", "file"]),
    ("neither a program nor a pid", &["agent", "add"]),
    ("a directory", &["agent", "add", "/usr/bin"]),
    ("no pid", &["explain", "cargo"]),
    ("a pid that cannot exist", &["explain", "4194305"]),
    ("neither a pid nor --list", &["keep"]),
    ("a time without a unit", &["keep", "4250", "--for", "2"]),
    ("no time", &["history", "--since", "soon"]),
    ("no number", &["history", "-n", "0"]),
    ("no journal", &["history", "--file", "none.db"]),
    ("a file that is no journal", &["history", "--file", "file"]),
    ("no age", &["scan", "--min-age", "soon"]),
    ("no scope", &["scan", "--scope", "4194304"]),
    (
        "options that exclude each other",
        &["daemon", "--observe", "--enforce"],
    ),
    ("no command to run", &["run"]),
    ("no time", &["run", "--timeout", "soon", "--", "true"]),
    ("nothing to unpin", &["unpin", "--pin-dir", "none"]),
];

fn errors() {
    let dir = TempDir::new();
    fs::write(dir.path().join("file"), "text\n").expect("write a file");
    let mut transcript = Transcript::new(dir.path());
    show(&mut transcript, ERRORS);
    let _listener = UnixListener::bind(dir.path().join("root.sock")).expect("listen");
    // Other users may not be able to read the build directory.
    let program = dir.path().join("reaper");
    link(Path::new(REAPER), &program);
    fs::create_dir(dir.path().join("own")).expect("create a directory");
    chown(dir.path().join("own"), Some(4242), None).expect("give it to the user");
    // With the scope, a daemon that starts in spite of the error watches only this process.
    for (what, words, hidden) in [
        (
            "a socket of root",
            &["status", "--socket", "root.sock"][..],
            &[][..],
        ),
        (
            "no permission",
            &["daemon", "--source", "ebpf"],
            &["--observe", "--scope", "1", "--runtime-dir", "own"],
        ),
    ] {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "4242", "--clear-groups"])
            .arg(&program);
        transcript.run(what, &words.join(" "), command.args(words).args(hidden));
    }
    // Which step the kernel refuses first depends on its settings.
    let refused = (r" \([a-z]+ error: .*\)$", "");
    transcript.assert("errors", &Mask::new(dir.path(), &[refused]));
}

/// Configs to check.
const CONFIGS: &[(&str, &str)] = &[
    ("good.toml", "grace = \"2s\"\n"),
    ("key.toml", "grave = \"5s\"\n"),
    ("value.toml", "grace = \"soon\"\nmode = \"kill\"\n"),
    ("syntax.toml", "grace = = 3\n"),
    (
        "rule.toml",
        "[[keep]]\nname = \"never\"\nexe = \"**/x\"\nnot_exe = \"**/x\"\n",
    ),
];

fn config() {
    let dir = TempDir::new();
    let mut transcript = Transcript::new(dir.path());
    for (name, text) in CONFIGS {
        fs::write(dir.path().join(name), text).expect("write a config");
        let what = text.trim_end().replace('\n', "; ");
        transcript.reaper(&what, &["config", "check", name]);
    }
    transcript.reaper(
        "as an option",
        &["config", "check", "--config", "good.toml"],
    );
    transcript.reaper("no file", &["config", "check", "none.toml"]);
    // With the scope, a daemon that starts in spite of the error watches only this process.
    let mut daemon = Command::new(REAPER);
    daemon.args(["daemon", "--config", "key.toml", "--observe", "--scope"]);
    daemon.arg(std::process::id().to_string());
    transcript.run(
        "a typo in the config",
        "daemon --config key.toml",
        &mut daemon,
    );
    transcript.assert("config", &Mask::new(dir.path(), &[]));
}

/// Commands about runs.
const RUNS: &[Entry<'static>] = &[
    ("no run", &["ps"]),
    ("no such program", &["run", "--", "no-such-program"]),
    (
        "a status of the command",
        &["run", "--", "sh", "-c", "exit 3"],
    ),
    (
        "a process is left behind",
        &["run", "--", "sh", "-c", "sleep 3301 &"],
    ),
    (
        "a time limit",
        &["run", "--timeout", "1s", "--", "sleep", "3302"],
    ),
    (
        "in the background",
        &["run", "--detach", "--name", "web", "--", "sleep", "3303"],
    ),
    (
        "a name that is taken",
        &["run", "--detach", "--name", "web", "--", "sleep", "3304"],
    ),
    ("a running command", &["ps"]),
    ("its output", &["logs", "web"]),
    ("an end", &["stop", "web"]),
    ("its status", &["wait", "web"]),
    ("all runs", &["ps", "--all"]),
    ("no such run", &["stop", "db"]),
    ("no such run", &["wait", "db"]),
    ("no such run", &["logs", "db"]),
];

fn runs() {
    let dir = TempDir::new();
    let mut transcript = Transcript::new(dir.path());
    show(&mut transcript, RUNS);
    let mut all = Command::new(REAPER);
    all.args(["ps", "--all", "--json"])
        .env("XDG_STATE_HOME", dir.path());
    let all: Value = serde_json::from_str(&run(dir.path(), &mut all).out).expect("JSON");
    let mut mask = Mask::new(dir.path(), VALUES);
    for run in all["runs"].as_array().expect("runs") {
        let id = run["id"].as_str().expect("an id");
        mask.add(&format!(r"\b{id}\b"), "RUN-ID");
    }
    transcript.assert("runs", &mask);
}

/// Output that differs between hosts, and help texts, are only measured.
fn widths() {
    let dir = TempDir::new();
    let mut transcript = Transcript::new(dir.path());
    transcript.reaper("this host", &["doctor"]);
    transcript.reaper("the service", &["service", "status"]);
    transcript.reaper("no installation", &["service", "install", "--dry-run"]);
    for command in [
        "daemon", "demo", "doctor", "config", "unpin", "status", "tree", "explain", "agents",
        "keep", "unkeep", "history", "scan", "run", "ps", "stop", "wait", "logs",
    ] {
        transcript.reaper("help", &[command, "--help"]);
        transcript.reaper("short help", &[command, "-h"]);
    }
    transcript.assert_widths();
}

fn show(transcript: &mut Transcript<'_>, entries: &[Entry<'_>]) {
    for (what, words) in entries {
        transcript.reaper(what, words);
    }
}
