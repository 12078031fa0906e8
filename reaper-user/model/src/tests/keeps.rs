//! Keeps of users, which cover a process and its descendants, even those discovered late.

use reaper_common::{MEMBER_KEPT, MEMBER_TRACKED};

use super::rules::{MINUTE, advance, read, set_markers, world};
use super::world::{INIT, World};
use crate::event::{Membership, ProcessKey, TICK_NS};
use crate::facts::{Fact, FactSet, Facts};
use crate::user_keep::{StoredKeep, UserKeep};

const KEPT: &str = "keep kept_by_user";
const REAPED: &str = "reap root_exited";

fn keep_made_at(made: u64) -> UserKeep {
    UserKeep {
        until_monotonic_ns: None,
        with_descendants: true,
        by_uid: 1000,
        made_at: made,
    }
}

/// Returns an agent with a shell that runs a server, and with another shell.
fn tree() -> (World, [ProcessKey; 4]) {
    let mut w = World::new();
    advance(&mut w, 0);
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "vite");
    let other = w.spawn(agent, "bash");
    (w, [agent, shell, server, other])
}

fn whys(w: &World, all: &[ProcessKey]) -> Vec<String> {
    all.iter().map(|key| w.why(*key)).collect()
}

/// Returns a keep that an earlier service stored, for a member of the session of `root`.
fn stored_keep(key: ProcessKey, root: ProcessKey, is_direct: bool, keep: UserKeep) -> StoredKeep {
    let session = root;
    StoredKeep {
        key,
        session,
        is_direct,
        keep,
    }
}

/// Returns the map entry of a member of the session of `root`.
fn membership(root: ProcessKey, flags: u32) -> Option<Membership> {
    Some(Membership {
        session: Some(root),
        flags: MEMBER_TRACKED | flags,
    })
}

/// Discovers a member with this parent and these flags in the map.
fn discover(w: &mut World, root: ProcessKey, parent: ProcessKey, flags: u32) -> ProcessKey {
    discover_with(w, parent, membership(root, flags))
}

fn discover_with(w: &mut World, parent: ProcessKey, membership: Option<Membership>) -> ProcessKey {
    let key = w.new_key();
    w.now += 20_000_000;
    w.row_with(key, parent.pid, "worker", |entry| {
        entry.membership = membership
    })
}

#[test]
fn discovered_process_is_kept_if_it_may_descend_from_a_keep() {
    // Index of the parent, flags in the map (`None`: no data), and whether the process is kept.
    let cases: [(usize, Option<u32>, bool); 9] = [
        (2, Some(0), true),
        (2, None, true),
        (4, Some(MEMBER_KEPT), true),
        (4, Some(0), false),
        (3, Some(0), false),
        // The other shell cannot adopt the process, because it is no ancestor of the kept shell.
        (3, None, false),
        // The agent may have adopted the process.
        (0, Some(MEMBER_KEPT), true),
        (0, None, true),
        (0, Some(0), false),
    ];
    for (parent, flags, kept) in cases {
        let (mut w, [agent, shell, server, other]) = tree();
        let now = w.now;
        advance(&mut w, 0);
        assert_eq!(w.model.keep(shell, keep_made_at(now)), 2);
        let parent = [agent, shell, server, other, INIT][parent];
        let entry = flags.and_then(|flags| membership(agent, flags));
        let worker = discover_with(&mut w, parent, entry);
        w.kill(agent);
        let expected = if kept { KEPT } else { REAPED };
        assert_eq!(w.why(worker), expected, "below {parent} with {flags:?}");
        assert_eq!(whys(&w, &[shell, server, other]), [KEPT, KEPT, REAPED]);
    }
}

#[test]
fn older_process_discovered_after_the_keep_may_be_covered() {
    let (mut w, [agent, shell, _, _]) = tree();
    let lost = w.new_key();
    w.now += 50_000_000;
    advance(&mut w, 0);
    assert_eq!(w.model.keep(shell, keep_made_at(1)), 2);
    let lost = w.row_with(lost, 1, "worker", |entry| {
        entry.membership = membership(agent, 0)
    });
    // Older than the kept process, so no descendant of it.
    let old = ProcessKey {
        pid: 90,
        start: shell.start - 500_000_000,
    };
    let old = w.row_with(old, 1, "worker", |entry| {
        entry.membership = membership(agent, 0)
    });
    w.kill(agent);
    assert_eq!(whys(&w, &[lost, old]), [KEPT, REAPED]);
}

