//! Cost of crafted tables: no user can keep the service busy by environments or deep trees.

use proptest::prelude::*;

use super::*;

/// Returns variables as agents set them, and others.
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
    fn env_markers_of_any_environment_are_bounded(entries in prop::collection::vec(entry(), 0..80), whole: bool) {
        let environ = entries.join(&0);
        let env_markers = EnvMarkers::of(&environ, whole);
        prop_assert!(env_markers.markers.len() <= 32 && env_markers.multiplexers.len() <= 32);
        prop_assert!(env_markers.cut || whole);
        let kept = environ.split(|byte| *byte == 0).any(|entry| entry == b"REAPER_KEEP=1");
        prop_assert_eq!(env_markers.keep, kept);
        prop_assert!(env_markers.agent_pids().all(|owner| owner > 0));
    }
}

#[test]
fn environment_full_of_markers_is_read_in_part() {
    let many = |of: &dyn Fn(u32) -> String| -> Vec<u8> {
        (2..60_000).flat_map(|n| of(n).into_bytes()).collect()
    };
    let most = |env_markers: &EnvMarkers| {
        env_markers
            .markers
            .len()
            .max(env_markers.multiplexers.len())
    };
    for (environ, cut) in [
        (many(&|n| format!("CLAUDE_PID={n}\0")), true),
        (many(&|n| format!("TMUX=x,{n},0\0")), true),
        // Repeated markers count once.
        (many(&|_| "CLAUDE_PID=4100\0".into()), false),
        (many(&|n| format!("CLAUDECODE={n}\0")), false),
    ] {
        let mut environ = environ;
        environ.extend(b"REAPER_KEEP=1\0SUDO_UID=0\0");
        let env_markers = EnvMarkers::of(&environ, true);
        assert!(most(&env_markers) <= 32, "{}", most(&env_markers));
        assert_eq!(env_markers.cut, cut);
        assert!(env_markers.keep && env_markers.switched, "the rest is read");
    }
    // The part that was not read may name a living agent.
    let environ = many(&|n| format!("OPENCODE_PID={}\0", 100_000 + n));
    let mut all = table(&[p(200, 1, 100, NODE, DEAD)]);
    all.rows.get_mut(&200).unwrap().env_markers = Fact::Known(EnvMarkers::of(&environ, true));
    let found = scan(&all, |_| {});
    assert_eq!(why(&found, 200), "unreadable");
    assert!(
        matches!(found[0].evidence, LeftoverEvidence::Marker { .. }),
        "no strong evidence"
    );
}

/// Each process depends on all of its ancestors, all hosts and all recorded members. Scanning them for each process
/// would take 10^9 steps.
#[test]
fn long_chains_and_many_hosts_take_linear_time() {
    let environ = |n: u32| -> EnvMarkers {
        let markers = (0..40).map(|m| format!("CLAUDE_PID={}\0", 200_000 + n % 7 * 100 + m));
        let markers: String = markers.chain(["ZELLIJ=0\0".to_owned()]).collect();
        EnvMarkers::of(markers.as_bytes(), true)
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
    let found = scan_recorded(&all, &[recorded], |_| {});
    assert_eq!(found.len(), count as usize);
    let subtree_root = ProcessKey {
        pid: 1000,
        start: 100 * S,
    };
    assert!(
        found
            .iter()
            .all(|leftover| leftover.subtree_root == subtree_root)
    );
    // Descendants come after their ancestors.
    let pids: Vec<u32> = found.iter().map(|leftover| leftover.key.pid).collect();
    assert!(pids.is_sorted());
}
