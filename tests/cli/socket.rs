//! Tests of the service's socket: wrong paths, connection limits and users' rights. And of `scan` without a request to a
//! service.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use nix::libc;
use serde_json::Value;

use super::keeper::user;
use super::service_requests::{ask, ask_as, ask_json, socket};
use super::{reaper, run};
use crate::daemon::{self, JOURNAL, REAPER};
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually, link};

/// Returns the tests that need neither root nor BPF.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "no-socket", no_socket),
        trial("cli", "runtime-dir-of-others", runtime_dir_of_others),
    ]
}

/// Returns the tests that need both.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "connection-limits", connection_limits),
        trial("cli", "live-services-are-listed", live_services_are_listed),
        trial("cli", "history-of-its-owner", history_of_its_owner),
        trial(
            "cli",
            "scan-respects-service-and-keeps",
            scan_respects_keeps,
        ),
    ]
}

/// A path that is no socket is reported and left unchanged.
fn no_socket() {
    let dir = TempDir::new();
    fs::write(dir.path().join("file"), "mine").expect("write a file");
    fs::create_dir(dir.path().join("directory")).expect("create a directory");
    for (path, message) in [
        ("file", "it is not a socket"),
        ("directory", "it is not a socket"),
        ("file/s", "not a directory"),
        (&"x".repeat(300), "shorter than"),
    ] {
        let said = reaper(dir.path(), &["status", "--socket", path]);
        assert_eq!(said.code, Some(5), "{path}: {}", said.err);
        let first = said.err.lines().next().expect("a message");
        assert!(first.contains(message), "{}", said.err);
    }
    assert_eq!(fs::read(dir.path().join("file")).expect("read it"), b"mine");
}

/// The daemon refuses a runtime directory that is a symbolic link, because others could replace its socket.
fn runtime_dir_of_others() {
    let dir = TempDir::new();
    fs::create_dir(dir.path().join("there")).expect("create a directory");
    symlink(dir.path().join("there"), dir.path().join("run")).expect("link it");
    let own = std::process::id().to_string();
    let arguments = daemon::arguments(dir.path(), Some(&own), CONFIG, &["--observe"]);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let said = reaper(dir.path(), &arguments);
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert!(said.err.contains("symbolic link"), "{}", said.err);
    let there = fs::read_dir(dir.path().join("there")).expect("list it");
    assert_eq!(there.count(), 0, "the daemon created a file");
}

/// Opens `count` connections as another user.
fn connect_as(path: &str, uid: u32, count: usize) -> Vec<UnixStream> {
    let path = path.to_owned();
    let connect = move || {
        // SAFETY: the call takes numbers only. It changes only this thread, which ends with the closure.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX) };
        assert_eq!(done, 0, "change to uid {uid}");
        let one = |_| UnixStream::connect(&path).expect("connect");
        (0..count).map(one).collect()
    };
    std::thread::spawn(connect).join().expect("the connections")
}