#[test]
fn process_forked_at_the_time_of_a_keep_is_covered() {
    for (later, expected) in [(0, KEPT), (TICK_NS, REAPED)] {
        let (mut w, [agent, shell, _, _]) = tree();
        w.now = w.now.next_multiple_of(TICK_NS);
        advance(&mut w, 0);
        assert_eq!(w.model.keep(shell, keep_made_at(1)), 2);
        let lost = ProcessKey {
            start: w.now + later,
            ..w.new_key()
        };
        w.now += 50_000_000;
        let lost = w.row_with(lost, 1, "worker", |entry| {
            entry.membership = membership(agent, 0)
        });
        w.kill(agent);
        assert_eq!(w.why(lost), expected, "{later}");
    }
}

#[test]
fn late_reported_children_of_exited_kept_process_are_kept() {
    let (mut w, [agent, shell, server, other]) = tree();
    assert_eq!(w.model.keep(shell, keep_made_at(1)), 2);
    w.exit(server);
    w.exit(shell);
    // Both creators have exited: the tree remembers the server, and the other was never reported.
    let late = w.new_key();
    w.fork_as(late, INIT, server);
    let unreported = ProcessKey {
        pid: 3_000,
        start: w.now,
    };
    let child = w.new_key();
    w.row_with(child, 1, "worker", |entry| {
        entry.membership = membership(agent, MEMBER_KEPT)
    });
    w.fork_as(child, unreported, unreported);
    let plain = w.fork(other);
    w.kill(agent);
    assert_eq!(
        whys(&w, &[late, child, plain, other]),
        [KEPT, KEPT, REAPED, REAPED]
    );
}

#[test]
fn reparented_descendants_are_kept_with_the_ancestor() {
    let (mut w, [agent, shell, server, other]) = tree();
    let daemon = w.spawn(server, "daemon");
    w.exit(server);
    assert_eq!(
        w.model.keep(shell, keep_made_at(1)),
        2,
        "the shell and the daemon"
    );
    w.exit(shell);
    let worker = w.fork(daemon);
    w.kill(agent);
    assert_eq!(whys(&w, &[daemon, worker, other]), [KEPT, KEPT, REAPED]);
}

#[test]
fn keep_of_a_root_covers_all_members() {
    let (mut w, [agent, shell, server, other]) = tree();
    let nested = w.spawn(other, "codex");
    assert_eq!(w.model.keep(agent, keep_made_at(1)), 5);
    let with = |w: &World, key| w.model.kept_with(key);
    assert_eq!((with(&w, shell), with(&w, agent)), (Some(agent), None));
    let all = [shell, server, other, nested].map(|parent| w.fork(parent));
    let lost = discover(&mut w, agent, INIT, MEMBER_KEPT);
    w.exit(shell);
    w.kill(agent);
    let late = w.fork(all[1]);
    let kept = [server, other, nested, lost, late];
    assert_eq!(whys(&w, &kept), [KEPT; 5]);
    assert_eq!(whys(&w, &all), [KEPT; 4]);
    assert_eq!(with(&w, nested), None, "the kept root has exited");
    assert_eq!(w.model.unkeep(nested), 9, "all living members");
    let born = w.fork(server);
    assert_eq!(whys(&w, &kept[..4]), [REAPED; 4]);
    assert_eq!(whys(&w, &[late, born]), ["reap forked_after_root_exit"; 2]);
    assert_eq!(w.model.unkeep(server), 0);
}

#[test]
fn longest_keep_is_in_force_until_it_is_revoked() {
    let (mut w, [agent, shell, server, _]) = tree();
    let hour = UserKeep {
        until_monotonic_ns: Some(w.now + 60 * MINUTE),
        ..keep_made_at(1)
    };
    let alone = UserKeep {
        with_descendants: false,
        ..keep_made_at(2)
    };
    w.model.keep(server, alone);
    assert_eq!(w.model.keep(shell, hour), 2, "the shell and the server");
    // The keep of the shell goes on for descendants of the server, which has its own keep.
    let child = w.fork(server);
    w.kill(agent);
    assert_eq!(w.decide(child).until, hour.until_monotonic_ns);
    assert_eq!(
        (w.decide(server).until, w.why(server).as_str()),
        (None, KEPT)
    );
    assert_eq!(w.model.unkeep(server), 1);
    assert_eq!(w.decide(server).until, hour.until_monotonic_ns);
    // The renewed keep is shorter.
    let minute = UserKeep {
        until_monotonic_ns: Some(w.now + MINUTE),
        ..keep_made_at(3)
    };
    assert_eq!(w.model.keep(shell, minute), 3);
    advance(&mut w, MINUTE);
    assert_eq!(whys(&w, &[shell, server]), [REAPED; 2]);
}

