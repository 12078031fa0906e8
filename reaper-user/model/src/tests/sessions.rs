//! Agents, roots, nesting, relaunches and boundaries.

use super::world::{INIT, World};
use crate::event::ExitStatus;
use crate::facts::{Fact, FactSet, Facts};
use crate::session::{ANCESTORS_MAX, ENCLOSING_MAX};

#[test]
fn agent_and_its_descendants_form_a_session() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let npm = w.spawn(agent, "npm");
    let node = w.spawn(npm, "node");
    assert_eq!(w.session_events(), ["opened claude"]);
    assert_eq!(
        [shell, agent, npm, node].map(|key| w.root_of(key)),
        [None, Some(agent), Some(agent), Some(agent)]
    );
    assert_eq!(
        [shell, agent, node].map(|key| w.why(key)),
        ["keep not_a_member", "keep root_alive", "keep root_alive"]
    );
}

#[test]
fn child_is_a_member_before_its_exec() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    let grandchild = w.fork(child);
    assert!(w.is_member(child) && w.is_member(grandchild));
}

#[test]
fn root_exit_makes_members_due_and_last_exit_closes_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let npm = w.spawn(agent, "npm");
    let node = w.spawn(npm, "node");
    w.kill(agent);
    assert_eq!(w.session_events(), ["opened claude", "root_exited claude"]);
    assert_eq!([npm, node].map(|key| w.why(key)), ["reap root_exited"; 2]);
    w.kill(npm);
    w.kill(node);
    assert_eq!(w.session_events(), ["closed claude"]);
    assert_eq!(w.why(node), "keep not_a_member");
}

#[test]
fn ancestors_of_member_end_at_its_agent() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let bash = w.spawn(agent, "bash");
    let npm = w.spawn(bash, "npm");
    let inner = w.spawn(npm, "codex");
    let node = w.spawn(inner, "node");
    let ancestors = |w: &World, key| {
        let node = w.model.tree.get(key).unwrap();
        let all = w.model.tree.member_ancestors(node.birth_parent);
        all.map(|(key, image, has_exited)| {
            let comm = String::from_utf8_lossy(&image.comm).into_owned();
            (key, comm, has_exited)
        })
        .collect::<Vec<_>>()
    };
    let alive = |key, comm: &str| (key, comm.to_owned(), false);
    let exited = |key, comm: &str| (key, comm.to_owned(), true);
    w.exit(bash);
    // The agent of the nested session has the ancestors in the outer one.
    assert_eq!(
        ancestors(&w, inner),
        [
            alive(npm, "npm"),
            exited(bash, "bash"),
            alive(agent, "claude")
        ]
    );
    assert_eq!(ancestors(&w, node), [alive(inner, "codex")]);
    w.kill(agent);
    w.kill(npm);
    assert_eq!(
        ancestors(&w, inner),
        [
            exited(npm, "npm"),
            exited(bash, "bash"),
            exited(agent, "claude")
        ]
    );
    assert_eq!(ancestors(&w, shell), []);
}

#[test]
fn ancestors_of_member_are_bounded() {
    let mut w = World::new();
    let mut last = w.spawn(INIT, "claude");
    for _ in 0..2 * ANCESTORS_MAX {
        last = w.spawn(last, "bash");
    }
    let ancestors = w.model.tree.member_ancestors(Some(last));
    assert_eq!(ancestors.count(), ANCESTORS_MAX);
}

#[test]
fn exit_of_root_without_members_closes_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    w.exit(agent);
    assert_eq!(
        w.session_events(),
        ["opened claude", "root_exited claude", "closed claude"]
    );
}

#[test]
fn double_forked_daemon_stays_a_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let middle = w.fork(agent);
    let daemon = w.fork(middle);
    w.exit(middle);
    w.exec(daemon, "server");
    assert_eq!(w.why(daemon), "keep detached");
    w.exit(agent);
    assert_eq!(w.why(daemon), "reap root_exited");
}

