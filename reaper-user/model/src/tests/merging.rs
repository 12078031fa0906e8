//! What /proc says and what the probes say of the same processes, and what comes twice, late or not at all.

use super::world::{INIT, OWN_PID, USER, World, image, rules};
use crate::Scope;
use crate::event::{EventKind, ExitStatus, ProcessKey, Provenance, TICK_NS, Uids};

/// A start that is no whole tick, and a pid.
pub(super) fn key(pid: u32) -> ProcessKey {
    ProcessKey {
        pid,
        start: 50 * TICK_NS + u64::from(pid) * 1000 + 1,
    }
}

#[test]
fn what_ran_before_is_a_session_like_any_other() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let shell = w.row(key(11), 10, "bash");
    let server = w.fork(shell);
    w.dies_by_signal(key(10));
    assert_eq!(
        [shell, server].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
    assert_eq!(w.why(agent), "keep not_a_member");
}

/// Its end may be known by its pidfd before all is read that it has done.
#[test]
fn whoever_is_told_of_after_the_end_of_its_maker_runs_what_that_ran() {
    for restless in [false, true] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        if restless {
            w.fork(shell);
        }
        w.exit(shell);
        let server = w.fork(shell);
        assert_eq!(w.model.tree.comm(server), b"bash");
        // Which is told last of all, where it is told late.
        let boundary = w.spawn(agent, "bash");
        w.exit(boundary);
        w.exec(boundary, "tmux");
        let nobodys = w.fork(boundary);
        let other = w.spawn(agent, "bash");
        w.exit(other);
        w.exec(other, "dash");
        let dashs = w.fork(other);
        assert_eq!(w.model.tree.comm(dashs), b"dash");
        w.dies_by_signal(agent);
        assert_eq!(w.why(server), "reap root_exited");
        assert_eq!(w.why(dashs), "reap root_exited");
        assert_eq!(w.why(nobodys), "keep not_a_member");
    }
}

#[test]
fn the_exact_start_of_a_seeded_process_is_told_later_and_names_it_too() {
    let mut w = World::new();
    let known = w.row(key(10), 1, "claude");
    let tool = w.fork(key(10));
    w.exec(key(10), "claude --resume");
    assert_eq!(w.session_events(), ["opened claude"]);
    assert_eq!(w.model.tree.get(key(10)).unwrap().key, known);
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(known));
    w.dies_by_signal(key(10));
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn what_the_kernel_says_of_a_start_known_to_the_tick_names_nobody_exactly() {
    for told in ["exec", "reparent"] {
        let mut w = World::new();
        let known = w.row(key(10), 1, "claude");
        let tool = w.fork(known);
        let mark = None;
        w.kernel(match told {
            "exec" => EventKind::Exec {
                key: known,
                parent: None,
                uids: USER,
                pidfd_inode: 0,
                image: image("claude --resume", 0),
                membership: mark,
            },
            _ => EventKind::Reparent {
                child: known,
                old_parent: None,
                adopter: Some(INIT),
                membership: mark,
            },
        });
        let node = |w: &World| w.model.tree.get(key(10)).map(|node| node.exact_key());
        assert_eq!(node(&w), Some(None), "{told}");
        w.fork_as(key(10), INIT, INIT);
        assert_eq!(node(&w), Some(Some(key(10))), "{told}");
        w.dies_by_signal(key(10));
        assert_eq!(w.why(tool), "reap root_exited", "{told}");
        // Remembered by its exact start.
        let successor = ProcessKey {
            start: key(10).start + 1,
            ..known
        };
        w.fork_as(successor, INIT, INIT);
        assert!(w.model.tree.get(successor).is_some(), "{told}");
    }
}

#[test]
fn an_end_told_by_the_tick_is_that_of_a_process_found_by_the_tick() {
    let mut w = World::new();
    let known = w.row(key(10), 1, "claude");
    let tool = w.fork(known);
    w.dies_by_signal(known);
    assert_eq!(w.why(tool), "reap root_exited");
    assert!(w.model.tree.get(known).is_none());
}

