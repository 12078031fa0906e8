use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::api::messages::{self, UntrackedReason};
use crate::export::{
    DecisionNames, ProcessRef, RecentOutcome, RecentProcess, RecentSession, RootExit, SessionRef,
};
use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason};
use reaper_host::facts::ScriptPaths;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Provenance, Uids};
use reaper_model::facts::{FactSet, KernelSession};
use reaper_model::leftover::EnvMarkers;
use reaper_model::rules;
use reaper_model::ruleset::Action;
use reaper_model::ruleset::SessionKind;

/// Pids larger than any that the kernel gives out.
const BASE: u32 = 1 << 30;

fn key(n: u32) -> ProcessKey {
    let start = u64::from(n) * 1_000_000_000;
    ProcessKey {
        pid: BASE + n,
        start,
    }
}

fn row(n: u32, parent: Option<u32>) -> ProcessSnapshot {
    let image = Image {
        comm: format!("p{n}").into(),
        argv: format!("p{n}\0--token\0secret\0").into(),
        ..Image::default()
    };
    ProcessSnapshot {
        key: key(n),
        parent: parent.map(key),
        image: Arc::new(image),
        uids: Uids::default(),
        session: None,
        root: false,
        orphan: false,
        due: false,
        boundary: None,
        evidence: None,
        decision: None,
    }
}

fn drawn(rows: Vec<ProcessSnapshot>, zombies: Vec<Zombie>) -> Vec<(u32, usize, bool)> {
    let mut by_parent: HashMap<u32, Vec<Zombie>> = HashMap::new();
    for zombie in zombies {
        by_parent.entry(zombie.parent).or_default().push(zombie);
    }
    let tree_rows = tree_rows(rows, &mut by_parent, &Procfs::default());
    let drawn = tree_rows.iter().map(|row| {
        let process = &row.process;
        (process.pid - BASE, row.depth, process.zombie)
    });
    drawn.collect()
}

#[test]
fn tree_lists_parents_before_children_with_zombies() {
    let rows = vec![
        row(9, Some(2)),
        row(3, Some(1)),
        row(2, Some(1)),
        // Its parent is not in the list.
        row(7, Some(100)),
        row(1, None),
    ];
    let zombie = Zombie {
        key: key(5),
        parent: BASE + 2,
        comm: b"dead".to_vec(),
        uid: 0,
    };
    let expected = [
        (1, 0, false),
        (2, 1, false),
        (5, 2, true),
        (9, 2, false),
        (3, 1, false),
        (7, 0, false),
    ];
    assert_eq!(drawn(rows, vec![zombie]), expected);
}

#[test]
fn deep_tree_does_not_overflow_the_stack() {
    let deep = 20_000;
    let rows = (1..=deep).map(|n| row(n, Some(n - 1))).collect();
    let drawn = drawn(rows, Vec::new());
    assert_eq!(drawn.last(), Some(&(deep, deep as usize - 1, false)));
}

#[test]
fn secrets_in_command_lines_are_redacted() {
    let shown = process(&row(1, None), SHORT, &Procfs::default());
    assert_eq!(shown.command, "p1 --token [redacted]");
    assert_eq!((shown.rss, shown.decision), (None, None));
}

#[test]
fn scan_separates_reapable_from_kept_members() {
    let session = SessionRef {
        agent: "claude-code".into(),
        first_root: key(1),
    };
    let decision = |n, decision, reason| ProcessSnapshot {
        session: Some(session.clone()),
        evidence: None,
        decision: Some(messages::DecisionSnapshot {
            decision,
            mode: "enforce",
            reason,
            rule: None,
            until: None,
            action: None,
            needs: FactSet::NONE,
        }),
        ..row(n, None)
    };
    let report = scan(vec![
        decision(3, "wait", "rule_delay"),
        decision(2, "reap", "root_exited"),
        decision(1, "keep", "root_alive"),
        decision(4, "keep", "detached"),
    ]);
    let pids = |list: &[Finding]| list.iter().map(|f| f.pid - BASE).collect::<Vec<_>>();
    assert_eq!(
        (pids(&report.reapable), pids(&report.kept)),
        (vec![2], vec![3, 4])
    );
}

