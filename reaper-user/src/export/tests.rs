use std::sync::Arc;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::*;
use crate::reap::{ReapOutcome, SentBy, SentSignal};
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Provenance, Uids};

const ROOT: ProcessKey = ProcessKey { pid: 42, start: 7 };

fn session() -> SessionRef {
    SessionRef {
        agent: "claude".into(),
        first_root: ROOT,
    }
}

fn who() -> ProcessRef {
    let image = Image {
        comm: b"claude".into(),
        argv: b"claude\0--token\0hunter2\0".into(),
        ..Image::default()
    };
    ProcessRef {
        key: ROOT,
        parent: None,
        birth_parent: None,
        image: Arc::new(image),
        uids: Uids::default(),
        session: Some(session()),
        provenance: Provenance::Kernel,
        evidence: None,
    }
}

fn sent(by: SentBy, latency: Option<u64>) -> EventBody {
    let (key, signal) = (ROOT, Signal::SIGTERM);
    let sent = SentSignal {
        key,
        signal,
        latency,
        by,
    };
    EventBody::Signal {
        process: who(),
        sent,
    }
}

fn ready(resumed: Option<Resumed>, pinned: Option<&str>) -> EventBody {
    EventBody::Ready {
        mode: "enforce",
        mode_reason: None,
        source: "ebpf",
        rejected_sources: Vec::new(),
        processes: 3,
        scope: Vec::new(),
        resumed,
        pin_dir: pinned.map(Into::into),
        kernel_reap: true,
        ring_size: Some(65_536),
    }
}

fn outcome(memory: Option<ProcessMemory>) -> EventBody {
    EventBody::Outcome {
        process: who(),
        outcome: ReapOutcome::Exited(ExitStatus::Signalled {
            signal: 15,
            core: false,
        }),
        signal: Some("SIGTERM"),
        duration: Some(2_000_000),
        memory,
    }
}

fn closed(memory: FreedMemory) -> EventBody {
    EventBody::SessionClose {
        session: session(),
        is_repeat: false,
        kept_reasons: vec![],
        nested: vec![],
        reaped: 5,
        kept: 1,
        failed: 0,
        memory,
        lost_before: 0,
    }
}

fn nested(pid: u32, kept: u32, waiting: u32) -> NestedSummary {
    let first_root = ProcessKey { pid, ..ROOT };
    NestedSummary {
        session: SessionRef {
            first_root,
            ..session()
        },
        kept,
        waiting,
    }
}

fn reparented(adopter: Option<ProcessKey>, namespace_ending: bool) -> EventBody {
    EventBody::Reparent {
        process: who(),
        old_parent: Some(ProcessKey { pid: 41, start: 5 }),
        old_parent_comm: b"sh".into(),
        adopter,
        adopter_comm: adopter.map_or_else(Vec::new, |_| b"systemd".into()),
        namespace_ending,
        provenance: Provenance::Kernel,
    }
}

fn gap(reason: &'static str, total: u64) -> EventBody {
    EventBody::GapOpen {
        reason,
        source: "ebpf",
        total,
        by_kind: [
            ("fork", total),
            ("exec", 0),
            ("exit", 0),
            ("reparent", 0),
            ("cgroup.migrate", 0),
        ],
    }
}

/// A record as a line for people without its time and colours, and as JSON.
fn told(body: EventBody) -> (String, Value) {
    let clock = EventClock::new("boot".into());
    let record = EventRecord { time: 0, body };
    let (mut text, mut object) = (Vec::new(), Vec::new());
    line::write(&mut anstream::StripStream::new(&mut text), &record, &clock).unwrap();
    json::write(&mut object, &record, 1, &clock).unwrap();
    let text = String::from_utf8(text).unwrap();
    let (_, text) = text.trim_end().split_once("  ").unwrap();
    (text.to_owned(), serde_json::from_slice(&object).unwrap())
}

