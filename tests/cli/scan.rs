//! Tests of `reaper scan` and of a service's first scan, limited to the tree of the test.

use std::collections::BTreeMap;

use libtest_mimic::Trial;
use serde_json::Value;

use super::keeper::{Keeper, Service, ask_as, socket, user};
use super::{CommandOutput, reaper};
use crate::daemon::{Event, JOURNAL};
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, copy, eventually};

/// Returns the tests that need neither root nor BPF.
pub fn trials() -> Vec<Trial> {
    vec![
        trial("cli", "scan", scan),
        trial("cli", "scan-beside-a-living-agent", beside_a_living_agent),
        trial("cli", "scan-long-command-lines", long_command_lines),
        trial("cli", "scan-usage", usage),
    ]
}

/// Returns the tests that need a service, and so both.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "scan-observed", observed),
        trial("cli", "scan-at-the-start", at_the_start),
        trial("cli", "scan-requested", requested),
        trial("cli", "scan-recorded", recorded),
        trial("cli", "scan-without-keeps", without_keeps),
    ]
}

/// Returns reason, outcome and signal of each finding in a list of the report, by command.
fn findings(report: &Value, list: &str) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let findings = report[list].as_array().expect("a list of findings").iter();
    findings
        .map(|finding| {
            let words = [&finding["reason"], &finding["outcome"], &finding["signal"]].map(text);
            (
                text(&finding["command"]),
                words.join(" ").trim_end().to_owned(),
            )
        })
        .collect()
}

fn scan() {
    let dir = TempDir::new();
    let keeper = Keeper::start(&dir);
    let pid = keeper.0.id().to_string();
    let run_scan = |more: &[&str]| {
        let args = [&["scan", "--config", "c.toml", "--scope", &pid][..], more].concat();
        reaper(dir.path(), &args)
    };
    let json = |out: &str| -> Value { serde_json::from_str(out).expect("scan --json gives JSON") };
    let before = keeper.living().count();

    let said = run_scan(&["--json"]);
    assert_eq!(said.code, Some(6), "{}{}", said.out, said.err);
    let report = json(&said.out);
    let found = findings(&report, "reapable");
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(
        found.values().all(|reason| reason == "dead_agent"),
        "{found:?}"
    );
    assert!(
        found.contains_key("sleep 3001") && found.contains_key("sleep 3002"),
        "{found:?}"
    );
    let kept = findings(&report, "kept");
    for (command, reason) in [
        ("sleep 3003", "keep_marker"),
        ("sleep 3004", "owner_alive"),
        ("sleep 3005", "no_owner"),
        ("sleep 3007", "not_orphan"),
        ("sleep 3010", "changed_uid"),
    ] {
        assert_eq!(
            kept.get(command).map(String::as_str),
            Some(reason),
            "{kept:?}"
        );
    }
    assert_eq!(kept.len(), 5, "{kept:?}");
    let said = run_scan(&[]);
    assert_eq!(said.code, Some(6), "{}", said.err);
    assert!(
        said.out.contains("sleep 3001") && said.out.contains("--reap"),
        "{}",
        said.out
    );
    assert_eq!(
        keeper.living().count(),
        before,
        "a scan without --reap ended a process"
    );

    let said = run_scan(&["--reap", "--json"]);
    assert_eq!(said.code, Some(6), "{}{}", said.out, said.err);
    let report = json(&said.out);
    let found = findings(&report, "reapable");
    assert!(
        found.values().all(|words| words.contains("ended")),
        "{found:?}"
    );
    let killed = found.values().any(|words| words.ends_with("SIGKILL"));
    assert!(killed, "one ignores SIGTERM: {found:?}");
    assert!(report["ended"].as_u64().is_some_and(|n| n >= 4), "{report}");
    assert_eq!(
        keeper.living().count(),
        before - 4,
        "number of living processes"
    );

    let said = run_scan(&["--json"]);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert_eq!(findings(&json(&said.out), "kept").len(), 5);
    let said = run_scan(&[]);
    assert!(
        said.out.starts_with("Nothing to reap: 5 processes") && said.out.contains("REAPER_KEEP=1"),
        "{}",
        said.out
    );
}

