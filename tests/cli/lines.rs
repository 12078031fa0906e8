//! The daemon's lines for people: one for each ended process and session, and nothing that looks like killing in
//! observe mode.

use std::fs;

use libtest_mimic::Trial;
use serde_json::Value;

use super::service_requests::{ask, ask_json, find};
use crate::trees::{CONFIG, trial};
use crate::world::{World, eventually};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "lines-of-an-observer", observed),
        trial("cli", "lines-of-a-kill", killed),
        trial("cli", "lines-of-a-wait", waited),
    ]
}

/// Returns the lines that the daemon has printed.
fn printed(world: &World) -> Vec<String> {
    let text = fs::read_to_string(world.dir().join("stdout")).expect("read the text");
    // Further rows of a line are indented.
    let lines = text.lines().filter(|line| !line.starts_with(' '));
    lines.map(str::to_owned).collect()
}

/// Number of characters of a line before the pid.
const HEAD: usize = 38;

/// Returns the number of lines with this event.
fn count(lines: &[String], event: &str) -> usize {
    let event = format!(" {event} ");
    let heads = lines.iter().map(|line| line.chars().take(HEAD));
    heads
        .filter(|head| head.clone().collect::<String>().contains(&event))
        .count()
}

/// Returns the stream as JSON.
fn stream(world: &World) -> Vec<Value> {
    let raw = fs::read_to_string(world.dir().join("events.jsonl")).expect("read the events");
    let lines = raw.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// Lines, history and JSON of a service that only observes say so. Its last lines sum up what it would have reaped.
fn observed() {
    let mut world = World::new(true);
    let words = ["leaf=sleep".into(), "other=sleep".into()];
    world.launch("claude", "agent", "agent", &words);
    let leaf = world.await_processes("leaf", 1)[0];
    let other = world.await_processes("other", 1)[0];
    world.start_daemon(
        CONFIG,
        &["--observe", "--verbose", "--journal-dir", "journal"],
    );
    world.kill("agent");
    for key in [leaf, other] {
        world.await_event("a decision", |e| e.is("decision", key));
    }
    let tree = ask_json(&world, &["tree"]);
    let decision = &find(&tree, leaf.pid).expect("the leaf")["decision"];
    assert_eq!(
        (&decision["decision"], &decision["mode"]),
        (&"reap".into(), &"observe".into())
    );
    let history = eventually("the history has the decisions", || {
        let said = ask(&world, &["history"]).out;
        (said.matches("would reap").count() == 2).then_some(said)
    });
    assert!(
        history.contains("2 processes would have been reaped"),
        "{history}"
    );
    let explained = ask(&world, &["explain", &leaf.pid.to_string()]).out;
    assert!(explained.starts_with("Would be reaped: "), "{explained}");
    world.stop();
    world.assert_alive(&["leaf", "other", "canary"]);

    let events = stream(&world);
    assert_eq!(events[0]["event"], "ready", "{}", events[0]);
    let decisions = events.iter().filter(|e| e["event"] == "decision");
    assert!(decisions.clone().count() >= 2);
    for decision in decisions {
        assert_eq!(decision["mode"], "observe", "{decision}");
    }
    assert_eq!(events.last().expect("a summary")["would_have_reaped"], 2);
    let lines = printed(&world);
    assert!(lines[0].contains(" ready "), "{lines:#?}");
    assert_eq!(count(&lines, "would reap"), 2, "{lines:#?}");
    for word in ["SIGTERM", "SIGKILL ", " ended ", "  reap  "] {
        let found = lines.iter().find(|line| line.contains(word));
        assert_eq!(found, None, "{word}");
    }
    let [.., observed, stopped] = &lines[..] else {
        panic!("{lines:#?}")
    };
    let total = "2 processes would have been reaped";
    assert!(observed.contains(&format!("{total}: ")), "{observed}");
    assert!(stopped.contains(total), "{stopped}");
}

/// By default a kill gives one line for each process and one for the session.
fn killed() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let words = [
        "leaf=sleep",
        "orphan=double+sleep",
        "boss=parent+worker+sleep",
    ];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    let roles = ["leaf", "orphan", "boss", "worker"];
    for role in roles {
        world.await_processes(role, 1);
    }
    world.kill("agent");
    world.await_gone(&roles);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    world.assert_alive(&["canary"]);
    let lines = printed(&world);
    let events = ["ready", "agent", "ended", "closed", "stopped"];
    let counts = events.map(|event| count(&lines, event));
    assert_eq!(counts, [1, 1, 4, 1, 1], "{lines:#?}");
    // One more is the hint how to keep a process.
    assert_eq!(lines.len(), 9, "{lines:#?}");
    let closed = lines.iter().find(|line| line.contains(" closed "));
    let closed = closed.expect("the end of the session");
    assert!(closed.contains("killed by SIGKILL: 4 reaped"), "{closed}");
}

/// A wait is shown with its time and its reason, also for an ancestor of the server.
fn waited() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let words = ["die=exit+0", "boss=parent+server+listen"];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    let boss = world.await_processes("boss", 1)[0];
    let server = world.await_processes("server", 1)[0];
    world.open_gate("die-agent");
    for key in [boss, server] {
        world.await_event("a wait", |e| {
            e.is("decision", key) && e.reason.as_deref() == Some("rule_delay")
        });
    }
    world.assert_alive(&["boss", "server", "canary"]);
    world.stop();
    let events = stream(&world);
    let wait = |pid: i32| {
        let mut waits = events.iter().filter(|e| e["reason"] == "rule_delay");
        waits.find(|e| e["process.pid"] == pid).expect("a wait")
    };
    let port = wait(server.pid)["listening_ports"][0].clone();
    assert!(port.as_u64().is_some(), "{}", wait(server.pid));
    assert_eq!(wait(boss.pid)["listener_pid"], server.pid);
    let lines = printed(&world);
    for (pid, words) in [
        (
            server.pid,
            format!(": it listens on {port}, and its agent exited with status 0"),
        ),
        (
            boss.pid,
            format!("({}) below it listens on {port}, ", server.pid),
        ),
    ] {
        let pid = format!(" {pid}  ");
        let line = lines.iter().find(|line| line.contains(&pid));
        let line = line.expect("a line about it");
        assert!(line.contains(" wait ") && line.contains(&words), "{line}");
        // On a busy machine some of the minute is over.
        assert!(line.contains("  1m: ") || line.contains("s: "), "{line}");
    }
}
