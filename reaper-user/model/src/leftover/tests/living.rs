//! Living agents beside a leftover: which of them prevent a reap.

use proptest::prelude::*;

use super::*;

const ID: &str = "0198c1de-7a44-4c39-9d7c-5f0a1b2c3d4e";

/// Returns a process with an environment that is not a constant.
fn with_env(process: P, env: &str) -> LeftoverRow {
    let env_markers = Fact::Known(EnvMarkers::of(env.as_bytes(), true));
    LeftoverRow {
        env_markers,
        ..process.row()
    }
}

/// Returns the reason for the verdict about process 200, a leftover with this environment.
fn beside(others: Vec<LeftoverRow>, env: &str) -> &'static str {
    let mut all = table(&[]);
    let left = with_env(p(200, 1, 100, NODE, ""), env);
    let rows = others.into_iter().chain([left]);
    all.rows.extend(rows.map(|row| (row.entry.key.pid, row)));
    why(&scan(&all, |_| {}), 200)
}

/// Returns an agent in the terminal of a shell.
fn agent(pid: u32, start: u64, argv: &'static str) -> P {
    P {
        sid: 60,
        tty: 7,
        ..p(pid, 60, start, argv, "")
    }
}

#[test]
fn other_living_agent_keeps_no_leftover() {
    for other in [
        agent(70, 50, "/x/claude"),
        agent(70, 150, "/x/claude"),
        agent(70, 50, "/x/codex"),
        agent(70, 50, "/x/claude-next"),
    ] {
        assert_eq!(beside(vec![other.row()], DEAD), "reap");
    }
    // A younger agent reuses the pid.
    assert_eq!(
        beside(vec![agent(4100, 101, "/x/claude").row()], DEAD),
        "reap"
    );
    // The agent that the marker names is alive.
    let named = agent(4100, 50, "/x/claude").row();
    assert_eq!(beside(vec![named], DEAD), "owner_alive");
}

#[test]
fn marker_shared_with_living_agent_is_no_evidence() {
    let carries = |argv, env| with_env(agent(70, 150, argv), env);
    let of_other = |row: LeftoverRow| {
        let mut row = row;
        (row.entry.uids.real, row.entry.uids.effective) = (1001, 1001);
        row
    };
    for (other, expected) in [
        (carries("/x/claude", DEAD), "shared_marker"),
        (carries("/x/codex", DEAD), "shared_marker"),
        (
            carries("/x/codex", "CLAUDE_PID=4101\0CLAUDECODE=1\0"),
            "reap",
        ),
        // A marker without a pid identifies no agent.
        (carries("/x/codex", BARE), "reap"),
        // An agent of another user, and a process that is not an agent.
        (of_other(carries("/x/claude", DEAD)), "reap"),
        (carries("/bin/cat", DEAD), "reap"),
    ] {
        assert_eq!(beside(vec![other], DEAD), expected);
    }
}

#[test]
fn marker_shared_with_ancestor_of_agent_is_no_evidence() {
    // A shell that was started inside the agent, from which a user has started another agent without the marker.
    let shell = |env| with_env(p(65, 60, 40, "/bin/zsh", ""), env);
    let between = |uid| {
        let mut row = p(66, 65, 45, "/bin/bash", "").row();
        (row.entry.uids.real, row.entry.uids.effective) = (uid, uid);
        row
    };
    let below = |parent| {
        P {
            parent,
            sid: parent,
            ..agent(70, 150, "/x/claude")
        }
        .row()
    };
    for (others, expected) in [
        (vec![shell(DEAD), below(65)], "shared_marker"),
        (vec![shell(DEAD), between(1000), below(66)], "shared_marker"),
        (vec![shell("A=1\0"), between(1000), below(66)], "reap"),
        // Without an agent below the shell.
        (vec![shell(DEAD), between(1000)], "reap"),
        // With a change of the user in between.
        (vec![shell(DEAD), between(0), below(66)], "reap"),
    ] {
        assert_eq!(beside(others, DEAD), expected);
    }
}

#[test]
fn unreadable_ancestor_of_agent_makes_marker_uncertain() {
    let unreadable = |argv, start| {
        let mut row = p(65, 60, start, argv, "").row();
        row.env_markers = Fact::Unreadable;
        row
    };
    let below = || {
        P {
            parent: 65,
            sid: 65,
            ..agent(70, 150, "/x/claude")
        }
        .row()
    };
    for (above, expected) in [
        (unreadable("/bin/zsh", 40), "agent_uncertain"),
        // It is younger than the leftover.
        (unreadable("/bin/zsh", 120), "reap"),
        // It builds a new environment for a login.
        (unreadable("/usr/sbin/sshd", 40), "reap"),
    ] {
        assert_eq!(beside(vec![above, below()], DEAD), expected);
    }
    let mut unread = agent(70, 150, "/x/claude").row();
    unread.env_markers = Fact::Unreadable;
    assert_eq!(beside(vec![unread], DEAD), "agent_uncertain");
}

