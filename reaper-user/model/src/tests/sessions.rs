//! Agents, roots, nesting, relaunches and boundaries.

use super::world::{INIT, World};
use crate::event::ExitStatus;
use crate::facts::{Fact, FactSet, Facts};

#[test]
fn an_agent_and_all_that_descends_from_it_are_a_session() {
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
fn a_child_is_a_member_before_it_runs_anything() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    let grandchild = w.fork(child);
    assert!(w.is_member(child) && w.is_member(grandchild));
}

#[test]
fn the_end_of_the_root_makes_every_member_due_and_the_last_one_closes_the_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let npm = w.spawn(agent, "npm");
    let node = w.spawn(npm, "node");
    w.dies_by_signal(agent);
    assert_eq!(w.session_events(), ["opened claude", "root_exited claude"]);
    assert_eq!([npm, node].map(|key| w.why(key)), ["reap root_exited"; 2]);
    w.dies_by_signal(npm);
    w.dies_by_signal(node);
    assert_eq!(w.session_events(), ["closed claude"]);
    assert_eq!(w.why(node), "keep not_a_member");
}

#[test]
fn a_root_without_members_leaves_nothing() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    w.exit(agent);
    assert_eq!(
        w.session_events(),
        ["opened claude", "root_exited claude", "closed claude"]
    );
}

#[test]
fn a_double_fork_stays_a_member() {
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
fn an_orphan_is_one_though_nobody_tells_who_has_it_now() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let server = w.spawn(shell, "server");
    w.end(shell, ExitStatus::Exited(0), None);
    assert_eq!(w.why(server), "keep detached");
    w.end(agent, ExitStatus::Exited(0), None);
    assert_eq!(w.why(server), "reap root_exited");
}

#[test]
fn a_subreaper_in_the_session_takes_an_orphan_and_it_stays_one() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let subreaper = w.spawn(agent, "tini");
    let shell = w.spawn(subreaper, "bash");
    let server = w.spawn(shell, "server");
    w.end(shell, ExitStatus::Exited(0), Some(subreaper));
    let node = w.model.tree.get(server).unwrap();
    assert_eq!(
        (node.parent, node.birth_parent),
        (Some(subreaper), Some(shell))
    );
    assert_eq!(w.why(server), "keep detached");
}

#[test]
fn clone_parent_makes_a_member_of_what_its_creator_is() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let sibling = w.clone_parent(agent, shell);
    assert_eq!(w.root_of(sibling), Some(agent));
    w.dies_by_signal(agent);
    assert_eq!(w.why(sibling), "reap root_exited");
}

#[test]
fn clone_parent_below_a_boundary_makes_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let pane = w.clone_parent(tmux, agent);
    w.dies_by_signal(agent);
    assert_eq!(w.why(pane), "keep not_a_member");
}

#[test]
fn membership_stops_at_a_boundary_and_an_agent_below_it_is_of_its_own() {
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
    w.dies_by_signal(outer);
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
    w.dies_by_signal(inner);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(pane), "keep not_a_member");
}

#[test]
fn the_last_member_of_a_gone_root_that_becomes_a_boundary_closes_the_session() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    w.dies_by_signal(agent);
    assert_eq!(w.why(child), "reap root_exited");
    w.exec(child, "tmux");
    assert_eq!(w.why(child), "keep not_a_member");
    assert_eq!(w.session_events().last().unwrap(), "closed claude");
}

#[test]
fn a_root_that_becomes_a_boundary_is_no_member_and_its_end_is_the_end_of_its_session() {
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
    w.dies_by_signal(root);
    assert_eq!(
        [pane, tool].map(|key| w.why(key)),
        ["keep not_a_member", "reap root_exited"]
    );
}

#[test]
fn a_root_that_becomes_a_boundary_and_leaves_nothing_closes_its_session() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    w.exec(root, "tmux");
    w.dies_by_signal(root);
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
fn a_boundary_that_was_a_root_and_becomes_an_agent_again_has_members_again() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    w.exec(root, "tmux");
    w.exec(root, "claude");
    let tool = w.spawn(root, "npm");
    w.dies_by_signal(root);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn the_end_of_a_nested_root_makes_only_its_own_members_due() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let shell = w.spawn(outer, "bash");
    let inner = w.spawn(shell, "codex");
    let tool = w.spawn(inner, "npm");
    w.dies_by_signal(inner);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!([outer, shell].map(|key| w.why(key)), ["keep root_alive"; 2]);
    w.dies_by_signal(tool);
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
fn the_end_of_the_outer_root_takes_the_nested_ones_too() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let shell = w.spawn(outer, "bash");
    let inner = w.spawn(shell, "codex");
    let tool = w.spawn(inner, "npm");
    w.dies_by_signal(outer);
    assert_eq!(
        [shell, inner, tool].map(|key| w.why(key)),
        ["reap root_exited"; 3]
    );
    let ladder = |key| {
        let session = w.model.tree.get(key).unwrap().state.member.session.unwrap();
        w.model.sessions.due(session).unwrap().0.root
    };
    assert_eq!([shell, inner, tool].map(ladder), [outer; 3]);
}

