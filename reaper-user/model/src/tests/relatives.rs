//! Relatives (ancestors and descendants) of members that wait for a delay or are kept because they listen.

use std::time::{Duration, Instant};

use super::rules::{MINUTE, advance, ruled, set_facts, set_listening, world};
use super::world::{INIT, USER, World};
use crate::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use crate::facts::{FactSet, Facts};
use crate::policy::Reason;

const SERVERS: &str = "[[rule]]\nname = 'servers'\naction = 'reap'\nafter = '10min'\nsession = 'ok'\nlistening = true\n";

/// Returns an agent with two trees: `npm` > `sh` > `vite` > `esbuild`, and `make` > `cc`.
fn tree(rules: &str) -> (World, ProcessKey, [ProcessKey; 6]) {
    let mut w = world(ruled(rules));
    let agent = w.spawn(INIT, "claude");
    let npm = w.spawn(agent, "npm");
    let sh = w.spawn(npm, "sh");
    let vite = w.spawn(sh, "vite");
    let esbuild = w.spawn(vite, "esbuild");
    let make = w.spawn(agent, "make");
    let cc = w.spawn(make, "cc");
    (w, agent, [npm, sh, vite, esbuild, make, cc])
}

/// The same after the agent's exit. All members except `vite` are known not to listen.
fn exited(rules: &str, status: ExitStatus) -> (World, [ProcessKey; 6]) {
    let (mut w, agent, all) = tree(rules);
    w.exit_with(agent, status, Some(INIT));
    advance(&mut w, 0);
    let others = all.into_iter().filter(|key| *key != all[2]);
    others.for_each(|key| set_listening(&mut w, key, false));
    (w, all)
}

fn whys(w: &World, all: &[ProcessKey]) -> Vec<String> {
    all.iter().map(|key| w.why(*key)).collect()
}

#[test]
fn only_relatives_of_a_server_wait_with_it() {
    let (mut w, all) = exited(SERVERS, ExitStatus::Exited(0));
    for key in [all[0], all[1], all[3]] {
        let decision = w.decide(key);
        let (needs, of) = (decision.needs, decision.relative);
        assert_eq!(decision.reason, Reason::Unread, "`vite` may be a server");
        assert_eq!((needs, of), (FactSet::LISTENING, Some(all[2])));
    }
    assert_eq!(whys(&w, &all[4..]), ["reap root_exited"; 2]);
    set_listening(&mut w, all[2], true);
    assert_eq!(whys(&w, &all[..4]), ["wait rule_delay servers"; 4]);
    let until = w.decide(all[2]).until;
    assert!(until.is_some());
    assert_eq!(
        all[..4]
            .iter()
            .map(|key| w.decide(*key).until)
            .collect::<Vec<_>>(),
        [until; 4]
    );
    assert_eq!(whys(&w, &all[4..]), ["reap root_exited"; 2]);
    advance(&mut w, 10 * MINUTE);
    let after_delay = [
        "reap root_exited",
        "reap root_exited",
        "reap root_exited servers",
        "reap root_exited",
    ];
    assert_eq!(whys(&w, &all[..4]), after_delay);
}

#[test]
fn member_with_unreadable_sockets_holds_relatives() {
    for (unreadable, expected) in [
        (false, "reap root_exited"),
        (true, "wait rule_delay servers"),
    ] {
        let (mut w, all) = exited(SERVERS, ExitStatus::Exited(0));
        if unreadable {
            set_facts(&mut w, all[2], FactSet::LISTENING, Facts::unreadable());
        } else {
            set_listening(&mut w, all[2], false);
        }
        assert_eq!(whys(&w, &[all[0], all[1], all[3]]), [expected; 3]);
        advance(&mut w, 10 * MINUTE);
        assert_eq!(
            w.why(all[0]),
            "reap root_exited",
            "relatives wait only until the delay expires"
        );
    }
}

#[test]
fn unreadable_rule_does_not_hide_a_rule_that_holds_relatives() {
    let rules =
        format!("[[rule]]\nname = 'tty'\naction = 'reap'\ntty = true\ncomm = 'vite'\n{SERVERS}");
    let (mut w, all) = exited(&rules, ExitStatus::Exited(0));
    set_facts(&mut w, all[2], FactSet::KERNEL_SESSION, Facts::unreadable());
    set_listening(&mut w, all[2], true);
    let relatives = [all[0], all[1], all[3]];
    assert_eq!(whys(&w, &relatives), ["wait rule_delay servers"; 3]);
}