/// Each body is told to people in these words, and to programs with these keys.
#[test]
fn lines() {
    let resumed = Resumed {
        sessions: 2,
        backlog: 2048,
        lost: 5,
    };
    for (body, words, keys) in [
        (
            ready(None, None),
            "ready  watching the whole host through ebpf, 3 processes found, mode enforce; \
             tracking ends with this program",
            json!({"event": "ready", "resumed": false, "kernel_reap": true, "ring_size": 65536}),
        ),
        (
            ready(Some(resumed), Some("/sys/fs/bpf/r\n")),
            "ready  watching the whole host through ebpf, 3 processes found, mode enforce; \
             pinned in /sys/fs/bpf/r\\n; taken up: 2 sessions, 2.0 KiB of events, 5 lost",
            json!({"resumed": true, "resumed_sessions": 2, "backlog_bytes": 2048, "lost_before": 5,
                "pin_dir": "/sys/fs/bpf/r\n"}),
        ),
        (
            gap("records_lost", 4),
            "gap  4 events lost: nothing new is decided until it is made up for",
            json!({"event": "gap.open", "reason": "records_lost", "source": "ebpf", "lost": 4, "lost_fork": 4, "lost_exit": 0}),
        ),
        (
            gap("restart", 0),
            "gap  nobody read meanwhile, 0 events lost: nothing new is decided until it is made up for",
            json!({"reason": "restart", "lost": 0}),
        ),
        (
            EventBody::GapClose {
                reason: "records_lost",
                total: 4,
                processes_recovered: 2,
                exits_recovered: 1,
                duration: 1_500_000,
            },
            "gap closed  after 1.5 ms: 2 processes and 1 ends found that nobody had told of",
            json!({"event": "gap.close", "reason": "records_lost", "lost": 4, "processes_recovered": 2, "exits_recovered": 1,
                "duration_ns": 1_500_000}),
        ),
        (
            EventBody::CaughtUp {
                records: 7,
                duration: 1_500_000,
            },
            "caught up  7 events in 1.5 ms",
            json!({"event": "caught_up", "records": 7, "duration_ns": 1_500_000}),
        ),
        (
            EventBody::MemberMapFull {
                count: 9,
                capacity: 1024,
            },
            "map full  9 processes beyond the 1024 of max_members: followed only while this service runs",
            json!({"event": "member_map.full", "count": 9, "capacity": 1024}),
        ),
        (
            EventBody::SessionResume {
                session: session(),
                root: ROOT,
                process: Some(who()),
                members: 3,
                root_exited: false,
            },
            "claude         resumed         42  claude --token [redacted]  3 members",
            json!({"event": "session.resume", "session_id": "claude-42-7", "process.pid": 42, "members": 3,
                "root_exited": false, "process.command_args": ["claude", "--token", "[redacted]"]}),
        ),
        (
            EventBody::SessionResume {
                session: session(),
                root: ROOT,
                process: None,
                members: 3,
                root_exited: true,
            },
            "claude         resumed         42  3 members, the agent is gone",
            json!({"session_id": "claude-42-7", "entity_id": "boot-7-42", "process.pid": 42, "root_exited": true}),
        ),
        (
            sent(SentBy::Kernel, Some(22_000)),
            "claude         SIGTERM         42  claude --token [redacted]  from the kernel, after 22 µs",
            json!({"event": "signal", "sent_by": "kernel", "latency_ns": 22_000}),
        ),
        (
            sent(SentBy::Service, None),
            "claude         SIGTERM         42  claude --token [redacted]",
            json!({"sent_by": "service"}),
        ),
        (
            reparented(Some(ProcessKey { pid: 1, start: 0 }), false),
            "claude         orphan          42  claude --token [redacted]  sh (41) exited, systemd (1) adopted it",
            json!({"event": "reparent", "adopter_pid": 1, "adopter_comm": "systemd", "no_adopter_reason": null}),
        ),
        (
            reparented(None, true),
            "claude         orphan          42  claude --token [redacted]  sh (41) exited, its namespace is ending",
            json!({"adopter_pid": null, "no_adopter_reason": "pid_namespace_exiting"}),
        ),
        (
            reparented(None, false),
            "claude         orphan          42  claude --token [redacted]  sh (41) exited, an unknown process adopted it",
            json!({"adopter_pid": null, "no_adopter_reason": null}),
        ),
        (
            EventBody::Summary {
                count: Totals::default(),
                reason: "SIGTERM",
                pin_dir: Some("/sys/fs/bpf/r".into()),
            },
            "stopped  SIGTERM: 0 sessions, 0 reaped, 0 kept, 0 failed; 0 signals sent, 0 events read, 0 lost; \
             left armed in /sys/fs/bpf/r",
            json!({"event": "summary", "pin_dir": "/sys/fs/bpf/r", "memory.rss": 0, "memory.unmeasured": 0}),
        ),
        (
            outcome(Some(ProcessMemory {
                rss: 3 << 20,
                swap: 0,
            })),
            "claude         ended           42  claude --token [redacted]  SIGTERM, 2.0 ms after the first \
             signal, 3.0 MiB given back",
            json!({"event": "outcome", "memory.rss": 3 << 20, "memory.swap": 0, "signal": "SIGTERM"}),
        ),
        (
            closed(FreedMemory {
                rss: 1 << 30,
                swap: 1 << 29,
                unmeasured: 2,
            }),
            "claude         closed          42  5 reaped, 1 kept, 0 failed, 1.5 GiB given back (512.0 MiB of \
             it swapped out), 2 too quick to weigh",
            json!({"event": "session.close", "memory.rss": 1 << 30, "memory.swap": 1 << 29,
                "memory.unmeasured": 2, "reaped": 5}),
        ),
        (
            EventBody::SessionClose {
                session: session(),
                reaped: 5,
                kept: 3,
                is_repeat: false,
                kept_reasons: vec!["keep_rule", "kept_by_user"],
                nested: vec![],
                failed: 0,
                memory: FreedMemory::default(),
                lost_before: 0,
            },
            "claude         closed          42  5 reaped, 3 kept (a rule keeps it, a user keeps it), 0 failed",
            json!({"kept": 3, "kept_reasons": ["keep_rule", "kept_by_user"]}),
        ),
        (
            EventBody::SessionClose {
                session: session(),
                is_repeat: false,
                reaped: 5,
                kept: 0,
                kept_reasons: vec![],
                nested: vec![nested(43, 0, 1), nested(44, 2, 3)],
                failed: 0,
                memory: FreedMemory::default(),
                lost_before: 0,
            },
            "claude         closed          42  5 reaped, 0 kept, 0 failed, the rest belongs to 43, 1 waits, and \
             to 44, 2 kept, 3 wait",
            json!({"kept": 0, "nested": [
                {"session_id": "claude-43-7", "root_pid": 43, "kept": 0, "waiting": 1},
                {"session_id": "claude-44-7", "root_pid": 44, "kept": 2, "waiting": 3},
            ]}),
        ),
        (
            closed(FreedMemory::default()),
            "claude         closed          42  5 reaped, 1 kept, 0 failed",
            json!({"memory.rss": 0, "nested": null}),
        ),
        (
            EventBody::Dropped {
                by: "journal",
                count: 7,
            },
            "dropped  7 records of the journal: it is not written fast enough",
            json!({"event": "dropped", "dropped_by": "journal", "count": 7}),
        ),
    ] {
        let (text, object) = told(body);
        assert_eq!(text, words);
        for (key, value) in keys.as_object().unwrap() {
            assert_eq!(
                object.get(key).unwrap_or(&Value::Null),
                value,
                "{key} in {object}"
            );
        }
    }
}

#[test]
fn what_does_not_hold_has_no_key() {
    let (_, ready) = told(ready(None, None));
    for key in ["pin_dir", "resumed_sessions", "lost_before"] {
        assert_eq!(ready.get(key), None, "{key} in {ready}");
    }
    let count = Totals::default();
    let (_, summary) = told(EventBody::Summary {
        count,
        reason: "SIGTERM",
        pin_dir: None,
    });
    assert_eq!(summary.get("pin_dir"), None, "{summary}");
    let (text, unread) = told(outcome(None));
    assert!(!text.contains("given back"), "{text}");
    assert_eq!(unread.get("memory.rss"), None, "{unread}");
}

#[test]
fn json_escapes_controls_and_hidden_text() {
    let text = "\u{1b}\u{7f}\u{80}\u{9b}\u{ad}\u{200b}\u{2028}\u{202e}\u{2066}\u{feff}\u{e0041}é日";
    let line = String::from_utf8(to_json(&text)).unwrap();
    assert_eq!(
        line,
        "\"\\u001b\\u007f\\u0080\\u009b\\u00ad\\u200b\\u2028\\u202e\\u2066\\ufeff\\udb40\\udc41é日\"\n"
    );
    assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
}
