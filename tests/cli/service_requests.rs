//! Tests of the commands that send requests to a service, as root and as other users.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{CommandOutput, reaper, run};
use crate::daemon::REAPER;
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, copy, eventually, link};

/// Returns the tests that need no service.
pub fn trials() -> Vec<Trial> {
    vec![trial("cli", "no-service", no_service)]
}

/// Returns the tests that need a service.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "requests", requests),
        trial("cli", "requests-of-other-users", requests_of_other_users),
        trial("cli", "kept-by-user", kept_by_user),
        trial(
            "cli",
            "socket-replaced-and-removed",
            socket_replaced_and_removed,
        ),
    ]
}

/// Returns the sockets in the runtime directory of a world.
fn sockets(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.dir().join("run")).expect("list the runtime directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "sock"))
        .collect()
}

/// Returns the only socket in the runtime directory of a world.
pub fn socket(world: &World) -> String {
    match sockets(world).as_slice() {
        [one] => one.display().to_string(),
        other => panic!("{} sockets", other.len()),
    }
}

/// Runs a command that sends a request to the service of a world.
pub fn ask(world: &World, args: &[&str]) -> CommandOutput {
    let socket = socket(world);
    reaper(world.dir(), &[args, &["--socket", &socket]].concat())
}

/// Returns the answer to such a command as JSON.
pub fn ask_json(world: &World, args: &[&str]) -> Value {
    let said = ask(world, &[args, &["--json"]].concat());
    assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
    serde_json::from_str(&said.out).expect("JSON")
}

/// Runs such a command as another user.
pub fn ask_as(world: &World, uid: u32, args: &[&str]) -> CommandOutput {
    let program = world.dir().join("reaper");
    if !program.exists() {
        // Other users may not be able to read the build directory.
        link(Path::new(REAPER), &program);
    }
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", &uid.to_string(), "--clear-groups"])
        .arg(program)
        .args(args)
        .args(["--socket", &socket(world)]);
    run(world.dir(), &mut command)
}

/// Returns the process with this pid in an answer to `tree`.
pub fn find(tree: &Value, pid: i32) -> Option<Value> {
    let groups = tree["groups"].as_array().expect("groups");
    let all = groups
        .iter()
        .flat_map(|group| group["processes"].as_array().expect("processes"));
    all.into_iter().find(|p| p["pid"] == pid).cloned()
}

fn no_service() {
    let dir = TempDir::new();
    for args in [
        &["status"][..],
        &["tree", "--all"],
        &["explain", "1"],
        &["agents"],
        &["keep", "1"],
        &["keep", "--list"],
        &["unkeep", "1"],
        &["config", "reload"],
        &["config", "show"],
    ] {
        let said = reaper(dir.path(), &[args, &["--socket", "none.sock"]].concat());
        assert_eq!(said.code, Some(5), "{args:?}: {}{}", said.out, said.err);
        // Services that answer elsewhere are listed in further lines.
        let first = said.err.lines().next().expect("a message");
        assert!(first.starts_with("reaper: no service"), "{}", said.err);
        assert!(said.err.contains("none.sock"), "{}", said.err);
        assert_eq!(said.out, "");
    }
    for args in [&["keep"][..], &["keep", "1", "--list"], &["explain", "x"]] {
        assert_eq!(reaper(dir.path(), args).code, Some(2), "{args:?}");
    }
}