#[test]
fn restarted_service_keeps_descendants_of_exited_kept_process() {
    let (w, [agent, shell, server, other]) = tree();
    let stored = [(shell, true), (server, false)]
        .map(|(key, is_direct)| stored_keep(key, agent, is_direct, keep_made_at(1)));
    // The next service: it discovers the processes, and the shell and the server have exited.
    let mut after = World::new();
    after.now = w.now;
    // Skip the pids that are in use.
    for _ in 0..50 {
        after.new_key();
    }
    advance(&mut after, 0);
    let agent = after.row(agent, 1, "claude");
    let other = after.row_with(other, agent.pid, "bash", |entry| {
        entry.membership = membership(agent, 0)
    });
    let kept_one = discover(&mut after, agent, INIT, MEMBER_KEPT);
    let plain = discover(&mut after, agent, INIT, 0);
    let below = discover(&mut after, agent, kept_one, MEMBER_KEPT);
    after.model.restore_keeps(stored.to_vec());
    let late = discover(&mut after, agent, INIT, MEMBER_KEPT);
    after.kill(agent);
    assert_eq!(
        whys(&after, &[kept_one, below, late, plain, other]),
        [KEPT, KEPT, KEPT, REAPED, REAPED]
    );
    assert_eq!(after.model.unkeep(below), 3);
    assert_eq!(whys(&after, &[kept_one, below, late]), [REAPED; 3]);
}

#[test]
fn stored_keep_applies_whenever_its_process_is_discovered() {
    // `read`: its row comes before the keeps are restored. `opened`: the agent is known as one from the start.
    for (tree, read, opened) in [
        (false, false, true),
        (true, false, true),
        (false, true, false),
        (true, true, false),
        (true, false, false),
    ] {
        let mut w = World::new();
        advance(&mut w, 0);
        let [agent, server, worker, other] = [(); 4].map(|()| {
            w.now += 20_000_000;
            w.new_key()
        });
        let membership = membership(agent, 0);
        let row = |w: &mut World, key, parent: ProcessKey, program| {
            w.row_with(key, parent.pid, program, |entry| {
                entry.membership = membership
            })
        };
        let agent = row(&mut w, agent, INIT, if opened { "claude" } else { "node" });
        if read {
            row(&mut w, server, agent, "vite");
        }
        let keep = UserKeep {
            with_descendants: tree,
            ..keep_made_at(1)
        };
        w.model
            .restore_keeps(vec![stored_keep(server, agent, true, keep)]);
        if !read {
            row(&mut w, server, agent, "vite");
        }
        row(&mut w, worker, server, "esbuild");
        row(&mut w, other, agent, "bash");
        if !opened {
            w.exec(agent, "claude");
        }
        let born = w.fork(server);
        w.kill(agent);
        let below = if tree { KEPT } else { REAPED };
        assert_eq!(
            whys(&w, &[server, worker, born, other]),
            [KEPT, below, below, REAPED],
            "tree: {tree}, read: {read}, opened: {opened}"
        );
    }
}