#[test]
fn no_relative_is_held_after_a_crash_of_the_agent() {
    let signal = ExitStatus::Signalled {
        signal: 11,
        core: true,
    };
    for (status, expected) in [
        (signal, "reap root_exited"),
        (ExitStatus::Exited(1), "reap root_exited"),
        // The agent may have exited with status 0.
        (ExitStatus::Unknown, "wait rule_delay servers"),
    ] {
        let (mut w, all) = exited(SERVERS, status);
        set_listening(&mut w, all[2], true);
        assert_eq!(whys(&w, &all[..4]), [expected; 4], "{status:?}");
    }
}

#[test]
fn relatives_are_reaped_when_the_server_has_exited() {
    let (mut w, all) = exited(SERVERS, ExitStatus::Exited(0));
    set_listening(&mut w, all[2], true);
    w.exit(all[2]);
    assert_eq!(whys(&w, &[all[0], all[1], all[3]]), ["reap root_exited"; 3]);
}

#[test]
fn sibling_of_a_held_process_is_reaped() {
    let (mut w, all) = exited(SERVERS, ExitStatus::Exited(0));
    set_listening(&mut w, all[2], true);
    // A sibling of the server has the same ancestors.
    let sibling = w.fork(all[1]);
    set_listening(&mut w, sibling, false);
    let worker = w.fork(all[2]);
    set_listening(&mut w, worker, false);
    assert_eq!(
        whys(&w, &[sibling, worker]),
        ["reap forked_after_root_exit", "wait rule_delay servers"]
    );
}

#[test]
fn restarted_server_holds_relatives_until_the_first_deadline() {
    let (mut w, all) = exited(SERVERS, ExitStatus::Exited(0));
    set_listening(&mut w, all[2], true);
    let until = w.decide(all[2]).until;
    advance(&mut w, 5 * MINUTE);
    let later = w.fork(all[1]);
    assert_eq!(w.decide(all[0]).until, until);
    w.exit(all[2]);
    // Relatives do not wait for facts about a process forked after the root's exit. They use known ones.
    assert_eq!(w.why(all[0]), "reap root_exited");
    set_listening(&mut w, later, true);
    assert_eq!(w.why(all[0]), "wait rule_delay servers");
    assert_eq!(w.decide(all[0]).until, until);
    advance(&mut w, 5 * MINUTE);
    assert_eq!(
        whys(&w, &[all[0], later]),
        ["reap root_exited", "wait rule_delay servers"]
    );
}

#[test]
fn rule_order_applies_to_relatives() {
    let with = |before: &str| format!("{before}{SERVERS}");
    let reaped = "[[rule]]\nname = 'now'\naction = 'reap'\nsession = 'gone'\ncomm = 'vite'\n";
    let kept = "[[keep]]\nname = 'permanent'\ncomm = 'vite'\n";
    let held = "[[rule]]\nname = 'now'\naction = 'reap'\nsession = 'gone'\ncomm = 'npm'\n";
    let longer = "[[rule]]\nname = 'builds'\naction = 'reap'\nafter = '1h'\nsession = 'gone'\ncomm = 'esbuild'\n";
    let listening = "[[rule]]\nname = 'mine'\naction = 'keep'\nlistening = true\n";
    let table = [
        (
            reaped,
            [
                "reap root_exited",
                "reap root_exited now",
                "reap root_exited",
            ],
        ),
        // A member that another rule keeps can hold its relatives too.
        (
            kept,
            [
                "wait rule_delay servers",
                "keep keep_rule permanent",
                "keep ancestor_kept permanent",
            ],
        ),
        (
            held,
            [
                "wait rule_delay servers",
                "wait rule_delay servers",
                "wait rule_delay servers",
            ],
        ),
        (
            longer,
            [
                "wait rule_delay builds",
                "wait rule_delay servers",
                "wait rule_delay builds",
            ],
        ),
        (
            listening,
            [
                "keep descendant_kept mine",
                "keep keep_rule mine",
                "keep ancestor_kept mine",
            ],
        ),
    ];
    for (rules, expected) in table {
        let (mut w, all) = exited(&with(rules), ExitStatus::Exited(0));
        set_listening(&mut w, all[2], true);
        assert_eq!(whys(&w, &[all[0], all[2], all[3]]), expected, "{rules}");
    }
}

