//! Merging of scans and events about the same processes, with events that are repeated, late or lost.

use super::world::{INIT, OWN_PID, USER, World, image, rules};
use crate::Scope;
use crate::event::{EventKind, ExitStatus, ProcessKey, Provenance, TICK_NS, Uids};

/// Returns a key whose start is not a multiple of the clock tick.
pub(super) fn key(pid: u32) -> ProcessKey {
    ProcessKey {
        pid,
        start: 50 * TICK_NS + u64::from(pid) * 1000 + 1,
    }
}

#[test]
fn pre_existing_agent_opens_a_session() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let shell = w.row(key(11), 10, "bash");
    let server = w.fork(shell);
    w.kill(key(10));
    assert_eq!(
        [shell, server].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
    assert_eq!(w.why(agent), "keep not_a_member");
}

/// A pidfd can report an exit before all events of the process are read.
#[test]
fn fork_reported_after_its_parents_exit_has_the_same_program() {
    for had_child in [false, true] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        if had_child {
            w.fork(shell);
        }
        w.exit(shell);
        let server = w.fork(shell);
        assert_eq!(w.model.tree.comm(server), b"bash");
        // An exec may be reported after the exit too. The last one counts.
        let boundary = w.spawn(agent, "bash");
        w.exit(boundary);
        w.exec(boundary, "tmux");
        let no_member = w.fork(boundary);
        let other = w.spawn(agent, "bash");
        w.exit(other);
        w.exec(other, "dash");
        let child_of_dash = w.fork(other);
        assert_eq!(w.model.tree.comm(child_of_dash), b"dash");
        w.kill(agent);
        assert_eq!(w.why(server), "reap root_exited");
        assert_eq!(w.why(child_of_dash), "reap root_exited");
        assert_eq!(w.why(no_member), "keep not_a_member");
    }
}

#[test]
fn seeded_process_is_found_by_its_exact_start_too() {
    let mut w = World::new();
    let known = w.row(key(10), 1, "claude");
    let tool = w.fork(key(10));
    w.exec(key(10), "claude --resume");
    assert_eq!(w.session_events(), ["opened claude"]);
    assert_eq!(w.model.tree.get(key(10)).unwrap().key, known);
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(known));
    w.kill(key(10));
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn event_with_a_tick_start_sets_no_exact_key() {
    for event in ["exec", "reparent"] {
        let mut w = World::new();
        let known = w.row(key(10), 1, "claude");
        let tool = w.fork(known);
        w.kernel(match event {
            "exec" => EventKind::Exec {
                key: known,
                parent: None,
                uids: USER,
                pidfd_inode: 0,
                image: image("claude --resume", 0),
                membership: None,
            },
            _ => EventKind::Reparent {
                child: known,
                old_parent: None,
                adopter: Some(INIT),
                membership: None,
            },
        });
        let node = |w: &World| w.model.tree.get(key(10)).map(|node| node.exact_key());
        assert_eq!(node(&w), Some(None), "{event}");
        w.fork_as(key(10), INIT, INIT);
        assert_eq!(node(&w), Some(Some(key(10))), "{event}");
        w.kill(key(10));
        assert_eq!(w.why(tool), "reap root_exited", "{event}");
        // The exited process is remembered by its exact start.
        let reused = ProcessKey {
            start: key(10).start + 1,
            ..known
        };
        w.fork_as(reused, INIT, INIT);
        assert!(w.model.tree.get(reused).is_some(), "{event}");
    }
}

#[test]
fn exit_with_a_tick_start_ends_a_seeded_process() {
    let mut w = World::new();
    let known = w.row(key(10), 1, "claude");
    let tool = w.fork(known);
    w.kill(known);
    assert_eq!(w.why(tool), "reap root_exited");
    assert!(w.model.tree.get(known).is_none());
}

#[test]
fn reused_pid_in_the_same_tick_is_another_process() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let victim = w.fork(agent);
    w.kill(agent);
    w.kill(victim);
    let reused = ProcessKey {
        start: victim.start + 1,
        ..victim
    };
    assert!(reused.has_same_tick(victim));
    w.fork_as(reused, INIT, INIT);
    assert_eq!(
        [victim, reused].map(|key| w.why(key)),
        ["keep not_a_member"; 2]
    );
    assert!(w.model.tree.get(victim).is_none());
    assert!(w.model.tree.get(reused).is_some());
}