/// Script with two agents, each with an orphan whose marker names it and a child. The first agent is killed.
///
/// A third agent runs in a shell with the marker of a dead agent, and an orphan of that shell has the same marker. `$0` is a
/// pid of no process.
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

/// A scan reaps a leftover whose marker names a dead agent, even if other agents live. It keeps what those own or may own.
fn beside_a_living_agent() {
    let dir = TempDir::new();
    copy("/bin/sh", dir.path().join("claude"));
    let mut keeper = Keeper::run_until_asleep(AGENTS, 6, &dir);
    let named = |keeper: &Keeper, name: &[u8]| {
        let comm = |pid| std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let is_named = |id: &crate::proc::ProcessKey| comm(id.pid).trim_ascii() == name;
        keeper.living().filter(is_named).count()
    };
    assert_eq!(named(&keeper, b"claude"), 3);
    // It has the marker of a dead agent, but is outside of the scope.
    let canary = std::process::Command::new("sleep")
        .args(["3108"])
        .env("CLAUDECODE", "1")
        .env("CLAUDE_PID", dead())
        .spawn()
        .expect("start a canary");
    let mut canary = Keeper(canary);
    keeper.next_step();
    eventually("the first agent has exited", || {
        (named(&keeper, b"claude") == 2).then_some(())
    });
    let pid = keeper.0.id().to_string();
    let run_scan = |more: &[&str]| -> Value {
        let args = ["scan", "--config", "c.toml", "--json", "--scope", &pid];
        let said = reaper(dir.path(), &[&args[..], more].concat());
        serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{e}: {}", said.err))
    };
    let report = run_scan(&[]);
    let found = BTreeMap::from([("sleep 3101".to_owned(), "dead_agent".to_owned())]);
    assert_eq!(findings(&report, "reapable"), found, "{report}");
    let kept = findings(&report, "kept");
    for (command, reason) in [
        ("sleep 3103", "owner_alive"),
        ("sleep 3105", "shared_marker"),
    ] {
        let found = kept.get(command).map(String::as_str);
        assert_eq!(found, Some(reason), "{kept:?}");
    }
    let report = run_scan(&["--reap"]);
    let found = findings(&report, "reapable");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found["sleep 3101"].contains("ended"), "{found:?}");
    assert_eq!(
        keeper.sleepers(),
        ["3102", "3103", "3104", "3105", "3106", "3107"]
    );
    let exit = canary.0.try_wait().expect("poll the canary's status");
    assert_eq!(exit, None, "the canary has exited");
}

/// Script with two leftovers that run `java`. Both have 39 KB of arguments before the class. A rule keeps the second by
/// its class. It starts later, because a kept process may have passed its markers on to younger ones.
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
    copy("/bin/sh", dir.path().join("java"));
    let keeper = Keeper::run_until_asleep(LONG, 2, &dir);
    let pid = keeper.0.id().to_string();
    let said = reaper(
        dir.path(),
        &["scan", "--config", "c.toml", "--json", "--scope", &pid],
    );
    let report = serde_json::from_str(&said.out).expect("scan --json gives JSON");
    for (list, sleeper, reason) in [
        ("reapable", "sleep 3201", "dead_agent"),
        ("kept", "sleep 3202", "keep_rule"),
    ] {
        let found = findings(&report, list);
        assert!(found.contains_key(sleeper), "{list} {report}");
        assert_eq!(found.len(), 2, "{list} {found:?}");
        assert!(
            found.values().all(|words| words == reason),
            "{list} {found:?}"
        );
    }
}

/// Returns a pid of no process.
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
        assert!(
            !said.err.is_empty(),
            "{args:?} is refused without a message"
        );
    }
}

/// Durations of all `sleep` processes of a keeper, in seconds.
const ALL: [&str; 8] = [
    "3001", "3002", "3003", "3004", "3005", "3006", "3007", "3010",
];