fn snapshot(decision: &'static str, reason: &'static str) -> ExplainSnapshot {
    let name = SessionRef {
        agent: "claude-code".into(),
        first_root: key(1),
    };
    let group = SessionSnapshot {
        kept: 0,
        name: name.clone(),
        kind: SessionKind::Agent,
        root: ProcessKey { pid: 42, start: 1 },
        opened: 0,
        members: 2,
        outer: None,
        root_exit: None,
        waits: Vec::new(),
    };
    let decision = messages::DecisionSnapshot {
        decision,
        mode: "enforce",
        reason,
        rule: None,
        until: None,
        action: None,
        needs: FactSet::NONE,
    };
    ExplainSnapshot {
        row: ProcessSnapshot {
            session: Some(name),
            evidence: None,
            decision: Some(decision),
            ..row(2, Some(1))
        },
        lineage: Vec::new(),
        adopter: None,
        session: Some(group),
        exited_root: None,
        if_killed: None,
        if_succeeded: None,
        untracked_reason: None,
        rules: Arc::default(),
        facts: Facts::default(),
        enforce: true,
        mode_reason: None,
        grace: Duration::from_secs(5),
        gap: false,
        predates_service: false,
        signalled: None,
        honors_keep: true,
        leftover: None,
    }
}

/// Returns a time in ns since boot that is `0s ago`, however slow the test runs: it lies in the future.
fn just_now() -> u64 {
    sys::boot_time() + 3_600_000_000_000
}

fn due(decision: &'static str, reason: &'static str, rule: Option<&str>) -> ExplainSnapshot {
    let mut snapshot = snapshot(decision, reason);
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    let group = snapshot.session.clone().unwrap();
    snapshot.exited_root = Some((group, just_now(), killed));
    snapshot.row.due = true;
    snapshot.row.decision.as_mut().unwrap().rule = rule.map(Into::into);
    snapshot
}

fn decision(
    decision: &'static str,
    reason: &'static str,
    rule: Option<&str>,
) -> messages::DecisionSnapshot {
    messages::DecisionSnapshot {
        decision,
        mode: "enforce",
        reason,
        rule: rule.map(Into::into),
        until: None,
        action: None,
        needs: FactSet::NONE,
    }
}

/// Returns a member of a living agent, with the decisions that would follow if the agent were killed or exited with 0.
fn alive(
    reason: &'static str,
    if_killed: messages::DecisionSnapshot,
    if_done: messages::DecisionSnapshot,
) -> ExplainSnapshot {
    ExplainSnapshot {
        if_killed: Some(if_killed),
        if_succeeded: Some(if_done),
        ..snapshot("keep", reason)
    }
}

/// Returns a living ancestor with this path and these arguments.
fn ancestor(n: u32, exe: &str, argv: &str) -> Ancestor {
    let image = Image {
        exe: exe.into(),
        argv: argv.into(),
        ..Image::default()
    };
    Ancestor {
        key: key(n),
        image: Some(image.into()),
        visible: true,
        alive: true,
        exit_status: None,
        agent: None,
        boundary: None,
        adopter: None,
    }
}

/// Returns the explanation of a service that only observes.
fn observed(mut snapshot: ExplainSnapshot) -> ExplainSnapshot {
    snapshot.enforce = false;
    snapshot.row.decision.as_mut().unwrap().mode = "observe";
    snapshot
}

fn waiting(snapshot: &mut ExplainSnapshot) {
    let decision = snapshot.row.decision.as_mut().unwrap();
    decision.until = Some(0);
    decision.action = Some(Action::Reap);
}