#[test]
fn reused_pid_in_the_tick_of_a_seeded_process_is_another() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    let victim = w.row(key(11), 10, "npm");
    w.kill(key(10));
    assert_eq!(w.why(victim), "reap root_exited");
    w.kill(key(11));
    let reused = ProcessKey {
        start: key(11).start + 7,
        ..key(11)
    };
    w.fork_as(reused, INIT, INIT);
    assert!(
        w.model.tree.get(victim).is_none(),
        "the key of the exited process finds nothing"
    );
    assert_eq!(w.why(reused), "keep not_a_member");
}

#[test]
fn reused_pid_ends_the_old_process() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let reused = w.new_key();
    let reused = ProcessKey {
        pid: agent.pid,
        ..reused
    };
    w.fork_as(reused, INIT, INIT);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(reused), "keep not_a_member");
}

#[test]
fn fork_read_after_the_scan_row_sets_the_birth_parent() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    // Discovered below init: it was orphaned between its fork and the scan.
    let orphan = w.row(key(12), 1, "server");
    assert!(!w.is_member(orphan));
    w.fork_as(key(11), agent, agent);
    w.fork_as(key(12), key(11), key(11));
    assert!(w.is_member(orphan));
    w.exit_with(key(11), ExitStatus::Exited(0), Some(INIT));
    let node = w.model.tree.get(orphan).unwrap();
    assert_eq!(
        (node.parent, node.birth_parent),
        (Some(INIT), Some(key(11)))
    );
    assert_eq!(w.why(orphan), "keep detached");
}

#[test]
fn seeded_agent_is_nested_when_its_fork_is_read() {
    let mut w = World::new();
    let inner = w.row(key(12), 1, "codex");
    let outer = w.spawn(INIT, "claude");
    w.fork_as(key(12), outer, outer);
    w.kill(outer);
    assert_eq!(w.why(inner), "reap root_exited");
}

#[test]
fn fork_read_after_the_scan_row_keeps_newer_uids() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let root = Uids::default();
    let sudo = w.row_with(key(11), 10, "dockerd", |row| row.uids = root);
    w.fork_as(key(11), agent, agent);
    w.kill(key(10));
    assert_eq!(w.why(sudo), "keep other_uid other-uid");
}

#[test]
fn repeated_fork_keeps_newer_uids() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let sudo = w.fork(agent);
    let fork = w.events.last().unwrap().clone();
    w.uids = Uids::default();
    w.exec(sudo, "dockerd");
    w.apply(fork);
    w.kill(agent);
    assert_eq!(w.why(sudo), "keep other_uid other-uid");
}

#[test]
fn repeated_events_change_nothing() {
    let mut once = World::new();
    let mut twice = World::new();
    for (w, again) in [(&mut once, false), (&mut twice, true)] {
        let steps: [fn(&mut World); 6] = [
            |w| _ = w.row(key(10), 1, "claude"),
            |w| w.fork_as(key(11), key(10), key(10)),
            |w| w.exec(key(11), "codex"),
            |w| w.fork_as(key(12), key(11), key(11)),
            |w| w.kill(key(11)),
            |w| w.exec(key(12), "npm"),
        ];
        for step in steps {
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
fn repeated_events_of_exited_process_do_not_revive_it() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let repeated = w.events.clone();
    w.kill(tool);
    let living = w.model.tree.len();
    repeated.into_iter().for_each(|event| w.apply(event));
    // The child's exit was reported first. When the parent exited, the child was still in its list.
    w.exit_with(agent, ExitStatus::Exited(0), None);
    w.adopt(tool, agent, INIT);
    assert_eq!(w.model.tree.len(), living - 1);
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
}

#[test]
fn scan_row_of_exited_process_does_not_revive_it() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.kill(tool);
    w.row(tool, agent.pid, "npm");
    w.row(key(10), 1, "bash");
    w.kill(key(10));
    w.row(key(10), 1, "bash");
    assert_eq!(w.model.tree.len(), 2);
}

#[test]
fn reparented_unknown_child_of_a_member_is_a_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    w.exit_with(shell, ExitStatus::Exited(0), None);
    let lost = w.new_key();
    w.adopt(lost, shell, INIT);
    assert_eq!(w.why(lost), "keep detached");
    w.kill(agent);
    // Its uids are unknown until the scan that follows lost events.
    assert_eq!(w.why(lost), "keep other_uid other-uid");
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
}

#[test]
fn reparented_unknown_child_of_seeded_member_is_a_member() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    w.row(key(11), 10, "bash");
    w.exit_with(key(11), ExitStatus::Exited(0), None);
    w.adopt(key(12), key(11), INIT);
    assert_eq!(w.why(key(12)), "keep detached");
}

