//! What users want kept with all that descends from it, however that comes to be known.

use reaper_common::{MEMBER_KEPT, MEMBER_TRACKED};

use super::rules::{MINUTE, marked, pass, read, world};
use super::world::{INIT, World};
use crate::event::{Membership, ProcessKey, TICK_NS};
use crate::facts::{Fact, FactSet, Facts};
use crate::user_keep::{StoredKeep, UserKeep};

const KEPT: &str = "keep kept_by_user";
const REAPED: &str = "reap root_exited";

fn wish(made: u64) -> UserKeep {
    UserKeep {
        until_monotonic_ns: None,
        with_descendants: true,
        by_uid: 1000,
        made_at: made,
    }
}

/// An agent with a shell that runs a server, and another shell.
fn tree() -> (World, [ProcessKey; 4]) {
    let mut w = World::new();
    pass(&mut w, 0);
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "vite");
    let other = w.spawn(agent, "bash");
    (w, [agent, shell, server, other])
}

fn whys(w: &World, all: &[ProcessKey]) -> Vec<String> {
    all.iter().map(|key| w.why(*key)).collect()
}

/// What the service before this one has written down of a member of the session of `root`.
fn noted(key: ProcessKey, root: ProcessKey, asked: bool, keep: UserKeep) -> StoredKeep {
    let session = root;
    StoredKeep {
        key,
        session,
        is_direct: asked,
        keep,
    }
}

/// What the kernel's map has for a member of the session of `root`.
fn mark(root: ProcessKey, flags: u32) -> Option<Membership> {
    Some(Membership {
        session: Some(root),
        flags: MEMBER_TRACKED | flags,
    })
}

/// A member is found with this parent, and with this in its mark.
fn found(w: &mut World, root: ProcessKey, parent: ProcessKey, flags: u32) -> ProcessKey {
    found_with(w, parent, mark(root, flags))
}

fn found_with(w: &mut World, parent: ProcessKey, mark: Option<Membership>) -> ProcessKey {
    let key = w.new_key();
    w.now += 20_000_000;
    w.row_with(key, parent.pid, "worker", |seen| seen.membership = mark)
}

#[test]
fn who_is_found_after_a_gap_is_kept_where_it_may_descend_from_a_kept_one() {
    // Who has it when it is found, what its mark says, and whether it is kept.
    let cases: [(usize, Option<u32>, bool); 9] = [
        (2, Some(0), true),
        (2, None, true),
        (4, Some(MEMBER_KEPT), true),
        (4, Some(0), false),
        (3, Some(0), false),
        // The other shell would not adopt from one that it is no ancestor of.
        (3, None, false),
        // Adopted by the agent, for all that is known.
        (0, Some(MEMBER_KEPT), true),
        (0, None, true),
        (0, Some(0), false),
    ];
    for (parent, flags, kept) in cases {
        let (mut w, [agent, shell, server, other]) = tree();
        let now = w.now;
        pass(&mut w, 0);
        assert_eq!(w.model.keep(shell, wish(now)), 2);
        let parent = [agent, shell, server, other, INIT][parent];
        let marked = flags.and_then(|flags| mark(agent, flags));
        let worker = found_with(&mut w, parent, marked);
        w.dies_by_signal(agent);
        let said = if kept { KEPT } else { REAPED };
        assert_eq!(w.why(worker), said, "below {parent} with {flags:?}");
        assert_eq!(whys(&w, &[shell, server, other]), [KEPT, KEPT, REAPED]);
    }
}

#[test]
fn who_was_born_before_it_was_asked_for_and_is_found_after_that_may_be_meant() {
    let (mut w, [agent, shell, _, _]) = tree();
    let lost = w.new_key();
    w.now += 50_000_000;
    pass(&mut w, 0);
    assert_eq!(w.model.keep(shell, wish(1)), 2);
    let lost = w.row_with(lost, 1, "worker", |seen| seen.membership = mark(agent, 0));
    // Older than what is kept: no descendant of it.
    let old = ProcessKey {
        pid: 90,
        start: shell.start - 500_000_000,
    };
    let old = w.row_with(old, 1, "worker", |seen| seen.membership = mark(agent, 0));
    w.dies_by_signal(agent);
    assert_eq!(whys(&w, &[lost, old]), [KEPT, REAPED]);
}