#[test]
fn members_of_a_session_that_is_not_due_are_no_relatives() {
    let mut w = world(ruled(SERVERS));
    let agent = w.spawn(INIT, "claude");
    let inner = w.spawn(agent, "codex");
    let npm = w.spawn(inner, "npm");
    let vite = w.spawn(npm, "vite");
    let other = w.spawn(vite, "claude");
    let below = w.spawn(other, "sh");
    w.exit(inner);
    advance(&mut w, 0);
    for key in [npm, other, below] {
        set_listening(&mut w, key, false);
    }
    set_listening(&mut w, vite, true);
    let all = [agent, npm, vite, other, below];
    let expected = [
        "keep root_alive",
        "wait rule_delay servers",
        "wait rule_delay servers",
    ];
    assert_eq!(whys(&w, &all[..3]), expected);
    assert_eq!(
        whys(&w, &all[3..]),
        ["wait rule_delay servers"; 2],
        "due with the inner session"
    );
}

#[test]
fn descendants_are_listed_once_after_parents() {
    let (w, agent, all) = tree(SERVERS);
    let of = |key: ProcessKey| {
        w.model
            .tree
            .descendants(key)
            .map(|node| node.key)
            .collect::<Vec<_>>()
    };
    assert_eq!(of(agent), all);
    assert_eq!(of(all[1]), all[2..4]);
    assert_eq!(of(all[3]), []);
}

#[test]
fn member_that_a_relative_may_hold_is_not_kernel_killable() {
    let is_killable = |rules: &str| {
        let (w, _, all) = tree(rules);
        w.model
            .is_kernel_killable(w.model.tree.get(all[0]).unwrap())
    };
    assert!(is_killable(SERVERS), "no rule applies to a killed agent");
    let any = SERVERS.replace("'ok'", "'gone'\ncomm = 'vite'");
    assert!(!is_killable(&any), "a descendant may listen");
}

/// Returns a chain of processes, each the child of the one before it, whose agent has exited with status 0.
fn chain(len: usize) -> (World, Vec<ProcessKey>) {
    let mut w = world(ruled(SERVERS));
    let agent = w.spawn(INIT, "claude");
    // The world would check the whole model after each event.
    let apply = |w: &mut World, kind| {
        w.now += 1_000_000;
        let (time, provenance) = (w.now, Provenance::Kernel);
        let event = Event {
            time,
            provenance,
            kind,
        };
        w.model.apply(&event, &mut Vec::new());
    };
    let mut chain = vec![agent];
    for _ in 0..len {
        let (child, parent) = (w.new_key(), chain.last().copied());
        let kind = EventKind::Fork {
            child,
            parent,
            creator: parent,
            uids: USER,
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        };
        apply(&mut w, kind);
        chain.push(child);
    }
    let exit = EventKind::Exit {
        key: agent,
        parent: None,
        exit_status: ExitStatus::Exited(0),
        peak_rss: 0,
        membership: None,
    };
    apply(&mut w, exit);
    advance(&mut w, 0);
    chain.remove(0);
    (w, chain)
}

#[test]
fn deep_chain_is_evaluated_in_linear_time() {
    let (mut w, chain) = chain(20_000);
    let began = Instant::now();
    let evaluation = w.model.evaluation();
    let mut decisions = chain.iter().map(|key| evaluation.decide(*key));
    assert!(decisions.all(|decision| decision.reason == Reason::Unread));
    let server = chain[chain.len() / 2];
    for key in &chain {
        set_listening(&mut w, *key, *key == server);
    }
    let evaluation = w.model.evaluation();
    let mut decisions = chain.iter().map(|key| evaluation.decide(*key));
    assert!(decisions.all(|decision| decision.reason == Reason::RuleDelay));
    // This takes less than a second. A walk for each process would take minutes.
    assert!(began.elapsed() < Duration::from_secs(30));
}
