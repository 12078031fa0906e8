//! Lines that depend on earlier ones.

use std::sync::Arc;

use nix::sys::signal::Signal;

use super::*;
use crate::export::record::{Adopter, Lifecycle, SessionRef};
use crate::export::{DecisionNames, FreedMemory, LEFT_RUNNING};
use crate::reap::{ReapOutcome, SentBy, SentSignal};
use reaper_model::event::{ExitStatus, Image, Provenance, Uids};
use reaper_model::ruleset::SessionKind;

const AGENT: ProcessKey = ProcessKey { pid: 42, start: 7 };
const SHELL: ProcessKey = ProcessKey { pid: 41, start: 5 };
const CHILD: ProcessKey = ProcessKey { pid: 43, start: 9 };

fn process(key: ProcessKey, comm: &str, argv: &str) -> ProcessRef {
    ProcessRef {
        key,
        parent: Some(AGENT),
        birth_parent: Some(AGENT),
        image: Arc::new(Image {
            comm: comm.into(),
            argv: argv.replace(' ', "\0").into(),
            ..Image::default()
        }),
        uids: Uids::default(),
        session: Some(session()),
        provenance: Provenance::Kernel,
        evidence: None,
    }
}

fn session() -> SessionRef {
    SessionRef {
        agent: "claude-code".into(),
        first_root: AGENT,
    }
}

fn agent() -> ProcessRef {
    ProcessRef {
        parent: Some(SHELL),
        ..process(AGENT, "2.1.197", "/opt/claude/versions/2.1.197 -p x")
    }
}

fn opened() -> EventBody {
    EventBody::SessionOpen {
        process: agent(),
        kind: SessionKind::Agent,
        rule: "claude-code".into(),
        outer: None,
        starter: None,
    }
}

fn decided(argv: &str, verdict: &'static str, mode: &'static str) -> EventBody {
    EventBody::Decision {
        process: process(CHILD, "sh", argv),
        decision: DecisionNames {
            verdict,
            mode,
            reason: "root_exited",
            rule: None,
            wait: None,
            memory: None,
            ancestors: Arc::default(),
        },
    }
}

fn orphaned(process: ProcessRef, old_parent: ProcessKey, comm: &str) -> EventBody {
    EventBody::Reparent {
        process,
        provenance: Provenance::Kernel,
        old_parent: Some(old_parent),
        old_parent_comm: comm.into(),
        adopter: Some(Adopter {
            key: ProcessKey { pid: 1, start: 0 },
            comm: b"init".to_vec(),
        }),
        namespace_ending: false,
    }
}

fn signalled() -> EventBody {
    EventBody::Signal {
        process: process(CHILD, "sh", "sh -c x"),
        sent: SentSignal {
            key: CHILD,
            signal: Signal::SIGTERM,
            by: SentBy::Service,
            latency: None,
        },
    }
}

fn exited(code: u8) -> EventBody {
    EventBody::Lifecycle {
        process: process(CHILD, "sh", "sh -c x"),
        provenance: Provenance::Kernel,
        event: Lifecycle::Exit {
            exit_status: ExitStatus::Exited(code),
            peak_rss: 0,
        },
    }
}

fn ended(argv: &str, code: u8) -> EventBody {
    EventBody::Outcome {
        process: process(CHILD, "sh", argv),
        outcome: ReapOutcome::Exited(ExitStatus::Exited(code)),
        signal: Some("SIGTERM"),
        memory: None,
        duration: Some(2_000_000_000),
    }
}

fn closed() -> EventBody {
    EventBody::SessionClose {
        session: session(),
        is_repeat: false,
        lost_before: 0,
        reaped: 1,
        kept: 0,
        kept_reasons: vec![],
        nested: vec![],
        failed: 0,
        would_have_reaped: 0,
        memory: FreedMemory::default(),
    }
}

fn boundary(pid: u32) -> EventBody {
    EventBody::Boundary {
        process: ProcessRef {
            session: None,
            ..process(ProcessKey { pid, start: 9 }, "tmux", "tmux new")
        },
        rule: "tmux".into(),
        session: Some(session()),
    }
}

