//! Rules over the state of sessions and processes, and over what has to be read.

use std::cell::RefCell;
use std::collections::HashMap;

use toml::de::DeTable;

use super::world::{INIT, World, image};
use crate::event::{ExitStatus, Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts, KernelSession};
use crate::policy::{Reason, Verdict};
use crate::rules::Rules;
use crate::ruleset::Ruleset;
use crate::user_keep::UserKeep;

pub(super) const MINUTE: u64 = 60_000_000_000;

/// Agents `claude` and `codex`, and the rules that are given; nothing that is built in, and marks mean nothing.
pub(super) fn ruled(rules: &str) -> Ruleset {
    read(&format!("honor_keep = false\n{rules}"))
}

thread_local! {
    /// What [`read`] has read: a property asks for the same in each of its cases.
    static READ: RefCell<HashMap<String, Ruleset>> = RefCell::default();
}

pub(super) fn read(rules: &str) -> Ruleset {
    let parse = || {
        let text = format!(
            "{rules}\n[defaults]\nagents = false\nboundaries = false\nkeeps = false\n\
             [[agent]]\nname = 'claude'\ncomm = 'claude'\n[[agent]]\nname = 'codex'\ncomm = 'codex'\n"
        );
        let top = |line: &&str| line.starts_with("honor_keep") || line.starts_with("enable");
        let (top, rest): (Vec<&str>, Vec<&str>) = text.lines().partition(top);
        let text = format!("{}\n{}", top.join("\n"), rest.join("\n"));
        let root = DeTable::parse(&text).unwrap();
        Rules::read(root.get_ref()).unwrap().in_force
    };
    READ.with_borrow_mut(|read| {
        let known = read.entry(rules.to_owned());
        known.or_insert_with(parse).clone()
    })
}

pub(super) fn world(rules: Ruleset) -> World {
    let mut w = World::new();
    w.model.set_rules(rules);
    w
}

/// Lets time pass.
pub(super) fn pass(w: &mut World, time: u64) {
    w.now += time;
    w.model.set_now(w.now);
}

pub(super) fn tell(w: &mut World, key: ProcessKey, needs: FactSet, found: Facts) {
    let now = w.now;
    w.model.set_facts(key, needs, found, now);
}

pub(super) fn listens(w: &mut World, key: ProcessKey, listens: bool) {
    let found = Facts {
        listening: Fact::Known(listens),
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::LISTENING, found);
}

pub(super) fn unit(w: &mut World, key: ProcessKey, unit: &str) {
    let found = Facts {
        unit: Fact::Known(unit.into()),
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::UNIT, found);
}

pub(super) fn marked(w: &mut World, key: ProcessKey, marks: Fact<u64>) {
    let found = Facts {
        markers: marks,
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::MARKERS, found);
}

const SERVERS: &str = "[[rule]]\nname = 'asked-for'\naction = 'reap'\nafter = '10min'\nsession = 'ok'\nlistening = true\n";

#[test]
fn a_server_that_was_just_asked_for_has_its_time_and_nothing_else_has() {
    let mut w = world(ruled(SERVERS));
    let agent = w.spawn(INIT, "claude");
    let (server, test) = (w.spawn(agent, "vite"), w.spawn(agent, "jest"));
    w.exit(agent);
    pass(&mut w, 0);
    let asks = w.decide(server);
    assert_eq!((asks.verdict, asks.reason), (Verdict::Wait, Reason::Unread));
    assert_eq!(
        (asks.needs, asks.rule.as_deref()),
        (FactSet::LISTENING, Some("asked-for"))
    );
    listens(&mut w, server, true);
    listens(&mut w, test, false);
    assert_eq!(w.why(test), "reap root_exited");
    let waits = w.decide(server);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    let due = waits.due.unwrap().at;
    assert_eq!(
        (waits.until, waits.needs),
        (Some(due + 10 * MINUTE), FactSet::NONE)
    );
    pass(&mut w, 9 * MINUTE);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    pass(&mut w, MINUTE);
    w.model.forget_volatile(server);
    assert_eq!(w.decide(server).needs, FactSet::LISTENING, "asked anew");
    listens(&mut w, server, true);
    assert_eq!(w.why(server), "reap root_exited asked-for");
}

#[test]
fn a_server_dies_at_once_with_an_agent_that_crashed_and_unread_it_is_kept() {
    let ends = [
        (ExitStatus::Exited(1), FactSet::NONE),
        (
            ExitStatus::Signalled {
                signal: 9,
                core: false,
            },
            FactSet::NONE,
        ),
        // Perhaps it was quit in peace: nobody knows.
        (ExitStatus::Unknown, FactSet::LISTENING),
    ];
    for (ended, needs) in ends {
        let mut w = world(ruled(SERVERS));
        let agent = w.spawn(INIT, "claude");
        let server = w.spawn(agent, "vite");
        w.end(agent, ended, Some(INIT));
        pass(&mut w, 0);
        assert_eq!(w.decide(server).needs, needs, "{ended:?}");
        let verdict = w.decide(server).verdict;
        assert_eq!(verdict == Verdict::Reap, needs.is_empty(), "{ended:?}");
        if !needs.is_empty() {
            listens(&mut w, server, true);
            assert_eq!(w.why(server), "wait rule_delay asked-for");
            pass(&mut w, 11 * MINUTE);
            assert_eq!(w.why(server), "reap root_exited");
            tell(&mut w, server, FactSet::LISTENING, Facts::unreadable());
            assert_eq!(w.why(server), "keep unreadable asked-for");
        }
    }
}