#[test]
fn birth_at_the_time_of_a_wish_is_not_later() {
    for (later, said) in [(0, KEPT), (TICK_NS, REAPED)] {
        let (mut w, [agent, shell, _, _]) = tree();
        w.now = w.now.next_multiple_of(TICK_NS);
        pass(&mut w, 0);
        assert_eq!(w.model.keep(shell, wish(1)), 2);
        let lost = ProcessKey {
            start: w.now + later,
            ..w.new_key()
        };
        w.now += 50_000_000;
        let lost = w.row_with(lost, 1, "worker", |seen| seen.membership = mark(agent, 0));
        w.dies_by_signal(agent);
        assert_eq!(w.why(lost), said, "{later}");
    }
}

#[test]
fn children_of_one_that_died_unseen_are_kept_and_those_of_an_adopter_are_not() {
    let (mut w, [agent, shell, server, other]) = tree();
    assert_eq!(w.model.keep(shell, wish(1)), 2);
    w.exit(server);
    w.exit(shell);
    // Both makers are gone: the one is remembered, of the other nobody has told.
    let told = w.new_key();
    w.fork_as(told, INIT, server);
    let unheard = ProcessKey {
        pid: 3_000,
        start: w.now,
    };
    let child = w.new_key();
    w.row_with(child, 1, "worker", |seen| {
        seen.membership = mark(agent, MEMBER_KEPT)
    });
    w.fork_as(child, unheard, unheard);
    let plain = w.fork(other);
    w.dies_by_signal(agent);
    assert_eq!(
        whys(&w, &[told, child, plain, other]),
        [KEPT, KEPT, REAPED, REAPED]
    );
}

#[test]
fn descendants_that_have_left_the_tree_before_are_kept_with_it() {
    let (mut w, [agent, shell, server, other]) = tree();
    let daemon = w.spawn(server, "daemon");
    w.exit(server);
    assert_eq!(w.model.keep(shell, wish(1)), 2, "the shell and the daemon");
    w.exit(shell);
    let worker = w.fork(daemon);
    w.dies_by_signal(agent);
    assert_eq!(whys(&w, &[daemon, worker, other]), [KEPT, KEPT, REAPED]);
}

#[test]
fn a_root_is_kept_with_all_its_members_and_their_children() {
    let (mut w, [agent, shell, server, other]) = tree();
    let nested = w.spawn(other, "codex");
    assert_eq!(w.model.keep(agent, wish(1)), 5);
    let with = |w: &World, key| w.model.kept_with(key);
    assert_eq!((with(&w, shell), with(&w, agent)), (Some(agent), None));
    let all = [shell, server, other, nested].map(|parent| w.fork(parent));
    let lost = found(&mut w, agent, INIT, MEMBER_KEPT);
    w.exit(shell);
    w.dies_by_signal(agent);
    let late = w.fork(all[1]);
    let kept = [server, other, nested, lost, late];
    assert_eq!(whys(&w, &kept), [KEPT; 5]);
    assert_eq!(whys(&w, &all), [KEPT; 4]);
    assert_eq!(with(&w, nested), None, "who it was asked for is gone");
    assert_eq!(w.model.unkeep(nested), 9, "all that lives of it");
    let born = w.fork(server);
    assert_eq!(whys(&w, &kept[..4]), [REAPED; 4]);
    assert_eq!(whys(&w, &[late, born]), ["reap forked_after_root_exit"; 2]);
    assert_eq!(w.model.unkeep(server), 0);
}

