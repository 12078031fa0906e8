//! What users want kept, while the service that was asked for it is no more.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::{PinnedWorld, SurvivalScenario, listed};
use crate::cli::{ask, ask_json};
use crate::daemon::JOURNAL;
use crate::trees::OWN_RULES;
use crate::world::eventually;

pub const STORIES: &[SurvivalScenario] = &[
    ("tree-kept-over-a-restart", tree_kept_over_a_restart),
    ("closed-before-a-restart", closed_before_a_restart),
    ("newer-journal", newer_journal),
];

/// A session that one service has reported closed is not reported closed by the next one, which writes down how the
/// kept member ends.
fn closed_before_a_restart() {
    let mut life = PinnedWorld::new(OWN_RULES, &JOURNAL);
    let children = ["keeper=as:test-keeper+sleep", "leaf=sleep"];
    life.agent("agent", &children, &["keeper", "leaf"]);
    life.world.kill("agent");
    life.await_left(&["keeper"]);
    life.await_closed(1);
    let await_kept = |life: &PinnedWorld, n: u64| {
        eventually("the history has what is kept", || {
            let said = ask(&life.world, &["history", "--json"]).out;
            let session: Value = serde_json::from_str(&said).ok()?;
            (!session["closed_at"].is_null() && session["kept"] == n).then_some(())
        });
    };
    await_kept(&life, 1);
    life.world.kill_daemon();
    life.world.restart_daemon(&[]);
    let keeper = life.world.process("keeper");
    life.world.kill("keeper");
    life.world
        .await_event("the end of the kept one", |e| e.is("exit", keeper));
    await_kept(&life, 0);
    life.world.stop();
    let stream = life.stream();
    let closed = stream.iter().filter(|e| e.event == "session.close");
    assert_eq!(closed.count(), 1, "times that the session was closed");
}

/// Who was born to a kept process after that was asked for, and has left its tree, is kept by the service that
/// comes next, though the one that was asked for is gone; and is let go by whoever takes that back.
fn tree_kept_over_a_restart() {
    let mut life = PinnedWorld::new(OWN_RULES, &JOURNAL);
    let children = ["top=later+go+apart+double+setsid", "other=double+setsid"];
    life.agent("agent", &children, &["top", "other"]);
    life.await_sessions(&["agent"]);
    let top = life.world.process("top");
    let said = ask(&life.world, &["keep", &top.pid.to_string(), "--tree"]);
    assert_eq!(
        said.out,
        format!("kept until it exits: process {}\n", top.pid),
        "{}",
        said.err
    );
    life.world.open_gate("go");
    let apart = life.world.await_processes("apart", 1)[0];
    life.world
        .await_event("it is an orphan", |e| e.is("orphan", apart));
    // A shorter wish for itself beside that for the tree: each of them is written down.
    let said = ask(
        &life.world,
        &["keep", &apart.pid.to_string(), "--for", "1h"],
    );
    assert_eq!(said.code, Some(0), "{}", said.err);
    life.world.kill("top");
    life.world.await_gone(&["top"]);
    life.world.kill_daemon();
    life.world.restart_daemon(&[]);
    let keeps = ask_json(&life.world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"][0]["process"]["pid"], apart.pid, "{keeps}");
    life.world.kill("agent");
    life.await_left(&["apart"]);
    life.world.await_event("it is kept", |e| {
        e.is("decision", apart) && e.reason.as_deref() == Some("kept_by_user")
    });
    let unkeep = |life: &PinnedWorld| {
        let said = ask(&life.world, &["unkeep", &apart.pid.to_string()]);
        assert_eq!(said.code, Some(0), "{}", said.err);
    };
    // Its own wish first, then that for the tree.
    for _ in 0..2 {
        let keeps = ask_json(&life.world, &["keep", "--list"]);
        let kept = &keeps["keeps"][0];
        assert_eq!(
            (&kept["process"]["pid"], &kept["tree"]),
            (&apart.pid.into(), &true.into()),
            "{keeps}"
        );
        unkeep(&life);
    }
    life.await_left(&[]);
    // Nor does the one after that begin with it.
    life.world.kill_daemon();
    life.world.restart_daemon(&[]);
    let keeps = ask_json(&life.world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"].as_array().map(Vec::len), Some(0), "{keeps}");
    life.world.stop();
}

/// A service whose journal has a newer schema sends no signal, not even after a reload, and leaves the files untouched.
/// Once it can read the journal again, it enforces.
fn newer_journal() {
    let mut life = PinnedWorld::new(OWN_RULES, &JOURNAL);
    life.world.stop();
    let files = |life: &PinnedWorld| -> BTreeMap<PathBuf, Vec<u8>> {
        let files = listed(&life.world.dir().join("journal")).into_iter();
        files
            .map(|path| (path.clone(), fs::read(path).expect("read a file")))
            .collect()
    };
    let path = files(&life).into_keys().next().expect("a journal");
    let set_version = |version: i64| -> i64 {
        let journal = rusqlite::Connection::open(&path).expect("open the journal");
        let version_before = journal.pragma_query_value(None, "user_version", |row| row.get(0));
        let set = journal.pragma_update(None, "user_version", version);
        set.expect("set the schema version");
        version_before.expect("read the schema version")
    };
    let version = set_version(99);
    let before = files(&life);
    life.world.restart_daemon(&["--enforce"]);
    life.agent("agent", &["leaf=sleep"], &["leaf"]);
    life.await_sessions(&["agent"]);
    let said = ask(&life.world, &["config", "reload"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let leaf = life.world.process("leaf");
    life.world.kill("agent");
    life.world.await_event("it would be reaped", |e| {
        e.is("decision", leaf) && e.decision.as_deref() == Some("reap")
    });
    let status = ask_json(&life.world, &["status"]);
    assert_eq!(status["mode"], "observe", "{status}");
    let reason = status["mode_reason"].as_str().unwrap_or_default();
    let parts = [path.to_str().expect("UTF-8"), "schema version 99"];
    for part in parts {
        assert!(reason.contains(part), "{status}");
    }
    let stream = fs::read_to_string(life.world.dir().join("events.jsonl")).expect("the events");
    assert!(stream.contains("\"mode_reason\""), "{stream}");
    let said = ask(&life.world, &["explain", &leaf.pid.to_string()]);
    assert!(said.out.contains("schema version 99"), "{}", said.out);
    let said = ask(&life.world, &["history"]);
    assert!(said.err.contains("schema version 99"), "{}", said.err);
    life.world.stop();
    life.world.assert_alive(&["leaf"]);
    assert_eq!(files(&life), before);
    let stream = life.stream();
    let signal = stream.iter().find(|e| e.event == "signal");
    assert!(signal.is_none(), "{signal:?}");
    set_version(version);
    life.world.restart_daemon(&["--enforce"]);
    life.agent("second", &["other=sleep"], &["other"]);
    life.await_sessions(&["second"]);
    life.world.kill("second");
    life.world.await_gone(&["other"]);
    life.world.stop();
}