/// Lets the delays in the snapshot end in 10 minutes from now.
fn start_delays(snapshot: &mut ExplainSnapshot) {
    let decisions = snapshot.row.decision.iter_mut();
    for decision in decisions.chain(&mut snapshot.if_succeeded) {
        let end = sys::monotonic() + 600_000_000_000;
        decision.until = decision.until.map(|_| end);
    }
}

#[test]
fn explanation_sentences_match_the_decision() {
    let mut given_time = due("wait", "rule_delay", Some("asked-for-servers"));
    waiting(&mut given_time);
    let mut spinning = snapshot("wait", "rule_delay");
    spinning.row.decision.as_mut().unwrap().rule = Some("busy-loops".into());
    waiting(&mut spinning);
    let untracked = |untracked| ExplainSnapshot {
        untracked_reason: Some(untracked),
        row: row(2, Some(1)),
        ..snapshot("keep", "not_a_member")
    };
    let tmux = ProcessName {
        pid: 7,
        comm: b"tmux".to_vec(),
    };
    let near_agent = ExplainSnapshot {
        rules: rules::built_in().shared_rules(),
        predates_service: true,
        lineage: vec![
            ancestor(1, "/usr/bin/node", "node\0bin/claude\0"),
            Ancestor {
                boundary: Some("tmux".into()),
                ..ancestor(2, "/usr/bin/tmux", "tmux\0")
            },
            ancestor(3, "/x/codex", "codex\0"),
        ],
        ..untracked(UntrackedReason::NoAgent(Some(tmux.clone())))
    };
    let reaped = || decision("reap", "root_exited", None);
    let server = messages::DecisionSnapshot {
        until: Some(0),
        action: Some(Action::Reap),
        ..decision("wait", "rule_delay", Some("asked-for-servers"))
    };
    let unread = messages::DecisionSnapshot {
        needs: FactSet::LISTENING,
        ..decision("wait", "unread", Some("asked-for-servers"))
    };
    let by_rule = || decision("keep", "keep_rule", Some("gradle"));
    let found = |decision: &str, why: &str| ExplainSnapshot {
        leftover: Some(Finding {
            decision: decision.into(),
            why: why.into(),
            ..Finding::default()
        }),
        ..untracked(UntrackedReason::NoAgent(None))
    };
    let agent_unknown = "If an agent started it, `reaper agents --test PID` with the agent's pid says why no rule matches, and \
                         `reaper agent add` adds one.";
    let lives = "Kept: the agent lives. Its agent is claude-code (42).";
    let killed = "Its agent claude-code (42) was killed by SIGKILL 0s ago.";
    let reaped_then = "this process is reaped at once: SIGTERM, and SIGKILL 5s later.";
    for (mut snapshot, why, next) in [
        (
            alive("root_alive", reaped(), reaped()),
            lives.to_owned(),
            format!("When claude-code (42) exits, {reaped_then}"),
        ),
        (
            alive("detached", reaped(), server),
            "Kept: orphaned, and its agent lives. Its agent is claude-code (42).".into(),
            format!(
                "If claude-code (42) exits with status 0, this process is reaped 10m later, by the rule \
                 \"asked-for-servers\". After any other exit, {reaped_then}"
            ),
        ),
        (
            alive("root_alive", reaped(), unread),
            lives.into(),
            format!(
                "If claude-code (42) exits with status 0, what happens to this process depends on the rule \
                 \"asked-for-servers\", which needs to know whether it listens. After any other exit, {reaped_then}"
            ),
        ),
        (
            alive("root_alive", by_rule(), by_rule()),
            lives.into(),
            "When claude-code (42) exits, this process is kept: a rule keeps it (gradle).".into(),
        ),
        (
            due("reap", "root_exited", None),
            format!("To be reaped: its {}", &killed[4..]),
            "Now: SIGTERM, and SIGKILL 5s later.".into(),
        ),
        (
            observed(due("reap", "root_exited", None)),
            format!("Would be reaped: its {}", &killed[4..]),
            "Now: nothing is signalled, as this service only observes.".into(),
        ),
        (
            due("keep", "keep_rule", Some("gradle")),
            format!("Kept: a rule keeps it (gradle). {killed}"),
            "It is left running as long as that reason holds.".into(),
        ),
        (
            due("keep", "other_uid", Some("other-uid")),
            format!("Kept: it runs as another user (other-uid). {killed}"),
            "It is left running as long as that reason holds.".into(),
        ),
        (
            given_time,
            format!("Waits 10m: a rule delays the decision (asked-for-servers). {killed}"),
            "In 10m that delay expires, and it is reaped: SIGTERM, and SIGKILL 5s later.".into(),
        ),
        (
            spinning,
            "Waits 10m: a rule delays the decision (busy-loops). Its agent is claude-code (42).".into(),
            "In 10m, if the conditions of that rule still hold, it is reaped: SIGTERM, and SIGKILL 5s later. When \
             claude-code (42) exits, the service decides about this process again."
                .into(),
        ),
        (
            untracked(UntrackedReason::NoAgent(None)),
            "Not tracked: no agent rule matches this process or one above it.".into(),
            format!("This service never signals it. {agent_unknown}"),
        ),
        (
            near_agent,
            "Not tracked: no agent rule matches this process or one between it and tmux (7); nearest to process \
             1073741825: claude-code, whose `script` needs an absolute path, not bin/claude."
                .into(),
            "This service never signals it, unless an agent left it behind before the service started: `reaper scan` checks that. \
             `reaper agents --test 1073741825` tests each rule, and `reaper agent add --pid 1073741825` adds one."
                .into(),
        ),
        (
            untracked(UntrackedReason::Never("never_pid1")),
            "Never signalled: it is the init process.".into(),
            "No rule changes that.".into(),
        ),
        (
            ExplainSnapshot {
                predates_service: true,
                ..untracked(UntrackedReason::NoAgent(None))
            },
            "Not tracked: no agent rule matches this process or one above it.".into(),
            format!(
                "This service never signals it, unless an agent left it behind before the service started: `reaper scan` checks that. \
                 {agent_unknown}"
            ),
        ),
        (
            found("reap", "to be reaped: orphaned shell of a tool"),
            "To be reaped: orphaned shell of a tool.".into(),
            "`reaper scan --reap` ends it. On its own, the service may need more evidence: see `reaper scan --help`.".into(),
        ),
        (
            found("keep", "kept: REAPER_KEEP=1 (CLAUDECODE in its environment)"),
            "Kept: REAPER_KEEP=1 (CLAUDECODE in its environment).".into(),
            "It is left running as long as that reason holds.".into(),
        ),
        (
            untracked(UntrackedReason::BelowBoundary(tmux, "tmux".into())),
            "Not tracked: it descends from tmux (7), a boundary by the rule \"tmux\".".into(),
            "This service never signals it.".into(),
        ),
    ] {
        start_delays(&mut snapshot);
        let explained = explanation(snapshot, ScriptPaths::Given);
        assert_eq!((explained.why, explained.next), (why, next));
    }
}

