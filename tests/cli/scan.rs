//! `reaper scan` and a service's first look, on a tree of their own and on nothing else.

use std::collections::BTreeMap;

use libtest_mimic::Trial;
use serde_json::Value;

use super::keeper::{Keeper, Service, ask_as, socket, user};
use super::{CommandOutput, reaper};
use crate::daemon::{Event, JOURNAL};
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually};

/// What needs neither root nor probes.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "scan", scan),
        trial("cli", "scan-beside-a-living-agent", beside_a_living_agent),
        trial("cli", "scan-long-command-lines", long_command_lines),
        trial("cli", "scan-usage", usage),
    ]
}

/// What needs them: a service.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "scan-observed", observed),
        trial("cli", "scan-at-the-start", at_the_start),
        trial("cli", "scan-ordered", ordered),
        trial("cli", "scan-recorded", recorded),
        trial("cli", "scan-without-keeps", without_keeps),
    ]
}

/// What is said of each command under a key of the report: its reason, and what came of it.
fn said(report: &Value, list: &str) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let findings = report[list].as_array().expect("a list of findings").iter();
    findings
        .map(|finding| {
            let came = [&finding["reason"], &finding["outcome"], &finding["signal"]].map(text);
            (
                text(&finding["command"]),
                came.join(" ").trim_end().to_owned(),
            )
        })
        .collect()
}

fn scan() {
    let dir = TempDir::new();
    let keeper = Keeper::start(&dir);
    let pid = keeper.0.id().to_string();
    let look = |more: &[&str]| {
        let args = [&["scan", "--config", "c.toml", "--scope", &pid][..], more].concat();
        reaper(dir.path(), &args)
    };
    let json = |out: &str| -> Value { serde_json::from_str(out).expect("scan --json gives JSON") };
    let before = keeper.living().count();

    let told = look(&["--json"]);
    assert_eq!(told.code, Some(1), "{}{}", told.out, told.err);
    let report = json(&told.out);
    let found = said(&report, "reapable");
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(
        found.values().all(|reason| reason == "dead_agent"),
        "{found:?}"
    );
    assert!(
        found.contains_key("sleep 3001") && found.contains_key("sleep 3002"),
        "{found:?}"
    );
    let spared = said(&report, "kept");
    for (command, reason) in [
        ("sleep 3003", "keep_marker"),
        ("sleep 3004", "owner_alive"),
        ("sleep 3005", "no_owner"),
        ("sleep 3007", "not_orphan"),
        ("sleep 3010", "changed_uid"),
    ] {
        assert_eq!(
            spared.get(command).map(String::as_str),
            Some(reason),
            "{spared:?}"
        );
    }
    assert_eq!(spared.len(), 5, "{spared:?}");
    let told = look(&[]);
    assert_eq!(told.code, Some(1), "{}", told.err);
    assert!(
        told.out.contains("sleep 3001") && told.out.contains("--reap"),
        "{}",
        told.out
    );
    assert_eq!(
        keeper.living().count(),
        before,
        "a look has changed something"
    );

    let told = look(&["--reap", "--json"]);
    assert_eq!(told.code, Some(1), "{}{}", told.out, told.err);
    let report = json(&told.out);
    let found = said(&report, "reapable");
    assert!(
        found.values().all(|came| came.contains("ended")),
        "{found:?}"
    );
    let killed = found.values().any(|came| came.ends_with("SIGKILL"));
    assert!(killed, "one ignores SIGTERM: {found:?}");
    assert!(report["ended"].as_u64().is_some_and(|n| n >= 4), "{report}");
    assert_eq!(
        keeper.living().count(),
        before - 4,
        "what was to live lives"
    );

    let told = look(&["--json"]);
    assert_eq!(told.code, Some(0), "{}{}", told.out, told.err);
    assert_eq!(said(&json(&told.out), "kept").len(), 5);
    let told = look(&[]);
    assert!(
        told.out.contains("No process") && told.out.contains("REAPER_KEEP=1"),
        "{}",
        told.out
    );
}

