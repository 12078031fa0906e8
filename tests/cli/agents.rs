//! Tests of `reaper agents` and `reaper agent add`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use libtest_mimic::Trial;
use serde_json::Value;

use super::service_requests::{ask, ask_json};
use super::{CommandOutput, reaper};
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, link};

/// Returns the tests that need no service.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "agents-without-service", agents_without_service),
        trial("cli", "agent-add-refuses", agent_add_refuses),
    ]
}

/// Returns the tests that need a service.
pub fn privileged() -> Vec<Trial> {
    vec![trial("cli", "own-agent-added", own_agent_added)]
}

fn json(said: &CommandOutput) -> Value {
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    serde_json::from_str(&said.out).expect("JSON")
}

/// Writes an executable script.
fn script(path: &Path, text: &str) {
    fs::write(path, text).expect("write a script");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("make it executable");
}

/// Process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A shell script is added as an agent; then it is listed, and its rule matches it. No service runs.
fn agents_without_service() {
    let dir = TempDir::new();
    let config = dir.path().join("config.toml");
    fs::write(&config, "# mine\ngrace = \"1s\" # short").expect("write the configuration");
    let agent = dir.path().join("my-agent.sh");
    script(&agent, "#!/bin/bash\nread -r _\n");
    let mut command = Command::new(&agent);
    let running = command.stdin(Stdio::piped()).spawn();
    let running = Running(running.expect("start the agent"));
    let pid = running.0.id().to_string();
    let ask = |args: &[&str]| reaper(dir.path(), &[args, &["--config", "config.toml"]].concat());

    let test = json(&ask(&["agents", "--test", &pid, "--json"]));
    assert_eq!(test["rule"], Value::Null, "{test}");
    let rules = test["rules"].as_array().expect("rules");
    for rule in rules {
        assert_eq!(rule["matches"], false, "{rule}");
        let text = rule["failed"].as_str().expect("a reason");
        assert!(
            text.contains(rule["condition"].as_str().expect("a condition")),
            "{rule}"
        );
    }
    assert!(rules.len() > 30, "{} rules", rules.len());

    let dry = json(&ask(&[
        "agent",
        "add",
        "--dry-run",
        "--pid",
        &pid,
        "--json",
    ]));
    assert_eq!(
        (&dry["written"], &dry["name"]),
        (&false.into(), &"my-agent".into())
    );
    assert_eq!(dry["matches"][0]["pid"].to_string(), pid, "{dry}");
    let said = ask(&["agent", "add", "./my-agent.sh"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.out.contains("matches 1 running process"),
        "{}",
        said.out
    );
    let written = fs::read_to_string(&config).expect("read the configuration");
    let rule = dry["rule"].as_str().expect("a rule");
    assert!(
        written.starts_with("# mine\ngrace = \"1s\" # short\n\n") && written.ends_with(rule),
        "{written}"
    );
    let said = reaper(dir.path(), &["config", "check", "config.toml"]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));

    let test = json(&ask(&["agents", "--test", &pid, "--json"]));
    assert_eq!(test["rule"], "my-agent");
    let said = ask(&["agents"]);
    let lines: Vec<&str> = said.out.lines().collect();
    let own = lines.iter().find(|line| line.starts_with("my-agent "));
    assert!(
        own.is_some_and(|line| line.ends_with(&format!("agent   1: {pid}"))),
        "{}",
        said.out
    );
    assert_eq!(
        lines.len(),
        rules.len() + 2,
        "one line each, and a headline: {}",
        said.out
    );
    let said = ask(&["agents", "my-agent"]);
    assert!(
        said.out.contains("script /") && !said.out.contains("claude"),
        "{}",
        said.out
    );
    let said = ask(&["agents", "no-such-agent"]);
    assert!(
        said.code == Some(1) && said.err.contains("\"no-such-agent\""),
        "{}",
        said.err
    );
}