#[test]
fn the_longer_wish_stands_and_another_takes_its_place_when_it_is_taken_back() {
    let (mut w, [agent, shell, server, _]) = tree();
    let hour = UserKeep {
        until_monotonic_ns: Some(w.now + 60 * MINUTE),
        ..wish(1)
    };
    let alone = UserKeep {
        with_descendants: false,
        ..wish(2)
    };
    w.model.keep(server, alone);
    assert_eq!(w.model.keep(shell, hour), 2, "the server for longer");
    // Of one that is kept for itself the tree goes on.
    let child = w.fork(server);
    w.dies_by_signal(agent);
    assert_eq!(w.decide(child).until, hour.until_monotonic_ns);
    assert_eq!(
        (w.decide(server).until, w.why(server).as_str()),
        (None, KEPT)
    );
    assert_eq!(w.model.unkeep(server), 1);
    assert_eq!(w.decide(server).until, hour.until_monotonic_ns);
    // Asked for anew, for less.
    let minute = UserKeep {
        until_monotonic_ns: Some(w.now + MINUTE),
        ..wish(3)
    };
    assert_eq!(w.model.keep(shell, minute), 3);
    pass(&mut w, MINUTE);
    assert_eq!(whys(&w, &[shell, server]), [REAPED; 2]);
}

#[test]
fn a_service_that_comes_after_keeps_who_was_born_since_though_all_that_was_asked_for_is_gone() {
    let (w, [agent, shell, server, other]) = tree();
    let said =
        [(shell, true), (server, false)].map(|(key, asked)| noted(key, agent, asked, wish(1)));
    // Another service: all is found, and the two that were asked for are gone.
    let mut after = World::new();
    after.now = w.now;
    // Pids that nobody has had.
    for _ in 0..50 {
        after.new_key();
    }
    pass(&mut after, 0);
    let agent = after.row(agent, 1, "claude");
    let other = after.row_with(other, agent.pid, "bash", |seen| {
        seen.membership = mark(agent, 0)
    });
    let spared = found(&mut after, agent, INIT, MEMBER_KEPT);
    let plain = found(&mut after, agent, INIT, 0);
    let below = found(&mut after, agent, spared, MEMBER_KEPT);
    after.model.restore_keeps(said.to_vec());
    let late = found(&mut after, agent, INIT, MEMBER_KEPT);
    after.dies_by_signal(agent);
    assert_eq!(
        whys(&after, &[spared, below, late, plain, other]),
        [KEPT, KEPT, KEPT, REAPED, REAPED]
    );
    assert_eq!(after.model.unkeep(below), 3);
    assert_eq!(whys(&after, &[spared, below, late]), [REAPED; 3]);
}

#[test]
fn who_is_named_by_a_wish_from_before_is_kept_whenever_it_turns_up() {
    // Whether its row could be read at first, and whether its agent was one by then.
    for (tree, read, opened) in [
        (false, false, true),
        (true, false, true),
        (false, true, false),
        (true, true, false),
        (true, false, false),
    ] {
        let mut w = World::new();
        pass(&mut w, 0);
        let [agent, server, worker, other] = [(); 4].map(|()| {
            w.now += 20_000_000;
            w.new_key()
        });
        let mark = mark(agent, 0);
        let row = |w: &mut World, key, parent: ProcessKey, program| {
            w.row_with(key, parent.pid, program, |seen| seen.membership = mark)
        };
        let agent = row(&mut w, agent, INIT, if opened { "claude" } else { "node" });
        if read {
            row(&mut w, server, agent, "vite");
        }
        let keep = UserKeep {
            with_descendants: tree,
            ..wish(1)
        };
        w.model
            .restore_keeps(vec![noted(server, agent, true, keep)]);
        if !read {
            row(&mut w, server, agent, "vite");
        }
        row(&mut w, worker, server, "esbuild");
        row(&mut w, other, agent, "bash");
        if !opened {
            w.exec(agent, "claude");
        }
        let born = w.fork(server);
        w.dies_by_signal(agent);
        let below = if tree { KEPT } else { REAPED };
        assert_eq!(
            whys(&w, &[server, worker, born, other]),
            [KEPT, below, below, REAPED],
            "tree: {tree}, read: {read}, opened: {opened}"
        );
    }
}