#[test]
fn what_was_slept_through_is_not_waited_for() {
    let mut w = world(ruled(SERVERS));
    w.model.set_suspended(0);
    let agent = w.spawn(INIT, "claude");
    let server = w.spawn(agent, "vite");
    w.exit(agent);
    pass(&mut w, MINUTE);
    listens(&mut w, server, true);
    let until = w.decide(server).until.unwrap();
    pass(&mut w, 60 * MINUTE);
    w.model.set_suspended(59 * MINUTE);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    assert_eq!(w.decide(server).until, Some(until), "monotonic time");
    pass(&mut w, 9 * MINUTE);
    assert_eq!(w.why(server), "reap root_exited asked-for");
}

#[test]
fn the_first_rule_that_holds_decides_whatever_it_does() {
    let rules = "[[keep]]\nname = 'a'\ncomm = 'a'\n[[rule]]\nname = 'b'\naction = 'reap'\nsession = 'failed'\nargv = '* x'\n\
                 [[rule]]\nname = 'c'\naction = 'report'\nagent = 'codex'\n[[keep]]\nname = 'd'\nargv = '* x'\n";
    for (agent, status, said) in [
        (
            "claude",
            0,
            ["keep keep_rule a", "keep keep_rule d", "reap root_exited"],
        ),
        (
            "claude",
            1,
            ["keep keep_rule a", "reap root_exited b", "reap root_exited"],
        ),
        (
            "codex",
            0,
            [
                "keep keep_rule a",
                "report report_rule c",
                "report report_rule c",
            ],
        ),
    ] {
        let mut w = world(ruled(rules));
        let root = w.spawn(INIT, agent);
        let all = ["a", "y x", "y z"].map(|program| w.spawn(root, program));
        assert_eq!(w.why(all[0]), "keep root_alive");
        w.end(root, ExitStatus::Exited(status), Some(INIT));
        assert_eq!(all.map(|key| w.why(key)), said, "{agent} {status}");
    }
}

#[test]
fn under_a_living_agent_only_what_a_rule_says_and_not_what_something_keeps() {
    let rules = "[[keep]]\nname = 'apt'\ncomm = 'apt'\n\
                 [[rule]]\nname = 'busy'\naction = 'reap'\nafter = '30min'\nsession = 'alive'\norphan = true\nmin_cpu = 90\n";
    let mut w = world(ruled(rules));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let (apt, busy, idle) = (
        w.spawn(shell, "apt"),
        w.spawn(shell, "yes"),
        w.spawn(shell, "vite"),
    );
    let script = w.spawn(apt, "dpkg");
    let held = w.spawn(agent, "node");
    w.exit(shell);
    pass(&mut w, MINUTE);
    assert_eq!(w.why(apt), "keep detached");
    assert_eq!(w.why(held), "keep root_alive");
    let waits = w.decide(busy);
    assert_eq!((waits.verdict, waits.needs), (Verdict::Wait, FactSet::NONE));
    pass(&mut w, 30 * MINUTE);
    assert_eq!(w.decide(busy).needs, FactSet::CPU);
    for (key, cpu) in [(busy, 97), (idle, 3), (apt, 99)] {
        let found = Facts {
            cpu: Fact::Known(cpu),
            ..Facts::NOTHING
        };
        tell(&mut w, key, FactSet::CPU, found);
    }
    let keys = [busy, idle, apt, script];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "reap reap_rule busy",
            "keep detached",
            "keep detached",
            "keep root_alive"
        ]
    );
    tell(&mut w, busy, FactSet::CPU, Facts::unreadable());
    assert_eq!(w.why(busy), "keep unreadable busy");
}

