//! Tests of the text.

use std::io::Write;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::printer::Printer;
use super::process::write_process;
use crate::export::{ExitInfo, FreedMemory};
use crate::journal::history::{HistoryDecision, HistoryOutcome, HistoryProcess, HistorySession};

#[test]
fn session_is_written_as_text() {
    let at = |ms: i64| Timestamp::from_millisecond(1_760_000_000_000 + ms).unwrap();
    let process = |pid, args: &[&str], decisions, outcomes| HistoryProcess {
        entity_id: "boot-1-1".into(),
        pid,
        uid: 1000,
        comm: "sh\u{1b}".into(),
        exe: String::new(),
        args: args.iter().map(|arg| arg.to_string()).collect(),
        exited_at: None,
        exit: ExitInfo::default(),
        lineage: Vec::new(),
        decisions,
        requests: Vec::new(),
        outcomes,
        keep_rule: None,
    };
    let decided = |ms, decision: &str, rule: Option<&str>| HistoryDecision {
        time: at(ms),
        decision: decision.into(),
        reason: "root_exited".into(),
        rule: rule.map(Into::into),
        mode: rule.map(|_| "observe".into()),
    };
    let ended = HistoryOutcome {
        time: at(900_002),
        outcome: "ended".into(),
        reason: None,
        signal: Some("SIGTERM".into()),
        exit: ExitInfo {
            code: Some(3),
            ..ExitInfo::default()
        },
        duration_ns: Some(1_200_000),
        rss: Some(3 << 20),
        swap: Some(0),
    };
    let session = HistorySession {
        name: "claude-100-1".into(),
        agent: "claude".into(),
        pid: 100,
        root_pid: Some(100),
        uid: Some(1000),
        args: vec!["claude".into(), "a\nb".into()],
        outer_session_id: None,
        opened_at: at(0),
        root_exited_at: Some(at(900_000)),
        exit: ExitInfo {
            signal: Some("SIGKILL".into()),
            ..ExitInfo::default()
        },
        closed_at: Some(at(901_000)),
        reaped: 1,
        kept: 1,
        failed: 0,
        lost_before: 0,
        memory: FreedMemory {
            rss: 3 << 20,
            ..FreedMemory::default()
        },
        processes: vec![
            process(
                101,
                &["sh", "x"],
                vec![decided(900_001, "reap", None)],
                vec![ended],
            ),
            process(102, &[], vec![decided(900_001, "keep", Some("r"))], vec![]),
            process(
                103,
                &["y"],
                vec![decided(900_001, "reap", Some("r"))],
                vec![],
            ),
        ],
    };
    let text = |width, pids| {
        let mut printer = Printer::new(Vec::new(), TimeZone::UTC, false, width, pids);
        printer.session(&session).unwrap();
        let text = printer.finish(Some(Duration::from_secs(7200))).unwrap();
        let mut plain = anstream::StripStream::new(Vec::new());
        plain.write_all(&text).unwrap();
        String::from_utf8(plain.into_inner()).unwrap()
    };
    assert_eq!(
        text(None, &[]),
        "\
2025-10-09 08:53:20  claude  claude-100-1, uid 1000
      100  claude a\\nb
      100  exited at 09:08:20 after 15m: SIGKILL; closed at 09:08:21
      100  1 reaped, 1 would have been, 1 kept, 3.1 MB RSS freed
      101  sh x
      101  09:08:20  reap        its agent exited
      101  09:08:20  ended       exit 3, 1.2ms after the first signal, 3.1 MB RSS freed
      102  [sh\\u{1b}]
      102  09:08:20  keep        its agent exited (r)
      103  y
      103  09:08:20  would reap  its agent exited (r)

1 session in the last 2h: 1 reaped, 1 would have been, 1 kept, 3.1 MB RSS freed
To keep such a process: REAPER_KEEP=1, `reaper keep PID`, or the rule from `reaper history 101`
"
    );
    for line in text(Some(80), &[]).lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let of_process = text(None, &[101]);
    assert!(
        of_process.contains("would have kept it") && !of_process.contains("To keep such"),
        "{of_process}"
    );
}

#[test]
fn each_line_of_a_session_has_its_pid() {
    let outcome = |reason: &str| HistoryOutcome {
        time: Timestamp::UNIX_EPOCH,
        outcome: "failed".into(),
        reason: Some(reason.into()),
        signal: None,
        exit: ExitInfo::default(),
        duration_ns: Some(7_000_000_000),
        rss: None,
        swap: None,
    };
    let process = HistoryProcess {
        entity_id: "boot-1-4194304".into(),
        pid: 4_194_304,
        uid: 0,
        comm: "x".repeat(15),
        exe: String::new(),
        args: vec!["y".repeat(300)],
        exited_at: None,
        exit: ExitInfo::default(),
        lineage: Vec::new(),
        decisions: Vec::new(),
        requests: Vec::new(),
        outcomes: vec![outcome("uninterruptible_sleep")],
        keep_rule: None,
    };
    let mut text = Vec::new();
    write_process(
        &mut text,
        &process,
        &|_| "2025-10-09 09:08:20".into(),
        Some(80),
    )
    .unwrap();
    let mut plain = anstream::StripStream::new(Vec::new());
    plain.write_all(&text).unwrap();
    let text = String::from_utf8(plain.into_inner()).unwrap();
    assert!(text.lines().count() > 2, "wrapped:\n{text}");
    for line in text.lines() {
        assert!(
            line.starts_with("  4194304  ") && line.chars().count() <= 80,
            "{line}"
        );
    }
}