#[test]
fn each_wish_stands_until_it_is_taken_back_itself() {
    for (whole, own_first) in [(false, true), (true, true), (false, false), (true, false)] {
        let (mut w, [agent, shell, server, _]) = tree();
        let child = w.fork(server);
        let own = UserKeep {
            until_monotonic_ns: Some(w.now + 60 * MINUTE),
            with_descendants: whole,
            ..wish(1)
        };
        let mut asked = [(server, own), (shell, wish(2))];
        if !own_first {
            asked.reverse();
        }
        for (key, keep) in asked {
            w.model.keep(key, keep);
        }
        w.dies_by_signal(agent);
        let until = |w: &World| [server, child].map(|key| (w.why(key), w.decide(key).until));
        let for_good = (KEPT.to_owned(), None);
        assert_eq!(until(&w), [for_good.clone(), for_good]);
        assert_eq!(
            w.model.keep_to_revoke(server),
            Some(own),
            "its own comes first"
        );
        assert_eq!(w.model.unkeep(shell), 3);
        assert_eq!(w.why(shell), REAPED);
        let kept = (KEPT.to_owned(), own.until_monotonic_ns);
        let below = if whole {
            kept.clone()
        } else {
            (REAPED.to_owned(), None)
        };
        assert_eq!(until(&w), [kept, below], "tree: {whole}");
        assert_eq!(w.model.unkeep(server), if whole { 2 } else { 1 });
        assert_eq!(whys(&w, &[server, child]), [REAPED; 2]);
        assert_eq!(w.model.keep_to_revoke(server), None);
    }
}

#[test]
fn what_is_kept_with_its_tree_stays_so_when_it_is_asked_for_anew() {
    for unrelated in [false, true] {
        let (mut w, [agent, shell, server, other]) = tree();
        if unrelated {
            w.model.keep(other, wish(9));
        }
        assert_eq!(w.model.keep(shell, wish(1)), 2);
        let hour = UserKeep {
            until_monotonic_ns: Some(w.now + 60 * MINUTE),
            with_descendants: false,
            ..wish(2)
        };
        assert_eq!(w.model.keep(shell, hour), 2);
        assert_eq!(
            w.model.keep_to_revoke(shell),
            Some(UserKeep {
                with_descendants: true,
                ..hour
            })
        );
        let born = w.fork(server);
        w.dies_by_signal(agent);
        let all = [shell, server, born];
        assert_eq!(whys(&w, &all), [KEPT; 3]);
        assert_eq!(
            all.map(|key| w.decide(key).until),
            [hour.until_monotonic_ns; 3]
        );
        assert_eq!(w.model.unkeep(shell), 3);
        assert_eq!(whys(&w, &all), [REAPED; 3]);
        assert_eq!(w.why(other), if unrelated { KEPT } else { REAPED });
        // What is over or taken back is no tree to go on with.
        w.model.keep(
            shell,
            UserKeep {
                with_descendants: false,
                ..wish(3)
            },
        );
        assert_eq!(whys(&w, &all), [KEPT, REAPED, REAPED]);
    }
}

#[test]
fn wishes_are_forgotten_with_their_sessions_and_when_they_are_over() {
    let mut w = World::new();
    pass(&mut w, 0);
    for n in 0..200 {
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        let minute = UserKeep {
            until_monotonic_ns: Some(w.now + MINUTE),
            ..wish(2 * n)
        };
        w.model.keep(agent, minute);
        w.model.keep(shell, wish(2 * n + 1));
        let keeps = w
            .model
            .tree
            .get(shell)
            .unwrap()
            .state
            .keeps
            .user_keeps
            .len();
        assert_eq!((keeps, w.model.kept_by_users().count()), (2, 2));
        w.exit(shell);
        w.exit(agent);
        // One that has closed lately may have members of whom nothing has been told yet.
        assert!(w.model.wishes() <= 2 * 64, "{} after {n}", w.model.wishes());
        pass(&mut w, MINUTE);
    }
    // Of the many that one wish was noted for it is one.
    let agent = w.spawn(INIT, "claude");
    let all: Vec<ProcessKey> = (0..100).map(|_| w.fork(agent)).collect();
    w.model.keep(agent, wish(1_000));
    let before = w.model.wishes();
    let all = all.iter().map(|key| noted(*key, agent, false, wish(1_001)));
    w.model.restore_keeps(all.collect());
    assert_eq!(w.model.wishes(), before + 1);
}