/// Two agents, each with an orphan that names it and with a child; the first is killed. A third agent runs in a shell
/// that has the marker of an agent that is gone, as has what that shell left behind. `$0` is a pid of no process.
const AGENTS: &str = r#"
    export leave='CLAUDECODE=1 CLAUDE_PID=$$ setsid sh -c "sleep $1 & exit"; sleep $2; :'
    ./claude -c "$leave" agent 3101 3102 & gone=$!
    ./claude -c "$leave" agent 3103 3104 &
    CLAUDECODE=1 CLAUDE_PID=$0 sh -c '
        setsid sh -c "sleep 3105 & exit"
        env -u CLAUDE_PID -u CLAUDECODE ./claude -c "sleep 3106; :"
        :' &
    echo up
    read x
    kill -KILL $gone
    sleep 3107
"#;

/// Evidence that names an agent that is gone counts beside agents that live; what they own, or may own, is kept.
fn beside_a_living_agent() {
    let dir = TempDir::new();
    std::fs::copy("/bin/sh", dir.path().join("claude")).expect("copy a shell");
    let mut keeper = Keeper::of(AGENTS, 6, &dir);
    let named = |keeper: &Keeper, name: &[u8]| {
        let comm = |pid| std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let is_named = |id: &crate::proc::ProcessKey| comm(id.pid).trim_ascii() == name;
        keeper.living().filter(is_named).count()
    };
    assert_eq!(named(&keeper, b"claude"), 3);
    // It is marked as what is reaped, and outside of the scope.
    let canary = std::process::Command::new("sleep")
        .args(["3108"])
        .env("CLAUDECODE", "1")
        .env("CLAUDE_PID", dead())
        .spawn()
        .expect("start a canary");
    let mut canary = Keeper(canary);
    keeper.go_on();
    eventually("the first agent is gone", || {
        (named(&keeper, b"claude") == 2).then_some(())
    });
    let pid = keeper.0.id().to_string();
    let look = |more: &[&str]| -> Value {
        let args = ["scan", "--config", "c.toml", "--json", "--scope", &pid];
        let told = reaper(dir.path(), &[&args[..], more].concat());
        serde_json::from_str(&told.out).unwrap_or_else(|e| panic!("{e}: {}", told.err))
    };
    let report = look(&[]);
    let found = BTreeMap::from([("sleep 3101".to_owned(), "dead_agent".to_owned())]);
    assert_eq!(said(&report, "reapable"), found, "{report}");
    let spared = said(&report, "kept");
    for (command, reason) in [
        ("sleep 3103", "owner_alive"),
        ("sleep 3105", "shared_marker"),
    ] {
        let said = spared.get(command).map(String::as_str);
        assert_eq!(said, Some(reason), "{spared:?}");
    }
    let report = look(&["--reap"]);
    let found = said(&report, "reapable");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found["sleep 3101"].contains("ended"), "{found:?}");
    assert_eq!(
        keeper.sleepers(),
        ["3102", "3103", "3104", "3105", "3106", "3107"]
    );
    let end = canary.0.try_wait().expect("ask for its end");
    assert_eq!(end, None, "the canary was ended");
}

/// Leftovers that run `java` with 39 KB before the class. A rule keeps the second by its class; it starts later, since it
/// may have handed on its markers to what is no older.
const LONG: &str = r#"
    export CLAUDECODE=1 CLAUDE_PID=$0
    long=$(printf '%039000d' 0)
    setsid sh -c './java -c "sleep 3201; :" "$0" Main & exit' "$long"
    sleep 0.1
    setsid sh -c './java -c "sleep 3202; :" "$0" org.gradle.launcher.daemon.bootstrap.GradleDaemon & exit' "$long"
    echo up
    read x
"#;

