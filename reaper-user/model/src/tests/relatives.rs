//! Ancestors and descendants of members that are given time, or are kept while they listen.

use std::time::{Duration, Instant};

use super::rules::{MINUTE, listens, pass, ruled, tell, world};
use super::world::{INIT, USER, World};
use crate::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use crate::facts::{FactSet, Facts};
use crate::policy::Reason;

const SERVERS: &str = "[[rule]]\nname = 'servers'\naction = 'reap'\nafter = '10min'\nsession = 'ok'\nlistening = true\n";

/// An agent, and below it `npm` above `sh` above `vite` above `esbuild`, beside that `make` above `cc`.
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

/// The end of the agent, and that of all but `vite` has been read that they do not listen.
fn ended(rules: &str, ended: ExitStatus) -> (World, [ProcessKey; 6]) {
    let (mut w, agent, all) = tree(rules);
    w.end(agent, ended, Some(INIT));
    pass(&mut w, 0);
    let others = all.into_iter().filter(|key| *key != all[2]);
    others.for_each(|key| listens(&mut w, key, false));
    (w, all)
}

fn whys(w: &World, all: &[ProcessKey]) -> Vec<String> {
    all.iter().map(|key| w.why(*key)).collect()
}

#[test]
fn relatives_of_a_server_wait_with_it_and_others_do_not() {
    let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
    for key in [all[0], all[1], all[3]] {
        let decision = w.decide(key);
        let (needs, of) = (decision.needs, decision.relative);
        assert_eq!(decision.reason, Reason::Unread, "it may be a server");
        assert_eq!((needs, of), (FactSet::LISTENING, Some(all[2])));
    }
    assert_eq!(whys(&w, &all[4..]), ["reap root_exited"; 2]);
    listens(&mut w, all[2], true);
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
    pass(&mut w, 10 * MINUTE);
    let over = [
        "reap root_exited",
        "reap root_exited",
        "reap root_exited servers",
        "reap root_exited",
    ];
    assert_eq!(whys(&w, &all[..4]), over);
}

#[test]
fn member_with_unreadable_sockets_holds_relatives() {
    for (unreadable, said) in [
        (false, "reap root_exited"),
        (true, "wait rule_delay servers"),
    ] {
        let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
        if unreadable {
            tell(&mut w, all[2], FactSet::LISTENING, Facts::unreadable());
        } else {
            listens(&mut w, all[2], false);
        }
        assert_eq!(whys(&w, &[all[0], all[1], all[3]]), [said; 3]);
        pass(&mut w, 10 * MINUTE);
        assert_eq!(
            w.why(all[0]),
            "reap root_exited",
            "no longer than its delay"
        );
    }
}

#[test]
fn unreadable_rule_hides_no_rule_that_holds_relatives() {
    let rules =
        format!("[[rule]]\nname = 'tty'\naction = 'reap'\ntty = true\ncomm = 'vite'\n{SERVERS}");
    let (mut w, all) = ended(&rules, ExitStatus::Exited(0));
    tell(&mut w, all[2], FactSet::KERNEL_SESSION, Facts::unreadable());
    listens(&mut w, all[2], true);
    let relatives = [all[0], all[1], all[3]];
    assert_eq!(whys(&w, &relatives), ["wait rule_delay servers"; 3]);
}

#[test]
fn no_relative_is_held_after_a_crash_of_the_agent() {
    let signal = ExitStatus::Signalled {
        signal: 11,
        core: true,
    };
    for (end, said) in [
        (signal, "reap root_exited"),
        (ExitStatus::Exited(1), "reap root_exited"),
        // Perhaps it was quit in peace: nobody knows.
        (ExitStatus::Unknown, "wait rule_delay servers"),
    ] {
        let (mut w, all) = ended(SERVERS, end);
        listens(&mut w, all[2], true);
        assert_eq!(whys(&w, &all[..4]), [said; 4], "{end:?}");
    }
}

