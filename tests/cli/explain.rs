//! Tests of `explain`, `history` and `session.close` events, and of answers from a broken or stopped service.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::Duration;

use jiff::Timestamp;
use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::service_requests::{ask, ask_json, socket};
use super::{CommandOutput, reaper};
use crate::daemon::{Event, JOURNAL};
use crate::proc::ProcessKey;
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually};

/// Returns the tests that need no service.
pub fn trials() -> Vec<Trial> {
    vec![trial("cli", "broken-service", broken_service)]
}

/// Returns the tests that need a service.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "explained", explained),
        trial("cli", "explained-delay", explained_delay),
        trial("cli", "explained-after-exit", explained_after_exit),
        trial("cli", "keep-expires", keep_expires),
        trial("cli", "stopped-service", stopped_service),
        trial("cli", "history-of-a-session", history_of_a_session),
        trial("cli", "history-of-an-own-exit", history_of_an_own_exit),
        trial("cli", "history-of-a-kept-orphan", history_of_a_kept_orphan),
        trial("cli", "closed-once", closed_once),
        trial("cli", "closed-with-kept-members", closed_with_kept),
        trial(
            "cli",
            "closed-with-an-open-nested-session",
            closed_with_nested,
        ),
        trial("cli", "namespace-that-ends", namespace_that_ends),
        trial("cli", "zombies-not-counted", zombies_not_counted),
    ]
}

fn explain(world: &World, key: ProcessKey) -> String {
    let said = ask(world, &["explain", &key.pid.to_string()]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out
}

fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

/// `explain` names the session of each member, the decision so far and the one at the agent's exit.
fn explained() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let words = [
        "leaf=sleep",
        "orphan=double+sleep",
        "key=as:ssh-agent+sleep",
    ];
    crate::world::link(
        &world.dir().join("bin/worker"),
        &world.dir().join("bin/ssh-agent"),
    );
    world.launch("claude", "agent", "agent", &words.map(String::from));
    let agent = world.await_processes("agent", 1)[0];
    let name = format!("claude-code ({})", agent.pid);
    let lives = format!("Kept: the agent lives. Its agent is {name}.");
    let reaped = format!(
        "When {name} exits, this process is reaped at once: SIGTERM, and SIGKILL 200ms later."
    );
    let leaf = world.await_processes("leaf", 1)[0];
    assert_contains(&explain(&world, leaf), &[&lives, &reaped, "listens: no"]);
    let orphan = world.await_processes("orphan", 1)[0];
    world.await_event("an orphan event", |e| e.is("orphan", orphan));
    let said = explain(&world, orphan);
    assert_contains(
        &said,
        &[
            "Kept: orphaned, and its agent lives.",
            &reaped,
            "[detached]",
            "(exited: exit 0)",
        ],
    );
    let key = world.await_processes("key", 1)[0];
    let kept = format!("When {name} exits, this process is kept: a rule keeps it (ssh-agent).");
    assert_contains(&explain(&world, key), &[&lives, &kept]);
    assert_contains(
        &explain(&world, agent),
        &["It is the agent", "what it leaves behind is reaped"],
    );

    // An untracked process and a dead one get different answers.
    let mut outside = Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("start sleep");
    let said = ask(&world, &["explain", &outside.id().to_string()]);
    let _ = outside.kill();
    let _ = outside.wait();
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_contains(&said.out, &["Not tracked: ", "never signals it"]);
    let said = ask(&world, &["explain", &outside.id().to_string()]);
    assert_eq!(said.code, Some(1), "{}", said.out);
    assert_contains(&said.err, &["there is no process", "reaper history"]);
}