#[test]
fn a_living_agent_is_no_prey_of_a_rule() {
    let rules =
        "[[rule]]\nname = 'all'\naction = 'reap'\nsession = 'any'\nargv = ['claude*', 'codex*']\n";
    let mut w = world(ruled(rules));
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let inner = w.spawn(agent, "codex");
    w.exit(shell);
    assert_eq!(
        [agent, inner].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
    w.exit(agent);
    assert_eq!(w.why(inner), "reap root_exited all");
}

#[test]
fn ages_terminals_children_and_sessions_are_asked_for() {
    let conditions = [
        ("min_age = '5min'", "keep keep_rule r"),
        ("max_age = '5min'", "reap root_exited"),
        ("children = false", "keep keep_rule r"),
        ("children = true", "reap root_exited"),
        ("tty = true", "reap root_exited"),
        ("tty = false", "keep keep_rule r"),
        ("new_session = true", "keep unreadable r"),
        ("uid = 1000", "keep keep_rule r"),
        ("uid = 'other'", "reap root_exited"),
        ("uid = 'same'", "keep keep_rule r"),
        ("agent = ['codex']", "reap root_exited"),
        ("orphan = true", "keep keep_rule r"),
        ("multiplexed = true", "reap root_exited"),
        ("environment = ['CI=*']", "reap root_exited"),
        ("unit = 'docker-*.scope'", "keep keep_rule r"),
    ];
    for (condition, said) in conditions {
        let mut w = world(ruled(&format!(
            "[[rule]]\nname = 'r'\naction = 'keep'\n{condition}\n"
        )));
        let agent = w.spawn(INIT, "claude");
        let tool = w.spawn(agent, "x");
        w.dies_by_signal(agent);
        pass(&mut w, 0);
        let found = Facts {
            markers: Fact::Known(0),
            unit: Fact::Known("docker-12.scope".into()),
            kernel_session: Fact::Known(KernelSession { sid: 4, tty: 0 }),
            ..Facts::NOTHING
        };
        let all = FactSet::MARKERS | FactSet::UNIT | FactSet::KERNEL_SESSION;
        if !w.decide(tool).needs.is_empty() {
            tell(&mut w, tool, all, found);
        }
        if condition.starts_with("m") && condition.contains("_age") {
            let young = if condition.starts_with("min") {
                "reap root_exited"
            } else {
                "keep keep_rule r"
            };
            assert_eq!(w.why(tool), young, "{condition}");
            pass(&mut w, 5 * MINUTE);
        }
        assert_eq!(w.why(tool), said, "{condition}");
    }
}

#[test]
fn new_session_is_one_that_the_agent_is_not_in() {
    for (sid, said) in [(4, "reap root_exited"), (5, "keep keep_rule r")] {
        let mut w = world(ruled(
            "[[rule]]\nname = 'r'\naction = 'keep'\nnew_session = true\n",
        ));
        let agent = w.fork(INIT);
        let image = Image {
            sid: 4,
            ..Image::clone(&image("claude", 0))
        };
        w.runs(agent, image);
        let tool = w.spawn(agent, "x");
        w.dies_by_signal(agent);
        pass(&mut w, 0);
        let found = Facts {
            kernel_session: Fact::Known(KernelSession { sid, tty: 0 }),
            ..Facts::NOTHING
        };
        tell(&mut w, tool, FactSet::KERNEL_SESSION, found);
        assert_eq!(w.why(tool), said, "{sid}");
    }
}

#[test]
fn only_what_nothing_could_spare_is_left_to_the_probes() {
    let clear = |w: &World, key| w.model.is_kernel_killable(w.model.tree.get(key).unwrap());
    let mut w = world(read(SERVERS));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    assert!(!clear(&w, shell), "its marks are not known");
    marked(&mut w, shell, Fact::Known(0));
    assert!(
        clear(&w, shell),
        "servers have their time after a quiet end only"
    );
    let keep = UserKeep {
        until_monotonic_ns: None,
        with_descendants: false,
        by_uid: 0,
        made_at: 1,
    };
    w.model.keep(shell, keep);
    assert!(!clear(&w, shell));
    for (rule, is) in [
        ("action = 'report'\ntty = true", false),
        (
            "action = 'reap'\nafter = '1min'\nsession = 'signalled'\nlistening = true",
            false,
        ),
        (
            "action = 'reap'\nafter = '1min'\nsession = 'alive'\norphan = true",
            true,
        ),
        ("action = 'keep'\nagent = 'codex'\ntty = true", true),
        ("action = 'keep'\nenvironment = ['CI=*']", true),
        ("action = 'keep'\nunit = 'x*'", false),
    ] {
        let mut w = world(read(&format!("[[rule]]\nname = 'r'\n{rule}\n")));
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        marked(&mut w, shell, Fact::Known(0));
        assert_eq!(clear(&w, shell), is, "{rule}");
    }
}

#[test]
fn other_rules_are_for_the_sessions_that_there_are_too() {
    let mut w = world(ruled("[[keep]]\nname = 'x'\ncomm = 'x'\n"));
    let agent = w.spawn(INIT, "claude");
    let (x, y) = (w.spawn(agent, "x"), w.spawn(agent, "y"));
    w.dies_by_signal(agent);
    assert_eq!(
        [x, y].map(|key| w.why(key)),
        ["keep keep_rule x", "reap root_exited"]
    );
    w.model
        .set_rules(ruled("[[keep]]\nname = 'y'\ncomm = 'y'\n"));
    assert_eq!(
        [x, y].map(|key| w.why(key)),
        ["reap root_exited", "keep keep_rule y"]
    );
    let other = w.spawn(INIT, "codex");
    assert_eq!(w.root_of(other), Some(other));
}