/// Returns a member that a decision to reap was made about, with the exit of its agent by SIGKILL.
fn exited(change: impl FnOnce(&mut messages::ExitedSnapshot)) -> messages::ExitedSnapshot {
    let now = just_now();
    let session = SessionRef {
        agent: "my-agent".into(),
        first_root: key(1),
    };
    let names = DecisionNames {
        verdict: "reap",
        reason: "root_exited",
        rule: None,
        memory: None,
        mode: "enforce",
        wait: None,
        ancestors: Arc::default(),
    };
    let root_exit = RootExit {
        root: ProcessKey { pid: 42, start: 1 },
        at: now,
        exit_status: ExitStatus::Signalled {
            signal: 9,
            core: false,
        },
    };
    let row = row(2, None);
    let mut snapshot = messages::ExitedSnapshot {
        recent: RecentProcess {
            process: ProcessRef {
                key: row.key,
                parent: None,
                birth_parent: None,
                image: row.image,
                uids: row.uids,
                session: Some(session),
                provenance: Provenance::Kernel,
                evidence: None,
            },
            decision: Some((now, names)),
            leftover: None,
            signal: None,
            outcome: None,
            exit: Some((now, ExitStatus::Exited(3))),
        },
        session: RecentSession {
            outer: None,
            root_exit: Some(root_exit),
        },
        enforce: true,
        honors_keep: true,
    };
    change(&mut snapshot);
    snapshot
}

