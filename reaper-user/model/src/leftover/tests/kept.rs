//! Processes that are kept although they look like leftovers, and limits of the search.

use super::*;

#[test]
fn process_with_reason_to_keep_is_kept() {
    let subtree_root = || p(200, 1, 100, "/bin/sh", DEAD);
    check(
        "keep_rule",
        &[subtree_root(), p(201, 200, 101, "/usr/bin/ssh-agent", "")],
    );
    check(
        "keep_rule",
        &[
            subtree_root(),
            p(201, 200, 101, "/usr/bin/ssh-agent", ""),
            p(202, 201, 102, NODE, ""),
        ],
    );
    check(
        "boundary",
        &[
            subtree_root(),
            p(201, 200, 101, "/usr/bin/tmux", ""),
            p(202, 201, 102, NODE, ""),
        ],
    );
    check(
        "keep_marker",
        &[p(200, 1, 100, NODE, "CLAUDE_PID=4100\0REAPER_KEEP=1\0")],
    );
    check(
        "keep_marker",
        &[subtree_root(), p(201, 200, 101, NODE, "REAPER_KEEP=1\0")],
    );
    let unit = |pid, parent, unit| P {
        unit,
        ..p(pid, parent, 100, NODE, DEAD)
    };
    check("own_unit", &[unit(200, 50, "web.service")]);
    check("own_unit", &[unit(200, 50, "run-u12.scope")]);
    check("reap", &[unit(200, 50, "vte-spawn-0a1b.scope")]);
    // An application that the desktop started, and a program typed in one.
    check("own_unit", &[unit(200, 50, "app-mail@1.service")]);
    check(
        "reap",
        &[P {
            sid: 180,
            ..unit(200, 50, "app-konsole@1.service")
        }],
    );
    check(
        "own_unit",
        &[subtree_root(), unit(201, 200, "docker-0a1b.scope")],
    );
    // The unit is that of the adopter.
    let mut adopter = p(150, 60, 50, "/usr/bin/keeper", "");
    adopter.unit = "ci.service";
    let left = P {
        sid: 180,
        ..unit(200, 150, "ci.service")
    };
    check("reap", &[adopter, left]);
    // The calling program runs below it, so a user works there.
    let mut own = table(&[
        p(200, 1, 100, "/bin/bash", DEAD),
        p(202, 200, 105, NODE, DEAD),
    ]);
    own.rows.insert(60, p(60, 200, 110, "/bin/zsh", DEAD).row());
    let found = scan(&own, |_| {});
    assert_eq!(why(&found, 202), "never_self");
    assert_eq!((why(&found, 60), why(&found, 200)), ("-", "-"));
}

#[test]
fn script_that_might_keep_a_leftover_keeps_it() {
    let condition = |field, pattern| Condition {
        field,
        any_of: vec![Pattern::exe(pattern).unwrap()],
        negative: false,
    };
    let daemon = Matcher::new(vec![
        condition(Field::Exe, "**/node"),
        condition(Field::Script, "**/daemon.js"),
    ]);
    let keep = Rule::new("daemon", Action::Keep, vec![daemon]);
    let rules = Ruleset::new(rules().rules().iter().cloned().chain([keep]).collect());
    for (script, expected) in [
        ("", "unreadable"),
        ("/lib/daemon.js", "keep_rule"),
        ("/lib/other.js", "reap"),
    ] {
        let mut rows = table(&[p(200, 1, 100, "/usr/bin/node\0/bin/tool", DEAD)]);
        let image = &mut rows.rows.get_mut(&200).unwrap().entry.image;
        Arc::make_mut(image).script = script.into();
        let found = scan(&rows, |options| options.rules = rules.clone());
        assert_eq!(why(&found, 200), expected, "{script:?}");
    }
}

#[test]
fn descendant_of_living_agent_is_no_leftover() {
    let agent = || p(70, 60, 50, "/x/claude", "");
    check("-", &[agent(), p(200, 70, 100, NODE, "CLAUDE_PID=70\0")]);
    // A nested agent, of which the inner one has exited.
    check("-", &[agent(), p(200, 70, 100, NODE, DEAD)]);
    // An agent that an exited agent started is only reported.
    check("agent", &[p(200, 1, 100, "/x/claude", DEAD)]);
    check(
        "-",
        &[
            p(200, 1, 100, "/x/claude", DEAD),
            p(201, 200, 101, NODE, DEAD),
        ],
    );
}

#[test]
fn process_watched_by_service_is_no_leftover() {
    let all = table(&[
        p(200, 1, 100, "/bin/sh", DEAD),
        p(201, 200, 300, NODE, ""),
        p(210, 1, 300, NODE, DEAD),
        p(220, 1, 100, NODE, DEAD),
        p(221, 220, 101, NODE, DEAD),
        p(230, 1, 300, SHELL, BARE),
    ]);
    let members = |start| {
        let key = ProcessKey {
            pid: 220,
            start: start * S,
        };
        HashMap::from_iter([(220, key)])
    };
    let (theirs, others) = (members(100), members(99));
    let of = |members: HashMap<u32, ProcessKey>, since| {
        let found = scan(&all, |q| (q.members, q.since) = (members, since));
        [200, 201, 210, 220, 221, 230].map(|pid| why(&found, pid))
    };
    // A process that started since the service watches is a leftover only below an older one.
    assert_eq!(
        of(theirs, Some(200 * S)),
        ["reap", "reap", "-", "-", "-", "-"]
    );
    assert_eq!(of(others, None), ["reap"; 6]);
}

