//! Tests that `explain`, `tree`, `scan` and `keep` judge a process in the same words.

use libtest_mimic::Trial;
use serde_json::Value;

use super::keeper::Service;
use super::{ask, ask_json, find};
use crate::daemon::JOURNAL;
use crate::trees::{CONFIG, trial};
use crate::world::{World, link};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "judgement-of-members", members),
        trial("cli", "judgement-of-untracked-processes", untracked),
        trial("cli", "judgement-of-leftovers", leftovers),
    ]
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns what the scan says of each process.
fn findings(report: &Value) -> Vec<(i32, String)> {
    let lists = ["reapable", "kept"].map(|list| report[list].as_array().expect("a list"));
    let findings = lists.into_iter().flatten();
    let pid = |finding: &Value| i32::try_from(finding["pid"].as_i64().expect("a pid"));
    findings
        .map(|finding| (pid(finding).expect("a pid"), text(&finding["why"])))
        .collect()
}

/// Splits a judgement into its verdict, without a time, and its reason.
fn parts(judgement: &str) -> (String, String) {
    let (verdict, reason) = judgement.split_once(": ").expect("a verdict and a reason");
    let word = verdict.split(' ').next().unwrap_or_default();
    (word.to_lowercase(), reason.to_owned())
}

/// Members that wait or are kept by a rule, a marker and a user.
fn members() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    let words = [
        "die=exit+0",
        "server=listen",
        "marked=env:REAPER_KEEP=1+sleep",
        "key=as:ssh-agent+sleep",
        "mine=sleep",
        "leaf=sleep",
    ];
    let program = world.dir().join("bin/worker");
    link(&program, &world.dir().join("bin/ssh-agent"));
    world.launch("claude", "agent", "agent", &words.map(String::from));
    for role in ["agent", "server", "marked", "key", "mine", "leaf"] {
        world.await_processes(role, 1);
    }
    let mine = world.process("mine").pid.to_string();
    let said = ask(&world, &["keep", &mine, "--for", "2h"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    world.open_gate("die-agent");
    world.await_gone(&["leaf"]);
    let server = world.process("server");
    world.await_event("a decision to wait", |e| {
        e.is("decision", server) && e.decision.as_deref() == Some("wait")
    });
    let report = ask(&world, &["scan", "--json"]);
    let scanned = findings(&serde_json::from_str(&report.out).expect("JSON"));
    let tree = ask_json(&world, &["tree"]);
    let drawn = ask(&world, &["tree"]).out;
    for (role, verdict, reason) in [
        (
            "server",
            "waits",
            "a rule delays the decision (unattended-servers)",
        ),
        ("marked", "kept", "REAPER_KEEP=1"),
        ("key", "kept", "a rule keeps it (ssh-agent)"),
        ("mine", "kept", "a user keeps it"),
    ] {
        let pid = world.process(role).pid;
        let expected = (verdict.to_owned(), reason.to_owned());
        let found = scanned.iter().find(|(known, _)| *known == pid);
        assert_eq!(parts(&found.expect(role).1), expected, "scan: {role}");
        let row = find(&tree, pid).expect(role);
        let tag = text(&row["decision"]["text"]);
        assert_eq!(parts(&tag), expected, "tree: {role}");
        assert!(drawn.contains(&format!(": {reason}]")), "{role}: {drawn}");
        let why = text(&ask_json(&world, &["explain", &pid.to_string()])["why"]);
        let (said, details) = parts(&why);
        assert_eq!(said, verdict, "explain: {role}");
        assert!(details.starts_with(&format!("{reason}. ")), "{role}: {why}");
    }
    world.assert_alive(&["server", "marked", "key", "mine", "canary"]);
}

/// A process that no agent started, the init process, and several pids in one request.
fn untracked() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    let canary = world.process("canary").pid.to_string();
    let why = text(&ask_json(&world, &["explain", &canary])["why"]);
    let judgement = why.trim_end_matches('.').replacen('N', "n", 1);
    assert!(judgement.starts_with("not tracked: "), "{why}");
    let kept = ask(&world, &["keep", &canary]);
    assert_eq!(kept.code, Some(1), "{}", kept.out);
    assert!(
        kept.err.contains(&format!("): {judgement}")),
        "{}",
        kept.err
    );
    let drawn = ask(&world, &["tree", "--all"]).out;
    assert!(drawn.contains("\nnot tracked: "), "{drawn}");

    let why = text(&ask_json(&world, &["explain", "1"])["why"]);
    assert_eq!(why, "Never signalled: it is the init process.");
    let kept = ask(&world, &["keep", "1"]);
    let judgement = "): never signalled: it is the init process;";
    assert!(kept.err.contains(judgement), "{}", kept.err);

    world.launch("claude", "agent", "agent", &["leaf*2=sleep".into()]);
    let leaves = world.await_processes("leaf", 2);
    let [one, other] = [0, 1].map(|n| leaves[n].pid.to_string());
    let said = ask(&world, &["keep", &one, &canary, &other]);
    assert_eq!(said.code, Some(1), "{}", said.err);
    let lines = [&one, &other].map(|pid| format!("Kept until it exits: process {pid}\n"));
    assert_eq!(said.out, lines.concat());
    let said = ask(&world, &["explain", &one, &other, "--json"]);
    assert_eq!((said.code, said.out.lines().count()), (Some(0), 2));
    let said = ask(&world, &["unkeep", &one, &other]);
    let released = said.out.matches("No longer kept: ").count();
    assert_eq!((said.code, released), (Some(0), 2), "{}", said.out);
    world.assert_alive(&["agent", "leaf", "canary"]);
}

/// Leftovers from before the service started, which only a scan recognises.
fn leftovers() {
    let service = Service::start("reap_leftovers = false\n", &[]);
    let tree = service.ask_json(&["tree", "--all"]);
    let scanned = findings(&service.ask_json(&["scan"]));
    assert_eq!(scanned.len(), 9, "{scanned:?}");
    assert!(
        scanned
            .iter()
            .any(|(_, why)| why.starts_with("to be reaped: "))
    );
    for (pid, why) in scanned {
        let row = find(&tree, pid).expect("a row");
        assert_eq!(text(&row["decision"]["text"]), why, "tree");
        let pid = pid.to_string();
        let explained = text(&service.ask_json(&["explain", &pid])["why"]);
        assert_eq!(explained[1..], format!("{}.", &why[1..]), "explain");
        let refused = service.ask(&["keep", &pid]);
        assert_eq!(refused.code, Some(1), "{}", refused.out);
        assert!(refused.err.contains(&why), "{why}: {}", refused.err);
    }
    assert_eq!(service.keeper.asleep(), 8, "a leftover was reaped");
}
