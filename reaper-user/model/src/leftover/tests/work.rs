//! What a crafted table costs: nobody can keep the service busy by what they put in an environment or nest.

use proptest::prelude::*;

use super::*;

/// Variables as agents set them, and as they do not.
fn entry() -> impl Strategy<Value = Vec<u8>> {
    let names = prop::sample::select(vec![
        "CLAUDE_PID",
        "CLAUDECODE",
        "AI_AGENT",
        "OPENCODE_PID",
        "AGENT",
        "TMUX",
        "STY",
        "TERM_PROGRAM",
        "VSCODE_",
        "SUDO_UID",
        "REAPER_KEEP",
        "PATH",
        "",
    ]);
    let values = prop_oneof![
        "[0-9]{0,12}",
        "[-,./a-z0-9]{0,12}",
        Just("claude-code".into()),
        Just("1".into()),
    ];
    prop_oneof![
        4 => (names, values).prop_map(|(name, value)| format!("{name}={value}").into_bytes()),
        1 => prop::collection::vec(any::<u8>(), 0..20),
    ]
}

proptest! {
    #[test]
    fn any_environment_tells_something(entries in prop::collection::vec(entry(), 0..80), whole: bool) {
        let environ = entries.join(&0);
        let trace = EnvMarkers::of(&environ, whole);
        prop_assert!(trace.markers.len() <= 32 && trace.multiplexers.len() <= 32);
        prop_assert!(trace.cut || whole);
        let kept = environ.split(|byte| *byte == 0).any(|entry| entry == b"REAPER_KEEP=1");
        prop_assert_eq!(trace.keep, kept);
        prop_assert!(trace.owners().all(|owner| owner > 0));
    }
}

#[test]
fn an_environment_full_of_marks_is_taken_in_in_part() {
    let many = |of: &dyn Fn(u32) -> String| -> Vec<u8> {
        (2..60_000).flat_map(|n| of(n).into_bytes()).collect()
    };
    let most = |trace: &EnvMarkers| trace.markers.len().max(trace.multiplexers.len());
    for (environ, cut) in [
        (many(&|n| format!("CLAUDE_PID={n}\0")), true),
        (many(&|n| format!("TMUX=x,{n},0\0")), true),
        // The same again and again is one.
        (many(&|_| "CLAUDE_PID=4100\0".into()), false),
        (many(&|n| format!("CLAUDECODE={n}\0")), false),
    ] {
        let mut environ = environ;
        environ.extend(b"REAPER_KEEP=1\0SUDO_UID=0\0");
        let trace = EnvMarkers::of(&environ, true);
        assert!(most(&trace) <= 32, "{}", most(&trace));
        assert_eq!(trace.cut, cut);
        assert!(trace.keep && trace.switched, "the rest is read");
    }
    // What was not taken in may name one that lives.
    let environ = many(&|n| format!("OPENCODE_PID={}\0", 100_000 + n));
    let mut all = table(&[p(200, 1, 100, NODE, DEAD)]);
    all.rows.get_mut(&200).unwrap().env_markers = Fact::Known(EnvMarkers::of(&environ, true));
    let strays = ask(&all, |_| {});
    assert_eq!(said(&strays, 200), "unreadable");
    assert!(
        matches!(strays[0].evidence, LeftoverEvidence::Mark { .. }),
        "no strong evidence"
    );
}

/// Each asks for its whole line, for all hosts and for all who were recorded: looked through one by one, that were
/// a thousand million looks.
#[test]
fn long_chains_and_many_hosts_are_gone_through_once() {
    let environ = |n: u32| -> EnvMarkers {
        let marks = (0..40).map(|m| format!("CLAUDE_PID={}\0", 200_000 + n % 7 * 100 + m));
        let marks: String = marks.chain(["ZELLIJ=0\0".to_owned()]).collect();
        EnvMarkers::of(marks.as_bytes(), true)
    };
    let count = 30_000;
    let mut rows = table(&[]).rows;
    for n in 0..count {
        let (pid, parent) = (1000 + n, if n == 0 { 1 } else { 999 + n });
        let mut row = p(pid, parent, 100, NODE, DEAD).row();
        if n % 3 == 0 {
            row = p(pid, parent, 100, "/bin/zellij", "").row();
            row.env_markers = Fact::Known(environ(n));
        }
        rows.insert(pid, row);
    }
    let recorded = RecordedSession {
        agent: "claude-code".into(),
        root: ProcessKey {
            pid: 4300,
            start: 0,
        },
        uid: Some(1000),
        members: rows
            .values()
            .map(|row| row.entry.key)
            .filter(|key| key.pid >= 1000)
            .collect(),
    };
    let all = ProcessTable {
        rows,
        unread: HashMap::new(),
    };
    let strays = ask_recorded(&all, &[recorded], |_| {});
    assert_eq!(strays.len(), count as usize);
    let head = ProcessKey {
        pid: 1000,
        start: 100 * S,
    };
    assert!(strays.iter().all(|stray| stray.subtree_root == head));
    // Those that stand below others are told after them.
    let pids: Vec<u32> = strays.iter().map(|stray| stray.key.pid).collect();
    assert!(pids.is_sorted());
}
