//! Who may be an agent, or have handed a mark on, or be another user's: nothing is reaped on that.

use super::*;

/// What is said of the last one, where these pids could not be read.
#[track_caller]
fn check_unread(expected: &str, processes: &[P], unread: &[(u32, Option<u32>)]) {
    let mut table = table(processes);
    table.unread.extend(unread.iter().copied());
    let last = processes.last().map_or(0, |p| p.pid);
    let strays = ask(&table, |_| {});
    assert_eq!(said(&strays, last), expected, "{strays:#?}");
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
fn whoever_cannot_be_read_may_be_its_agent_or_has_handed_the_mark_on() {
    let marked = || p(200, 1, 100, NODE, DEAD);
    let shell = || p(200, 1, 100, SHELL, BARE);
    for (unread, of_marked, of_shell) in [
        (
            &[(900, Some(1000))][..],
            "agent_uncertain",
            "agent_uncertain",
        ),
        (&[(900, None)], "agent_uncertain", "agent_uncertain"),
        // Another user's.
        (&[(900, Some(1001))], "reap", "reap"),
        (
            &[(900, Some(0)), (901, Some(1000))],
            "agent_uncertain",
            "agent_uncertain",
        ),
    ] {
        check_unread(of_marked, &[marked()], unread);
        check_unread(of_shell, &[shell()], unread);
        let mut all = table(&[p(200, 60, 100, NODE, "")]);
        all.unread.extend(unread.iter().copied());
        let strays = ask_recorded(&all, &[recorded(1000)], |_| {});
        assert_eq!(said(&strays, 200), of_shell);
    }
    // The leader of its session, and whoever is above it.
    let of_session = P {
        sid: 900,
        ..marked()
    };
    check_unread("terminal_session", &[of_session], &[(900, Some(0))]);
    let mut all = table(&[p(200, 900, 100, NODE, "")]);
    all.unread.insert(900, Some(0));
    let strays = ask_recorded(&all, &[recorded(1000)], |_| {});
    assert_eq!(said(&strays, 200), "not_orphan");
}

#[test]
fn a_host_whose_environment_cannot_be_read_may_have_the_mark() {
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
        // No such places.
        (host("/usr/bin/cat", 1000), "reap"),
        (host("/usr/bin/ssh-agent", 1000), "reap"),
        (host("/x/claude", 1000), "agent_uncertain"),
    ] {
        check(expected, &[host, p(312, 1, 70, NODE, DEAD)]);
    }
    // It was read in part only.
    let mut cut = table(&[
        p(310, 1, 50, "/usr/bin/kitty", ""),
        p(312, 1, 70, NODE, DEAD),
    ]);
    cut.rows.get_mut(&310).unwrap().env_markers = Fact::Known(EnvMarkers::of(b"A=1\0", false));
    assert_eq!(said(&ask(&cut, |_| {}), 312), "multiplexed");
    // The leader of its session.
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
fn what_rules_keep_hands_its_environment_on() {
    let desktop = |start, env| p(310, 1, start, "/usr/bin/sway", env);
    let left = || p(312, 1, 70, NODE, DEAD);
    check("multiplexed", &[desktop(50, DEAD), left()]);
    check("reap", &[desktop(50, "A=1\0"), left()]);
    // It came later, and so did its mark.
    check("reap", &[desktop(80, DEAD), left()]);
    check("keep_rule", &[desktop(50, DEAD)]);
    check("keep_rule", &[desktop(50, DEAD), p(311, 310, 60, NODE, "")]);
    let agent = p(310, 1, 50, "/usr/bin/ssh-agent", DEAD);
    check("reap", &[agent, left()]);
    // Where the command line is cut that may tell.
    let mut all = table(&[p(310, 1, 50, "/usr/bin/java", DEAD), left()]);
    let java = all.rows.get_mut(&310).unwrap();
    Arc::make_mut(&mut java.entry.image).truncated = true;
    let catalogue = crate::rules::built_in();
    let of = |all: &ProcessTable| {
        let mut all = all.clone();
        all.rows.get_mut(&1).unwrap().env_markers = Fact::Known(EnvMarkers::default());
        let nobody = HashMap::new();
        let question = LeftoverQuery {
            rules: &catalogue,
            recorded: &[],
            own_pid: 61,
            uid: None,
            scope: &Scope::default(),
            members: &nobody,
            watched_since: None,
            kept: &[],
            min_age: 600 * S,
            now: 10_000 * S,
            honor_keep: true,
            waited: &HashMap::new(),
            by_order: true,
        };
        said(&find(&all, &question), 312)
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
fn the_outermost_for_which_strong_evidence_speaks_is_the_head() {
    let keeper = |argv, env| p(201, 200, 101, argv, env);
    // An orphan below something that the same agent has left.
    let inner = || P {
        sid: 180,
        ..p(202, 201, 102, NODE, DEAD)
    };
    let outer = || p(200, 1, 100, "/bin/sh", DEAD);
    let all = [outer(), keeper("/bin/keeper", "A=1\0"), inner()];
    let strays = ask(&table(&all), |_| {});
    assert!(strays.iter().all(|stray| stray.subtree_root.pid == 200));
    assert_eq!(said(&strays, 202), "reap");
    // What keeps the one between keeps the one below.
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
    // One between belongs to an agent that lives.
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
fn a_mark_proves_nothing_of_who_changes_the_user() {
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
fn who_was_recorded_runs_as_the_agent_did() {
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
        let strays = ask_recorded(&table(&[member]), &[recorded(of)], |_| {});
        assert_eq!(said(&strays, 200), expected, "{uid} {euid} {of}");
    }
    // It names another agent, which lives.
    let all = [
        p(4100, 60, 50, "/bin/opencode", ""),
        p(200, 60, 100, NODE, DEAD),
    ];
    let strays = ask_recorded(&table(&all), &[recorded(1000)], |_| {});
    assert_eq!(said(&strays, 200), "owner_alive");
}

#[test]
fn an_agent_may_be_known_by_another_pid_than_here() {
    let agent = |nested, name| P {
        nested,
        ..p(90, 60, 50, name, "")
    };
    let left = || p(200, 1, 100, NODE, DEAD);
    check("owner_uncertain", &[agent(true, "/x/claude"), left()]);
    check("reap", &[agent(false, "/x/claude"), left()]);
    check("reap", &[agent(true, "/bin/cat"), left()]);
    // An agent that began later has reused the pid.
    check("reap", &[p(4100, 60, 150, "/x/claude", ""), left()]);
}