/// Programs whose rule would match too much are refused with the reason, and nothing is written.
fn agent_add_refuses() {
    let dir = TempDir::new();
    let sleep = fs::canonicalize("/bin/sleep").expect("sleep");
    for name in ["tmux", "sudo"] {
        link(&sleep, &dir.path().join(name));
    }
    script(&dir.path().join("python3"), "#!/bin/sh\n");
    script(&dir.path().join("x.tcl"), "#!/usr/bin/env tclsh\n");
    let own = std::process::id().to_string();
    for (args, why) in [
        (&["bash"][..], "bash runs no script"),
        (&["./tmux"], "a boundary by the rule \"tmux\""),
        (&["./sudo"], "runs other programs"),
        (&["./python3"], "chooses a python3"),
        (&["./x.tcl"], "tclsh"),
        (&["./absent"], "there is no such program"),
        (&["no-such-program"], "no such program in PATH"),
        (&["."], "cannot add .: it is a directory"),
        (&["/usr/bin"], "cannot add /usr/bin: it is a directory"),
        (&["--pid", "1"], "the init process"),
        (&["--pid", &own], "an ancestor of this command"),
        (
            &["/bin/sleep", "--name", "codex"],
            "a rule is named \"codex\" already",
        ),
    ] {
        let said = reaper(
            dir.path(),
            &[&["agent", "add", "--config", "c.toml"], args].concat(),
        );
        assert_eq!(said.code, Some(1), "{args:?}: {}{}", said.out, said.err);
        assert!(said.err.contains(why), "no {why:?} in: {}", said.err);
        assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    }
    assert!(!dir.path().join("c.toml").exists());
    for args in [
        &["agent", "add"][..],
        &["agent", "add", "--pid", "7", "x"],
        &["agents", "--test", "x"],
    ] {
        assert_eq!(reaper(dir.path(), args).code, Some(2), "{args:?}");
    }
}

/// The reason why an agent is not recognised is explained. With a rule for it, its orphans are reaped, and no other
/// process.
fn own_agent_added() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    world.provide("mine", &["opt/claude".into()]);
    world.spawn("old", "as:mine agent old-leaf=sleep");
    let old = world.await_processes("old", 1)[0];
    let leaf = world.await_processes("old-leaf", 1)[0];
    let (pid, path) = (old.pid.to_string(), world.dir().join("opt/claude"));
    let said = ask(&world, &["explain", &leaf.pid.to_string(), "--json"]);
    let why = json(&said)["why"].to_string();
    for part in [
        "no agent rule matches this process or one above it",
        &format!(
            "nearest to process {pid}: claude-code, whose `exe` does not match {}",
            path.display()
        ),
    ] {
        assert!(why.contains(part), "no {part:?} in: {why}");
    }
    // No event reports a process below a boundary. Without an agent above it, the boundary is not the reason.
    world.provide("mux", &["bin/tmux".into()]);
    world.spawn("mux", "as:mux agent below=as:mine+sleep");
    let mux = world.await_processes("mux", 1)[0];
    let below = world.await_processes("below", 1)[0];
    let why = ask_json(&world, &["explain", &below.pid.to_string()])["why"].to_string();
    let reason = format!(
        "this process or one between it and tmux ({}); nearest to this process: claude-code",
        mux.pid
    );
    assert!(why.contains(&reason), "{why}");
    let test = ask_json(&world, &["agents", "--test", &pid]);
    assert_eq!(
        (&test["nearest"]["name"], &test["rule"]),
        (&"claude-code".into(), &Value::Null)
    );

    let add = [
        "agent",
        "add",
        "--pid",
        &pid,
        "--name",
        "mine",
        "--config",
        "config.toml",
        "--json",
    ];
    let added = json(&reaper(world.dir(), &add));
    assert_eq!(
        added["matches"].as_array().map(Vec::len),
        Some(2),
        "{added}"
    );
    assert_eq!(ask(&world, &["config", "reload"]).code, Some(0));
    assert_eq!(
        ask_json(&world, &["agents", "--test", &pid])["rule"],
        "mine"
    );
    world.spawn("new", "as:mine agent new-leaf=sleep");
    let new = world.await_processes("new", 1)[0];
    world.await_processes("new-leaf", 1);
    world.await_event("a session", |e| e.is("session.open", new));
    let listed = ask_json(&world, &["agents", "mine"]);
    assert_eq!(listed["agents"][0]["running"], serde_json::json!([new.pid]));
    world.kill("new");
    world.await_gone(&["new-leaf"]);
    world.assert_alive(&["old", "old-leaf", "mux", "below"]);
    world.stop();
}