#[test]
fn a_successor_in_the_same_tick_is_another_process() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let victim = w.fork(agent);
    w.dies_by_signal(agent);
    w.dies_by_signal(victim);
    let successor = ProcessKey {
        start: victim.start + 1,
        ..victim
    };
    assert!(successor.has_same_tick(victim));
    w.fork_as(successor, INIT, INIT);
    assert_eq!(
        [victim, successor].map(|key| w.why(key)),
        ["keep not_a_member"; 2]
    );
    assert!(w.model.tree.get(victim).is_none());
    assert!(w.model.tree.get(successor).is_some());
}

#[test]
fn a_successor_in_the_same_tick_as_a_seeded_process_is_another_process() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    let victim = w.row(key(11), 10, "npm");
    w.dies_by_signal(key(10));
    assert_eq!(w.why(victim), "reap root_exited");
    w.dies_by_signal(key(11));
    let successor = ProcessKey {
        start: key(11).start + 7,
        ..key(11)
    };
    w.fork_as(successor, INIT, INIT);
    assert!(
        w.model.tree.get(victim).is_none(),
        "the name of the first is not its"
    );
    assert_eq!(w.why(successor), "keep not_a_member");
}

#[test]
fn a_pid_that_is_given_away_ends_its_old_owner() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let successor = w.new_key();
    let successor = ProcessKey {
        pid: agent.pid,
        ..successor
    };
    w.fork_as(successor, INIT, INIT);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(successor), "keep not_a_member");
}

#[test]
fn a_fork_that_is_read_after_the_row_tells_whose_child_it_is() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    // Orphaned between its fork and the look at /proc, which finds it with the init.
    let orphan = w.row(key(12), 1, "server");
    assert!(!w.is_member(orphan));
    w.fork_as(key(11), agent, agent);
    w.fork_as(key(12), key(11), key(11));
    assert!(w.is_member(orphan));
    w.end(key(11), ExitStatus::Exited(0), Some(INIT));
    let node = w.model.tree.get(orphan).unwrap();
    assert_eq!(
        (node.parent, node.birth_parent),
        (Some(INIT), Some(key(11)))
    );
    assert_eq!(w.why(orphan), "keep detached");
}

#[test]
fn a_seeded_agent_is_nested_once_it_is_known_whose_child_it_is() {
    let mut w = World::new();
    let inner = w.row(key(12), 1, "codex");
    let outer = w.spawn(INIT, "claude");
    w.fork_as(key(12), outer, outer);
    w.dies_by_signal(outer);
    assert_eq!(w.why(inner), "reap root_exited");
}

#[test]
fn a_fork_that_is_read_after_the_row_brings_back_no_old_uids() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let root = Uids::default();
    let sudo = w.row_with(key(11), 10, "dockerd", |row| row.uids = root);
    w.fork_as(key(11), agent, agent);
    w.dies_by_signal(key(10));
    assert_eq!(w.why(sudo), "keep other_uid other-uid");
}

#[test]
fn a_fork_told_twice_brings_back_no_old_uids() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let sudo = w.fork(agent);
    let fork = w.events.last().unwrap().clone();
    w.uids = Uids::default();
    w.exec(sudo, "dockerd");
    w.apply(fork);
    w.dies_by_signal(agent);
    assert_eq!(w.why(sudo), "keep other_uid other-uid");
}

#[test]
fn what_is_told_twice_is_told_once() {
    let mut once = World::new();
    let mut twice = World::new();
    for (w, again) in [(&mut once, false), (&mut twice, true)] {
        let story: [fn(&mut World); 6] = [
            |w| _ = w.row(key(10), 1, "claude"),
            |w| w.fork_as(key(11), key(10), key(10)),
            |w| w.exec(key(11), "codex"),
            |w| w.fork_as(key(12), key(11), key(11)),
            |w| w.dies_by_signal(key(11)),
            |w| w.exec(key(12), "npm"),
        ];
        for step in story {
            let before = w.events.len();
            step(w);
            if again {
                w.repeat(w.events.len() - before);
            }
        }
    }
    assert_eq!(once.decisions(), twice.decisions());
    assert_eq!(once.session_events(), twice.session_events());
}

