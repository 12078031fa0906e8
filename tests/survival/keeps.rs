//! Tests of users' keeps, closed sessions and a newer journal across restarts of the service.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::{PinnedWorld, SurvivalScenario, listed};
use crate::cli::{ask, ask_json};
use crate::daemon::JOURNAL;
use crate::trees::OWN_RULES;
use crate::world::eventually;

pub const SCENARIOS: &[SurvivalScenario] = &[
    ("tree-kept-over-a-restart", tree_kept_over_a_restart),
    ("closed-before-a-restart", closed_before_a_restart),
    ("newer-journal", newer_journal),
];

/// A service does not report a session closed again that an earlier one has closed. It records the exit of the kept member.
fn closed_before_a_restart() {
    let mut test = PinnedWorld::new(OWN_RULES, &JOURNAL);
    let children = ["keeper=as:test-keeper+sleep", "leaf=sleep"];
    test.agent("agent", &children, &["keeper", "leaf"]);
    test.world.kill("agent");
    test.await_only(&["keeper"]);
    test.await_closed(1);
    let await_kept = |test: &PinnedWorld, n: u64| {
        eventually("the history has the number of kept members", || {
            let output = ask(&test.world, &["history", "--json"]).out;
            let session: Value = serde_json::from_str(&output).ok()?;
            (!session["closed_at"].is_null() && session["kept"] == n).then_some(())
        });
    };
    await_kept(&test, 1);
    test.world.kill_daemon();
    test.world.restart_daemon(&[]);
    let keeper = test.world.process("keeper");
    test.world.kill("keeper");
    test.world
        .await_event("the exit of the kept member", |e| e.is("exit", keeper));
    await_kept(&test, 0);
    test.world.stop();
    let stream = test.stream();
    let closed = stream.iter().filter(|e| e.event == "session.close");
    assert_eq!(closed.count(), 1, "number of session.close events");
}

/// A restarted service keeps an orphan of a kept tree, even if the process named in the keep has exited.
///
/// The orphan also has its own keep. `unkeep` removes one keep at a time.
fn tree_kept_over_a_restart() {
    let mut test = PinnedWorld::new(OWN_RULES, &JOURNAL);
    let children = ["top=later+go+apart+double+setsid", "other=double+setsid"];
    test.agent("agent", &children, &["top", "other"]);
    test.await_sessions(&["agent"]);
    let top = test.world.process("top");
    let said = ask(&test.world, &["keep", &top.pid.to_string(), "--tree"]);
    assert_eq!(
        said.out,
        format!("Kept until it exits: process {}\n", top.pid),
        "{}",
        said.err
    );
    test.world.open_gate("go");
    let apart = test.world.await_processes("apart", 1)[0];
    test.world
        .await_event("it is an orphan", |e| e.is("orphan", apart));
    // A second keep, of this process alone and for a limited time. Both are recorded.
    let said = ask(
        &test.world,
        &["keep", &apart.pid.to_string(), "--for", "1h"],
    );
    assert_eq!(said.code, Some(0), "{}", said.err);
    test.world.kill("top");
    test.world.await_gone(&["top"]);
    test.world.kill_daemon();
    test.world.restart_daemon(&[]);
    let keeps = ask_json(&test.world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"][0]["process"]["pid"], apart.pid, "{keeps}");
    test.world.kill("agent");
    test.await_only(&["apart"]);
    test.world.await_event("a decision to keep it", |e| {
        e.is("decision", apart) && e.reason.as_deref() == Some("kept_by_user")
    });
    let unkeep = |test: &PinnedWorld| {
        let said = ask(&test.world, &["unkeep", &apart.pid.to_string()]);
        assert_eq!(said.code, Some(0), "{}", said.err);
    };
    // The first call removes its own keep, the second that of the tree.
    for _ in 0..2 {
        let keeps = ask_json(&test.world, &["keep", "--list"]);
        let kept = &keeps["keeps"][0];
        assert_eq!(
            (&kept["process"]["pid"], &kept["tree"]),
            (&apart.pid.into(), &true.into()),
            "{keeps}"
        );
        unkeep(&test);
    }
    test.await_only(&[]);
    // The removal survives a restart.
    test.world.kill_daemon();
    test.world.restart_daemon(&[]);
    let keeps = ask_json(&test.world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"].as_array().map(Vec::len), Some(0), "{keeps}");
    test.world.stop();
}

/// A service whose journal has a newer schema sends no signal, not even after a reload, and leaves the files untouched.
/// Once it can read the journal again, it enforces.
fn newer_journal() {
    let mut test = PinnedWorld::new(OWN_RULES, &JOURNAL);
    test.world.stop();
    let files = |test: &PinnedWorld| -> BTreeMap<PathBuf, Vec<u8>> {
        let files = listed(&test.world.dir().join("journal")).into_iter();
        files
            .map(|path| (path.clone(), fs::read(path).expect("read a file")))
            .collect()
    };
    let path = files(&test).into_keys().next().expect("a journal");
    let set_version = |version: i64| -> i64 {
        let journal = rusqlite::Connection::open(&path).expect("open the journal");
        let version_before = journal.pragma_query_value(None, "user_version", |row| row.get(0));
        let set = journal.pragma_update(None, "user_version", version);
        set.expect("set the schema version");
        version_before.expect("read the schema version")
    };
    let version = set_version(99);
    let before = files(&test);
    test.world.restart_daemon(&["--enforce"]);
    test.agent("agent", &["leaf=sleep"], &["leaf"]);
    test.await_sessions(&["agent"]);
    let said = ask(&test.world, &["config", "reload"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let leaf = test.world.process("leaf");
    test.world.kill("agent");
    test.world.await_event("a decision to reap", |e| {
        e.is("decision", leaf) && e.decision.as_deref() == Some("reap")
    });
    let status = ask_json(&test.world, &["status"]);
    assert_eq!(status["mode"], "observe", "{status}");
    let reason = status["mode_reason"].as_str().unwrap_or_default();
    let parts = [path.to_str().expect("UTF-8"), "schema version 99"];
    for part in parts {
        assert!(reason.contains(part), "{status}");
    }
    let stream = fs::read_to_string(test.world.dir().join("events.jsonl")).expect("the events");
    assert!(stream.contains("\"mode_reason\""), "{stream}");
    let said = ask(&test.world, &["explain", &leaf.pid.to_string()]);
    assert!(said.out.contains("schema version 99"), "{}", said.out);
    let said = ask(&test.world, &["history"]);
    assert!(said.err.contains("schema version 99"), "{}", said.err);
    test.world.stop();
    test.world.assert_alive(&["leaf"]);
    assert_eq!(files(&test), before);
    let stream = test.stream();
    let signal = stream.iter().find(|e| e.event == "signal");
    assert!(signal.is_none(), "{signal:?}");
    set_version(version);
    test.world.restart_daemon(&["--enforce"]);
    test.agent("second", &["other=sleep"], &["other"]);
    test.await_sessions(&["second"]);
    test.world.kill("second");
    test.world.await_gone(&["other"]);
    test.world.stop();
}