/// Writes records, one per second, and returns the lines without their times.
fn written(detail: Detail, bodies: impl IntoIterator<Item = EventBody>) -> Vec<String> {
    let mut lines = LineWriter {
        comm_of: |key| [41, 50].contains(&key.pid).then(|| b"bash".to_vec()),
        ..LineWriter::new(detail)
    };
    let mut out = Vec::new();
    let mut plain = anstream::StripStream::new(&mut out);
    for (n, body) in (1..).zip(bodies) {
        let boot_ns = n * 1_000_000_000;
        lines.write_due(&mut plain, boot_ns, None).unwrap();
        let record = EventRecord { boot_ns, body };
        lines.write(&mut plain, &record, None).unwrap();
    }
    let text = String::from_utf8(out).unwrap();
    let words = text.lines().map(|line| {
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        words.join(" ")
    });
    words.collect()
}

#[test]
fn each_ended_process_and_session_has_one_line() {
    let lines = written(
        Detail::Summary,
        [
            opened(),
            orphaned(agent(), SHELL, ""),
            decided("sh -c x", "reap", "enforce"),
            signalled(),
            exited(143),
            ended("sh -c x", 143),
            closed(),
        ],
    );
    assert_eq!(
        lines,
        [
            "claude-code agent 42 claude -p x",
            "claude-code ended 43 sh -c x exit 143, as after SIGTERM, 2s after the first signal",
            "claude-code closed 42 claude -p x 1 reaped",
        ]
    );
}

#[test]
fn steps_name_the_agent_and_an_earlier_program() {
    let lines = written(
        Detail::Steps,
        [
            opened(),
            orphaned(agent(), SHELL, ""),
            orphaned(process(CHILD, "sh", "sh -c x"), AGENT, "2.1.197"),
            decided("sh -c x", "reap", "enforce"),
            ended("sleep 1", 0),
        ],
    );
    assert_eq!(
        lines[1..],
        [
            "claude-code orphan 42 claude -p x bash (41) exited, init (1) adopted it",
            "claude-code orphan 43 sh -c x claude-code (42) exited, init (1) adopted it",
            "claude-code reap 43 sh -c x its agent exited",
            "claude-code ended 43 sleep 1 exit 0 after SIGTERM, 2s after the first signal, was sh -c x",
        ]
    );
}

#[test]
fn process_that_ends_by_itself_is_said_to() {
    let would = || decided("sh -c x", "reap", "observe");
    for (before, expected) in [
        (
            vec![would()],
            "claude-code exited 43 sh -c x by itself: exit 3",
        ),
        (
            vec![decided("sh -c x", "report", "enforce")],
            "claude-code exited 43 sh -c x by itself: exit 3",
        ),
    ] {
        let lines = written(Detail::Summary, before.into_iter().chain([exited(3)]));
        assert_eq!(lines.last().unwrap(), expected);
    }
    let signalled = [would(), signalled(), exited(3)];
    assert_eq!(written(Detail::Summary, signalled).len(), 1);
    assert!(written(Detail::Summary, [exited(3)]).is_empty());
}

#[test]
fn boundary_that_exits_at_once_has_no_line() {
    let records = || [boundary(49), boundary(50), opened(), opened()];
    assert_eq!(
        written(Detail::Steps, records())[..2],
        [
            "- boundary 50 tmux new rule tmux: membership ends here",
            "claude-code agent 42 claude -p x",
        ]
    );
    assert_eq!(written(Detail::Summary, records()).len(), 2);
}

#[test]
fn close_names_what_may_still_run() {
    let noted = |argv| match decided(argv, "report", "enforce") {
        EventBody::Decision { process, decision } => EventBody::Decision {
            process,
            decision: DecisionNames {
                reason: LEFT_RUNNING,
                rule: Some("containers-detached".into()),
                ..decision
            },
        },
        other => other,
    };
    let starters = [
        "docker run -d nginx",
        "docker run -d nginx",
        "docker compose up -d",
    ];
    let starters = starters
        .into_iter()
        .flat_map(|argv| [noted(argv), exited(0)]);
    let records = [opened()].into_iter().chain(starters).chain([closed()]);
    let lines = written(Detail::Summary, records);
    assert_eq!(
        lines[1..],
        [
            "claude-code closed 42 claude -p x 1 reaped; may still run: docker compose up -d, docker run -d nginx"
        ]
    );
}

#[test]
fn dropped_lines_name_their_cause() {
    let dropped = |by| EventBody::Dropped { by, count: 2 };
    let lines = written(Detail::Summary, [dropped("stream"), dropped("file")]);
    assert!(
        lines[0].ends_with("2 lines of this stream: its reader is too slow"),
        "{lines:?}"
    );
    assert!(
        lines[1].ends_with("2 lines of the file of --events: it could not be written"),
        "{lines:?}"
    );
}