fn long_command_lines() {
    let dir = TempDir::new();
    std::fs::copy("/bin/sh", dir.path().join("java")).expect("copy a shell");
    let keeper = Keeper::of(LONG, 2, &dir);
    let pid = keeper.0.id().to_string();
    let told = reaper(
        dir.path(),
        &["scan", "--config", "c.toml", "--json", "--scope", &pid],
    );
    let report = serde_json::from_str(&told.out).expect("scan --json gives JSON");
    for (list, sleeper, reason) in [
        ("reapable", "sleep 3201", "dead_agent"),
        ("kept", "sleep 3202", "keep_rule"),
    ] {
        let said = said(&report, list);
        assert!(said.contains_key(sleeper), "{list} {report}");
        assert_eq!(said.len(), 2, "{list} {said:?}");
        assert!(said.values().all(|said| said == reason), "{list} {said:?}");
    }
}

/// A pid of no process.
fn dead() -> String {
    let mut gone = std::process::Command::new("true")
        .spawn()
        .expect("run true");
    gone.wait().expect("wait for it");
    gone.id().to_string()
}

fn usage() {
    let dir = TempDir::new();
    for args in [
        &["scan", "--min-age", "soon"][..],
        &["scan", "--scope", "x"],
        &["scan", "--scope", "4194305"],
        &["scan", "--config", "absent.toml"],
        &["scan", "--socket", "s", "--scope", "1"],
    ] {
        let said = reaper(dir.path(), args);
        assert_eq!(said.code, Some(2), "exit code of {args:?}: {}", said.err);
        assert!(!said.err.is_empty(), "{args:?} is refused without a word");
    }
}

/// All who sleep for so long.
const ALL: [&str; 8] = [
    "3001", "3002", "3003", "3004", "3005", "3006", "3007", "3010",
];

/// What is older than a service is told of, and nothing is done; a scan of the service's says the same as one
/// without.
fn observed() {
    let service = Service::start("", &["--observe"]);
    service.await_leftovers(2, "owner_unknown");
    for reason in ["owner_alive", "no_owner", "not_orphan", "changed_uid"] {
        service.await_leftovers(1, reason);
    }
    let strays = service.leftovers();
    let reasons: Vec<_> = strays.iter().filter_map(|e| e.reason.as_deref()).collect();
    assert!(!reasons.contains(&"keep_marker"), "{reasons:?}");
    let report = service.ask_json(&["scan"]);
    assert_eq!(report["scanned_by"], "service");
    let scope = service.keeper.0.id().to_string();
    let args = ["scan", "--config", "c.toml", "--scope", &scope, "--json"];
    let alone = reaper(service.dir.path(), &args);
    let alone: Value = serde_json::from_str(&alone.out).expect("JSON");
    assert_eq!(alone["scanned_by"], "command");
    for list in ["reapable", "kept"] {
        assert_eq!(said(&report, list), said(&alone, list));
    }
    let keys = |value: &Value| -> Vec<String> {
        let object = value["reapable"][0].as_object().expect("a finding");
        object.keys().cloned().collect()
    };
    assert_eq!(keys(&report), keys(&alone));
    let refused = service.ask(&["scan", "--reap"]);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(refused.err.contains("observes"), "{}", refused.err);
    assert_eq!(service.ask_json(&["status"])["would_have_reaped"], 0);

    // None of it is theirs, and no journal but through the service.
    let seen = service.ask_as(4242, &["scan"]);
    assert_eq!(seen.code, Some(0), "{}{}", seen.out, seen.err);
    let seen: Value = serde_json::from_str(&seen.out).expect("JSON");
    assert_eq!(
        (said(&seen, "reapable").len(), said(&seen, "kept").len()),
        (0, 0)
    );
    let refused = service.ask_as(4242, &["scan", "--reap"]);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(refused.err.contains("only root"), "{}", refused.err);
    let heard = service.ask_as(4242, &["history"]);
    assert_eq!((heard.code, &*heard.out), (Some(0), ""), "{}", heard.err);
    assert_eq!(service.keeper.sleepers(), ALL);
    assert_eq!(service.outcomes("ended"), 0);
}

