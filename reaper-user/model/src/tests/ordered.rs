//! What the root of a session has ended of what it has started.

use reaper_common::MEMBER_SIGTERM_SENT;

use super::rules::{marked, pass, read, world};
use super::world::{INIT, USER, World};
use crate::event::{ExitStatus, ProcessKey, Uids};
use crate::facts::Fact;

const ORDERED: &str = "reap end_ordered";
const LIVES: &str = "keep root_alive";
const KILLED: ExitStatus = ExitStatus::Signalled {
    signal: 9,
    core: false,
};

/// An agent with a shell that runs something.
fn tree() -> (World, [ProcessKey; 3]) {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let test = w.spawn(shell, "jest");
    (w, [agent, shell, test])
}

/// Whom the order of `root` is for.
fn order(w: &mut World, root: ProcessKey, by: u32) -> Option<Vec<ProcessKey>> {
    pass(w, 1_000_000);
    let (order, mut all) = w.model.end_order_for(root, by)?;
    w.model.order_end(order, &all);
    all.sort_unstable();
    Some(all)
}

#[test]
fn all_that_descends_from_the_root_is_meant_and_nobody_else() {
    let (mut w, [agent, shell, test]) = tree();
    let nested = w.spawn(shell, "codex");
    let inside = w.spawn(nested, "node");
    let tmux = w.spawn(shell, "tmux");
    let pane = w.spawn(tmux, "bash");
    let other = w.spawn(INIT, "claude");
    let others = w.spawn(other, "bash");
    let meant = [shell, test, nested, inside];
    assert_eq!(order(&mut w, agent, USER.real), Some(meant.to_vec()));
    for key in meant {
        assert_eq!(w.why(key), ORDERED);
    }
    for key in [agent, other, others] {
        assert_eq!(w.why(key), LIVES);
    }
    for key in [tmux, pane] {
        assert_eq!(w.why(key), "keep not_a_member");
    }
    for key in [shell, INIT, tmux] {
        assert_eq!(order(&mut w, key, 0), None, "it is no root");
    }
}

#[test]
fn who_is_born_to_them_is_meant_and_what_the_root_starts_next_is_not() {
    let (mut w, [agent, shell, test]) = tree();
    let aside = w.fork(shell);
    order(&mut w, agent, USER.real);
    let late = w.spawn(test, "sleep");
    // It makes a child of its parent's.
    let sibling = w.clone_parent(shell, agent);
    w.exit(test);
    w.exit(shell);
    let after = w.spawn(agent, "hook");
    let below = w.spawn(after, "bash");
    for key in [late, sibling, aside] {
        assert_eq!(w.why(key), ORDERED);
        let node = w.model.tree.get(key).unwrap();
        assert_eq!(w.model.is_born_late(node, &w.decide(key)), key != aside);
    }
    for key in [after, below] {
        assert_eq!(w.why(key), LIVES);
    }
    // A second order means these too.
    assert_eq!(
        order(&mut w, agent, USER.real).map(|all| all.contains(&below)),
        Some(true)
    );
    assert_eq!(w.why(below), ORDERED);
}

#[test]
fn nothing_keeps_what_who_orders_could_end_themselves() {
    let mut w = world(read("[[keep]]\nname = 'apt'\ncomm = 'apt'\n"));
    let agent = w.spawn(INIT, "claude");
    let (kept, with_mark) = (w.spawn(agent, "apt"), w.spawn(agent, "bash"));
    marked(&mut w, with_mark, Fact::Known(1));
    w.uids = Uids {
        real: 0,
        effective: 0,
    };
    let by_sudo = w.spawn(agent, "make");
    order(&mut w, agent, USER.real);
    assert_eq!(w.why(kept), ORDERED);
    assert_eq!(w.why(with_mark), ORDERED);
    assert_eq!(w.why(by_sudo), LIVES);
    let (mut w, [agent, shell, _]) = tree();
    order(&mut w, agent, 0);
    assert_eq!(w.why(shell), ORDERED, "root's order");
}

#[test]
fn it_takes_nobody_further_than_who_has_given_it_could() {
    let (mut w, [agent, shell, test]) = tree();
    let root = Uids {
        real: 0,
        effective: 0,
    };
    w.uids = root;
    let by_sudo = w.spawn(shell, "sshd");
    w.uids = USER;
    order(&mut w, agent, USER.real);
    // What becomes the user's again below it is not the user's to end by that.
    let login = w.spawn(by_sudo, "bash");
    assert_eq!(w.why(login), LIVES);
    // One that has become root's has got away, and so has what it starts.
    w.model.set_uids(test, root);
    assert_eq!(w.why(test), LIVES);
    let below = w.spawn(test, "bash");
    assert_eq!(w.why(below), LIVES);
    // It takes nothing from what would be done without it.
    w.dies_by_signal(agent);
    assert_eq!(w.why(by_sudo), "keep other_uid other-uid");
    assert_eq!(w.why(shell), ORDERED);
}