/// In observe mode a service reports leftovers and reaps none. Its scan has the same findings as one without a service.
fn observed() {
    let service = Service::start("", &["--observe"]);
    service.await_leftovers(2, "owner_unknown");
    for reason in ["owner_alive", "no_owner", "not_orphan", "changed_uid"] {
        service.await_leftovers(1, reason);
    }
    let leftovers = service.leftovers();
    let reasons: Vec<_> = leftovers
        .iter()
        .filter_map(|e| e.reason.as_deref())
        .collect();
    assert!(!reasons.contains(&"keep_marker"), "{reasons:?}");
    let report = service.ask_json(&["scan"]);
    assert_eq!(report["scanned_by"], "service");
    let scope = service.keeper.0.id().to_string();
    let args = ["scan", "--config", "c.toml", "--scope", &scope, "--json"];
    let alone = reaper(service.dir.path(), &args);
    let alone: Value = serde_json::from_str(&alone.out).expect("JSON");
    assert_eq!(alone["scanned_by"], "command");
    for list in ["reapable", "kept"] {
        assert_eq!(findings(&report, list), findings(&alone, list));
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

    // Another user sees none of it, and reads the journal only through the service.
    let said = service.ask_as(4242, &["scan"]);
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!(
        (
            findings(&report, "reapable").len(),
            findings(&report, "kept").len()
        ),
        (0, 0)
    );
    let refused = service.ask_as(4242, &["scan", "--reap"]);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(refused.err.contains("only root"), "{}", refused.err);
    let said = service.ask_as(4242, &["history"]);
    assert_eq!((said.code, &*said.out), (Some(0), ""), "{}", said.err);
    assert_eq!(service.keeper.sleepers(), ALL);
    assert_eq!(service.outcomes("ended"), 0);
}

/// Requests a reap of leftovers. Retries while the service refuses because its own scan is not complete.
fn request_reap(service: &Service) -> CommandOutput {
    eventually("the service's own scan is complete", || {
        let said = service.ask(&["scan", "--reap"]);
        (!said.err.contains("already being reaped")).then_some(said)
    })
}

/// At its start a service reports leftovers whose owner it has never seen. It reaps them on request only. It does not
/// reap a later orphan whose parent it has seen.
fn at_the_start() {
    let mut service = Service::start("", &[]);
    let reap = |e: &&Event| e.decision.as_deref() == Some("reap");
    let leftovers = service.await_leftovers(2, "owner_unknown");
    assert_eq!(leftovers.iter().filter(reap).count(), 0);
    assert_eq!(service.keeper.sleepers(), ALL);
    request_reap(&service);
    eventually("all four have been reaped", || {
        (service.outcomes("ended") >= 4).then_some(())
    });
    assert_eq!(service.keeper.sleepers(), &ALL[2..]);
    let leftovers = service.leftovers();
    assert!(
        leftovers
            .iter()
            .filter(reap)
            .all(|e| e.reason.as_deref() == Some("dead_agent"))
    );
    let status = service.ask_json(&["status"]);
    assert!(status["reaped"].as_u64() >= Some(4), "{status}");

    // The service has seen the parent of this one.
    service.keeper.next_step();
    for more in [&[][..], &["--reap"]] {
        let args = [&["scan"][..], more].concat();
        let said = service.ask(&args);
        assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    }
    assert_eq!(service.keeper.sleepers()[5..], ["3008", "3010"]);
}

/// With `reap_leftovers = false`, a service reaps leftovers on request.
fn requested() {
    let service = Service::start("reap_leftovers = false\n", &[]);
    let report = service.ask_json(&["scan"]);
    assert_eq!(findings(&report, "reapable").len(), 4, "{report}");
    assert_eq!(service.keeper.asleep(), 8, "a leftover was reaped");
    let report = service.ask_json(&["scan", "--reap"]);
    let found = findings(&report, "reapable");
    assert!(
        found.len() >= 4 && found.values().all(|words| words.contains("ended")),
        "{report}"
    );
    assert_eq!(service.keeper.sleepers(), &ALL[2..]);
    service.await_leftovers(4, "dead_agent");
    eventually("all outcomes are reported", || {
        (service.outcomes("ended") >= 4).then_some(())
    });
    assert_eq!(service.ask(&["scan"]).code, Some(0));
}

/// A service that cannot read users' keeps reaps no leftovers, and says so.
fn without_keeps() {
    let dir = TempDir::new();
    std::fs::write(dir.path().join("journal"), "").expect("write a file");
    let service = Service::start_in(dir, "", &[]);
    service.await_leftovers(2, "owner_unknown");
    assert_eq!(findings(&service.ask_json(&["scan"]), "reapable").len(), 4);
    let refused = request_reap(&service);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(
        refused.err.contains("no journal could be opened"),
        "{}",
        refused.err
    );
    let warnings = std::fs::read_to_string(service.dir.path().join("stderr"));
    let warnings = warnings.expect("read standard error");
    assert_eq!(warnings.matches("but not reaped").count(), 1, "{warnings}");
    assert_eq!(service.keeper.sleepers(), ALL);
}

/// Rule with a shorter delay than the built-in one.
const SERVERS: &str = r#"
[[rule]]
name = "asked-for-servers"
action = "reap"
after = "3s"
session = "ok"
listening = true
"#;

/// A service reaps members of an earlier service whose agent exited meanwhile: the journal has the session. It also has the
/// owner that an environment marker names.
fn recorded() {
    let mut world = World::new(true);
    // A special program name, because another agent of the same kind and user on this machine could count as the successor.
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
    for key in [leaf, other, server] {
        world.await_event("a detached member", |e| {
            e.is("decision", key) && e.reason.as_deref() == Some("detached")
        });
    }
    // The journal is complete when the service has stopped.
    world.stop();
    world.assert_alive(&["agent", "leaf", "other", "server"]);
    // No service runs, and the leader of its terminal session exits.
    let markers = format!("env:OPENCODE=1 env:OPENCODE_PID={agent}");
    let between = "{dir}/bin/worker test-process parent between {dir} late sleep";
    world.spawn("user", &format!("{markers} exec setsid {user} {between}"));
    let late = world.await_processes("late", 1)[0];
    world.await_processes("between", 1);
    world.kill("between");
    world.kill("agent");
    world.await_gone(&["agent", "between"]);
    world.restart_daemon(&[]);
    for key in [leaf, other] {
        let leftover = world.await_event("a leftover", |e| e.is("leftover", key));
        assert_eq!(leftover.reason.as_deref(), Some("recorded_session"));
    }
    let leftover = world.await_event("a leftover", |e| e.is("leftover", late));
    assert_eq!(leftover.reason.as_deref(), Some("dead_agent"));
    world.await_gone(&["leaf", "other", "late"]);
    world.await_event("the leaf's outcome", |e| e.is("outcome", leaf));
    // The delay of the server begins now.
    let leftover = world.await_event("a server", |e| e.is("leftover", server));
    assert_eq!(leftover.decision.as_deref(), Some("wait"));
    assert_eq!(leftover.rule.as_deref(), Some("asked-for-servers"));
    world.assert_alive(&["server"]);
    world.await_gone(&["server"]);
    world.assert_alive(&["launcher", "canary", "canary-orphan"]);
    // The session is in the history, which the service shows to each user for their own sessions.
    let socket = socket(world.dir());
    eventually("the outcomes are in the history", || {
        let said = reaper(world.dir(), &["history", "--json", "--socket", &socket]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        let session: Value = serde_json::from_str(&said.out).expect("one session");
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
        let said = reaper(world.dir(), &args);
        assert_eq!(said.out.lines().count(), lines, "{args:?}: {}", said.err);
    }
    let said = ask_as(world.dir(), 4242, &["history"]);
    assert_eq!((said.code, &*said.out), (Some(0), ""), "{}", said.err);
    world.stop();
}
