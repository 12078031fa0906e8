//! Conditions of rules on sessions, processes and facts.

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

/// Returns rules with the agents `claude` and `codex`, without built-in rules and without `REAPER_KEEP`.
pub(super) fn ruled(rules: &str) -> Ruleset {
    read(&format!("honor_keep = false\n{rules}"))
}

thread_local! {
    /// Cache of [`read`], because a property reads the same rules for each of its cases.
    static READ: RefCell<HashMap<String, Ruleset>> = RefCell::default();
}

/// Like [`ruled`], with `honor_keep` as in the text.
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

/// Advances the clock.
pub(super) fn advance(w: &mut World, time: u64) {
    w.now += time;
    w.model.set_time(w.now, 0);
}

pub(super) fn set_facts(w: &mut World, key: ProcessKey, needs: FactSet, found: Facts) {
    let now = w.now;
    w.model.set_facts(key, needs, found, now);
}

pub(super) fn set_listening(w: &mut World, key: ProcessKey, listens: bool) {
    let found = Facts {
        listening: Fact::Known(listens),
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::LISTENING, found);
}

pub(super) fn set_unit(w: &mut World, key: ProcessKey, unit: &str) {
    let found = Facts {
        unit: Fact::Known(unit.into()),
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::UNIT, found);
}

pub(super) fn set_markers(w: &mut World, key: ProcessKey, markers: Fact<u64>) {
    let found = Facts {
        markers,
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::MARKERS, found);
}

const SERVERS: &str = "[[rule]]\nname = 'asked-for'\naction = 'reap'\nafter = '10min'\nsession = 'ok'\nlistening = true\n";

#[test]
fn only_a_listening_member_gets_the_delay_after_exit_0() {
    let mut w = world(ruled(SERVERS));
    let agent = w.spawn(INIT, "claude");
    let (server, test) = (w.spawn(agent, "vite"), w.spawn(agent, "jest"));
    w.exit(agent);
    advance(&mut w, 0);
    let unread = w.decide(server);
    assert_eq!(
        (unread.verdict, unread.reason),
        (Verdict::Wait, Reason::Unread)
    );
    assert_eq!(
        (unread.needs, unread.rule.as_deref()),
        (FactSet::LISTENING, Some("asked-for"))
    );
    set_listening(&mut w, server, true);
    set_listening(&mut w, test, false);
    assert_eq!(w.why(test), "reap root_exited");
    let waiting = w.decide(server);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    let due = waiting.due.unwrap().at;
    assert_eq!(
        (waiting.until, waiting.needs),
        (Some(due + 10 * MINUTE), FactSet::NONE)
    );
    advance(&mut w, 9 * MINUTE);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    advance(&mut w, MINUTE);
    w.model.forget_volatile(server);
    assert_eq!(
        w.decide(server).needs,
        FactSet::LISTENING,
        "read again after the delay"
    );
    set_listening(&mut w, server, true);
    assert_eq!(w.why(server), "reap root_exited asked-for");
}

#[test]
fn listening_member_gets_no_delay_after_a_crash() {
    let ends = [
        (ExitStatus::Exited(1), FactSet::NONE),
        (
            ExitStatus::Signalled {
                signal: 9,
                core: false,
            },
            FactSet::NONE,
        ),
        // The agent may have exited with status 0.
        (ExitStatus::Unknown, FactSet::LISTENING),
    ];
    for (ended, needs) in ends {
        let mut w = world(ruled(SERVERS));
        let agent = w.spawn(INIT, "claude");
        let server = w.spawn(agent, "vite");
        w.exit_with(agent, ended, Some(INIT));
        advance(&mut w, 0);
        assert_eq!(w.decide(server).needs, needs, "{ended:?}");
        let verdict = w.decide(server).verdict;
        assert_eq!(verdict == Verdict::Reap, needs.is_empty(), "{ended:?}");
        if !needs.is_empty() {
            set_listening(&mut w, server, true);
            assert_eq!(w.why(server), "wait rule_delay asked-for");
            advance(&mut w, 11 * MINUTE);
            assert_eq!(w.why(server), "reap root_exited");
            set_facts(&mut w, server, FactSet::LISTENING, Facts::unreadable());
            assert_eq!(w.why(server), "keep unreadable asked-for");
        }
    }
}

#[test]
fn delay_does_not_run_during_suspend() {
    let mut w = world(ruled(SERVERS));
    w.model.set_time(w.now, 0);
    let agent = w.spawn(INIT, "claude");
    let server = w.spawn(agent, "vite");
    w.exit(agent);
    advance(&mut w, MINUTE);
    set_listening(&mut w, server, true);
    let until = w.decide(server).until.unwrap();
    // The model learns of the suspend together with the time after it.
    w.now += 60 * MINUTE;
    w.model.set_time(w.now, 59 * MINUTE);
    assert_eq!(w.why(server), "wait rule_delay asked-for");
    assert_eq!(
        w.decide(server).until,
        Some(until),
        "the deadline is monotonic"
    );
    advance(&mut w, 9 * MINUTE);
    assert_eq!(w.why(server), "reap root_exited asked-for");
}