#[test]
fn unknown_child_is_discovered_after_its_session_closed() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let lost = w.new_key();
    w.kill(agent);
    w.exit_with(shell, ExitStatus::Exited(0), None);
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
    w.adopt(lost, shell, INIT);
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
    w.session_events();
    w.kill(lost);
    assert_eq!(w.session_events(), ["closed claude"]);
}

#[test]
fn unknown_child_is_in_the_scope_of_its_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let mut w = World::scoped(Scope {
        roots: vec![agent],
        ..Scope::default()
    });
    assert_eq!(w.spawn(INIT, "claude"), agent);
    let lost = w.new_key();
    w.exit_with(agent, ExitStatus::Exited(0), None);
    w.adopt(lost, agent, INIT);
    w.row(lost, 1, "npm");
    assert_eq!(w.why(lost), "reap root_exited");
}

#[test]
fn exec_of_unknown_process_joins_its_parents_session() {
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
fn orphan_of_a_namespace_init_is_in_an_ending_namespace() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let init = w.namespace(agent);
    // `adopted` was adopted by the init. The reparenting of `early` is reported before the init's exit.
    let shell = w.fork(init);
    let (early, adopted) = (w.fork(init), w.fork(shell));
    w.exit_with(shell, ExitStatus::Exited(0), Some(init));
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
    w.exit_with(init, ExitStatus::Exited(0), None);
    assert_eq!(ending(&w, adopted), Some(true));
}

#[test]
fn process_from_outside_a_pid_namespace_is_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let init = w.namespace(agent);
    let own = w.fork(init);
    // `nsenter` from outside: its first process is known, and the init adopts its child.
    let nsenter = w.spawn(INIT, "nsenter");
    let known = w.fork(nsenter);
    w.exit_with(nsenter, ExitStatus::Exited(0), Some(init));
    // Other processes become known later: by a scan, by an exec, or by the exit of the init.
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
    w.kill(agent);
    w.exit_with(init, ExitStatus::Exited(0), None);
    let left = w.new_key();
    w.adopt(left, init, INIT);
    assert_eq!(w.why(own), "reap root_exited");
    for key in [known, found, ran, left] {
        assert_eq!(w.why(key), "keep not_a_member");
    }
}

#[test]
fn adopter_reported_before_exit_of_seeded_parent_is_used() {
    let mut w = World::new();
    let agent = w.row(key(10), 1, "claude");
    let tool = w.fork(agent);
    w.adopt(tool, key(10), INIT);
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(INIT));
}

#[test]
fn repeated_reparenting_does_not_undo_a_later_one() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let subreaper = w.spawn(agent, "tini");
    let shell = w.spawn(subreaper, "bash");
    let server = w.spawn(shell, "server");
    w.exit_with(shell, ExitStatus::Exited(0), Some(subreaper));
    let late = w.events.last().unwrap().clone();
    w.exit(subreaper);
    w.apply(late);
    assert_eq!(w.model.tree.get(server).unwrap().parent, Some(INIT));
}

#[test]
fn fork_without_a_known_parent_is_no_member() {
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
fn agents_that_are_each_others_children_form_no_loop() {
    let mut w = World::new();
    let [a, b] = [10, 11].map(|pid| w.row(key(pid), 1, "claude"));
    w.fork_as(key(10), b, b);
    w.fork_as(key(11), a, a);
    w.kill(key(11));
    assert_eq!(w.why(a), "reap root_exited");
    w.kill(key(10));
    assert_eq!(w.model.sessions.iter().count(), 0);
}

#[test]
fn damaged_keys_form_no_loops() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let [a, b] = [w.fork(agent), w.fork(agent)];
    w.fork_as(key(90), key(90), key(90));
    w.adopt(a, agent, b);
    w.adopt(b, agent, a);
    w.kill(agent);
    assert_eq!([a, b].map(|key| w.why(key)), ["reap root_exited"; 2]);
    w.report(
        Provenance::Inferred,
        EventKind::Exit {
            key: a,
            parent: Some(a),
            exit_status: ExitStatus::Unknown,
            peak_rss: 0,
            membership: None,
        },
    );
    w.kill(b);
    w.kill(key(90));
    assert_eq!(w.model.tree.len(), 1);
}

#[test]
fn tree_is_empty_until_a_process_is_discovered() {
    let model = crate::Model::new(rules(), Scope::default(), OWN_PID);
    assert!(model.tree.is_empty());
    assert!(!World::new().model.tree.is_empty());
}