#[test]
fn what_is_told_of_an_exited_process_does_not_bring_it_back() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let told = w.events.clone();
    w.dies_by_signal(tool);
    let living = w.model.tree.len();
    told.into_iter().for_each(|event| w.apply(event));
    // The child had told of its own exit, but was still on its parent's list when that exited.
    w.end(agent, ExitStatus::Exited(0), None);
    w.adopt(tool, agent, INIT);
    assert_eq!(w.model.tree.len(), living - 1);
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
}

#[test]
fn a_row_of_what_has_just_exited_does_not_bring_it_back() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.dies_by_signal(tool);
    w.row(tool, agent.pid, "npm");
    w.row(key(10), 1, "bash");
    w.dies_by_signal(key(10));
    w.row(key(10), 1, "bash");
    assert_eq!(w.model.tree.len(), 2);
}

#[test]
fn an_unknown_child_of_a_member_becomes_one_when_it_is_orphaned() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    w.end(shell, ExitStatus::Exited(0), None);
    let lost = w.new_key();
    w.adopt(lost, shell, INIT);
    assert_eq!(w.why(lost), "keep detached");
    w.dies_by_signal(agent);
    // Nothing else is known of it until the look at /proc that follows a loss.
    assert_eq!(w.why(lost), "keep other_uid other-uid");
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
}

#[test]
fn an_unknown_child_of_a_seeded_member_becomes_one_when_it_is_orphaned() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    w.row(key(11), 10, "bash");
    w.end(key(11), ExitStatus::Exited(0), None);
    w.adopt(key(12), key(11), INIT);
    assert_eq!(w.why(key(12)), "keep detached");
}

#[test]
fn an_unknown_child_of_the_last_member_is_found_after_the_end_of_the_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let lost = w.new_key();
    w.dies_by_signal(agent);
    w.end(shell, ExitStatus::Exited(0), None);
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
    w.adopt(lost, shell, INIT);
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
    w.session_events();
    w.dies_by_signal(lost);
    assert_eq!(w.session_events(), ["closed claude"]);
}

#[test]
fn an_unknown_child_is_in_the_scope_of_its_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let mut w = World::scoped(Scope {
        roots: vec![agent],
        ..Scope::default()
    });
    assert_eq!(w.spawn(INIT, "claude"), agent);
    let lost = w.new_key();
    w.end(agent, ExitStatus::Exited(0), None);
    w.adopt(lost, agent, INIT);
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
}

#[test]
fn an_unknown_process_that_runs_something_is_what_its_parent_is() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let lost = w.new_key();
    w.kernel(EventKind::Exec {
        key: lost,
        parent: Some(agent),
        uids: super::world::USER,
        pidfd_inode: 0,
        image: image("npm", 0),
        membership: None,
    });
    assert_eq!(w.root_of(lost), Some(agent));
}

#[test]
fn child_of_a_namespace_init_that_exits_is_in_an_ending_namespace() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let init = w.namespace(agent);
    // One of them was adopted by the init, and the record of one child comes before that of the init's exit.
    let shell = w.fork(init);
    let (early, adopted) = (w.fork(init), w.fork(shell));
    w.end(shell, ExitStatus::Exited(0), Some(init));
    let ending = |w: &World, key| {
        let orphaned = w.model.tree.get(key).and_then(|node| node.orphaned);
        orphaned.map(|from| from.namespace_ending)
    };
    assert_eq!(
        (ending(&w, early), ending(&w, adopted)),
        (None, Some(false))
    );
    w.kernel(EventKind::Reparent {
        child: early,
        old_parent: Some(init),
        adopter: None,
        membership: None,
    });
    assert_eq!(ending(&w, early), Some(true));
    w.end(init, ExitStatus::Exited(0), None);
    assert_eq!(ending(&w, adopted), Some(true));
}