#[test]
fn first_rule_that_applies_decides() {
    let rules = "[[keep]]\nname = 'a'\ncomm = 'a'\n[[rule]]\nname = 'b'\naction = 'reap'\nsession = 'failed'\nargv = '* x'\n\
                 [[rule]]\nname = 'c'\naction = 'report'\nagent = 'codex'\n[[keep]]\nname = 'd'\nargv = '* x'\n";
    for (agent, status, expected) in [
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
        w.exit_with(root, ExitStatus::Exited(status), Some(INIT));
        assert_eq!(all.map(|key| w.why(key)), expected, "{agent} {status}");
    }
}

#[test]
fn reap_rule_below_a_living_root_respects_earlier_keeps() {
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
    advance(&mut w, MINUTE);
    assert_eq!(w.why(apt), "keep detached");
    assert_eq!(w.why(held), "keep root_alive");
    let waiting = w.decide(busy);
    assert_eq!(
        (waiting.verdict, waiting.needs),
        (Verdict::Wait, FactSet::NONE)
    );
    advance(&mut w, 30 * MINUTE);
    assert_eq!(w.decide(busy).needs, FactSet::CPU);
    for (key, cpu) in [(busy, 97), (idle, 3), (apt, 99)] {
        let found = Facts {
            cpu: Fact::Known(cpu),
            ..Facts::NOTHING
        };
        set_facts(&mut w, key, FactSet::CPU, found);
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
    set_facts(&mut w, busy, FactSet::CPU, Facts::unreadable());
    assert_eq!(w.why(busy), "keep unreadable busy");
}

#[test]
fn living_root_is_not_reaped_by_a_member_rule() {
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
fn each_condition_of_a_rule_is_evaluated() {
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
    for (condition, expected) in conditions {
        let mut w = world(ruled(&format!(
            "[[rule]]\nname = 'r'\naction = 'keep'\n{condition}\n"
        )));
        let agent = w.spawn(INIT, "claude");
        let tool = w.spawn(agent, "x");
        w.kill(agent);
        advance(&mut w, 0);
        let found = Facts {
            markers: Fact::Known(0),
            unit: Fact::Known("docker-12.scope".into()),
            kernel_session: Fact::Known(KernelSession { sid: 4, tty: 0 }),
            ..Facts::NOTHING
        };
        let all = FactSet::MARKERS | FactSet::UNIT | FactSet::KERNEL_SESSION;
        if !w.decide(tool).needs.is_empty() {
            set_facts(&mut w, tool, all, found);
        }
        if condition.starts_with("m") && condition.contains("_age") {
            let young = if condition.starts_with("min") {
                "reap root_exited"
            } else {
                "keep keep_rule r"
            };
            assert_eq!(w.why(tool), young, "{condition}");
            advance(&mut w, 5 * MINUTE);
        }
        assert_eq!(w.why(tool), expected, "{condition}");
    }
}

#[test]
fn new_session_compares_with_the_roots_session_id() {
    for (sid, expected) in [(4, "reap root_exited"), (5, "keep keep_rule r")] {
        let mut w = world(ruled(
            "[[rule]]\nname = 'r'\naction = 'keep'\nnew_session = true\n",
        ));
        let agent = w.fork(INIT);
        let image = Image {
            sid: 4,
            ..Image::clone(&image("claude", 0))
        };
        w.exec_image(agent, image);
        let tool = w.spawn(agent, "x");
        w.kill(agent);
        advance(&mut w, 0);
        let found = Facts {
            kernel_session: Fact::Known(KernelSession { sid, tty: 0 }),
            ..Facts::NOTHING
        };
        set_facts(&mut w, tool, FactSet::KERNEL_SESSION, found);
        assert_eq!(w.why(tool), expected, "{sid}");
    }
}

#[test]
fn member_is_kernel_killable_only_if_no_rule_may_keep_it() {
    let is_killable = |w: &World, key| w.model.is_kernel_killable(w.model.tree.get(key).unwrap());
    let mut w = world(read(SERVERS));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    assert!(!is_killable(&w, shell), "its markers are unread");
    set_markers(&mut w, shell, Fact::Known(0));
    assert!(
        is_killable(&w, shell),
        "the delay needs an exit with status 0"
    );
    let keep = UserKeep {
        until_monotonic_ns: None,
        with_descendants: false,
        by_uid: 0,
        made_at: 1,
    };
    w.model.keep(shell, keep);
    assert!(!is_killable(&w, shell));
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
        set_markers(&mut w, shell, Fact::Known(0));
        assert_eq!(is_killable(&w, shell), is, "{rule}");
    }
}

#[test]
fn changed_rules_apply_to_open_sessions() {
    let mut w = world(ruled("[[keep]]\nname = 'x'\ncomm = 'x'\n"));
    let agent = w.spawn(INIT, "claude");
    let (x, y) = (w.spawn(agent, "x"), w.spawn(agent, "y"));
    w.kill(agent);
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