#[test]
fn search_is_limited_to_user_and_scope() {
    let other = P {
        uid: 1001,
        euid: 1001,
        ..p(200, 1, 100, NODE, DEAD)
    };
    let all = table(&[
        other,
        p(150, 60, 50, "/bin/x", ""),
        P {
            sid: 180,
            ..p(210, 150, 100, NODE, DEAD)
        },
    ]);
    let of = |uid, scope: &Scope| {
        let mut all = all.clone();
        let image = Arc::make_mut(&mut all.rows.get_mut(&210).unwrap().entry.image);
        image.cgroup_id = 7;
        let found = scan(&all, |q| (q.uid, q.scope) = (uid, scope.clone()));
        (why(&found, 200), why(&found, 210))
    };
    let mut scope = Scope::default();
    assert_eq!(of(None, &scope), ("reap", "reap"));
    assert_eq!(of(Some(1000), &scope), ("-", "reap"));
    scope.cgroups.push(7);
    assert_eq!(of(None, &scope), ("-", "reap"));
    scope.cgroups[0] = 8;
    assert_eq!(of(None, &scope), ("-", "-"));
    scope.roots.push(ProcessKey {
        pid: 150,
        start: 50 * S,
    });
    assert_eq!(of(None, &scope), ("-", "reap"));
    // A process of another user below a leftover.
    let other = P {
        uid: 0,
        euid: 0,
        ..p(201, 200, 101, NODE, DEAD)
    };
    let rules = scan(&table(&[p(200, 1, 100, "/bin/sh", DEAD), other]), |_| {});
    assert_eq!(why(&rules, 201), "other_uid");
}

#[test]
fn keep_of_a_unit_with_more_conditions_keeps() {
    for (program, own_unit, expected) in [
        (None, true, "reap"),
        (None, false, "keep_rule"),
        (Some("/usr/bin/node"), true, "keep_rule"),
        (Some("/usr/bin/other"), true, "reap"),
    ] {
        let mut keep = match program {
            Some(program) => rule("mine", Action::Keep, program),
            None => Rule::new("mine", Action::Keep, Vec::new()),
        };
        keep.when.own_unit = Some(own_unit);
        let rules = Ruleset::new(vec![keep]);
        let all = table(&[p(200, 1, 100, NODE, DEAD)]);
        let found = scan(&all, |query| query.rules = rules);
        assert_eq!(why(&found, 200), expected, "{program:?} {own_unit}");
    }
}

#[test]
fn grace_and_need_follow_the_programs_above() {
    let mut database = rule("database", Action::Reap, "/usr/bin/redis");
    database.grace_ns = 60 * S;
    let rules = Ruleset::new(vec![database]);
    let all = table(&[
        p(200, 1, 100, "/bin/sh", DEAD),
        p(201, 200, 101, "/usr/bin/redis", DEAD),
        p(202, 201, 102, "/bin/sh", DEAD),
        p(203, 202, 103, NODE, DEAD),
        p(204, 203, 104, "/usr/bin/redis", DEAD),
    ]);
    let key = |pid: u32| all.rows[&pid].entry.key;
    let of = |reaped: &[u32]| {
        let graces = graces(&all, &rules, &reaped.iter().map(|pid| key(*pid)).collect());
        reaped
            .iter()
            .map(|pid| {
                graces
                    .get(&key(*pid))
                    .map(|grace| (grace.ns / S, grace.needed_by))
            })
            .collect::<Vec<_>>()
    };
    let above = Some(key(201));
    assert_eq!(
        of(&[200, 201, 203, 204]),
        [None, Some((60, None)), Some((0, above)), Some((60, above))]
    );
    // One that is kept needs no help.
    assert_eq!(of(&[203, 204]), [None, Some((60, None))]);
    assert_eq!(of(&[200, 203]), [None, None]);
}

#[test]
fn kernel_thread_and_init_are_no_leftovers() {
    let mut all = table(&[p(2, 0, 0, "", DEAD), p(200, 1, 100, NODE, DEAD)]);
    if let Some(row) = all.rows.get_mut(&2) {
        row.entry.kernel_thread = true;
    }
    if let Some(row) = all.rows.get_mut(&1) {
        row.env_markers = Fact::Known(EnvMarkers::of(DEAD.as_bytes(), true));
    }
    let found = scan(&all, |_| {});
    assert_eq!((why(&found, 1), why(&found, 2)), ("-", "-"));
    // Init has that marker itself, so it may have started the process.
    assert_eq!(why(&found, 200), "not_orphan");
    // A corrupt table.
    let ring = [p(300, 301, 100, NODE, DEAD), p(301, 300, 100, NODE, DEAD)];
    assert_eq!(why(&scan(&table(&ring), |_| {}), 300), "not_orphan");
}
