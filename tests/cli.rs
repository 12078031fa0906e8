//! Tests of the command line: bad input, missing privileges, and output that stays on one line.

mod agents;
mod config;
mod config_file;
mod docs;
mod escaped;
mod explain;
pub mod hostile;
mod journal;
mod judgement;
mod keeper;
mod lines;
mod readers;
mod scan;
mod service_files;
mod service_requests;
pub mod snapshots;
mod socket;
mod sources;
mod stream;
mod unpin;

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

pub use service_requests::{ask, ask_json, find};

use crate::daemon::REAPER;
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually, link};

/// Path of the BPF object that the program contains.
pub const OBJECT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/host/src/source/ebpf/reaper.bpf.o"
);

/// Returns the tests that need neither root nor BPF.
pub fn trials() -> Vec<Trial> {
    let mut trials = config::trials();
    trials.extend(docs::trials());
    trials.extend(unpin::trials());
    trials.extend(service_files::trials());
    trials.extend(service_requests::trials());
    trials.extend(hostile::trials());
    trials.extend(scan::trials());
    trials.extend(socket::trials());
    trials.extend(explain::trials());
    trials.extend(agents::trials());
    trials.extend(snapshots::trials());
    trials.push(trial("cli", "help", help));
    trials.push(trial("cli", "wrong-usage", wrong_usage));
    trials.push(trial("cli", "leave-nothing", leave_nothing));
    trials.push(trial(
        "cli",
        "user-without-directories",
        user_without_directories,
    ));
    trials.push(trial("cli", "doctor", doctor));
    trials
}

/// Returns the tests that need root and BPF.
pub fn privileged() -> Vec<Trial> {
    let mut trials = vec![
        trial("cli", "no-privilege", no_privilege),
        trial("cli", "foreign-object", foreign_object),
        trial("cli", "second-daemon", second_daemon),
        trial("cli", "terminated", terminated),
        trial("cli", "forged-argv", || forged_argv(&[])),
        trial("cli", "forged-argv-json", || forged_argv(&["--json"])),
        trial("cli", "demo", demo),
    ];
    trials.push(docs::privileged());
    trials.extend(unpin::privileged());
    trials.extend(service_files::privileged());
    trials.extend(escaped::privileged());
    trials.extend(service_requests::privileged());
    trials.extend(hostile::privileged());
    trials.extend(lines::privileged());
    trials.extend(scan::privileged());
    trials.extend(socket::privileged());
    trials.extend(config_file::privileged());
    trials.extend(readers::privileged());
    trials.extend(stream::privileged());
    trials.extend(explain::privileged());
    trials.extend(agents::privileged());
    trials.extend(snapshots::privileged());
    trials.extend(judgement::privileged());
    trials.extend(journal::privileged());
    trials
}

/// Returns the tests that need root but not BPF.
pub fn without_probes() -> Vec<Trial> {
    sources::privileged()
}

/// Exit code and output of a command.
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs a command until it exits, with its output in files in `dir`.
pub fn run(dir: &Path, command: &mut Command) -> CommandOutput {
    let file = |name| File::create(dir.join(name)).expect("create a file for output");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file("out"))
        .stderr(file("err"))
        .spawn()
        .expect("run");
    let wait = || {
        eventually("the command exits", || {
            child.try_wait().expect("wait for the command")
        })
    };
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(wait));
    if ended.is_err() {
        // A command that hangs must not outlive the test.
        let _ = child.kill();
        let _ = child.wait();
    }
    let read = |name| {
        String::from_utf8_lossy(&fs::read(dir.join(name)).expect("read output")).into_owned()
    };
    let (out, err) = (read("out"), read("err"));
    let status = ended.unwrap_or_else(|_| panic!("{command:?} does not exit\n{out}\n{err}"));
    CommandOutput {
        code: status.code(),
        out,
        err,
    }
}

/// Runs `reaper` until it exits.
pub fn reaper(dir: &Path, args: &[&str]) -> CommandOutput {
    run(dir, Command::new(REAPER).args(args).current_dir(dir))
}

