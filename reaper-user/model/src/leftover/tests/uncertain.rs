//! Processes that may be the agent, have passed the marker on, or belong to another user: none of them leads to a reap.

use super::*;

/// Checks the result for the last process if these pids are unreadable.
#[track_caller]
fn check_unread(expected: &str, processes: &[P], unread: &[(u32, Option<u32>)]) {
    let mut table = table(processes);
    table.unread.extend(unread.iter().copied());
    let last = processes.last().map_or(0, |p| p.pid);
    let found = scan(&table, |_| {});
    assert_eq!(why(&found, last), expected, "{found:#?}");
}

fn recorded(uid: u32) -> RecordedSession {
    RecordedSession {
        agent: "codex".into(),
        root: ProcessKey {
            pid: 4300,
            start: 20 * S,
        },
        uid: Some(uid),
        members: HashSet::from_iter([ProcessKey {
            pid: 200,
            start: 100 * S,
        }]),
    }
}

#[test]
fn unreadable_process_may_be_agent_or_marker_origin() {
    let with_marker = || p(200, 1, 100, NODE, DEAD);
    let shell = || p(200, 1, 100, SHELL, BARE);
    for (unread, of_marked, of_shell) in [
        (
            &[(900, Some(1000))][..],
            "agent_uncertain",
            "agent_uncertain",
        ),
        (&[(900, None)], "agent_uncertain", "agent_uncertain"),
        // A process of another user.
        (&[(900, Some(1001))], "reap", "reap"),
        (
            &[(900, Some(0)), (901, Some(1000))],
            "agent_uncertain",
            "agent_uncertain",
        ),
    ] {
        check_unread(of_marked, &[with_marker()], unread);
        check_unread(of_shell, &[shell()], unread);
        let mut all = table(&[p(200, 60, 100, NODE, "")]);
        all.unread.extend(unread.iter().copied());
        let found = scan_recorded(&all, &[recorded(1000)], |_| {});
        assert_eq!(why(&found, 200), of_shell);
    }
    // The leader of its kernel session, and an ancestor.
    let of_session = P {
        sid: 900,
        ..with_marker()
    };
    check_unread("terminal_session", &[of_session], &[(900, Some(0))]);
    let mut all = table(&[p(200, 900, 100, NODE, "")]);
    all.unread.insert(900, Some(0));
    let found = scan_recorded(&all, &[recorded(1000)], |_| {});
    assert_eq!(why(&found, 200), "not_orphan");
}

#[test]
fn unreadable_host_may_have_the_marker() {
    let host = |argv, uid| P {
        env: None,
        uid,
        euid: uid,
        ..p(310, 1, 50, argv, "")
    };
    for (host, expected) in [
        (host("/usr/bin/kitty", 1000), "multiplexed"),
        (host("/usr/bin/tmux", 1000), "multiplexed"),
        (host("/usr/bin/sway", 1000), "multiplexed"),
        (host("/usr/bin/kitty", 1001), "reap"),
        // Programs in which users start no processes.
        (host("/usr/bin/cat", 1000), "reap"),
        (host("/usr/bin/ssh-agent", 1000), "reap"),
        (host("/x/claude", 1000), "agent_uncertain"),
    ] {
        check(expected, &[host, p(312, 1, 70, NODE, DEAD)]);
    }
    // Its environment was read in part.
    let mut cut = table(&[
        p(310, 1, 50, "/usr/bin/kitty", ""),
        p(312, 1, 70, NODE, DEAD),
    ]);
    cut.rows.get_mut(&310).unwrap().env_markers = Fact::Known(EnvMarkers::of(b"A=1\0", false));
    assert_eq!(why(&scan(&cut, |_| {}), 312), "multiplexed");
    // The leader of its kernel session.
    let leader = P {
        env: None,
        ..p(311, 305, 60, "/bin/zsh", "")
    };
    let left = P {
        sid: 311,
        ..p(312, 1, 70, NODE, DEAD)
    };
    check("terminal_session", &[leader, left]);
}

#[test]
fn kept_program_may_have_passed_the_marker_on() {
    let desktop = |start, env| p(310, 1, start, "/usr/bin/sway", env);
    let left = || p(312, 1, 70, NODE, DEAD);
    check("multiplexed", &[desktop(50, DEAD), left()]);
    check("reap", &[desktop(50, "A=1\0"), left()]);
    // The desktop and its marker are younger.
    check("reap", &[desktop(80, DEAD), left()]);
    check("keep_rule", &[desktop(50, DEAD)]);
    check("keep_rule", &[desktop(50, DEAD), p(311, 310, 60, NODE, "")]);
    let agent = p(310, 1, 50, "/usr/bin/ssh-agent", DEAD);
    check("reap", &[agent, left()]);
    // A command line whose end is missing, which a rule may match.
    let mut all = table(&[p(310, 1, 50, "/usr/bin/java", DEAD), left()]);
    let java = all.rows.get_mut(&310).unwrap();
    Arc::make_mut(&mut java.entry.image).truncated = true;
    let catalogue = crate::rules::built_in();
    let of = |all: &ProcessTable| {
        let mut all = all.clone();
        all.rows.get_mut(&1).unwrap().env_markers = Fact::Known(EnvMarkers::default());
        let image = &mut all.rows.get_mut(&312).unwrap().entry.image;
        Arc::make_mut(image).script = "/srv/server.js".into();
        let no_members = HashMap::new();
        let query = LeftoverQuery {
            rules: &catalogue,
            recorded: &[],
            own_pid: 61,
            uid: None,
            scope: &Scope::default(),
            members: &no_members,
            watched_since: None,
            kept: &[],
            min_age: 600 * S,
            now: 10_000 * S,
            honor_keep: true,
            waited: &HashMap::new(),
            requested_by_user: true,
        };
        why(&find(&all, &query), 312)
    };
    assert_eq!(of(&all), "multiplexed");
    for (argv, expected) in [
        ("/usr/bin/gnome-shell", "multiplexed"),
        ("/usr/bin/dbus-daemon\0--session", "multiplexed"),
        ("/usr/bin/supervisord", "multiplexed"),
        ("/usr/bin/nvim", "multiplexed"),
        ("/usr/bin/gpg-agent\0--daemon", "reap"),
        ("/usr/bin/dockerd", "reap"),
    ] {
        let all = table(&[p(310, 1, 50, argv, DEAD), left()]);
        assert_eq!(of(&all), expected, "{argv}");
    }
}

