//! Tests of the text.

use std::io::Write;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::printer::Printer;
use super::process::write_process;
use crate::export::{ExitInfo, FreedMemory};
use crate::journal::history::{
    HistoryAncestor, HistoryDecision, HistoryOutcome, HistoryProcess, HistoryRequest,
    HistorySession,
};

/// Returns a time in milliseconds after the start of the session.
fn at(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(1_760_000_000_000 + ms).unwrap()
}

/// Returns a session with a process that was reaped, one that was kept, and one that was only observed.
fn session() -> HistorySession {
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
    HistorySession {
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
    }
}

/// Returns a session as `reaper history PID…` prints it, 20 minutes after its start.
fn text(session: &HistorySession, width: Option<usize>, pids: &[u32]) -> String {
    let mut printer = Printer::new(Vec::new(), TimeZone::UTC, false, width, pids);
    printer.now = at(1_200_000);
    printer.session(session).unwrap();
    let text = printer.finish(Some(Duration::from_secs(7200))).unwrap();
    let mut plain = anstream::StripStream::new(Vec::new());
    plain.write_all(&text).unwrap();
    String::from_utf8(plain.into_inner()).unwrap()
}

#[test]
fn session_is_written_as_text() {
    assert_eq!(
        text(&session(), None, &[]),
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
    for line in text(&session(), Some(80), &[]).lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

/// Returns the session with the process at this index alone, which has two requests and two ancestors.
fn session_of(index: usize) -> HistorySession {
    let mut session = session();
    let mut process = session.processes.swap_remove(index);
    let ancestor = |pid, comm: &str, exited| HistoryAncestor {
        pid,
        start_ns: 1,
        comm: comm.into(),
        exited,
    };
    process.lineage = vec![ancestor(110, "npm", true), ancestor(100, "x", false)];
    let request = |ms, request: &str, until| HistoryRequest {
        time: at(ms),
        request: request.into(),
        by_uid: 1000,
        tree: (request == "keep").then_some(true),
        until,
    };
    process.requests = vec![
        request(1000, "keep", Some(at(7_200_000))),
        request(2000, "unkeep", None),
    ];
    session.processes = vec![process];
    session
}

#[test]
fn history_of_a_process_begins_with_its_end() {
    let shown = text(&session_of(0), None, &[101]);
    let (before, after) = shown
        .split_once("\nEach of these would have kept it")
        .unwrap();
    assert_eq!(
        before,
        "      101  Reaped 4m 59s ago: SIGTERM, its agent claude (100) was killed by SIGKILL.
2025-10-09 08:53:20  claude  claude-100-1, uid 1000
      100  claude a\\nb
      100  exited at 09:08:20 after 15m: SIGKILL; closed at 09:08:21
      100  1 reaped, 1 kept, 3.1 MB RSS freed
      101  sh x
      101  lineage: claude (100) > npm (110, exited) > sh\\u{1b} (101)
      101  08:53:21  request     kept with its descendants by uid 1000 until 10:53:20
      101  08:53:22  request     no longer kept, by uid 1000
      101  09:08:20  reap        its agent exited
      101  09:08:20  ended       exit 3, 1.2ms after the first signal, 3.1 MB RSS freed
"
    );
    assert_eq!(
        after.lines().last(),
        Some("1 process in 1 session in the last 2h: 1 reaped, 3.1 MB RSS freed")
    );
    for line in text(&session_of(0), Some(80), &[101]).lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn history_without_an_end_begins_with_the_last_decision() {
    let first = |session: &HistorySession, pid| {
        let text = text(session, None, &[pid]);
        text.lines().next().unwrap().to_owned()
    };
    let kept = session_of(1);
    assert_eq!(
        first(&kept, 102),
        "      102  Kept: its agent exited (r). Decided 4m 59s ago; no exit is recorded."
    );
    let total = "1 process in 1 session in the last 2h: 0 reaped, 1 kept";
    assert_eq!(text(&kept, None, &[102]).lines().last(), Some(total));
    let mut requested = session_of(1);
    requested.processes[0].decisions.clear();
    assert_eq!(
        first(&requested, 102),
        "      102  No longer kept, by uid 1000. Requested 19m 58s ago; no exit is recorded."
    );
    let mut expired = session_of(2);
    expired.processes[0].requests.truncate(1);
    let total = "1 process in 1 session in the last 2h: 1 process would have been reaped";
    assert_eq!(text(&expired, None, &[103]).lines().last(), Some(total));
    let mut observed = session_of(2);
    assert_eq!(
        first(&observed, 103),
        "      103  Would be reaped: its agent exited (r). Decided 4m 59s ago; no exit is recorded."
    );
    observed.processes[0].exited_at = Some(at(1_140_000));
    observed.processes[0].exit.code = Some(0);
    assert_eq!(
        first(&observed, 103),
        "      103  Exited by itself 1m ago (exit 0). It would have been reaped, but this service only observes: its agent \
         claude (100) was killed by SIGKILL."
    );
    assert_eq!(
        first(&session(), 100),
        "      100  claude (100) was killed by SIGKILL 5m ago: 1 reaped, 1 would have been, 1 kept, 3.1 MB RSS freed."
    );
}

#[test]
fn unknown_ancestors_have_an_ellipsis() {
    let mut session = session_of(0);
    session.processes[0].lineage.pop();
    let shown = text(&session, None, &[101]);
    assert!(
        shown.contains("  101  lineage: claude (100) > … > npm (110, exited) > sh"),
        "{shown}"
    );
    session.processes[0].lineage.clear();
    assert!(!text(&session, None, &[101]).contains("lineage"));
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
        Some(&"npm (4194303, exited) > ".repeat(9)),
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