#[test]
fn orphan_without_a_reported_adopter_is_an_orphan() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "server");
    w.exit_with(shell, ExitStatus::Exited(0), None);
    assert_eq!(w.why(server), "keep detached");
    w.exit_with(agent, ExitStatus::Exited(0), None);
    assert_eq!(w.why(server), "reap root_exited");
}

#[test]
fn orphan_adopted_by_a_member_stays_an_orphan() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let subreaper = w.spawn(agent, "tini");
    let shell = w.spawn(subreaper, "bash");
    let server = w.spawn(shell, "server");
    w.exit_with(shell, ExitStatus::Exited(0), Some(subreaper));
    let node = w.model.tree.get(server).unwrap();
    assert_eq!(
        (node.parent, node.birth_parent),
        (Some(subreaper), Some(shell))
    );
    assert_eq!(w.why(server), "keep detached");
}

#[test]
fn clone_parent_child_joins_its_creators_session() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let sibling = w.clone_parent(agent, shell);
    assert_eq!(w.root_of(sibling), Some(agent));
    w.kill(agent);
    assert_eq!(w.why(sibling), "reap root_exited");
}

#[test]
fn clone_parent_child_of_a_boundary_is_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let pane = w.clone_parent(tmux, agent);
    w.kill(agent);
    assert_eq!(w.why(pane), "keep not_a_member");
}

#[test]
fn agent_below_a_boundary_is_not_nested() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let tmux = w.spawn(outer, "tmux");
    let pane = w.spawn(tmux, "bash");
    let inner = w.spawn(pane, "claude");
    let tool = w.spawn(inner, "npm");
    assert_eq!(
        w.session_events(),
        ["opened claude", "boundary tmux in claude", "opened claude"]
    );
    w.kill(outer);
    let keys = [tmux, pane, inner, tool];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "keep not_a_member",
            "keep not_a_member",
            "keep root_alive",
            "keep root_alive"
        ]
    );
    w.kill(inner);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(pane), "keep not_a_member");
}

#[test]
fn last_due_member_that_becomes_a_boundary_closes_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    w.kill(agent);
    assert_eq!(w.why(child), "reap root_exited");
    w.exec(child, "tmux");
    assert_eq!(w.why(child), "keep not_a_member");
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
}

#[test]
fn exit_of_root_that_became_a_boundary_makes_members_due() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    let tool = w.spawn(root, "npm");
    w.exec(root, "tmux");
    let pane = w.spawn(root, "bash");
    let keys = [root, pane, tool];
    assert_eq!(
        keys.map(|key| w.why(key)),
        ["keep not_a_member", "keep not_a_member", "keep root_alive"]
    );
    w.kill(root);
    assert_eq!(
        [pane, tool].map(|key| w.why(key)),
        ["keep not_a_member", "reap root_exited"]
    );
}

#[test]
fn exit_of_lone_root_that_became_a_boundary_closes_session() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    w.exec(root, "tmux");
    w.kill(root);
    assert_eq!(
        w.session_events(),
        [
            "opened claude",
            "boundary tmux in claude",
            "root_exited claude",
            "closed claude"
        ]
    );
    assert_eq!(w.model.sessions.iter().count(), 0);
}

#[test]
fn root_that_was_a_boundary_in_between_has_members_again() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    w.exec(root, "tmux");
    w.exec(root, "claude");
    let tool = w.spawn(root, "npm");
    w.kill(root);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn exit_of_nested_root_makes_only_its_members_due() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let shell = w.spawn(outer, "bash");
    let inner = w.spawn(shell, "codex");
    let tool = w.spawn(inner, "npm");
    w.kill(inner);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!([outer, shell].map(|key| w.why(key)), ["keep root_alive"; 2]);
    w.kill(tool);
    assert_eq!(
        w.session_events(),
        [
            "opened claude",
            "opened codex",
            "root_exited codex",
            "closed codex"
        ]
    );
}