#[test]
fn leftover_of_continued_conversation_is_not_reaped() {
    let left = format!("{DEAD}CLAUDE_CODE_SESSION_ID={ID}\0");
    let runs = |argv: &str| {
        let mut row = agent(70, 150, "/x/claude").row();
        let image = Arc::make_mut(&mut row.entry.image);
        image.argv = format!("/x/claude\0{}\0", argv.replace(' ', "\0")).into_bytes();
        row
    };
    for (argv, expected) in [
        (format!("--resume {ID}"), "owner_alive"),
        (format!("--resume={ID}"), "owner_alive"),
        (
            format!("--fork-session --resume /home/u/.claude/projects/p/{ID}.jsonl"),
            "owner_alive",
        ),
        (
            "--resume 0198c1de-7a44-4c39-9d7c-5f0a1b2c3d4f".into(),
            "reap",
        ),
        ("--continue".into(), "reap"),
    ] {
        assert_eq!(beside(vec![runs(&argv)], &left), expected, "{argv}");
        // Without the id it cannot be the same conversation.
        assert_eq!(beside(vec![runs(&argv)], DEAD), "reap", "{argv}");
    }
    let in_env = with_env(agent(70, 150, "/x/claude"), &left[DEAD.len()..]);
    assert_eq!(beside(vec![in_env], &left), "shared_marker");
    // The rest of its arguments may name the id.
    let mut cut = runs("-p");
    Arc::make_mut(&mut cut.entry.image).truncated = true;
    assert_eq!(beside(vec![cut.clone()], &left), "agent_uncertain");
    assert_eq!(beside(vec![cut], DEAD), "reap");
    // A tool shell has no marker with a pid.
    let shell = with_env(p(200, 1, 100, SHELL, ""), &left[DEAD.len()..]);
    let mut all = table(&[]);
    let rows = [shell, runs(&format!("--resume {ID}"))];
    all.rows.extend(rows.map(|row| (row.entry.key.pid, row)));
    assert_eq!(why(&scan(&all, |_| {}), 200), "owner_alive");
}

#[test]
fn possible_successor_keeps_leftover() {
    let relaunched = |sid, parent, tty| P {
        sid,
        parent,
        tty,
        ..agent(70, 150, "/x/claude")
    };
    for (other, expected) in [
        (relaunched(91, 1, 7), "agent_alive"),
        // It created its own kernel session, has no terminal, or its creator is alive.
        (relaunched(70, 1, 7), "reap"),
        (relaunched(91, 1, 0), "reap"),
        (relaunched(60, 60, 7), "reap"),
    ] {
        assert_eq!(beside(vec![other.row()], DEAD), expected);
    }
    let codex = P {
        argv: "/x/codex",
        ..relaunched(91, 1, 7)
    };
    assert_eq!(beside(vec![codex.row()], DEAD), "reap");
}

#[test]
fn recorded_member_is_kept_only_for_a_possible_successor() {
    let recorded = |root: u64| RecordedSession {
        agent: "claude-code".into(),
        root: ProcessKey {
            pid: 4300,
            start: root * S + 7,
        },
        uid: Some(1000),
        members: HashSet::from_iter([ProcessKey {
            pid: 200,
            start: 100 * S,
        }]),
    };
    let of = |other: P| {
        let all = table(&[p(200, 60, 100, NODE, ""), other]);
        why(&scan_recorded(&all, &[recorded(20)], |_| {}), 200)
    };
    let successor = |start| P {
        sid: 91,
        ..agent(70, start, "/x/claude")
    };
    assert_eq!(of(successor(150)), "agent_alive");
    assert_eq!(of(successor(20)), "agent_alive");
    // It is older than the root, or its creator is alive.
    assert_eq!(of(successor(10)), "reap");
    assert_eq!(of(agent(70, 150, "/x/claude")), "reap");
}

#[test]
fn conversation_server_keeps_leftovers_of_its_agent() {
    let server = || p(70, 1, 150, "/x/claude-server", "").row();
    let of_opencode = "OPENCODE=1\0OPENCODE_PID=4100\0";
    assert_eq!(beside(vec![server()], DEAD), "agent_alive");
    assert_eq!(beside(vec![server()], of_opencode), "reap");
    let other_user = P {
        uid: 1001,
        euid: 1001,
        ..p(70, 1, 150, "/x/claude-server", "")
    };
    assert_eq!(beside(vec![other_user.row()], DEAD), "reap");
}

prop_compose! {
    /// Returns an agent that is unrelated to the leftover: below a shell or alone, older or younger.
    fn unrelated()(
        pid in 70_u32..80,
        parent in prop::sample::select(vec![1_u32, 50, 60]),
        start in 10_u64..9000,
        argv in prop::sample::select(vec!["/x/claude", "/x/codex", "/x/claude-next", "/x/goose"]),
        env in prop::sample::select(vec![
            "",
            BARE,
            "CLAUDECODE=1\0CLAUDE_PID=4200\0",
            "CODEX_CI=1\0CODEX_THREAD_ID=0198c1de-7a44\0",
        ]),
        terminal: bool,
    ) -> P {
        let tty = if terminal && parent == 60 { 7 } else { 0 };
        let sid = if tty == 0 { pid } else { 60 };
        P { sid, tty, ..p(pid, parent, start, argv, env) }
    }
}

proptest! {
    #[test]
    fn unrelated_agents_never_change_a_verdict(
        others in prop::collection::vec(unrelated(), 0..6),
        env in prop::sample::select(vec![
            DEAD,
            "CLAUDECODE=1\0CLAUDE_PID=4100\0REAPER_KEEP=1\0",
            "CLAUDECODE=1\0CLAUDE_PID=4100\0SUDO_UID=1000\0",
            "CLAUDE_PID=4100\0",
            "OPENCODE=1\0OPENCODE_PID=4100\0CLAUDE_CODE_SESSION_ID=0198c1de-7a55\0",
        ]),
        parent in prop::sample::select(vec![1_u32, 60]),
    ) {
        let left = || p(200, parent, 100, NODE, env);
        let alone = scan(&table(&[left()]), |_| {});
        let all: Vec<P> = others.into_iter().chain([left()]).collect();
        let found = scan(&table(&all), |_| {});
        prop_assert_eq!(why(&found, 200), why(&alone, 200));
        // With the named agent alive.
        let named = p(4100, 60, 99, "/x/claude", "");
        let all: Vec<P> = all.into_iter().chain([named]).collect();
        let found = scan(&table(&all), |_| {});
        prop_assert!(why(&found, 200) != "reap");
    }
}