#[test]
fn outermost_process_with_strong_evidence_is_tree_top() {
    let keeper = |argv, env| p(201, 200, 101, argv, env);
    // An orphan below another leftover of the same agent.
    let inner = || P {
        sid: 180,
        ..p(202, 201, 102, NODE, DEAD)
    };
    let outer = || p(200, 1, 100, "/bin/sh", DEAD);
    let all = [outer(), keeper("/bin/keeper", "A=1\0"), inner()];
    let found = scan(&table(&all), |_| {});
    assert!(
        found
            .iter()
            .all(|leftover| leftover.subtree_root.pid == 200)
    );
    assert_eq!(why(&found, 202), "reap");
    // A reason to keep the process in between keeps its descendants.
    for (between, expected) in [
        (keeper("/usr/bin/sway", "A=1\0"), "keep_rule"),
        (keeper("/bin/keeper", "REAPER_KEEP=1\0"), "keep_marker"),
        (
            P {
                unit: "ci.service",
                ..keeper("/bin/keeper", "A=1\0")
            },
            "own_unit",
        ),
    ] {
        check(expected, &[outer(), between, inner()]);
    }
    // The process in between belongs to a living agent.
    let living = p(4200, 60, 50, "/bin/cat", "");
    check(
        "owner_alive",
        &[
            living,
            outer(),
            keeper(NODE, "CLAUDE_PID=4200\0"),
            p(202, 201, 102, NODE, ""),
        ],
    );
}

#[test]
fn marker_proves_nothing_after_change_of_user() {
    let of = |uid, euid, argv, env| P {
        uid,
        euid,
        ..p(200, 1, 100, argv, env)
    };
    for (process, expected) in [
        (of(1000, 0, NODE, DEAD), "changed_uid"),
        (of(0, 0, "/usr/bin/sudo\0make", DEAD), "changed_uid"),
        (of(0, 0, "/bin/su", DEAD), "changed_uid"),
        (
            of(0, 0, NODE, "CLAUDECODE=1\0CLAUDE_PID=4100\0SUDO_UID=1000\0"),
            "changed_uid",
        ),
        (
            of(
                0,
                0,
                NODE,
                "CLAUDECODE=1\0PKEXEC_UID=1000\0CLAUDE_PID=4100\0",
            ),
            "changed_uid",
        ),
        (
            of(0, 0, NODE, "CLAUDECODE=1\0CLAUDE_PID=4100\0DOAS_USER=u\0"),
            "changed_uid",
        ),
        (of(0, 0, SHELL, "SUDO_USER=u\0"), "changed_uid"),
        (
            P {
                login_uid: Some(1000),
                ..of(0, 0, NODE, DEAD)
            },
            "changed_uid",
        ),
        (
            P {
                login_uid: Some(0),
                ..of(0, 0, NODE, DEAD)
            },
            "reap",
        ),
        (of(0, 0, NODE, DEAD), "reap"),
    ] {
        check(expected, &[process]);
    }
}

#[test]
fn recorded_member_must_have_uid_of_agent() {
    for (uid, euid, of, expected) in [
        (1000, 1000, 1000, "reap"),
        (0, 0, 0, "reap"),
        (0, 0, 1000, "changed_uid"),
        (1000, 0, 1000, "changed_uid"),
        (26, 26, 0, "changed_uid"),
    ] {
        let member = P {
            uid,
            euid,
            ..p(200, 60, 100, NODE, "SUDO_UID=1000\0")
        };
        let found = scan_recorded(&table(&[member]), &[recorded(of)], |_| {});
        assert_eq!(why(&found, 200), expected, "{uid} {euid} {of}");
    }
    // Its marker names another agent, which is alive.
    let all = [
        p(4100, 60, 50, "/bin/opencode", ""),
        p(200, 60, 100, NODE, DEAD),
    ];
    let found = scan_recorded(&table(&all), &[recorded(1000)], |_| {});
    assert_eq!(why(&found, 200), "owner_alive");
}

#[test]
fn nested_agent_may_have_the_pid_in_the_marker() {
    let agent = |nested, name| P {
        nested,
        ..p(90, 60, 50, name, "")
    };
    let left = || p(200, 1, 100, NODE, DEAD);
    check("owner_uncertain", &[agent(true, "/x/claude"), left()]);
    check("reap", &[agent(false, "/x/claude"), left()]);
    check("reap", &[agent(true, "/bin/cat"), left()]);
    // A younger agent reuses the pid.
    check("reap", &[p(4100, 60, 150, "/x/claude", ""), left()]);
}