#[test]
fn exit_of_outer_root_makes_nested_sessions_due() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let shell = w.spawn(outer, "bash");
    let inner = w.spawn(shell, "codex");
    let tool = w.spawn(inner, "npm");
    w.kill(outer);
    assert_eq!(
        [shell, inner, tool].map(|key| w.why(key)),
        ["reap root_exited"; 3]
    );
    let due_session_root = |key| {
        let session = w.model.tree.get(key).unwrap().state.member.session.unwrap();
        w.model.sessions.due(session).unwrap().0.root
    };
    assert_eq!([shell, inner, tool].map(due_session_root), [outer; 3]);
}

#[test]
fn outer_session_closes_after_nested_ones() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let inner = w.spawn(outer, "codex");
    w.kill(outer);
    w.session_events();
    w.kill(inner);
    assert_eq!(
        w.session_events(),
        ["root_exited codex", "closed codex", "closed claude"]
    );
}

#[test]
fn due_member_that_becomes_an_agent_stays_due() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    w.kill(agent);
    w.exec(child, "claude");
    let tool = w.fork(child);
    assert_eq!(
        [child, tool].map(|key| w.why(key)),
        ["reap root_exited", "reap forked_after_root_exit"]
    );
}

/// Returns a root, a child with the same program, and a tool below the child.
fn relaunch(w: &mut World, child_tty: u32) -> [crate::event::ProcessKey; 3] {
    w.tty = 7;
    let root = w.spawn(INIT, "claude");
    w.tty = child_tty;
    let child = w.spawn(root, "claude --relaunched");
    let tool = w.spawn(child, "npm");
    w.session_events();
    [root, child, tool]
}