#[test]
fn each_keep_lasts_until_it_is_revoked() {
    for (whole, own_first) in [(false, true), (true, true), (false, false), (true, false)] {
        let (mut w, [agent, shell, server, _]) = tree();
        let child = w.fork(server);
        let own = UserKeep {
            until_monotonic_ns: Some(w.now + 60 * MINUTE),
            with_descendants: whole,
            ..keep_made_at(1)
        };
        let mut keeps = [(server, own), (shell, keep_made_at(2))];
        if !own_first {
            keeps.reverse();
        }
        for (key, keep) in keeps {
            w.model.keep(key, keep);
        }
        w.kill(agent);
        let until = |w: &World| [server, child].map(|key| (w.why(key), w.decide(key).until));
        let permanent = (KEPT.to_owned(), None);
        assert_eq!(until(&w), [permanent.clone(), permanent]);
        assert_eq!(
            w.model.keep_to_revoke(server),
            Some(own),
            "its direct keep comes first"
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
fn renewed_keep_still_covers_the_descendants() {
    for unrelated in [false, true] {
        let (mut w, [agent, shell, server, other]) = tree();
        if unrelated {
            w.model.keep(other, keep_made_at(9));
        }
        assert_eq!(w.model.keep(shell, keep_made_at(1)), 2);
        let hour = UserKeep {
            until_monotonic_ns: Some(w.now + 60 * MINUTE),
            with_descendants: false,
            ..keep_made_at(2)
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
        w.kill(agent);
        let all = [shell, server, born];
        assert_eq!(whys(&w, &all), [KEPT; 3]);
        assert_eq!(
            all.map(|key| w.decide(key).until),
            [hour.until_monotonic_ns; 3]
        );
        assert_eq!(w.model.unkeep(shell), 3);
        assert_eq!(whys(&w, &all), [REAPED; 3]);
        assert_eq!(w.why(other), if unrelated { KEPT } else { REAPED });
        // A revoked keep no longer covers the descendants.
        w.model.keep(
            shell,
            UserKeep {
                with_descendants: false,
                ..keep_made_at(3)
            },
        );
        assert_eq!(whys(&w, &all), [KEPT, REAPED, REAPED]);
    }
}

#[test]
fn keeps_are_dropped_after_expiry_or_session_close() {
    let mut w = World::new();
    advance(&mut w, 0);
    for n in 0..200 {
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        let minute = UserKeep {
            until_monotonic_ns: Some(w.now + MINUTE),
            ..keep_made_at(2 * n)
        };
        w.model.keep(agent, minute);
        w.model.keep(shell, keep_made_at(2 * n + 1));
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
        // The keeps of recently closed sessions stay, because members may still be reported late.
        assert!(
            w.model.keep_request_count() <= 2 * 64,
            "{} after {n}",
            w.model.keep_request_count()
        );
        advance(&mut w, MINUTE);
    }
    // A keep that is stored for many members is one keep.
    let agent = w.spawn(INIT, "claude");
    let all: Vec<ProcessKey> = (0..100).map(|_| w.fork(agent)).collect();
    w.model.keep(agent, keep_made_at(1_000));
    let before = w.model.keep_request_count();
    let all = all
        .iter()
        .map(|key| stored_keep(*key, agent, false, keep_made_at(1_001)));
    w.model.restore_keeps(all.collect());
    assert_eq!(w.model.keep_request_count(), before + 1);
}

#[test]
fn keep_marker_or_unreadable_environment_keeps() {
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    assert_eq!(
        w.why(shell),
        "keep root_alive",
        "no fact is read while the root is alive"
    );
    set_markers(&mut w, shell, Fact::Known(1));
    // A fork inherits the environment, an exec may set another.
    let (copy, other) = (w.fork(shell), w.spawn(shell, "env"));
    let below = w.spawn(other, "sleep");
    w.kill(agent);
    assert_eq!([shell, copy].map(|key| w.why(key)), ["keep keep_marker"; 2]);
    assert_eq!(
        (w.decide(other).needs, w.decide(below).needs),
        (FactSet::MARKERS, FactSet::MARKERS)
    );
    set_markers(&mut w, other, Fact::Known(0));
    set_markers(&mut w, below, Fact::Unreadable);
    assert_eq!(
        [other, below].map(|key| w.why(key)),
        ["reap root_exited", "keep unreadable"]
    );
}

#[test]
fn facts_read_before_an_exec_are_dropped() {
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
    let needs = FactSet::MARKERS | FactSet::LISTENING;
    w.model.set_facts(shell, needs, found.clone(), before);
    let facts = w.model.tree.get(shell).unwrap().facts().unwrap();
    assert_eq!(
        (facts.markers, facts.listening),
        (Fact::Unread, Fact::Known(true))
    );
    // Facts read after the fork do not apply to the child.
    let child = w.fork(shell);
    let now = w.now + 10;
    w.model.set_facts(shell, needs, found, now);
    w.now = now + 10;
    let later = w.fork(shell);
    let markers = |w: &World, key| w.model.tree.get(key).unwrap().facts().map(|f| f.markers);
    assert_eq!(
        [child, later].map(|key| markers(&w, key)),
        [None, Some(Fact::Known(1))]
    );
}

#[test]
fn user_keep_covers_a_process_or_its_tree_until_it_expires() {
    let mut w = World::new();
    advance(&mut w, 0);
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "vite");
    let untracked = w.spawn(INIT, "bash");
    let keep = UserKeep {
        until_monotonic_ns: Some(w.now + MINUTE),
        with_descendants: true,
        by_uid: 1000,
        made_at: 1,
    };
    assert_eq!(w.model.keep(untracked, keep), 0);
    assert_eq!(w.model.keep(shell, keep), 2);
    let later = w.spawn(server, "esbuild");
    w.exit(server);
    w.kill(agent);
    assert_eq!(
        [shell, later].map(|key| w.why(key)),
        ["keep kept_by_user"; 2]
    );
    assert_eq!(w.decide(shell).until, keep.until_monotonic_ns);
    assert_eq!(w.model.kept_by_users().count(), 2);
    advance(&mut w, MINUTE);
    assert_eq!(
        [shell, later].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
    assert_eq!(w.model.kept_by_users().count(), 0);
    let permanent = UserKeep {
        until_monotonic_ns: None,
        with_descendants: false,
        by_uid: 0,
        made_at: 1,
    };
    assert_eq!(w.model.keep(shell, permanent), 1);
    let child = w.fork(shell);
    assert_eq!(
        [shell, child].map(|key| w.why(key)),
        ["keep kept_by_user", "reap forked_after_root_exit"]
    );
    assert_eq!((w.model.unkeep(shell), w.model.unkeep(shell)), (1, 0));
    assert_eq!(w.why(shell), "reap root_exited");
}
