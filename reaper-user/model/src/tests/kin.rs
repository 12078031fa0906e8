//! Who is above and below those who have their time, or are kept for as long as they listen.

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
fn kin_of_a_server_waits_for_as_long_as_it_and_others_do_not() {
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
fn what_does_not_listen_holds_nobody_and_what_cannot_be_read_does() {
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
fn rule_that_cannot_be_read_hides_none_that_holds_kin() {
    let rules =
        format!("[[rule]]\nname = 'tty'\naction = 'reap'\ntty = true\ncomm = 'vite'\n{SERVERS}");
    let (mut w, all) = ended(&rules, ExitStatus::Exited(0));
    tell(&mut w, all[2], FactSet::KERNEL_SESSION, Facts::unreadable());
    listens(&mut w, all[2], true);
    let kin = [all[0], all[1], all[3]];
    assert_eq!(whys(&w, &kin), ["wait rule_delay servers"; 3]);
}

#[test]
fn nobody_is_held_when_the_agent_crashed() {
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
fn kin_is_due_when_the_server_is_gone() {
    let (mut w, all) = ended(SERVERS, ExitStatus::Exited(0));
    listens(&mut w, all[2], true);
    w.exit(all[2]);
    assert_eq!(whys(&w, &[all[0], all[1], all[3]]), ["reap root_exited"; 3]);
}

#[test]
fn who_is_held_holds_nobody() {
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
fn what_is_begun_again_and_again_holds_nobody_for_good() {
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
fn the_order_of_rules_counts_for_kin_too() {
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
        // What is kept anyway may need its kin all the same.
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
fn those_of_another_session_that_is_not_due_are_no_kin() {
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
fn descendants_come_each_after_its_parent_and_once() {
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
fn who_may_be_held_when_a_signal_ends_the_agent_is_not_left_to_the_probes() {
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
        // Not through the world, which looks at all of it after each event.
        w.now += 1_000_000;
        let (time, provenance) = (w.now, Provenance::Kernel);
        let event = Event {
            time,
            provenance,
            kind,
        };
        w.model.apply(&event, &mut Vec::new());
        chain.push(child);
    }
    w.end(agent, ExitStatus::Exited(0), None);
    pass(&mut w, 0);
    chain.remove(0);
    (w, chain)
}

#[test]
fn a_deep_chain_is_walked_once_for_all_that_is_decided_about_it() {
    let (mut w, chain) = chain(4_000);
    let round = w.model.evaluation();
    for key in &chain {
        assert_eq!(
            round.decide(*key).reason,
            Reason::Unread,
            "each may be a server"
        );
    }
    // None has been asked more often than for those above it and for its kin.
    let asked = round.asked();
    assert!((1..=2 * chain.len()).contains(&asked), "{asked}");
    let server = chain[chain.len() / 2];
    for key in &chain {
        listens(&mut w, *key, *key == server);
    }
    let round = w.model.evaluation();
    for key in &chain {
        assert_eq!(round.decide(*key).reason, Reason::RuleDelay, "{key}");
    }
    let asked = round.asked();
    assert!((1..=2 * chain.len()).contains(&asked), "{asked}");
}