/// Each request is answered, in observe mode as in enforce mode.
fn requests() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    let agent = world.await_processes("agent", 1)[0];
    let leaf = world.await_processes("leaf", 1)[0];
    let status = ask_json(&world, &["status"]);
    assert_eq!(
        (&status["mode"], &status["sessions_open"], &status["reaped"]),
        (&"observe".into(), &1.into(), &0.into())
    );
    let tree = ask_json(&world, &["tree"]);
    assert_eq!(
        find(&tree, agent.pid).expect("the agent")["session_root"],
        true
    );
    let shown = find(&tree, leaf.pid).expect("the leaf");
    assert_eq!((&shown["due"], &shown["depth"]), (&false.into(), &1.into()));
    assert!(shown["rss"].as_u64().is_some_and(|rss| rss > 0), "{shown}");
    let canary = world.process("canary").pid;
    assert_eq!(find(&tree, canary), None);
    assert!(find(&ask_json(&world, &["tree", "--all"]), canary).is_some());
    let agents = ask_json(&world, &["agents"]);
    let agents = agents["agents"].as_array().expect("agents");
    let open = |agent: &&Value| agent["sessions"] != Value::Array(Vec::new());
    assert_eq!(agents.iter().filter(open).count(), 1);
    let reply = ask_json(&world, &["explain", &leaf.pid.to_string()]);
    assert_eq!(reply["process"]["decision"]["reason"], "root_alive");
    assert_eq!(reply["lineage"][0]["pid"], agent.pid);
    let untracked = ask(&world, &["explain", &canary.to_string()]);
    assert!(untracked.out.contains("Not tracked"), "{}", untracked.out);

    world.kill("agent");
    world.await_event("a decision", |e| e.is("decision", leaf));
    let reply = ask_json(&world, &["explain", &leaf.pid.to_string()]);
    assert_eq!(reply["process"]["decision"]["decision"], "reap");
    assert_eq!(reply["process"]["due"], true);
    assert!(
        reply["why"]
            .as_str()
            .expect("a sentence")
            .contains("SIGKILL"),
        "{reply}"
    );
    assert_eq!(reply["lineage"][0]["ended"], "SIGKILL");
    assert!(ask_json(&world, &["status"])["would_have_reaped"].as_u64() > Some(0));
    let tree = ask(&world, &["tree"]);
    assert!(
        tree.out.contains("[would be reaped: its agent exited]"),
        "{}",
        tree.out
    );
    assert_eq!(ask(&world, &["explain", "4194304"]).code, Some(1));
    world.assert_alive(&["leaf", "canary"]);
}

/// Users other than root see and change only their own processes.
fn requests_of_other_users() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    let agent = world.await_processes("agent", 1)[0];
    let leaf = world.await_processes("leaf", 1)[0];
    let pid = leaf.pid.to_string();
    let uid = 4242;
    let tree = ask_as(&world, uid, &["tree", "--all", "--json"]);
    let tree: Value = serde_json::from_str(&tree.out).expect("JSON");
    assert_eq!(
        (find(&tree, agent.pid), find(&tree, leaf.pid)),
        (None, None)
    );
    for args in [
        &["explain", &pid][..],
        &["keep", &pid],
        &["keep", &pid, "--tree", "--for", "1h"],
        &["unkeep", &pid],
        &["keep", "1"],
        &["config", "reload"],
        &["config", "show"],
    ] {
        let said = ask_as(&world, uid, args);
        assert_eq!(said.code, Some(1), "{args:?}: {}{}", said.out, said.err);
        assert!(said.err.contains("only"), "{args:?}: {}", said.err);
    }
    link_target_is_hidden(&world, uid);
    let keeps = ask_json(&world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"], Value::Array(Vec::new()));
    assert!(!world.daemon().events().iter().any(|e| e.event == "keep"));
}