fn help() {
    let dir = TempDir::new();
    let said = reaper(dir.path(), &["--help"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for word in [
        "daemon", "demo", "doctor", "config", "unpin", "status", "tree", "explain", "agents",
        "agent", "keep", "unkeep", "history", "scan", "run", "ps", "stop", "wait", "logs",
    ] {
        assert!(
            said.out.contains(word),
            "the help does not mention '{word}'"
        );
        let said = reaper(dir.path(), &[word, "--help"]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        let example = format!("reaper {word}");
        assert!(
            ["agent", "config"].contains(&word)
                || said.out.contains("Example") && said.out.contains(&example),
            "no example in the help of '{word}'"
        );
    }
    let said = reaper(dir.path(), &["daemon", "--help"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for word in ["--leave-pinned", "--pin-dir", "--no-pin", "--kernel-reap"] {
        assert!(
            said.out.contains(word),
            "the help of daemon does not mention '{word}'"
        );
    }
}

fn wrong_usage() {
    let dir = TempDir::new();
    for args in [
        &["demon"][..],
        &["daemon", "--scope"],
        &["daemon", "--observe", "--enforce"],
        &["daemon", "--scope", "x"],
        &["daemon", "--no-pin", "--leave-pinned"],
        &["daemon", "--no-pin", "--pin-dir", "/sys/fs/bpf/x"],
        &["daemon", "--kernel-reap", "always"],
        &["unpin", "all"],
        &["unpin", "--config", "absent.toml"],
        &["doctor", "--config", "absent.toml"],
    ] {
        let said = reaper(dir.path(), args);
        assert_eq!(said.code, Some(2), "exit code of {args:?}: {}", said.err);
        assert!(
            !said.err.is_empty(),
            "{args:?} is refused without a message"
        );
    }
}

/// A daemon of a user needs the variables only of directories that no option names. The wrong scope keeps it from
/// starting.
fn user_without_directories() {
    let dir = TempDir::new();
    fs::write(dir.path().join("c.toml"), "").expect("write the configuration");
    let base = ["daemon", "--user", "--config", "c.toml", "--scope", "x"];
    for (options, named) in [
        (&[][..], "or name a directory with --runtime-dir"),
        (
            &["--runtime-dir", "r"],
            "or name a directory with --journal-dir",
        ),
        (&["--runtime-dir", "r", "--journal-dir", "j"], "--scope"),
        (&["--runtime-dir", "r", "--no-journal"], "--scope"),
    ] {
        let mut command = Command::new(REAPER);
        for name in ["HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"] {
            command.env_remove(name);
        }
        let said = run(
            dir.path(),
            command.args(base).args(options).current_dir(dir.path()),
        );
        assert_eq!(said.code, Some(2), "{options:?}: {}", said.err);
        assert!(said.err.contains(named), "{options:?}: {}", said.err);
    }
}

/// `--leave-pinned` is refused if the config disables pins.
fn leave_nothing() {
    let dir = TempDir::new();
    fs::write(dir.path().join("c.toml"), "pin = false\n").expect("write the configuration");
    let args = ["daemon", "--config", "c.toml", "--leave-pinned"];
    let said = reaper(dir.path(), &[&args[..], &["--runtime-dir", "r"]].concat());
    assert_eq!(said.code, Some(2), "{}{}", said.out, said.err);
    assert!(
        said.err.contains("pin = false"),
        "the message does not name the setting: {}",
        said.err
    );
    assert!(!dir.path().join("r").exists(), "something was started");
}

/// Text and JSON report the same result, and the exit code says whether BPF is usable.
fn doctor() {
    let dir = TempDir::new();
    let json = reaper(dir.path(), &["doctor", "--json"]);
    let report: Value = serde_json::from_str(&json.out).expect("doctor --json gives JSON");
    let usable = report["usable"].as_bool().expect("`usable` is a boolean");
    assert_eq!(
        json.code,
        Some(if usable { 0 } else { 3 }),
        "exit code of doctor --json"
    );
    let checks = report["checks"].as_array().expect("a list of checks");
    for name in ["bpffs", "process iterator", "kills in the kernel"] {
        assert!(
            checks.iter().any(|check| check["name"] == name),
            "no check is named '{name}'"
        );
    }
    let text = reaper(dir.path(), &["doctor"]);
    assert_eq!(
        text.code,
        Some(if usable { 0 } else { 3 }),
        "exit code of doctor"
    );
    assert!(
        text.out.lines().count() > 3,
        "the report is too short: {}",
        text.out
    );
}

/// An unprivileged user gets a message of one line and exit code 3.
fn no_privilege() {
    let dir = TempDir::new();
    // That user cannot read the build directory.
    let program = dir.path().join("reaper");
    link(Path::new(REAPER), &program);
    let run_dir = dir.path().join("run");
    fs::create_dir(&run_dir).expect("create the runtime directory");
    chown(&run_dir, Some(65534), Some(65534)).expect("give that user the runtime directory");
    let mut command = Command::new(program);
    command
        .args([
            "daemon",
            "--source",
            "ebpf",
            "--scope",
            &std::process::id().to_string(),
            "--runtime-dir",
        ])
        .arg(run_dir);
    let said = run(dir.path(), command.uid(65534).gid(65534).current_dir("/"));
    assert_refused(&said, "root");
}

/// Asserts exit code 3 and a message of one line that contains `word`.
fn assert_refused(said: &CommandOutput, word: &str) {
    assert_eq!(said.code, Some(3), "{}{}", said.out, said.err);
    let lines = said.err.trim_end().lines().count();
    assert!(lines == 1 && said.err.contains(word), "{}", said.err);
}

/// A BPF object with another ABI version is refused before it is loaded.
fn foreign_object() {
    let dir = TempDir::new();
    let mut object = fs::read(OBJECT).expect("read the shipped object");
    let at = section(&object, b"reaper_abi").expect("the section with the version");
    object[at] ^= 0x40;
    fs::write(dir.path().join("foreign.o"), object).expect("write the object");
    let scope = std::process::id().to_string();
    let args = [
        "daemon",
        "--scope",
        &scope,
        "--no-pin",
        "--runtime-dir",
        "run",
        "--bpf-object",
        "foreign.o",
    ];
    let said = reaper(dir.path(), &args);
    assert_refused(&said, "version");
    fs::write(dir.path().join("foreign.o"), "no object").expect("write garbage");
    let said = reaper(dir.path(), &args);
    assert_eq!(said.code, Some(3), "{}{}", said.out, said.err);
}

/// Returns the file offset of a section. `elf` is a 64-bit little-endian ELF file.
fn section(elf: &[u8], name: &[u8]) -> Option<usize> {
    let number = |at: usize, bytes: usize| {
        let field = elf.get(at..at + bytes)?;
        usize::try_from(field.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b))).ok()
    };
    let (table, size, count, names) = (
        number(0x28, 8)?,
        number(0x3a, 2)?,
        number(0x3c, 2)?,
        number(0x3e, 2)?,
    );
    let bytes_of = |nth: usize| number(table + nth * size + 0x18, 8);
    let strings = bytes_of(names)?;
    let named = |nth: &usize| {
        let text = number(table + nth * size, 4).and_then(|at| elf.get(strings + at..));
        text.is_some_and(|text| {
            text.strip_prefix(name)
                .is_some_and(|rest| rest.first() == Some(&0))
        })
    };
    bytes_of((0..count).find(named)?)
}

/// A second daemon on the same scope exits with code 4 and names the first one.
fn second_daemon() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let scope = world.process("launcher").pid.to_string();
    let said = reaper(
        world.dir(),
        &[
            "daemon",
            "--scope",
            &scope,
            "--no-pin",
            "--runtime-dir",
            "run",
        ],
    );
    assert_eq!(said.code, Some(4), "{}{}", said.out, said.err);
    let holder = world.daemon().pid().to_string();
    assert!(
        said.err.contains(&holder),
        "the holder's pid {holder} is not named: {}",
        said.err
    );
    world.stop();
    world.start_daemon(CONFIG, &[]);
    world.stop();
}

/// SIGTERM stops the daemon in the same way as Ctrl-C, and the agents live on.
fn terminated() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    world.await_processes("agent", 1);
    let events = world.stop_by(Signal::SIGTERM);
    assert_eq!(
        events
            .last()
            .map(|e| (e.event.as_str(), e.reason.as_deref())),
        Some(("summary", Some("SIGTERM")))
    );
    world.assert_alive(&["agent", "leaf", "canary"]);
}

/// Names and arguments with line breaks and control characters cannot forge a line of output.
fn forged_argv(more: &[&str]) {
    let mut world = World::new(true);
    world.start_daemon("grace = \"500ms\"\nevents = \"all\"\n", more);
    world.launch("claude", "agent", "agent", &["forger=forger".into()]);
    world.await_processes("agent", 1);
    let forged = world.await_processes("forged", 1)[0];
    world.kill("agent");
    world.await_gone(&["forger", "forged"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    let one_line = |text: &[u8]| {
        let text = std::str::from_utf8(text).expect("output in UTF-8");
        assert!(
            !text.lines().any(|line| line.starts_with("FORGED")),
            "a forged line:\n{text}"
        );
        let control = text.lines().find(|line| line.contains(char::is_control));
        assert_eq!(control, None, "a control character in a line of output");
        text.to_owned()
    };
    let json = one_line(&fs::read(world.dir().join("events.jsonl")).expect("read the events"));
    let printed = one_line(&fs::read(world.dir().join("stdout")).expect("read the output"));
    assert!(!printed.is_empty(), "nothing was printed");
    let lines = if more.is_empty() {
        json
    } else {
        printed + &json
    };
    let events: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    let exec = |e: &&Value| e["event"] == "exec" && e["process.pid"] == forged.pid;
    let exec = events.iter().find(exec).expect("the forged exec");
    let args = exec["process.command_args"]
        .as_array()
        .expect("an array of arguments");
    assert_eq!(
        exec["process.args_count"].as_u64(),
        Some(args.len() as u64),
        "arguments of {exec}"
    );
    assert!(
        args.iter()
            .any(|a| a.as_str().is_some_and(|a| a.contains("FORGED\r"))),
        "argv of {exec}"
    );
    assert!(
        args.iter()
            .any(|a| a.as_str().is_some_and(|a| a.contains('\u{fffd}'))),
        "invalid UTF-8 in {exec}"
    );
}

/// `reaper demo` shows how orphans are reaped, and leaves no process behind.
fn demo() {
    let world = World::new(true);
    let mut witness = Command::new(world.dir().join("bin/worker"));
    witness
        .args(["test-process", "check-survivors", "witness"])
        .arg(world.dir())
        .args([REAPER, "demo"]);
    let said = run(world.dir(), &mut witness);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    for word in ["SIGTERM", "SIGKILL", "orphan"] {
        assert!(said.out.contains(word), "no '{word}' in:\n{}", said.out);
    }
    world.assert_alive(&["launcher", "canary", "canary-orphan"]);
}