#[test]
fn what_is_marked_to_be_kept_is_and_so_is_what_nobody_could_read() {
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    assert_eq!(
        w.why(shell),
        "keep root_alive",
        "nothing is read before it matters"
    );
    marked(&mut w, shell, Fact::Known(1));
    // The environment is inherited, and another program may be given another.
    let (copy, other) = (w.fork(shell), w.spawn(shell, "env"));
    let below = w.spawn(other, "sleep");
    w.dies_by_signal(agent);
    assert_eq!([shell, copy].map(|key| w.why(key)), ["keep keep_marker"; 2]);
    assert_eq!(
        (w.decide(other).needs, w.decide(below).needs),
        (FactSet::MARKERS, FactSet::MARKERS)
    );
    marked(&mut w, other, Fact::Known(0));
    marked(&mut w, below, Fact::Unreadable);
    assert_eq!(
        [other, below].map(|key| w.why(key)),
        ["reap root_exited", "keep unreadable"]
    );
}

#[test]
fn what_was_read_before_an_exec_says_nothing_of_what_came_after_it() {
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let before = w.now;
    w.now += 10;
    w.exec(shell, "server");
    let found = Facts {
        markers: Fact::Known(1),
        listening: Fact::Known(true),
        ..Facts::NOTHING
    };
    let asked = FactSet::MARKERS | FactSet::LISTENING;
    w.model.set_facts(shell, asked, found.clone(), before);
    let facts = w.model.tree.get(shell).unwrap().facts().unwrap();
    assert_eq!(
        (facts.markers, facts.listening),
        (Fact::Unread, Fact::Known(true))
    );
    // Nor of a child that was born before.
    let child = w.fork(shell);
    let now = w.now + 10;
    w.model.set_facts(shell, asked, found, now);
    w.now = now + 10;
    let later = w.fork(shell);
    let marks = |w: &World, key| w.model.tree.get(key).unwrap().facts().map(|f| f.markers);
    assert_eq!(
        [child, later].map(|key| marks(&w, key)),
        [None, Some(Fact::Known(1))]
    );
}

#[test]
fn a_user_keeps_one_process_or_all_that_comes_of_it_for_a_while() {
    let mut w = World::new();
    pass(&mut w, 0);
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "vite");
    let stranger = w.spawn(INIT, "bash");
    let keep = UserKeep {
        until_monotonic_ns: Some(w.now + MINUTE),
        with_descendants: true,
        by_uid: 1000,
        made_at: 1,
    };
    assert_eq!(w.model.keep(stranger, keep), 0);
    assert_eq!(w.model.keep(shell, keep), 2);
    let later = w.spawn(server, "esbuild");
    w.exit(server);
    w.dies_by_signal(agent);
    assert_eq!(
        [shell, later].map(|key| w.why(key)),
        ["keep kept_by_user"; 2]
    );
    assert_eq!(w.decide(shell).until, keep.until_monotonic_ns);
    assert_eq!(w.model.kept_by_users().count(), 2);
    pass(&mut w, MINUTE);
    assert_eq!(
        [shell, later].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
    assert_eq!(w.model.kept_by_users().count(), 0);
    let for_good = UserKeep {
        until_monotonic_ns: None,
        with_descendants: false,
        by_uid: 0,
        made_at: 1,
    };
    assert_eq!(w.model.keep(shell, for_good), 1);
    let child = w.fork(shell);
    assert_eq!(
        [shell, child].map(|key| w.why(key)),
        ["keep kept_by_user", "reap forked_after_root_exit"]
    );
    assert_eq!((w.model.unkeep(shell), w.model.unkeep(shell)), (1, 0));
    assert_eq!(w.why(shell), "reap root_exited");
}