fn outcome(outcome: ReapOutcome, signal: Option<&'static str>) -> Option<(u64, RecentOutcome)> {
    let memory = Some(ProcessMemory {
        rss: 3 << 20,
        swap: 0,
    });
    let outcome = RecentOutcome {
        outcome,
        signal,
        memory,
        duration: Some(2_000_000),
    };
    Some((just_now(), outcome))
}

#[test]
fn exited_process_is_explained() {
    let ended = outcome(ReapOutcome::Exited(ExitStatus::Exited(3)), Some("SIGTERM"));
    let stuck = outcome(
        ReapOutcome::Failed(ReapFailure::KillTimeout('D')),
        Some("SIGKILL"),
    );
    let gone = outcome(ReapOutcome::NotSent(ReleaseReason::AlreadyExited), None);
    let cause = "its agent my-agent (42) was killed by SIGKILL";
    let outer = SessionRef {
        agent: "outer".into(),
        first_root: ProcessKey { pid: 9, start: 10 },
    };
    for (snapshot, why) in [
        (
            exited(|it| it.recent.outcome = ended),
            format!("Reaped 0s ago: SIGTERM, {cause}."),
        ),
        (
            exited(|it| it.recent.outcome = stuck),
            format!(
                "Could not be ended 0s ago: it did not exit after SIGKILL: it waits in the kernel (state D), {cause}."
            ),
        ),
        (
            exited(|it| it.recent.outcome = gone),
            format!("Exited 0s ago, before a signal was sent. It was to be reaped: {cause}."),
        ),
        (
            exited(|it| it.recent.signal = Some((just_now(), "SIGTERM"))),
            format!("Ended 0s ago, after SIGTERM, {cause}."),
        ),
        (
            exited(|it| it.enforce = false),
            format!(
                "Exited by itself 0s ago (exit 3). It would have been reaped, but this service only observes: {cause}."
            ),
        ),
        (
            exited(|it| it.recent.decision = None),
            "Exited by itself 0s ago (exit 3).".into(),
        ),
        (
            exited(|it| {
                it.recent.outcome = ended;
                it.session.root_exit = None;
            }),
            format!(
                "Reaped 0s ago: SIGTERM, its agent my-agent ({}) exited.",
                BASE + 1
            ),
        ),
        (
            exited(|it| {
                it.recent.outcome = ended;
                it.recent.process.key = ProcessKey { pid: 42, start: 1 };
                it.session.outer = Some(outer);
            }),
            "Reaped 0s ago: SIGTERM, the agent of the session outer-9-a, in which it ran, exited."
                .into(),
        ),
    ] {
        assert_eq!(exited::Exited::recent(snapshot).explanation(None).why, why);
    }
}

