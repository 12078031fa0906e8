//! Agents that markers name: they must have exited, and without an order of a user also be recorded.

use super::*;

fn session(agent: &str, uid: u32, root: u32, start: u64) -> RecordedSession {
    let start = start * S;
    RecordedSession {
        agent: agent.into(),
        root: ProcessKey { pid: root, start },
        uid: Some(uid),
        members: HashSet::new(),
    }
}

#[test]
fn without_order_only_recorded_agents_count() {
    let claude = |uid, root, start| session("claude-code", uid, root, start);
    let left = table(&[p(200, 1, 100, NODE, DEAD)]);
    let both = "CLAUDECODE=1\0CLAUDE_PID=4100\0OPENCODE_PID=4200\0OPENCODE=1\0";
    let of_both = table(&[p(200, 1, 100, NODE, both)]);
    for (all, recorded, expected) in [
        (&left, vec![], "owner_unknown"),
        (&left, vec![claude(1000, 4100, 50)], "reap"),
        // Another pid, another user, another agent, and a younger one.
        (&left, vec![claude(1000, 4101, 50)], "owner_unknown"),
        (&left, vec![claude(1001, 4100, 50)], "owner_unknown"),
        (
            &left,
            vec![session("codex", 1000, 4100, 50)],
            "owner_unknown",
        ),
        (&left, vec![claude(1000, 4100, 100)], "owner_unknown"),
        (
            &left,
            vec![claude(1001, 4100, 40), claude(1000, 4100, 50)],
            "reap",
        ),
        // All named agents must be recorded.
        (&of_both, vec![claude(1000, 4100, 50)], "owner_unknown"),
        (
            &of_both,
            vec![claude(1000, 4100, 50), session("opencode", 1000, 4200, 50)],
            "reap",
        ),
    ] {
        let alone = scan_recorded(all, &recorded, |q| q.requested_by_user = false);
        assert_eq!(why(&alone, 200), expected, "{recorded:?}");
        assert_eq!(why(&scan_recorded(all, &recorded, |_| {}), 200), "reap");
    }
    // A tool's shell names no agent.
    let shell = table(&[p(200, 1, 100, SHELL, BARE)]);
    assert_eq!(
        why(&scan(&shell, |q| q.requested_by_user = false), 200),
        "reap"
    );
}

#[test]
fn marker_with_pid_alone_is_weak_evidence() {
    for (env, expected) in [
        ("CLAUDE_PID=4100\0", "no_owner"),
        ("CLAUDE_PID=4100\0OPENCODE=1\0", "no_owner"),
        ("CLAUDE_PID=4100\0CLAUDE_PID=x\0", "no_owner"),
        ("CLAUDE_PID=4100\0CLAUDE_CODE_SESSION_ID=a\0", "reap"),
        ("CLAUDE_PID=4100\0AI_AGENT=claude-code/2\0", "reap"),
        ("CLAUDE_PID=4100\0AI_AGENT=other\0", "no_owner"),
        ("OPENCODE_PID=4100\0", "no_owner"),
        ("OPENCODE_PID=4100\0OPENCODE=1\0", "reap"),
        // The named process is alive.
        ("CLAUDE_PID=60\0", "owner_alive"),
    ] {
        check(expected, &[p(200, 1, 100, NODE, env)]);
    }
}

#[test]
fn living_agent_keeps_only_leftovers_without_a_pid() {
    let agent = |start, argv| p(70, 60, start, argv, "");
    let of = |uid, agent| P {
        uid,
        euid: uid,
        ..agent
    };
    for (agent, of_shell) in [
        (agent(99, "/x/claude"), "agent_alive"),
        // It is younger, or belongs to another user.
        (agent(101, "/x/claude"), "reap"),
        (of(1001, agent(99, "/x/claude")), "reap"),
        // An agent with another name.
        (agent(99, "/x/codex"), "agent_alive"),
        // Agents without a rule.
        (agent(99, "/x/claude-next"), "agent_alive"),
        (agent(99, "/x/cursor-agent"), "agent_alive"),
        (agent(99, "/x/goose"), "agent_alive"),
        (agent(99, "/x/amplifier"), "reap"),
        (agent(99, "/x/cat\0claude"), "reap"),
    ] {
        let name = agent.argv;
        for (argv, env, expected) in [(NODE, DEAD, "reap"), (SHELL, BARE, of_shell)] {
            let all = table(&[
                P {
                    argv: name,
                    ..of(agent.uid, p(70, 60, agent.start, name, ""))
                },
                p(200, 1, 100, argv, env),
            ]);
            assert_eq!(why(&scan(&all, |_| {}), 200), expected, "{name} {argv}");
        }
    }
    // A process with the name of an agent is not reaped, and neither are its descendants.
    check("agent", &[p(200, 1, 100, "/x/claude-next", DEAD)]);
    let next = p(200, 1, 100, "/x/claude-next", DEAD);
    check("-", &[next, p(201, 200, 101, NODE, DEAD)]);
    // A service has seen that it is not an agent.
    let helper = ProcessKey {
        pid: 200,
        start: 100 * S,
    };
    let recorded = RecordedSession {
        members: HashSet::from_iter([helper]),
        ..session("codex", 1000, 4300, 20)
    };
    let all = table(&[p(200, 60, 100, "/x/codex-linux-sandbox", "")]);
    assert_eq!(why(&scan_recorded(&all, &[recorded], |_| {}), 200), "reap");
}