#[test]
fn an_outer_session_closes_after_the_nested_ones() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let inner = w.spawn(outer, "codex");
    w.dies_by_signal(outer);
    w.session_events();
    w.dies_by_signal(inner);
    assert_eq!(
        w.session_events(),
        ["root_exited codex", "closed codex", "closed claude"]
    );
}

#[test]
fn what_becomes_an_agent_while_it_is_due_stays_due() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.fork(agent);
    w.dies_by_signal(agent);
    w.exec(child, "claude");
    let tool = w.fork(child);
    assert_eq!(
        [child, tool].map(|key| w.why(key)),
        ["reap root_exited", "reap forked_after_root_exit"]
    );
}

/// A root, its child that runs the same program, and a tool below that.
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
fn a_root_that_leaves_hands_over_to_its_child_in_the_same_terminal() {
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
    w.dies_by_signal(tool);
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
fn a_member_of_the_first_root_lives_as_long_as_the_second_one() {
    let mut w = World::new();
    let [root, child, _] = relaunch(&mut w, 7);
    let server = w.spawn(root, "server");
    w.exit(root);
    assert_eq!(w.why(server), "keep detached");
    w.dies_by_signal(child);
    assert_eq!(w.why(server), "reap root_exited");
}

#[test]
fn a_relaunch_can_be_relaunched() {
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
fn a_killed_root_hands_over_to_nobody() {
    let mut w = World::new();
    let [root, child, tool] = relaunch(&mut w, 7);
    w.dies_by_signal(root);
    assert_eq!([child, tool].map(|key| w.why(key)), ["reap root_exited"; 2]);
}

#[test]
fn a_child_in_another_terminal_or_in_none_is_no_heir() {
    for tty in [0, 8] {
        let mut w = World::new();
        let [root, child, tool] = relaunch(&mut w, tty);
        w.exit(root);
        assert_eq!([child, tool].map(|key| w.why(key)), ["reap root_exited"; 2]);
    }
}

#[test]
fn a_child_that_reads_from_elsewhere_is_no_heir_of_a_root_that_reads_from_the_terminal() {
    let reads = |w: &mut World, key, input| {
        let found = Facts {
            stdin_is_terminal: input,
            ..Facts::NOTHING
        };
        let now = w.now;
        w.model.set_facts(key, FactSet::STDIN, found, now);
    };
    use Fact::{Known, Unread, Unreadable};
    for (of_root, of_child, hands_over) in [
        (Known(true), Known(false), false),
        (Known(true), Known(true), true),
        // Both were started so.
        (Known(false), Known(false), true),
        // What is not known speaks for it.
        (Unread, Known(false), true),
        (Unreadable, Known(false), true),
        (Known(true), Unread, true),
        (Known(true), Unreadable, true),
    ] {
        let mut w = World::new();
        let [root, child, tool] = relaunch(&mut w, 7);
        reads(&mut w, root, of_root);
        reads(&mut w, child, of_child);
        w.exit(root);
        let expected = if hands_over {
            ["keep root_alive", "keep root_alive"]
        } else {
            ["reap root_exited"; 2]
        };
        let told = [child, tool].map(|key| w.why(key));
        assert_eq!(told, expected, "{of_root:?} {of_child:?}");
    }
}

#[test]
fn roots_without_a_terminal_have_no_heirs() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    let child = w.spawn(root, "claude --relaunched");
    w.exit(root);
    assert_eq!(w.why(child), "reap root_exited");
}

#[test]
fn a_grandchild_or_another_agent_is_no_heir() {
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
fn a_shim_that_becomes_the_agent_is_the_agent() {
    let mut w = World::new();
    let shim = w.spawn(INIT, "node");
    let early = w.spawn(shim, "npm");
    w.exec(shim, "claude");
    let tool = w.spawn(shim, "npm");
    w.dies_by_signal(shim);
    assert_eq!(
        [early, tool].map(|key| w.why(key)),
        ["keep not_a_member", "reap root_exited"]
    );
}

#[test]
fn a_root_that_becomes_another_agent_keeps_its_session() {
    let mut w = World::new();
    let root = w.spawn(INIT, "claude");
    let tool = w.spawn(root, "npm");
    w.exec(root, "codex");
    assert_eq!(w.session_events(), ["opened claude"]);
    w.dies_by_signal(root);
    assert_eq!(w.session_events(), ["root_exited codex"]);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn a_shim_that_starts_the_agent_and_exits_is_no_root() {
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

/// A thread that is no leader takes the leader's pid and start time: the same key runs on.
#[test]
fn an_exec_by_another_thread_is_an_exec_of_the_process() {
    let mut w = World::new();
    let launcher = w.spawn(INIT, "node");
    w.exec(launcher, "claude");
    w.exec(launcher, "claude --thread");
    let tool = w.spawn(launcher, "npm");
    assert_eq!(w.session_events(), ["opened claude"]);
    assert_eq!(w.root_of(tool), Some(launcher));
}