/// `explain` answers for members that have exited, without a journal and while they are zombies. It and the stream name
/// the ways to keep such a process.
fn explained_after_exit() {
    const ADOPTER: &str = "never-waiting-subreaper";
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    world.spawn(ADOPTER, &format!("{ADOPTER} leaf=sleep other=sleep"));
    let agent = world.await_processes("agent", 1)[0];
    let leaf = world.await_processes("leaf", 1)[0];
    let other = world.await_processes("other", 1)[0];
    world.kill("other");
    world.await_event("the other exits", |e| e.is("exit", other));
    let said = explain(&world, other);
    assert_contains(&said, &["by SIGKILL, which this service did not send."]);
    assert!(
        !said.contains("REAPER_KEEP=1"),
        "its agent was alive:\n{said}"
    );

    world.kill("agent");
    world.await_event("an outcome", |e| e.is("outcome", leaf));
    eventually("the leaf is a zombie", || {
        let stat = crate::proc::stat(leaf.pid)?;
        (stat.state == b'Z').then_some(())
    });
    let said = explain(&world, leaf);
    let cause = format!(
        "s ago: SIGTERM, its agent claude-code ({}) was killed by SIGKILL.",
        agent.pid
    );
    let parent = world.process(ADOPTER).pid;
    assert_contains(
        &said,
        &[
            "Reaped ",
            &cause,
            "It is a zombie, because its parent ",
            &format!("({parent}) has not waited for it"),
            "REAPER_KEEP=1 ",
            "reaper keep PID ",
            "    [[keep]]\n    name = \"my-",
        ],
    );
    for line in said
        .lines()
        .skip_while(|line| !line.contains("would have kept"))
        .filter(|line| !line.contains(" --socket "))
        .take(4)
    {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let reply = ask_json(&world, &["explain", &leaf.pid.to_string()]);
    assert_eq!(
        (&reply["exited"], &reply["outcome"]["signal"]),
        (&true.into(), &"SIGTERM".into()),
        "{reply}"
    );
    assert_eq!(reply["process"]["zombie"], true, "{reply}");
    let parent = &reply["lineage"][0];
    assert_eq!(parent["pid"], agent.pid, "{reply}");
    assert_eq!(
        (&parent["agent"], &parent["alive"]),
        (&"claude-code".into(), &false.into()),
        "{reply}"
    );
    assert_eq!(reply["keep_with"]["environment"], "REAPER_KEEP=1");
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    let text = fs::read_to_string(world.dir().join("stdout")).expect("read the text");
    let hints = text.lines().filter(|line| line.contains("  hint  "));
    let hints: Vec<&str> = hints.collect();
    let expected = format!("REAPER_KEEP=1; more ways: reaper explain {} --", leaf.pid);
    assert!(hints.len() == 1 && hints[0].contains(&expected), "{text}");
}

/// `explain` of a waiting member names the rule and the remaining delay.
fn explained_delay() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let words = ["die=exit+0", "server=listen", "leaf=sleep"];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    world.await_processes("agent", 1);
    world.await_processes("leaf", 1);
    let server = world.await_processes("server", 1)[0];
    world.open_gate("die-agent");
    world.await_event("a decision to wait", |e| {
        e.is("decision", server) && e.decision.as_deref() == Some("wait")
    });
    world.await_gone(&["leaf"]);
    let pid = server.pid.to_string();
    let reply = ask_json(&world, &["explain", &pid]);
    let decision = &reply["process"]["decision"];
    assert_eq!(
        (&decision["decision"], &decision["rule"]),
        (&"wait".into(), &"unattended-servers".into())
    );
    assert!(
        decision["remaining_s"]
            .as_u64()
            .is_some_and(|s| (1..=60).contains(&s)),
        "{reply}"
    );
    assert_eq!(reply["facts"]["listening"], true);
    assert_contains(
        &explain(&world, server),
        &[
            "Waits ",
            ": a rule delays the decision (unattended-servers). Its agent claude-code (",
            " ago with status 0.",
            "that delay expires, and it is reaped: SIGTERM, and SIGKILL 200ms later.",
            "listens: yes",
        ],
    );
    assert_contains(
        &ask(&world, &["tree"]).out,
        &[
            "[waits ",
            ": a rule delays the decision (unattended-servers)]",
        ],
    );
    world.assert_alive(&["server"]);
}

