//! Commands of `reaper run`, which ends the leftovers of its command itself.

use super::rules::{read, set_markers, world};
use super::world::{INIT, World};
use crate::event::{ExitStatus, ProcessKey};
use crate::facts::Fact;
use crate::session::Succession;

/// A run whose command is an agent with a shell, below which a nested agent has a shell too.
fn tree() -> (World, [ProcessKey; 5]) {
    let mut w = world(read("[[agent]]\nname = 'reaper-run'\ncomm = 'reaper'\n"));
    let run = w.spawn(INIT, "reaper");
    let agent = w.spawn(run, "claude");
    let shell = w.spawn(agent, "bash");
    let nested = w.spawn(shell, "claude");
    let inside = w.spawn(nested, "bash");
    for key in [shell, nested, inside] {
        set_markers(&mut w, key, Fact::Known(0));
    }
    (w, [run, agent, shell, nested, inside])
}

#[test]
fn leftovers_of_a_command_are_due_when_its_run_exits() {
    let (mut w, [run, agent, shell, nested, inside]) = tree();
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    w.exit_with(agent, killed, Some(run));
    for key in [shell, nested, inside] {
        assert!(w.why(key).starts_with("keep "), "{}", w.why(key));
    }
    w.kill(run);
    for key in [shell, nested, inside] {
        assert_eq!(w.why(key), "reap root_exited");
    }
}

#[test]
fn command_of_a_run_gets_no_successor() {
    let (mut w, [run, agent, shell, ..]) = tree();
    let other = w.spawn(INIT, "claude");
    let id = w
        .model
        .tree
        .get(shell)
        .unwrap()
        .state
        .member
        .session
        .unwrap();
    w.exit_with(agent, ExitStatus::Exited(0), Some(run));
    assert_eq!(w.model.succession(id), Some(Succession::LeftToRun));
    assert!(w.model.set_successor(id, other).is_empty());
    w.model.set_succession(id, Succession::Excluded);
    assert_eq!(w.model.succession(id), Some(Succession::LeftToRun));
    assert!(w.why(shell).starts_with("keep "), "{}", w.why(shell));
}

#[test]
fn command_below_a_fork_of_its_run_is_due_with_the_run() {
    let mut w = world(read("[[agent]]\nname = 'reaper-run'\ncomm = 'reaper'\n"));
    let run = w.spawn(INIT, "reaper");
    let supervisor = w.fork(run);
    let agent = w.spawn(supervisor, "claude");
    let shell = w.spawn(agent, "bash");
    set_markers(&mut w, shell, Fact::Known(0));
    w.kill(agent);
    assert!(w.why(shell).starts_with("keep "), "{}", w.why(shell));
    w.kill(run);
    assert_eq!(w.why(shell), "reap root_exited");
}

#[test]
fn leftovers_of_a_nested_agent_are_due_at_once() {
    let (mut w, [_, _, shell, nested, inside]) = tree();
    w.kill(nested);
    assert_eq!(w.why(inside), "reap root_exited");
    assert_eq!(w.why(shell), "keep root_alive");
}

#[test]
fn members_are_not_kernel_killable_while_the_run_lives() {
    let (mut w, [run, agent, shell, _, inside]) = tree();
    let other = w.spawn(INIT, "claude");
    let others = w.spawn(other, "bash");
    set_markers(&mut w, others, Fact::Known(0));
    let killable = |w: &World, key| w.model.is_kernel_killable(w.model.tree.get(key).unwrap());
    assert!(killable(&w, others));
    assert!(!killable(&w, shell) && !killable(&w, inside));
    w.kill(run);
    assert!(w.model.tree.get(agent).is_some());
    assert!(killable(&w, shell) && killable(&w, inside));
}