#[test]
fn ancestor_of_living_agent_is_only_reported() {
    let all = table(&[
        p(200, 1, 100, "/bin/sh", DEAD),
        p(201, 200, 101, "/bin/sh", ""),
        p(202, 201, 102, "/x/codex", ""),
        p(203, 202, 103, NODE, ""),
        p(204, 201, 104, NODE, ""),
    ]);
    let found = scan(&all, |_| {});
    let of = |pid| why(&found, pid);
    assert_eq!(
        [200, 201, 202, 203, 204].map(of),
        ["agent", "-", "-", "-", "-"]
    );
}

#[test]
fn recorded_session_without_rule_is_only_reported() {
    let member = ProcessKey {
        pid: 200,
        start: 100 * S,
    };
    for (agent, expected) in [("codex", "reap"), ("gone", "agent_unknown")] {
        let recorded = RecordedSession {
            members: HashSet::from_iter([member]),
            ..session(agent, 1000, 4300, 20)
        };
        let all = table(&[p(200, 60, 100, NODE, "")]);
        let found = scan_recorded(&all, &[recorded], |_| {});
        assert_eq!(why(&found, 200), expected);
    }
}

#[test]
fn terminals_without_server_pid_prevent_a_reap() {
    for (variable, expected) in [
        ("TERM_PROGRAM=vscode", "multiplexed"),
        ("VSCODE_IPC_HOOK_CLI=/run/x", "multiplexed"),
        ("VSCODE_INJECTION=1", "multiplexed"),
        ("KITTY_PID=60", "multiplexed"),
        ("ALACRITTY_SOCKET=/x", "multiplexed"),
        ("WEZTERM_PANE=0", "multiplexed"),
        ("ABDUCO_SESSION=a", "multiplexed"),
        ("SHPOOL_SESSION_NAME=a", "multiplexed"),
        ("NVIM=/run/nvim", "multiplexed"),
        ("TMUX=broken", "multiplexed"),
        ("TERM_PROGRAM=ghostty", "reap"),
        ("NVIM=", "reap"),
    ] {
        let mut all = table(&[p(200, 1, 100, NODE, DEAD)]);
        let env = format!("{DEAD}{variable}\0");
        all.rows.get_mut(&200).unwrap().env_markers =
            Fact::Known(EnvMarkers::of(env.as_bytes(), true));
        assert_eq!(why(&scan(&all, |_| {}), 200), expected, "{variable}");
    }
}

#[test]
fn user_service_may_have_passed_the_marker_on() {
    let main = |env, sid| P {
        unit: "build.service",
        sid,
        ..p(190, 50, 90, "/usr/bin/build", env)
    };
    let left = || p(200, 1, 100, NODE, DEAD);
    check("multiplexed", &[main(DEAD, 190), left()]);
    check("reap", &[main("A=1\0", 190), left()]);
    // Not the main process of a service.
    check("reap", &[main(DEAD, 180), left()]);
}

#[test]
fn system_user_without_agents_counts_as_changed_uid() {
    let of = |uid, login_uid| P {
        uid,
        euid: uid,
        login_uid,
        ..p(200, 1, 100, NODE, DEAD)
    };
    for (uid, login_uid, expected) in [
        (26, None, "changed_uid"),
        (999, None, "changed_uid"),
        (26, Some(26), "reap"),
        (0, None, "reap"),
        (1000, None, "reap"),
    ] {
        check(expected, &[of(uid, login_uid)]);
    }
    // Agents of that user are known.
    let agent = P {
        uid: 26,
        euid: 26,
        ..p(70, 60, 101, "/x/claude", "")
    };
    check("reap", &[agent, of(26, None)]);
    let recorded = [session("codex", 26, 4300, 20)];
    let found = scan_recorded(&table(&[of(26, None)]), &recorded, |_| {});
    assert_eq!(why(&found, 200), "reap");
}

#[test]
fn marker_names_nested_agent_by_its_inner_pid() {
    let agent = |uid, inner_pid| P {
        uid,
        euid: uid,
        nested: true,
        inner_pid,
        ..p(90, 60, 150, "/x/claude", "")
    };
    for (agent, expected) in [
        (agent(1000, Some(4100)), "owner_uncertain"),
        (agent(1000, None), "owner_uncertain"),
        (agent(1000, Some(7)), "reap"),
        (agent(1001, Some(4100)), "reap"),
    ] {
        check(expected, &[agent, p(200, 1, 100, NODE, DEAD)]);
    }
}

#[test]
fn recorded_root_without_a_pid_names_no_owner() {
    for (evidence, owner) in [
        (LeftoverEvidence::Recorded { root: 0 }, None),
        (LeftoverEvidence::Recorded { root: 1 }, Some(1)),
        (LeftoverEvidence::ToolShell, None),
    ] {
        assert_eq!(evidence.owner(), owner, "{evidence:?}");
    }
}