/// Returns the status code of the response to a request on this connection.
fn response_status(mut stream: UnixStream) -> String {
    // A refused connection may be closed already.
    let _ = stream.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n");
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    let response = String::from_utf8_lossy(&response);
    response.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// A client that finds no service lists those that answer. `REAPER_SOCKET` names one of them, and hints repeat it.
fn live_services_are_listed() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    let live = socket(&world);
    let absent = world.dir().join("run/reaper.sock").display().to_string();
    fs::write(world.dir().join("run/reaper-7.sock"), "").expect("write a file");
    let list = format!("  {live}");
    for named in [&["--socket", &absent][..], &[]] {
        let args = [&["status"], named].concat();
        let mut command = Command::new(REAPER);
        command.args(args).env("REAPER_SOCKET", &absent);
        let said = run(world.dir(), &mut command);
        assert_eq!(said.code, Some(5), "{}", said.err);
        assert!(said.err.lines().any(|line| line == list), "{}", said.err);
        assert!(!said.err.contains("reaper-7.sock"), "{}", said.err);
    }
    for words in [&[][..], &["agents"]] {
        let mut command = Command::new(REAPER);
        command.args(words).env("REAPER_SOCKET", &absent);
        let said = run(world.dir(), &mut command);
        assert_eq!(said.code, Some(0), "{}", said.err);
        let mut lines = said.out.lines().chain(said.err.lines());
        assert!(lines.any(|line| line == list), "{}{}", said.out, said.err);
    }
    let mut command = Command::new(REAPER);
    let said = run(
        world.dir(),
        command.arg("status").env("REAPER_SOCKET", &live),
    );
    assert_eq!(said.code, Some(0), "{}", said.err);
    let mut command = Command::new(REAPER);
    let json = run(
        world.dir(),
        command.arg("--json").env("REAPER_SOCKET", &live),
    );
    let status: Value = serde_json::from_str(&json.out).expect("JSON");
    assert_eq!(status["mode"], "observe", "{}", json.err);
    let hint = format!("`reaper keep PID --socket {live}`");
    for (name, named) in [("REAPER_SOCKET", &[][..]), ("UNUSED", &["--socket", &live])] {
        let mut command = Command::new(REAPER);
        command
            .args(["keep", "--list"])
            .args(named)
            .env(name, &live);
        let said = run(world.dir(), &mut command);
        assert!(said.out.contains(&hint), "{}{}", said.out, said.err);
    }
    let stdout = fs::read_to_string(world.dir().join("stdout")).expect("read the output");
    for row in [
        format!("socket {live}"),
        format!("next: reaper tree --socket {live}"),
    ] {
        assert!(stdout.lines().any(|line| line.trim() == row), "{stdout}");
    }
}

/// Four users cannot use all connections, but many can. Root gets one in any case.
fn connection_limits() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    let path = socket(&world);
    let few: Vec<_> = (7000..7004).map(|uid| connect_as(&path, uid, 20)).collect();
    let mut one = connect_as(&path, 7004, 1);
    assert_eq!(
        response_status(one.remove(0)),
        "200",
        "four users hold all connections"
    );
    let many: Vec<_> = (7004..7024).map(|uid| connect_as(&path, uid, 4)).collect();
    let mut one = connect_as(&path, 7100, 1);
    assert_eq!(
        response_status(one.remove(0)),
        "503",
        "the connections are not limited"
    );
    let roots = UnixStream::connect(&path).expect("connect");
    assert_eq!(response_status(roots), "200", "root is refused");
    drop((few, many));
    eventually("closed connections are released", || {
        (response_status(connect_as(&path, 7100, 1).remove(0)) == "200").then_some(())
    });
}

/// Users get the history of their own sessions. Root gets all.
fn history_of_its_owner() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    world.open_to_all();
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    let user = "exec setpriv --reuid 4242 --clear-groups";
    let claude = "{dir}/node_modules/.bin/claude test-process agent mine {dir} own=sleep";
    world.spawn("user", &format!("{user} {claude}"));
    let agents = ["agent", "mine"].map(|role| world.await_processes(role, 1)[0]);
    world.await_processes("leaf", 1);
    let own = world.await_processes("own", 1)[0];
    world.kill("agent");
    world.kill("mine");
    world.await_gone(&["leaf", "own"]);
    let history = |uid: u32| -> Vec<Value> {
        let said = ask_as(&world, uid, &["history", "--json"]);
        assert_eq!(said.code, Some(0), "{uid}: {}", said.err);
        let line = |line: &str| serde_json::from_str(line).expect("JSON");
        said.out.lines().map(line).collect()
    };
    let closed = |uid: u32, count: usize| {
        eventually("the sessions are in the journal", || {
            let sessions = history(uid);
            let closed = sessions
                .iter()
                .filter(|session| session["closed_at"].is_string());
            (closed.count() == count).then_some(sessions)
        })
    };
    closed(0, 2);
    let sessions = closed(4242, 1);
    let [session] = &sessions[..] else {
        panic!("{sessions:?}")
    };
    assert_eq!(session["process.pid"], agents[1].pid);
    assert_eq!(session["process.user.id"], 4242);
    assert_eq!(session["processes"][0]["process.pid"], own.pid, "{session}");
    assert_eq!(history(4243), Vec::<Value>::new());
    let first = history(0)[0]["session_id"].clone();
    for id in [&first, &history(0)[1]["session_id"]] {
        let id = id.as_str().expect("an id");
        let said = ask_as(&world, 4242, &["history", "--json", "--session", id]);
        let expected = usize::from(id == session["session_id"]);
        assert_eq!(said.out.lines().count(), expected, "{id}: {}", said.out);
    }
}