/// Orders a service to end what it finds, once its own look is over: until then it refuses, be it that all is told of.
fn order_reap(service: &Service) -> CommandOutput {
    eventually("its own look is over", || {
        let said = service.ask(&["scan", "--reap"]);
        (!said.err.contains("being reaped already")).then_some(said)
    })
}

/// Of an owner whom nobody ever watched a service tells at its start; by order they are ended, and nothing else, nor
/// what comes later.
fn at_the_start() {
    let mut service = Service::start("", &[]);
    let reap = |e: &&Event| e.decision.as_deref() == Some("reap");
    let strays = service.await_leftovers(2, "owner_unknown");
    assert_eq!(strays.iter().filter(reap).count(), 0);
    assert_eq!(service.keeper.sleepers(), ALL);
    order_reap(&service);
    eventually("all four are ended", || {
        (service.outcomes("ended") >= 4).then_some(())
    });
    assert_eq!(service.keeper.sleepers(), &ALL[2..]);
    let strays = service.leftovers();
    assert!(
        strays
            .iter()
            .filter(reap)
            .all(|e| e.reason.as_deref() == Some("dead_agent"))
    );
    let status = service.ask_json(&["status"]);
    assert!(status["reaped"].as_u64() >= Some(4), "{status}");

    // The service has seen where this one comes from.
    service.keeper.go_on();
    for more in [&[][..], &["--reap"]] {
        let args = [&["scan"][..], more].concat();
        let said = service.ask(&args);
        assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    }
    assert_eq!(service.keeper.sleepers()[5..], ["3008", "3010"]);
}

/// Where that is switched off, it takes an order.
fn ordered() {
    let service = Service::start("reap_leftovers = false\n", &[]);
    let report = service.ask_json(&["scan"]);
    assert_eq!(said(&report, "reapable").len(), 4, "{report}");
    assert_eq!(service.keeper.asleep(), 8, "they are told of, and no more");
    let report = service.ask_json(&["scan", "--reap"]);
    let found = said(&report, "reapable");
    assert!(
        found.len() >= 4 && found.values().all(|came| came.contains("ended")),
        "{report}"
    );
    assert_eq!(service.keeper.sleepers(), &ALL[2..]);
    service.await_leftovers(4, "dead_agent");
    eventually("the ends are told", || {
        (service.outcomes("ended") >= 4).then_some(())
    });
    assert_eq!(service.ask(&["scan"]).code, Some(0));
}

/// A service that cannot tell what users want kept ends nothing, and says so.
fn without_keeps() {
    let dir = TempDir::new();
    std::fs::write(dir.path().join("journal"), "").expect("write a file");
    let service = Service::start_in(dir, "", &[]);
    service.await_leftovers(2, "owner_unknown");
    assert_eq!(said(&service.ask_json(&["scan"]), "reapable").len(), 4);
    let refused = order_reap(&service);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(
        refused.err.contains("no journal could be opened"),
        "{}",
        refused.err
    );
    let warnings = std::fs::read_to_string(service.dir.path().join("stderr"));
    let warnings = warnings.expect("what it has warned of");
    assert_eq!(warnings.matches("and not ended").count(), 1, "{warnings}");
    assert_eq!(service.keeper.sleepers(), ALL);
}

/// Less time than is shipped.
const SERVERS: &str = r#"
[[rule]]
name = "asked-for-servers"
action = "reap"
after = "3s"
session = "ok"
listening = true
"#;