#[test]
fn child_in_the_same_terminal_succeeds_its_root() {
    let mut w = World::new();
    let [root, child, tool] = relaunch(&mut w, 7);
    w.exit(root);
    assert_eq!(w.session_events(), ["relaunched claude"]);
    assert_eq!(
        [child, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
    w.exit(child);
    assert_eq!(w.why(tool), "reap root_exited");
    w.kill(tool);
    assert_eq!(
        w.session_events(),
        [
            "root_exited claude",
            "root_exited claude",
            "closed claude",
            "closed claude"
        ]
    );
}

#[test]
fn member_of_the_first_root_is_due_when_its_successor_exits() {
    let mut w = World::new();
    let [root, child, _] = relaunch(&mut w, 7);
    let server = w.spawn(root, "server");
    w.exit(root);
    assert_eq!(w.why(server), "keep detached");
    w.kill(child);
    assert_eq!(w.why(server), "reap root_exited");
}

#[test]
fn relaunched_root_can_be_relaunched() {
    let mut w = World::new();
    let [first, second, tool] = relaunch(&mut w, 7);
    let third = w.spawn(second, "claude --again");
    w.exit(first);
    w.exit(second);
    assert_eq!(w.why(tool), "keep detached");
    w.exit(third);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn killed_root_has_no_successor() {
    let mut w = World::new();
    let [root, child, tool] = relaunch(&mut w, 7);
    w.kill(root);
    assert_eq!([child, tool].map(|key| w.why(key)), ["reap root_exited"; 2]);
}

#[test]
fn child_in_another_terminal_or_none_is_no_successor() {
    for tty in [0, 8] {
        let mut w = World::new();
        let [root, child, tool] = relaunch(&mut w, tty);
        w.exit(root);
        assert_eq!([child, tool].map(|key| w.why(key)), ["reap root_exited"; 2]);
    }
}

#[test]
fn child_that_does_not_read_the_terminal_is_no_successor() {
    let set_stdin = |w: &mut World, key, stdin| {
        let found = Facts {
            stdin_is_terminal: stdin,
            ..Facts::NOTHING
        };
        let now = w.now;
        w.model.set_facts(key, FactSet::STDIN, found, now);
    };
    use Fact::{Known, Unread, Unreadable};
    for (of_root, of_child, hands_over) in [
        (Known(true), Known(false), false),
        (Known(true), Known(true), true),
        // Neither reads the terminal.
        (Known(false), Known(false), true),
        // An unknown value does not exclude the child.
        (Unread, Known(false), true),
        (Unreadable, Known(false), true),
        (Known(true), Unread, true),
        (Known(true), Unreadable, true),
    ] {
        let mut w = World::new();
        let [root, child, tool] = relaunch(&mut w, 7);
        set_stdin(&mut w, root, of_root);
        set_stdin(&mut w, child, of_child);
        w.exit(root);
        let expected = if hands_over {
            ["keep root_alive", "keep root_alive"]
        } else {
            ["reap root_exited"; 2]
        };
        let decisions = [child, tool].map(|key| w.why(key));
        assert_eq!(decisions, expected, "{of_root:?} {of_child:?}");
    }
}

#[test]
fn root_without_a_terminal_has_no_successor() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    let child = w.spawn(root, "claude --relaunched");
    w.exit(root);
    assert_eq!(w.why(child), "reap root_exited");
}

#[test]
fn grandchild_or_other_agent_is_no_successor() {
    let mut w = World::new();
    w.tty = 7;
    let root = w.spawn(INIT, "claude");
    let codex = w.spawn(root, "codex");
    let shell = w.spawn(root, "bash");
    let grandchild = w.spawn(shell, "claude -p");
    w.exit(root);
    assert_eq!(
        [codex, shell, grandchild].map(|key| w.why(key)),
        ["reap root_exited"; 3]
    );
}

#[test]
fn shim_that_execs_the_agent_is_the_root() {
    let mut w = World::new();
    let shim = w.spawn(INIT, "node");
    let early = w.spawn(shim, "npm");
    w.exec(shim, "claude");
    let tool = w.spawn(shim, "npm");
    w.kill(shim);
    assert_eq!(
        [early, tool].map(|key| w.why(key)),
        ["keep not_a_member", "reap root_exited"]
    );
}

#[test]
fn root_that_execs_another_agent_keeps_its_session() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    let tool = w.spawn(root, "npm");
    w.exec(root, "codex");
    assert_eq!(w.session_events(), ["opened claude"]);
    w.kill(root);
    assert_eq!(w.session_events(), ["root_exited codex"]);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn shim_that_starts_the_agent_and_exits_is_no_root() {
    let mut w = World::new();
    let shim = w.spawn(INIT, "node");
    let agent = w.spawn(shim, "claude");
    let tool = w.spawn(agent, "npm");
    w.exit(shim);
    assert_eq!(
        [agent, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
}

/// A thread that calls execve(2) takes over the pid and start time of the leader, so the key stays.
#[test]
fn exec_by_another_thread_is_an_exec_of_the_process() {
    let mut w = World::new();
    let launcher = w.spawn(INIT, "node");
    w.exec(launcher, "claude");
    w.exec(launcher, "claude --thread");
    let tool = w.spawn(launcher, "npm");
    assert_eq!(w.session_events(), ["opened claude"]);
    assert_eq!(w.root_of(tool), Some(launcher));
}

#[test]
fn agent_nested_too_deep_stays_a_member() {
    let mut w = World::new();
    let mut agent = w.spawn(INIT, "claude");
    for _ in 0..ENCLOSING_MAX {
        agent = w.spawn(agent, "claude");
    }
    assert_eq!(w.root_of(agent), Some(agent));
    let deeper = w.spawn(agent, "claude");
    let tool = w.spawn(deeper, "sh");
    assert_eq!([deeper, tool].map(|key| w.root_of(key)), [Some(agent); 2]);
    w.kill(deeper);
    assert_eq!(w.why(tool), "keep detached");
    w.kill(agent);
    assert_eq!(w.why(tool), "reap root_exited");
}