#[test]
fn what_is_brought_into_a_pid_namespace_is_not_taken_for_a_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let init = w.namespace(agent);
    let own = w.fork(init);
    // `nsenter` from elsewhere: its first process is known, and the init adopts what that leaves.
    let nsenter = w.spawn(INIT, "nsenter");
    let known = w.fork(nsenter);
    w.end(nsenter, ExitStatus::Exited(0), Some(init));
    // Of others only the outcome is seen: by a look at /proc, by an exec, by the end of the init.
    let found = w.new_key();
    w.row(found, init.pid, "sh");
    let ran = w.new_key();
    w.kernel(EventKind::Exec {
        key: ran,
        parent: Some(init),
        uids: super::world::USER,
        pidfd_inode: 0,
        image: image("sh", 0),
        membership: None,
    });
    w.dies_by_signal(agent);
    w.end(init, ExitStatus::Exited(0), None);
    let left = w.new_key();
    w.adopt(left, init, INIT);
    assert_eq!(w.why(own), "reap root_exited");
    for key in [known, found, ran, left] {
        assert_eq!(w.why(key), "keep not_a_member");
    }
}

#[test]
fn an_adopter_that_is_told_before_the_exit_is_taken_though_the_parent_was_seeded() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let tool = w.fork(agent);
    w.adopt(tool, key(10), INIT);
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(INIT));
}

#[test]
fn a_late_adoption_does_not_undo_a_later_one() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let subreaper = w.spawn(agent, "tini");
    let shell = w.spawn(subreaper, "bash");
    let server = w.spawn(shell, "server");
    w.end(shell, ExitStatus::Exited(0), Some(subreaper));
    let late = w.events.last().unwrap().clone();
    w.exit(subreaper);
    w.apply(late);
    assert_eq!(w.model.tree.get(server).unwrap().parent, Some(INIT));
}

#[test]
fn a_process_that_the_probes_tell_of_without_its_parent_is_nobodys() {
    let mut w = World::new();
    let child = w.new_key();
    w.kernel(EventKind::Fork {
        child,
        parent: None,
        creator: None,
        uids: Uids::default(),
        pidfd_inode: 0,
        namespace_init: false,
        membership: None,
    });
    assert_eq!(w.why(child), "keep not_a_member");
}

#[test]
fn agents_that_are_each_others_children_make_no_loop() {
    let mut w = World::new();
    let [a, b] = [10, 11].map(|pid| w.row(key(pid), 1, "claude"));
    w.fork_as(key(10), b, b);
    w.fork_as(key(11), a, a);
    w.dies_by_signal(key(11));
    assert_eq!(w.why(a), "reap root_exited");
    w.dies_by_signal(key(10));
    assert_eq!(w.model.sessions.iter().count(), 0);
}

#[test]
fn damaged_keys_make_no_loops() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let [a, b] = [w.fork(agent), w.fork(agent)];
    w.fork_as(key(90), key(90), key(90));
    w.adopt(a, agent, b);
    w.adopt(b, agent, a);
    w.dies_by_signal(agent);
    assert_eq!([a, b].map(|key| w.why(key)), ["reap root_exited"; 2]);
    w.tell(
        Provenance::Inferred,
        EventKind::Exit {
            key: a,
            parent: Some(a),
            exit_status: ExitStatus::Unknown,
            peak_rss: 0,
            membership: None,
        },
    );
    w.dies_by_signal(b);
    w.dies_by_signal(key(90));
    assert_eq!(w.model.tree.len(), 1);
}

#[test]
fn tree_is_empty_until_a_process_is_found() {
    let model = crate::Model::new(rules(), Scope::default(), OWN_PID);
    assert!(model.tree.is_empty());
    assert!(!World::new().model.tree.is_empty());
}