/// Whoever was a member when the service ended, and whose agent ended after that, is known from the journal; and so is
/// the owner that a mark names.
fn recorded() {
    let mut world = World::new(true);
    // An agent of the same kind and user that runs on this machine would be taken for a possible heir.
    let name = "opencode";
    let program = "recorded-agent";
    world.provide(program, &[format!("bin/{program}")]);
    let rules = format!("[[agent]]\nname = '{name}'\ncomm = '{program}'\n{SERVERS}");
    world.start_daemon(&format!("{CONFIG}{rules}"), &JOURNAL);
    world.open_to_all();
    let uid = user();
    let user = format!("setpriv --reuid {uid} --clear-groups");
    let words = "leaf=double+setsid other=double+setsid server=double+listen";
    let agent =
        format!("exec {user} {{dir}}/bin/{program} test-process agent agent {{dir}} {words}");
    world.spawn("user", &agent);
    let agent = world.await_processes("agent", 1)[0].pid;
    let [leaf, other, server] =
        ["leaf", "other", "server"].map(|role| world.await_processes(role, 1)[0]);
    for who in [leaf, other, server] {
        world.await_event("it is detached", |e| {
            e.is("decision", who) && e.reason.as_deref() == Some("detached")
        });
    }
    // Written by the time that it has stopped.
    world.stop();
    world.assert_alive(&["agent", "leaf", "other", "server"]);
    // Nobody watches, and its terminal session ends with who has started it.
    let marks = format!("env:OPENCODE=1 env:OPENCODE_PID={agent}");
    let between = "{dir}/bin/worker test-process parent between {dir} late sleep";
    world.spawn("user", &format!("{marks} exec setsid {user} {between}"));
    let late = world.await_processes("late", 1)[0];
    world.await_processes("between", 1);
    world.kill("between");
    world.kill("agent");
    world.await_gone(&["agent", "between"]);
    world.restart_daemon(&[]);
    for who in [leaf, other] {
        let stray = world.await_event("a leftover", |e| e.is("leftover", who));
        assert_eq!(stray.reason.as_deref(), Some("recorded_session"));
    }
    let stray = world.await_event("a leftover", |e| e.is("leftover", late));
    assert_eq!(stray.reason.as_deref(), Some("dead_agent"));
    world.await_gone(&["leaf", "other", "late"]);
    world.await_event("its end", |e| e.is("outcome", leaf));
    // The server has the time that the rule gives it, from now on.
    let stray = world.await_event("a server", |e| e.is("leftover", server));
    assert_eq!(stray.decision.as_deref(), Some("wait"));
    assert_eq!(stray.rule.as_deref(), Some("asked-for-servers"));
    world.assert_alive(&["server"]);
    world.await_gone(&["server"]);
    world.assert_alive(&["launcher", "canary", "canary-orphan"]);
    // It is in the history, which the service tells to everybody of what is theirs.
    let socket = socket(world.dir());
    eventually("the end is written", || {
        let heard = reaper(world.dir(), &["history", "--json", "--socket", &socket]);
        assert_eq!(heard.code, Some(0), "{}", heard.err);
        let session: Value = serde_json::from_str(&heard.out).expect("one session");
        assert_eq!(session["agent"], name);
        let processes = session["processes"].as_array().expect("processes");
        let ended = processes.iter().filter(|process| {
            let outcomes = process["outcomes"].as_array().expect("outcomes");
            outcomes.iter().any(|outcome| outcome["outcome"] == "ended")
        });
        (ended.count() == 3).then_some(())
    });
    for (args, lines) in [
        (&["history", "--agent", "codex"][..], 0),
        (&["history", "--since", "1h", "--session", name], 1),
    ] {
        let args = [args, &["--json", "--socket", &socket]].concat();
        let heard = reaper(world.dir(), &args);
        assert_eq!(heard.out.lines().count(), lines, "{args:?}: {}", heard.err);
    }
    let heard = ask_as(world.dir(), 4242, &["history"]);
    assert_eq!((heard.code, &*heard.out), (Some(0), ""), "{}", heard.err);
    world.stop();
}
