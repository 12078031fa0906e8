use std::ffi::OsString;

use proptest::prelude::*;

use super::*;
use crate::damage::arbitrary_bytes;

/// Returns the header of an ordinary run.
pub(in crate::run) fn header(id: &str) -> RunHeader {
    RunHeader {
        schema: SCHEMA,
        id: id.to_owned(),
        name: None,
        session: Some("s-1".to_owned()),
        agent: None,
        boot_id: "0a15f438-6774-4ca6-b514-09852823d3e8".to_owned(),
        pid_namespace: 0,
        supervisor: RecordedProcess {
            pid: Some(700),
            start_ns: 70_000_000,
        },
        uid: 1000,
        command: vec!["make".to_owned(), "all".to_owned()],
        truncated: false,
        cwd: "/work".to_owned(),
        started: "2026-11-22T12:00:00Z".parse().unwrap(),
        timeout_ms: Some(60_000),
        idle_ms: None,
        grace_ms: 5000,
        signal: 15,
        leader_first: false,
        limit: None,
        cgroup: None,
        detached: false,
    }
}

fn text(lines: &[Line]) -> Vec<u8> {
    let line = |line| serde_json::to_string(line).unwrap() + "\n";
    lines.iter().map(line).collect::<String>().into_bytes()
}

fn claim(outcome: RunOutcome, by: u32) -> Line {
    Line::Claim(Claim {
        outcome,
        by: Some(by),
    })
}

fn sample_lines() -> Vec<Line> {
    let process = RecordedProcess {
        pid: Some(701),
        start_ns: 80_000_000,
    };
    vec![
        Line::Run(Box::new(header("abcd"))),
        Line::Cgroup(CgroupCreated { id: 5 }),
        Line::Cgroup(CgroupCreated { id: 6 }),
        Line::Command(CommandStarted { process, at: 9 }),
        claim(RunOutcome::Cancelled, 5),
        claim(RunOutcome::Timeout, 6),
        Line::Over(Box::new(RunResult::unobserved(RunOutcome::Cancelled, "x"))),
        Line::Over(Box::new(RunResult::unobserved(RunOutcome::Death, "y"))),
    ]
}

#[test]
fn first_claim_and_first_result_count() {
    let record = RunRecord::parse(&text(&sample_lines())).unwrap();
    assert_eq!(record.header, header("abcd"));
    assert_eq!(record.commands.len(), 1);
    assert_eq!(
        record.cgroup,
        Some(CgroupCreated { id: 6 }),
        "not the last cgroup"
    );
    assert_eq!(record.claim.unwrap().by, Some(5));
    assert_eq!(record.outcome(), Some(RunOutcome::Cancelled));
    assert_eq!(record.result.unwrap().notes, ["x"]);
}

#[test]
fn incomplete_line_is_ignored() {
    let mut bytes = text(&sample_lines()[..2]);
    bytes.extend(b"\n{\"claim\":{\"outcome\":\"succ");
    let record = RunRecord::parse(&bytes).unwrap();
    assert_eq!(record.claim, None);
    // The next writer begins with a line break.
    bytes.extend(b"\n{\"claim\":{\"outcome\":\"idle\",\"by\":3}}\n");
    let record = RunRecord::parse(&bytes).unwrap();
    assert_eq!(record.outcome(), Some(RunOutcome::Idle));
}

#[test]
fn file_without_a_header_is_damaged() {
    for damaged in [
        &b""[..],
        b"\n\n",
        b"{}\n",
        b"\0\0\0\0\n",
        b"{\"run\":{\"schema\":1,\"id\":\"x\"}}\n",
        b"{\"claim\":{\"outcome\":\"idle\",\"by\":3}}\n",
    ] {
        assert_eq!(RunRecord::parse(damaged), Err(RecordParseError::Damaged));
    }
    let mut cut = text(&sample_lines()[..1]);
    cut.pop();
    assert_eq!(RunRecord::parse(&cut), Err(RecordParseError::Damaged));
    let later = b"{\"run\":{\"schema\":2,\"what\":\"ever\"}}\n";
    assert_eq!(RunRecord::parse(later), Err(RecordParseError::Later(2)));
}

#[test]
fn long_command_line_is_truncated() {
    let kept = |words: &[&str]| {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        truncate_command(words.iter().map(OsString::as_os_str))
    };
    assert_eq!(kept(&["a", "b"]), (vec!["a".into(), "b".into()], false));
    let (words, cut) = kept(&["x", &"é".repeat(5000), "y"]);
    assert!(cut && words.len() == 2 && words[1].len() <= COMMAND_MAX);
    let (words, cut) = kept(&["word"; 1000]);
    assert!(cut && words.iter().map(String::len).sum::<usize>() <= COMMAND_MAX);
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in arbitrary_bytes(text(&sample_lines()))) {
        if let Ok(record) = RunRecord::parse(&bytes) {
            prop_assert_eq!(record.header.schema, SCHEMA);
        }
    }
}

#[test]
fn pids_are_shown_only_in_the_pid_namespace_of_the_run() {
    let mut record = RunRecord::parse(&text(&sample_lines())).unwrap();
    let left = Survivor {
        pid: Some(702),
        command: "cc".to_owned(),
        reason: "x".to_owned(),
    };
    record.result.as_mut().unwrap().left.push(left);
    assert_eq!(record.clone().shown_in(Some(0)), record);
    for elsewhere in [Some(4_026_531_999), None] {
        let shown = record.clone().shown_in(elsewhere);
        let pids = [
            shown.header.supervisor.pid,
            shown.commands[0].process.pid,
            shown.claim.unwrap().by,
            shown.result.as_ref().unwrap().left[0].pid,
        ];
        assert_eq!(pids, [None; 4]);
        let header = serde_json::to_value(&shown.header).unwrap();
        assert!(header["wrapper"]["pid"].is_null(), "{header}");
        assert_eq!(shown.outcome(), record.outcome());
    }
}