#[test]
fn relatives_are_reaped_when_the_server_has_exited() {
    let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
    listens(&mut w, all[2], true);
    w.exit(all[2]);
    assert_eq!(whys(&w, &[all[0], all[1], all[3]]), ["reap root_exited"; 3]);
}

#[test]
fn sibling_of_a_held_process_is_reaped() {
    let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
    listens(&mut w, all[2], true);
    // A sister of the server, below those who wait for it.
    let sister = w.fork(all[1]);
    listens(&mut w, sister, false);
    let worker = w.fork(all[2]);
    listens(&mut w, worker, false);
    assert_eq!(
        whys(&w, &[sister, worker]),
        ["reap forked_after_root_exit", "wait rule_delay servers"]
    );
}

#[test]
fn restarted_server_holds_relatives_until_the_first_delay() {
    let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
    listens(&mut w, all[2], true);
    let until = w.decide(all[2]).until;
    pass(&mut w, 5 * MINUTE);
    let later = w.fork(all[1]);
    assert_eq!(w.decide(all[0]).until, until);
    w.exit(all[2]);
    // Nobody waits to hear of what is born while all is due, but it counts once it is known.
    assert_eq!(w.why(all[0]), "reap root_exited");
    listens(&mut w, later, true);
    assert_eq!(w.why(all[0]), "wait rule_delay servers");
    assert_eq!(w.decide(all[0]).until, until);
    pass(&mut w, 5 * MINUTE);
    assert_eq!(
        whys(&w, &[all[0], later]),
        ["reap root_exited", "wait rule_delay servers"]
    );
}

#[test]
fn order_of_rules_counts_for_relatives_too() {
    let with = |before: &str| format!("{before}{SERVERS}");
    let reaped = "[[rule]]\nname = 'now'\naction = 'reap'\nsession = 'gone'\ncomm = 'vite'\n";
    let kept = "[[keep]]\nname = 'for-good'\ncomm = 'vite'\n";
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
        // A member that is kept anyway may need its relatives all the same.
        (
            kept,
            [
                "wait rule_delay servers",
                "keep keep_rule for-good",
                "keep ancestor_kept for-good",
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
    for (rules, said) in table {
        let (mut w, all) = ended(&with(rules), ExitStatus::Exited(0));
        listens(&mut w, all[2], true);
        assert_eq!(whys(&w, &[all[0], all[2], all[3]]), said, "{rules}");
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
    pass(&mut w, 0);
    for key in [npm, other, below] {
        listens(&mut w, key, false);
    }
    listens(&mut w, vite, true);
    let all = [agent, npm, vite, other, below];
    let said = [
        "keep root_alive",
        "wait rule_delay servers",
        "wait rule_delay servers",
    ];
    assert_eq!(whys(&w, &all[..3]), said);
    assert_eq!(
        whys(&w, &all[3..]),
        ["wait rule_delay servers"; 2],
        "due with the inner one"
    );
}

#[test]
fn descendants_come_once_and_after_their_parents() {
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
    let clear = |rules: &str| {
        let (w, _, all) = tree(rules);
        w.model
            .is_kernel_killable(w.model.tree.get(all[0]).unwrap())
    };
    assert!(clear(SERVERS), "its agent has not quit in peace then");
    let any = SERVERS.replace("'ok'", "'gone'\ncomm = 'vite'");
    assert!(!clear(&any), "there may be one below it");
}

/// A chain of processes, each the child of the one before, whose agent has left in peace.
fn chain(long: usize) -> (World, Vec<ProcessKey>) {
    let mut w = world(ruled(SERVERS));
    let agent = w.spawn(INIT, "claude");
    // Not through the world, which looks at all of it after each event.
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
    for _ in 0..long {
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
    pass(&mut w, 0);
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
        listens(&mut w, *key, *key == server);
    }
    let evaluation = w.model.evaluation();
    let mut decisions = chain.iter().map(|key| evaluation.decide(*key));
    assert!(decisions.all(|decision| decision.reason == Reason::RuleDelay));
    // It takes less than a second. A walk for each process takes minutes.
    assert!(began.elapsed() < Duration::from_secs(30));
}