/// A scan without a request to a service refuses to reap while a service runs. Afterwards it respects users' keeps.
fn scan_respects_keeps() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    let mut gone = std::process::Command::new("true")
        .spawn()
        .expect("run true");
    gone.wait().expect("wait for it");
    let left = |role: &str| {
        let gone = gone.id();
        format!("{role}=env:CLAUDECODE=1+env:CLAUDE_PID={gone}+sleep")
    };
    let claude = "{dir}/node_modules/.bin/claude test-process agent agent {dir}";
    let (leaf, other) = (left("leaf"), left("kept"));
    // The agent leads its terminal session, which so has no leader after its exit.
    let uid = user();
    world.open_to_all();
    let user = format!("exec setsid setpriv --reuid {uid} --clear-groups");
    world.spawn("agent", &format!("{user} {claude} {leaf} {other}"));
    world.await_processes("agent", 1);
    world.await_processes("leaf", 1);
    let kept = world.await_processes("kept", 1)[0];
    let pid = kept.pid.to_string();
    assert_eq!(ask(&world, &["keep", &pid]).code, Some(0));
    let service = ask_json(&world, &["status"])["pid"].to_string();

    let path = |name| world.dir().join(name).display().to_string();
    let (runtime, journal, config) = (path("run"), path("journal"), path("scan.toml"));
    let text = format!("grace = \"300ms\"\nruntime_dir = {runtime:?}\njournal_dir = {journal:?}\n");
    fs::write(&config, text).expect("write a config");
    let scope = world.process("launcher").pid.to_string();
    let scan = [
        "scan", "--reap", "--json", "--config", &config, "--scope", &scope,
    ];
    let refused = reaper(world.dir(), &scan);
    assert_eq!(refused.code, Some(4), "{}{}", refused.out, refused.err);
    assert!(
        refused.err.contains(&format!("pid {service} ")) && refused.err.contains("--socket"),
        "{}",
        refused.err
    );

    // A user without access to the lock file gets the same message.
    link(Path::new(REAPER), &world.dir().join("reaper"));
    let mut command = Command::new("setpriv");
    let command = command.args(["--reuid", "4242", "--clear-groups", "./reaper"]);
    let refused = run(world.dir(), command.args(scan).current_dir(world.dir()));
    assert_eq!(refused.code, Some(4), "{}{}", refused.out, refused.err);
    assert!(
        refused.err.contains(&format!("pid {service} ")),
        "{}",
        refused.err
    );

    world.kill_daemon();
    world.kill("agent");
    world.await_gone(&["agent"]);
    let run_scan = || reaper(world.dir(), &scan);
    let said = run_scan();
    assert_eq!(said.code, Some(6), "{}{}", said.out, said.err);
    world.await_gone(&["leaf"]);
    let report: Value = serde_json::from_str(&said.out).expect("JSON");
    let keeps = report["kept"].as_array().expect("a list");
    let keeps = keeps.iter().find(|found| found["pid"] == kept.pid);
    assert_eq!(keeps.expect("the kept process")["reason"], "kept_by_user");
    world.assert_alive(&["kept"]);

    fs::write(world.dir().join("journal/journal-x.db"), "damaged").expect("write a file");
    let refused = run_scan();
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(
        refused.err.contains("journal-x.db") && refused.err.contains("nothing was reaped"),
        "{}",
        refused.err
    );
    world.assert_alive(&["kept"]);
}