#[test]
fn exited_zombie_is_explained_with_its_parent() {
    let snapshot = exited(|it| {
        it.recent.outcome = outcome(ReapOutcome::Exited(ExitStatus::Exited(3)), Some("SIGTERM"));
    });
    let zombie = Zombie {
        key: key(2),
        parent: BASE,
        comm: Vec::new(),
        uid: 0,
    };
    let explained = exited::Exited::recent(snapshot).explanation(Some(&zombie));
    assert_eq!(
        explained.next,
        format!(
            "It exited 2ms after the first signal (exit 3); 3.1 MB RSS freed. It is a zombie, because its parent {BASE} has \
             not waited for it; a zombie holds no memory."
        )
    );
    assert!(explained.process.zombie && explained.exited);
    let advice = explained.keep_with.unwrap();
    assert_eq!(advice.command, "reaper keep PID");
    assert_eq!(
        advice.rule.as_deref(),
        Some("[[keep]]\nname = \"my-p2-5aa6\"\ncomm = \"p2\"\n")
    );
}

#[test]
fn explanation_says_what_keeps_the_process() {
    let advice = |snapshot| explanation(snapshot, ScriptPaths::Given).keep_with;
    let reap = || decision("reap", "root_exited", None);
    let due = due("reap", "root_exited", None);
    assert_eq!(
        advice(due.clone()).unwrap().command,
        format!("reaper keep {}", BASE + 2)
    );
    assert!(advice(alive("root_alive", reap(), reap())).is_some());
    let kept = || decision("keep", "keep_rule", Some("gradle"));
    assert!(advice(alive("root_alive", kept(), kept())).is_none());
    let dishonored = ExplainSnapshot {
        honors_keep: false,
        ..due.clone()
    };
    assert_eq!(advice(dishonored).unwrap().environment, None);

    let signalled = |end| {
        let recent = exited(|it| {
            it.recent.signal = Some((just_now(), "SIGTERM"));
            it.recent.outcome = end;
        });
        let snapshot = ExplainSnapshot {
            signalled: Some(recent.recent),
            ..due.clone()
        };
        let explained = explanation(snapshot, ScriptPaths::Given);
        (explained.why, explained.next)
    };
    let cause = "its agent claude-code (42) was killed by SIGKILL 0s ago";
    assert_eq!(
        signalled(None),
        (
            format!("Being reaped: SIGTERM sent 0s ago, {cause}."),
            "SIGKILL follows 5s after the first signal, unless it exits.".into()
        )
    );
    let stuck = outcome(ReapOutcome::Failed(ReapFailure::Eperm), None);
    assert_eq!(
        signalled(stuck),
        (
            format!(
                "Could not be ended 0s ago: it may not be signalled by this user; end it as root; {cause}."
            ),
            "This service does not try again; `sudo reaper scan --reap` does.".into()
        )
    );
}

#[test]
fn facts_are_shown_as_values_or_unreadable() {
    let mut snapshot = snapshot("keep", "root_alive");
    snapshot.facts = Facts {
        markers: Fact::Known(1),
        unit: Fact::Unreadable,
        listening: Fact::Known(false),
        cpu: Fact::Unread,
        kernel_session: Fact::Known(KernelSession { sid: 9, tty: 0 }),
        stdin_is_terminal: Fact::Known(false),
        inherited: Fact::Known(Arc::new(InheritedFacts {
            env_markers: EnvMarkers::of(b"CLAUDECODE=1\0", true),
            directory: Some(Path::new("/w/app").into()),
            ..InheritedFacts::default()
        })),
        conversations: Fact::Unread,
        activity: Fact::Unread,
        stdio: Fact::Unread,
        arguments: Fact::Unreadable,
        script: Fact::Unread,
        local_sockets: Fact::Known(
            LocalSockets {
                displays: ["X0".as_bytes().into()].into(),
                listens: false,
            }
            .into(),
        ),
    };
    let facts = serde_json::to_value(facts(&snapshot)).unwrap();
    let expected = serde_json::json!({
        "keep_marker": true, "unit": "unreadable", "listening": false, "sid": 9, "terminal": false,
        "terminal_input": false, "cwd": "/w/app", "agent_markers": ["CLAUDECODE"],
        "displays": ["X0"],
    });
    assert_eq!(facts, expected);
}