/// A keep with a duration expires: the member is reaped then, and not before.
fn keep_expires() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    world.launch("claude", "agent", "agent", &["leaf=sleep".into()]);
    world.await_processes("agent", 1);
    let leaf = world.await_processes("leaf", 1)[0];
    let pid = leaf.pid.to_string();
    let wrong = [
        &["keep", &pid, "--for", "0s"],
        &["keep", &pid, "--for", "20years"],
        &["keep", "0", "--for", "1s"],
    ];
    for args in wrong {
        let said = ask(&world, args);
        assert_eq!(said.code, Some(2), "{args:?}: {}{}", said.out, said.err);
    }
    let said = ask(&world, &["keep", &pid, "--for", "1s"]);
    assert_eq!(said.out, format!("Kept for 1s: process {pid}\n"));
    world.await_event("a keep event", |e| e.is("keep", leaf));
    world.kill("agent");
    world.await_gone(&["leaf"]);
    let keeps = ask_json(&world, &["keep", "--list"]);
    assert_eq!(keeps["keeps"], Value::Array(Vec::new()));
    let events = world.stop();
    let decision = |e: &&Event| e.is("decision", leaf);
    let last = events.iter().rfind(decision).expect("a decision");
    assert_eq!(last.decision.as_deref(), Some("reap"));
    let of_leaf: Vec<Value> = lines(&world)
        .into_iter()
        .filter(|e: &Value| e["process.pid"] == leaf.pid)
        .collect();
    // `until` in place of the event's time, because the event follows only when the keep is recorded.
    let time = |name: &str, key: &str| {
        let event = of_leaf.iter().find(|e| e["event"] == name);
        let time = event.and_then(|e| e[key].as_str()?.parse::<Timestamp>().ok());
        time.unwrap_or_else(|| panic!("no {key} of '{name}' in {of_leaf:?}"))
    };
    let (until, signalled) = (time("keep", "until"), time("signal", "time"));
    // The system clock may be adjusted between the two.
    let adjusted = Duration::from_millis(5);
    assert!(
        signalled + adjusted >= until,
        "signalled at {signalled}, kept until {until}"
    );
}

/// A command exits with code 5 if no service listens, and says whether the socket exists.
fn stopped_service() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    let path = socket(&world);
    let status = |world: &World| reaper(world.dir(), &["status", "--socket", &path]);
    assert_eq!(status(&world).code, Some(0));
    world.kill_daemon();
    let said = status(&world);
    assert_eq!(said.code, Some(5), "{}", said.err);
    assert_contains(&said.err, &[&path, "has stopped", "sudo reaper daemon"]);
    world.restart_daemon(&[]);
    assert_eq!(status(&world).code, Some(0));
    world.stop();
    let said = status(&world);
    assert_eq!(said.code, Some(5), "{}", said.err);
    assert_contains(&said.err, &[&path, "no such socket", "sudo reaper daemon"]);
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
}

/// A command without a valid response exits with code 5. The server sends nothing, an incomplete response or another
/// protocol.
fn broken_service() {
    for (answer, message) in [
        ("", "closed the connection before it answered"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"groups\"",
            "closed the connection before it answered",
        ),
        ("220 mail.example.org ESMTP\r\n", "not a reaper service"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
            "not a reaper service",
        ),
    ] {
        let dir = TempDir::new();
        let listener = UnixListener::bind(dir.path().join("s")).expect("listen");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept a connection");
            let mut head = [0; 4096];
            let n = stream.read(&mut head).expect("read the request");
            assert!(n > 0, "the request is empty");
            stream.write_all(answer.as_bytes()).expect("respond");
        });
        let CommandOutput { code, out, err } = reaper(dir.path(), &["tree", "--socket", "s"]);
        server.join().expect("the server");
        assert_eq!((code, &*out), (Some(5), ""), "{answer:?}: {err}");
        assert_contains(&err, &[message]);
        assert_eq!(err.lines().count(), 1, "{err}");
    }
}