/// A user's process names a link in a directory of root as its script. Only root sees where the link leads.
fn link_target_is_hidden(world: &World, uid: u32) {
    let secret = world.dir().join("secret");
    fs::create_dir(&secret).expect("create a directory");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).expect("change the mode");
    fs::write(secret.join("target.js"), "").expect("write a file");
    // `sleep` with the name `node` takes the script's name as a number of seconds.
    symlink("target.js", secret.join("300")).expect("create a link");
    let node = world.dir().join("node");
    copy("/bin/sleep", &node);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &uid.to_string(), "--clear-groups"]);
    command.arg(&node).arg("300").current_dir(&secret);
    let mut process = command.spawn().expect("start a process");
    let pid = process.id().to_string();
    let exe = format!("/proc/{pid}/exe");
    eventually("the process runs node", || {
        fs::read_link(&exe).ok().filter(|exe| *exe == node)
    });
    for args in [
        &["agents", "--test", &pid, "--json"][..],
        &["explain", &pid, "--json"],
    ] {
        let own = ask_as(world, uid, args);
        assert_eq!(own.code, Some(0), "{args:?}: {}", own.err);
        assert!(!own.out.contains("target.js"), "{args:?}: {}", own.out);
    }
    let tested = ask(world, &["agents", "--test", &pid, "--json"]);
    assert!(tested.out.contains("secret/target.js"), "{}", tested.out);
    process.kill().expect("kill the process");
    process.wait().expect("wait for the process");
}

/// A process that a user keeps lives until `unkeep`.
fn kept_by_user() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let words = ["leaf=sleep".into(), "other=sleep".into()];
    world.launch("claude", "agent", "agent", &words);
    world.await_processes("agent", 1);
    let leaf = world.await_processes("leaf", 1)[0];
    world.await_processes("other", 1);
    let pid = leaf.pid.to_string();
    ask_json(&world, &["keep", &pid]);
    let released = ask_json(&world, &["unkeep", &pid]);
    let explained = ask_json(&world, &["explain", &pid]);
    assert_eq!(released["why"], explained["why"]);
    assert_eq!(released["next"], explained["next"]);
    let kept = ask_json(&world, &["keep", &pid, "--for", "2h"]);
    assert_eq!(kept["processes"], 1);
    let keeps = ask_json(&world, &["keep", "--list"]);
    let remaining_s = keeps["keeps"][0]["remaining_s"].as_u64().expect("a time");
    assert!((7000..=7200).contains(&remaining_s), "{keeps}");
    let canary = world.process("canary").pid.to_string();
    let said = ask(&world, &["keep", &canary]);
    assert_eq!(said.code, Some(1), "{}", said.out);
    let why = format!("cannot keep process {canary} (");
    let lives = "): not tracked: no agent rule matches this process or one above it";
    assert!(
        said.err.contains(&why) && said.err.contains(lives),
        "{}",
        said.err
    );

    world.kill("agent");
    world.await_gone(&["other"]);
    world.await_event("a decision to keep", |e| {
        e.is("decision", leaf) && e.reason.as_deref() == Some("kept_by_user")
    });
    world.assert_alive(&["leaf"]);
    let reply = ask_json(&world, &["explain", &pid]);
    assert_eq!(reply["process"]["decision"]["reason"], "kept_by_user");

    let said = ask(&world, &["unkeep", &pid]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let next = "To be reaped: its agent claude-code (";
    assert!(
        said.out.contains(next) && said.out.contains("Now: SIGTERM"),
        "{}",
        said.out
    );
    world.await_gone(&["leaf"]);
    let events = world.stop();
    assert!(
        events.iter().any(|e| e.is("keep", leaf)),
        "the keep is not reported"
    );
    assert!(
        events.iter().any(|e| e.is("unkeep", leaf)),
        "the unkeep is not reported"
    );
}

/// A service replaces the socket of a killed service, and removes its own when it stops.
fn socket_replaced_and_removed() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    let first = ask_json(&world, &["status"])["pid"].clone();
    world.kill_daemon();
    assert_eq!(ask(&world, &["status"]).code, Some(5));
    world.restart_daemon(&[]);
    assert_ne!(ask_json(&world, &["status"])["pid"], first);
    world.stop_by(Signal::SIGTERM);
    assert!(sockets(&world).is_empty(), "the socket was not removed");
    world.start_daemon("socket = false\n", &["--observe"]);
    assert!(sockets(&world).is_empty(), "there is a socket");
    world.stop();
}