#[test]
fn it_is_over_when_its_ladder_is_and_ends_at_a_boundary() {
    let (mut w, [agent, shell, test]) = tree();
    order(&mut w, agent, USER.real);
    w.exec(test, "tmux");
    let pane = w.spawn(test, "bash");
    let inside = w.spawn(pane, "claude");
    let child = w.spawn(inside, "bash");
    assert_eq!(w.why(pane), "keep not_a_member");
    assert_eq!(w.why(child), LIVES);
    let session = w
        .model
        .tree
        .get(shell)
        .unwrap()
        .state
        .member
        .session
        .unwrap();
    w.model.clear_end_orders(session);
    assert_eq!(w.why(shell), LIVES);
    let later = w.spawn(shell, "bash");
    assert_eq!(w.why(later), LIVES);
}

/// So that nobody has less time than that gives.
#[test]
fn of_two_ladders_the_outer_one_counts() {
    let (mut w, [agent, shell, _]) = tree();
    let nested = w.spawn(shell, "codex");
    let inside = w.spawn(nested, "node");
    let ladder = |w: &World, key| w.model.escalation_of(w.model.tree.get(key).unwrap());
    let session = |w: &World, key| w.model.tree.get(key).unwrap().state.member.session;
    let (outer, inner) = (session(&w, agent), session(&w, inside));
    w.end(nested, KILLED, Some(agent));
    assert_eq!(ladder(&w, inside), inner);
    order(&mut w, agent, USER.real);
    assert_eq!(ladder(&w, inside), outer);
    assert_eq!(ladder(&w, shell), outer);
    // Inside one that is due the order is nothing more.
    let (mut w, [agent, shell, _]) = tree();
    let nested = w.spawn(shell, "codex");
    let inside = w.spawn(nested, "node");
    let outer = session(&w, agent);
    w.dies_by_signal(agent);
    order(&mut w, nested, USER.real);
    assert_eq!(ladder(&w, inside), outer);
}

/// Whom one starts that has been asked before, as its agent is gone, is what that cleans up with; what one starts that is only
/// asked now is not.
#[test]
fn whoever_is_born_to_one_that_was_asked_before_the_order_is_born_late() {
    let (mut w, [run, _, _]) = tree();
    let agent = w.spawn(run, "codex");
    let [asked, kept] = ["server", "apt"].map(|name| w.spawn(agent, name));
    w.end(agent, KILLED, Some(run));
    w.model.on_signal_sent(asked, MEMBER_SIGTERM_SENT);
    let [clean_up, script] = [asked, kept].map(|maker| w.spawn(maker, "sh"));
    let [its, scripts] = [clean_up, script].map(|maker| w.spawn(maker, "rm"));
    order(&mut w, run, USER.real);
    let late = [(clean_up, true), (its, true), (asked, false)];
    for (key, late) in late.into_iter().chain([(script, false), (scripts, false)]) {
        assert_eq!(w.why(key), ORDERED);
        let node = w.model.tree.get(key).unwrap();
        assert_eq!(w.model.is_born_late(node, &w.decide(key)), late);
    }
}

/// What is ordered by one inside does not take the place of what was ordered before.
#[test]
fn an_order_inside_another_changes_nothing() {
    let (mut w, [agent, shell, _]) = tree();
    let nested = w.spawn(shell, "codex");
    let inside = w.spawn(nested, "node");
    order(&mut w, agent, USER.real);
    order(&mut w, nested, USER.real);
    let session = w
        .model
        .tree
        .get(inside)
        .unwrap()
        .state
        .member
        .session
        .unwrap();
    w.model.clear_end_orders(session);
    assert_eq!(w.why(inside), ORDERED);
}

#[test]
fn what_has_got_away_is_not_meant() {
    let (mut w, [agent, shell, test]) = tree();
    // Adopted by init: the root is no subreaper, and what it starts is not all its own any more.
    w.exit(shell);
    let kept = w.spawn(agent, "vite");
    assert_eq!(order(&mut w, agent, USER.real), Some(vec![kept]));
    assert_eq!(w.why(test), "keep detached");
    // The end of the root does not take it back.
    w.dies_by_signal(agent);
    assert_eq!(w.why(kept), ORDERED);
    assert_eq!(w.why(test), "reap root_exited");
}