/// `history` reports a closed session, its processes and the memory that they freed.
fn history_of_a_session() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    // They ignore SIGTERM, because a process that exits on SIGTERM may be gone before its memory is read.
    let words = ["leaf*3=ignore-term", "marked=env:REAPER_KEEP=1+sleep"];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    let agent = world.await_processes("agent", 1)[0];
    let leaves = world.await_processes("leaf", 3);
    let [leaf, other] = [0, 1].map(|n| leaves[n].pid.to_string());
    world.await_processes("marked", 1);
    world.kill("agent");
    world.await_gone(&["leaf"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();

    let raw = fs::read_to_string(world.dir().join("events.jsonl")).expect("read the events");
    let mut lines = raw
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let closed: Value = lines
        .find(|e: &Value| e["event"] == "session.close")
        .expect("a close");
    let rss = closed["memory.rss"].as_u64().expect("memory");
    assert!(rss > 3 * 4096, "{closed}");

    let journal = eventually("a journal", || {
        let mut entries = fs::read_dir(world.dir().join("journal")).ok()?.flatten();
        let path = entries.find(|e| e.path().extension().is_some_and(|end| end == "db"))?;
        Some(path.path().display().to_string())
    });
    let read = |more: &[&str], code: i32| {
        let args = [&["history", "--file", &journal], more].concat();
        let said = reaper(world.dir(), &args);
        assert_eq!(said.code, Some(code), "{more:?}: {}", said.err);
        said
    };
    let history = |more: &[&str]| read(more, 0);
    let sessions = history(&["--json"]).out;
    assert_eq!(sessions.lines().count(), 1, "{sessions}");
    let session: Value = serde_json::from_str(&sessions).expect("JSON");
    assert_eq!(session["process.pid"], agent.pid);
    assert_eq!(
        [&session["reaped"], &session["kept"], &session["failed"]],
        [&Value::from(3), &1.into(), &0.into()]
    );
    assert_eq!(session["memory.rss"].as_u64(), Some(rss));
    assert_eq!(session["process.exit.signal"], "SIGKILL");
    let processes = session["processes"].as_array().expect("processes");
    let ended = processes
        .iter()
        .filter(|p| p["outcomes"][0]["outcome"] == "ended");
    let each: u64 = ended
        .filter_map(|p| p["outcomes"][0]["memory.rss"].as_u64())
        .sum();
    assert_eq!(each, rss, "{session}");
    let text = history(&["--since", "1h", "--agent", "claude-code"]).out;
    assert_contains(
        &text,
        &["3 reaped, 1 kept, ", " freed", "REAPER_KEEP=1", "SIGKILL"],
    );
    let text = history(&[&leaf]).out;
    let of_leaf = format!("{leaf:>9}  ");
    assert!(
        text.lines()
            .filter(|line| line.starts_with(&of_leaf))
            .count()
            >= 3,
        "{text}"
    );
    assert_contains(&text, &["would have kept it", "    [[keep]]\n"]);
    let whole = history(&[&agent.pid.to_string(), "-n", "1"]).out;
    let next = format!(" --file {journal}`");
    assert_contains(&whole, &[": 3 reaped", "rule from `reaper history ", &next]);
    // The first line is about the agent, the second is the title of the session.
    let answer = format!("{:>9}  claude-code ({0}) was killed by SIGKILL ", agent.pid);
    assert!(whole.starts_with(&answer), "{whole}");
    let of_session = whole.lines().skip(2).take_while(|line| !line.is_empty());
    for line in of_session {
        let pid = line.split_whitespace().next().unwrap_or_default();
        assert!(pid.parse::<u32>().is_ok(), "no pid: {line}");
    }
    // Status 1 for a process that the journal does not know, as of `explain`.
    let said = read(&["4194304"], 1);
    assert_eq!(said.out, "");
    assert_contains(&said.err, &["matches process 4194304"]);
    let several = read(&[&leaf, "4194304", &other], 1);
    assert_contains(&several.out, &[&of_leaf, &format!("{other:>9}  ")]);
    assert!(
        !several.out.contains("would have kept it"),
        "{}",
        several.out
    );
    assert_contains(&several.err, &["matches process 4194304"]);
    let said = history(&["--agent", "nobody"]);
    assert_eq!(said.out, "");
    assert_contains(
        &said.err,
        &["in the journal matches --agent nobody; no agent is named \"nobody\": "],
    );
    let said = reaper(world.dir(), &["history", "--file", "none.db"]);
    assert_eq!(said.code, Some(1), "{}", said.out);
    assert_contains(&said.err, &["none.db"]);

    // A later service knows it from the journal.
    world.restart_daemon(&[]);
    let said = ask(&world, &["explain", &leaf]);
    let cause = format!(
        "its agent claude-code ({}) was killed by SIGKILL.",
        agent.pid
    );
    assert_contains(&said.out, &["Reaped ", "s ago: SIGKILL, ", &cause]);
    let both = ask_json(&world, &["history", &leaf, &other]);
    assert_eq!(both["processes"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        ask_json(&world, &["history", &leaf])["processes"][0]["process.pid"].to_string(),
        leaf
    );
}

/// A process that exits without a signal of the service is explained from the journal too.
fn history_of_an_own_exit() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    world.launch("claude", "agent", "agent", &["orphan=double+sleep".into()]);
    world.await_processes("agent", 1);
    let orphan = world.await_processes("orphan", 1)[0];
    world.await_event("a decision", |e| e.is("decision", orphan));
    world.kill("orphan");
    world.await_event("its exit", |e| e.is("exit", orphan));
    world.stop();
    world.restart_daemon(&[]);
    assert_contains(
        &explain(&world, orphan),
        &[
            "Ended ",
            " ago by SIGKILL, which this service did not send.",
        ],
    );
    let history = ask(&world, &["history", &orphan.pid.to_string()]).out;
    assert_contains(
        &history,
        &["  exited      SIGKILL, which the service did not send"],
    );
    world.assert_alive(&["agent", "canary"]);
}

/// `history` and, after a restart, `explain` know who kept a process, and its ancestors up to the agent that have exited
/// before it.
fn history_of_a_kept_orphan() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    world.launch("claude", "agent", "agent", &["orphan=double+sleep".into()]);
    let agent = world.await_processes("agent", 1)[0].pid;
    let orphan = world.await_processes("orphan", 1)[0];
    world.await_event("a decision", |e| e.is("decision", orphan));
    let pid = orphan.pid.to_string();
    for request in [
        &["keep", &pid, "--for", "2h", "--tree"][..],
        &["unkeep", &pid],
    ] {
        let said = ask(&world, request);
        assert_eq!(said.code, Some(0), "{}", said.err);
    }
    world.await_event("an unkeep event", |e| e.is("unkeep", orphan));
    let history = |world: &World| ask(world, &["history", &pid]).out;
    let first = eventually("the request is in the journal", || {
        let text = history(&world);
        text.contains("no longer kept, by uid ").then_some(text)
    });
    let uid = nix::unistd::geteuid();
    assert_contains(
        &first,
        &[
            &format!("  request     kept with its descendants by uid {uid} until "),
            "1 process in 1 session: 0 reaped, 1 kept",
        ],
    );
    world.kill("agent");
    world.await_gone(&["orphan"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    world.restart_daemon(&[]);
    let text = history(&world);
    let (first, rest) = text.split_once('\n').expect("lines");
    assert_contains(
        first,
        &[
            &format!("{pid}  Reaped "),
            &format!("s ago: SIGTERM, its agent claude-code ({agent}) was killed by SIGKILL."),
        ],
    );
    let lineage = format!("{pid}  lineage: claude-code ({agent}, exited) > ");
    assert_contains(rest, &[&lineage, "1 process in 1 session: 1 reaped"]);
    let session = ask_json(&world, &["history", &pid]);
    let process = &session["processes"][0];
    let requests = process["requests"].as_array().expect("requests");
    let requests: Vec<_> = requests.iter().map(|r| r["request"].as_str()).collect();
    assert_eq!(requests, [Some("keep"), Some("unkeep")], "{session}");
    let ancestors = process["lineage"].as_array().expect("ancestors");
    assert!(ancestors.len() > 1, "{session}");
    assert!(ancestors.iter().all(|a| a["exited"] == true), "{session}");
    assert_eq!(ancestors.last().expect("the agent")["process.pid"], agent);
    let reply = ask_json(&world, &["explain", &pid]);
    let lineage = reply["lineage"].as_array().expect("ancestors");
    let explained: Vec<_> = lineage.iter().map(|a| (&a["pid"], &a["alive"])).collect();
    let alive = Value::from(false);
    let stored: Vec<_> = ancestors
        .iter()
        .map(|a| (&a["process.pid"], &alive))
        .collect();
    assert_eq!(explained, stored, "{reply}");
    assert_eq!(lineage.last().expect("the agent")["agent"], "claude-code");
    world.assert_alive(&["canary"]);
}

/// A session closes once, after its agent's exit, even if a rule reaped a member before.
fn closed_once() {
    let mut world = World::new(true);
    let rule = "[[rule]]\nname = \"idle\"\naction = \"reap\"\nafter = \"200ms\"\nsession = \"alive\"\norphan = true\n";
    world.start_daemon(&format!("{CONFIG}{rule}"), &[]);
    let words = ["leaf=sleep", "orphan=double+sleep"];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    world.await_processes("agent", 1);
    world.await_processes("leaf", 1);
    let orphan = world.await_processes("orphan", 1)[0];
    world.await_event("the orphan's outcome", |e| e.is("outcome", orphan));
    world.assert_alive(&["agent", "leaf"]);
    world.kill("agent");
    world.await_gone(&["leaf"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    let events = world.stop();
    let at = |name: &str| events.iter().position(|e| e.event == name);
    assert!(
        at("session.root_exit") < at("session.close"),
        "closed before its agent exited"
    );
    let closed = |e: &&Event| e.event == "session.close";
    assert_eq!(events.iter().filter(closed).count(), 1);
    let decision = events.iter().rfind(|e| e.is("decision", orphan));
    let decision = decision.expect("a decision");
    assert_eq!(
        (decision.reason.as_deref(), decision.rule.as_deref()),
        (Some("reap_rule"), Some("idle"))
    );
}

/// A session with members that a user keeps closes once. Their exits go to the history, not to a second close.
fn closed_with_kept() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &JOURNAL);
    let words = ["kept=parent+worker+sleep", "leaf=sleep"];
    world.launch("claude", "agent", "agent", &words.map(String::from));
    world.await_processes("agent", 1);
    world.await_processes("kept", 1);
    world.await_processes("leaf", 1);
    world.await_processes("worker", 1);
    let kept = world.process("kept");
    let pid = kept.pid.to_string();
    let said = ask(&world, &["keep", &pid, "--tree"]);
    let expected = format!("Kept until it exits: process {pid} and 1 process below it\n");
    assert_eq!(said.out, expected, "{}", said.err);
    assert_eq!(ask_json(&world, &["status"])["kept"], 0, "its agent lives");
    world.kill("agent");
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.assert_alive(&["kept", "worker"]);
    let status = ask_json(&world, &["status"]);
    assert_eq!(status["kept"], 2, "{status}");
    assert!(
        status["since"]
            .as_str()
            .is_some_and(|since| since.len() == "2026-11-20T18:09:16Z".len()),
        "{status}"
    );
    assert_contains(
        &ask(&world, &["status"]).out,
        &["2 processes whose agent has exited"],
    );
    assert_contains(
        &ask(&world, &["tree"]).out,
        &[
            ", 2 kept\n  session claude-code-",
            "[kept: a user keeps it]",
        ],
    );
    // A keep of a tree cannot be removed for a descendant alone.
    let worker = world.process("worker").pid.to_string();
    let said = ask(&world, &["unkeep", &worker]);
    assert_eq!(said.code, Some(1), "{}", said.out);
    assert_contains(&said.err, &[&format!("is kept with its ancestor {pid}: ")]);
    assert_eq!(ask(&world, &["unkeep", &pid]).code, Some(0));
    world.await_gone(&["kept", "worker"]);
    world.await_event("an outcome of the kept process", |e| e.is("outcome", kept));
    eventually("the history has both exits", || {
        let history = ask_json(&world, &["history"]);
        let counts = [&history["reaped"], &history["kept"]].map(Value::as_u64);
        (counts == [Some(3), Some(0)]).then_some(())
    });
    assert_eq!(ask_json(&world, &["status"])["kept"], 0);
    world.stop();
    let closes = closes(&world);
    let [closed] = closes.as_slice() else {
        panic!("closed {} times", closes.len())
    };
    assert_eq!((&closed["reaped"], &closed["kept"]), (&1.into(), &2.into()));
    assert_eq!(closed["kept_reasons"], json!(["kept_by_user"]));
}

/// The close of an outer session names its open nested session. Each of them closes once.
fn closed_with_nested() {
    let mut world = World::new(true);
    let rule = "[[rule]]\nname = \"asked-for-servers\"\naction = \"reap\"\nafter = \"4s\"\n\
        session = \"ok\"\nlistening = true\n";
    world.start_daemon(&format!("{CONFIG}{rule}"), &[]);
    let inner = "inner=as:claude+agent+server=listen+tool=sleep";
    world.launch("claude", "agent", "agent", &[inner.into()]);
    let outer = world.await_processes("agent", 1)[0];
    let inner = world.await_processes("inner", 1)[0];
    let server = world.await_processes("server", 1)[0];
    world.await_processes("tool", 1);
    world.open_gate("die-inner");
    world.await_event("the server waits", |e| {
        e.is("decision", server) && e.decision.as_deref() == Some("wait")
    });
    world.open_gate("die-agent");
    world.await_gone(&["server"]);
    eventually("both sessions are closed", || {
        (closes(&world).len() == 2).then_some(())
    });
    world.stop();
    let closes = closes(&world);
    let [first, last] = closes.as_slice() else {
        panic!("closed {} times", closes.len())
    };
    let rest = json!([{
        "session_id": last["session_id"], "root_pid": inner.pid, "kept": 0, "waiting": 1,
    }]);
    assert_eq!((&first["reaped"], &first["nested"]), (&0.into(), &rest));
    assert_eq!(
        (&last["reaped"], &last["nested"]),
        (&2.into(), &Value::Null)
    );
    let text = fs::read_to_string(world.dir().join("stdout")).expect("read the text");
    let line = text.lines().find(|line| line.contains("closed"));
    let words = format!("; nested sessions remain: {} (1 waiting)", inner.pid);
    assert_contains(line.unwrap_or_default(), &[&outer.pid.to_string(), &words]);
}

/// The children of a PID namespace's exiting init process have no adopter, because the kernel kills them.
fn namespace_that_ends() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--verbose"]);
    world.launch("claude", "agent", "agent", &["creator=namespace".into()]);
    let inside = world.await_processes("inside", 1)[0];
    world.await_processes("inside-too", 1);
    let init = world.process("init").pid;
    world.kill("init");
    world.await_gone(&["inside", "inside-too"]);
    world.await_event("a reparent event", |e| e.is("reparent", inside));
    world.stop();
    let events = lines(&world);
    let orphan = events
        .iter()
        .find(|e| e["event"] == "reparent" && e["process.pid"] == inside.pid);
    let orphan = orphan.expect("a reparent event");
    assert_eq!(
        orphan["no_adopter_reason"], "pid_namespace_exiting",
        "{orphan}"
    );
    assert_eq!(orphan["adopter_pid"], Value::Null, "{orphan}");
    let text = fs::read_to_string(world.dir().join("stdout")).expect("read the text");
    assert_contains(
        &text,
        &[&format!("({init}) exited, its namespace is ending")],
    );
}

/// A zombie is shown as one. It does not count as reaped, nor its memory as freed.
fn zombies_not_counted() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &[]);
    world.launch("claude", "agent", "agent", &["leaf=zombie-parent".into()]);
    world.await_processes("agent", 1);
    world.await_processes("leaf", 1);
    eventually("the status counts a zombie", || {
        (ask_json(&world, &["status"])["zombies"] == 1).then_some(())
    });
    assert_contains(&ask(&world, &["tree"]).out, &["[zombie]"]);
    let status = ask_json(&world, &["status"]);
    assert_eq!(
        (&status["reaped"], &status["memory.rss"]),
        (&0.into(), &0.into())
    );
    world.kill("agent");
    world.await_gone(&["leaf"]);
    world.await_event("the session is closed", |e| e.event == "session.close");
    world.stop();
    let lines = lines(&world);
    let close = lines.iter().find(|e| e["event"] == "session.close");
    let close = close.expect("the session is closed");
    assert_eq!(close["reaped"], 1, "the leaf: {close}");
    let outcomes = lines.iter().filter(|e| e["event"] == "outcome");
    let sum: u64 = outcomes.filter_map(|e| e["memory.rss"].as_u64()).sum();
    assert_eq!(close["memory.rss"], sum, "{close}");
}

/// Returns the `session.close` events of the stream.
fn closes(world: &World) -> Vec<Value> {
    let mut lines = lines(world);
    lines.retain(|e| e["event"] == "session.close");
    lines
}

/// Returns the stream as JSON.
fn lines(world: &World) -> Vec<Value> {
    let raw = fs::read_to_string(world.dir().join("events.jsonl")).expect("read the events");
    let lines = raw.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}
