//! What the kernel's map should have for whom, and who is foreign where only the followed are told of.

use reaper_common::{
    MEMBER_CANDIDATE, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE, MEMBER_NAME_MATCHED, MEMBER_ROOT,
    MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_TRACKED, MEMBER_UNCERTAIN,
    MEMBER_WATCHED,
};

use super::world::{INIT, OWN_PID, World, assert_consistent};
use crate::Scope;
use crate::event::{EventKind, Membership, ProcessKey, Uids};

/// The session that a mark names and its flags, without the one that all have and the one that members have of
/// whom nothing more is to be known: here, where no rule asks for more, all but those who are kept.
fn wanted(w: &World, key: ProcessKey) -> Option<(Option<ProcessKey>, u32)> {
    let mark = w.model.wanted_membership(key)?;
    assert!(mark.has(MEMBER_TRACKED));
    let kept = mark.flags & (MEMBER_KEPT | MEMBER_UNCERTAIN) != 0;
    assert_eq!(
        mark.has(MEMBER_KERNEL_KILLABLE),
        mark.session.is_some() && !kept
    );
    Some((
        mark.session,
        mark.flags & !(MEMBER_TRACKED | MEMBER_KERNEL_KILLABLE),
    ))
}

fn scoped(roots: Vec<ProcessKey>, cgroups: Vec<u64>) -> World {
    World::scoped(Scope {
        roots,
        cgroups,
        uid: None,
    })
}

#[test]
fn a_mark_says_whose_a_process_is_and_what_the_probes_may_do() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "npm");
    let inner = w.spawn(tool, "codex");
    let deep = w.spawn(inner, "npm");
    let tmux = w.spawn(agent, "tmux");
    let pane = w.spawn(tmux, "bash");
    let apt = w.spawn(agent, "apt");
    let script = w.spawn(apt, "dpkg");
    let stranger = w.spawn(shell, "ls");
    let table = [
        (shell, Some((None, MEMBER_WATCHED))),
        (agent, Some((Some(agent), MEMBER_ROOT))),
        (tool, Some((Some(agent), 0))),
        (inner, Some((Some(inner), MEMBER_ROOT))),
        (deep, Some((Some(inner), 0))),
        (tmux, Some((None, MEMBER_WATCHED))),
        (pane, None),
        (apt, Some((Some(agent), MEMBER_KEPT))),
        (script, Some((Some(agent), MEMBER_KEPT))),
        (stranger, None),
    ];
    for (key, mark) in table {
        assert_eq!(wanted(&w, key), mark, "{}", key.pid);
    }
    w.dies_by_signal(tool);
    assert_eq!(wanted(&w, tool), None, "it is not in the map any more");
}

#[test]
fn what_is_never_signalled_is_spared() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let own = ProcessKey {
        pid: OWN_PID,
        start: 5,
    };
    w.fork_as(own, shell, shell);
    w.uids = Uids::default();
    let sudo = w.spawn(agent, "sudo");
    for key in [own, shell, sudo] {
        assert_eq!(wanted(&w, key), Some((Some(agent), MEMBER_KEPT)));
    }
    let flags = MEMBER_ROOT | MEMBER_KEPT;
    w.exec(own, "claude");
    assert_eq!(wanted(&w, own), Some((Some(own), flags)));
}

#[test]
fn what_has_been_sent_stands_in_the_mark() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.kernel(EventKind::SignalSent {
        key: tool,
        signal: 15,
    });
    assert_eq!(wanted(&w, tool), Some((Some(agent), MEMBER_SIGTERM_SENT)));
    w.model.on_signal_sent(tool, MEMBER_SIGKILL_SENT);
    let both = MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT;
    assert_eq!(wanted(&w, tool), Some((Some(agent), both)));
}

#[test]
fn the_heir_of_a_root_is_one_and_the_session_keeps_its_name() {
    let mut w = World::new();
    w.tty = 7;
    let first = w.spawn(INIT, "claude");
    let tool = w.spawn(first, "npm");
    let heir = w.spawn(first, "claude --relaunched");
    w.exit(first);
    assert_eq!(wanted(&w, heir), Some((Some(heir), MEMBER_ROOT)));
    assert_eq!(wanted(&w, tool), Some((Some(first), 0)));
    let session = w.model.sessions.by_first_root(first).unwrap();
    assert_eq!(session.root, heir);
}

#[test]
fn a_scope_by_pid_is_for_the_kernel_and_others_are_not() {
    let first = World::new().new_key();
    for (mut w, flag) in [
        (scoped(vec![first], vec![]), MEMBER_SCOPE),
        (scoped(vec![], vec![0]), 0),
        (World::new(), 0),
    ] {
        let shell = w.spawn(INIT, "bash");
        assert_eq!(shell, first);
        let early = w.spawn(shell, "npm");
        let agent = w.spawn(shell, "claude");
        let tmux = w.spawn(agent, "tmux");
        let scope_only = (flag != 0).then_some((None, flag));
        assert_eq!(wanted(&w, early), scope_only);
        assert_eq!(wanted(&w, agent), Some((Some(agent), MEMBER_ROOT | flag)));
        assert_eq!(wanted(&w, tmux), Some((None, MEMBER_WATCHED | flag)));
    }
}

#[test]
fn a_node_knows_what_the_map_has_for_it() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let known = |w: &World| w.model.tree.get(agent).unwrap().membership;
    assert_eq!(known(&w), None);
    let flags = MEMBER_TRACKED
        | MEMBER_CANDIDATE
        | MEMBER_NAME_MATCHED
        | MEMBER_UNCERTAIN
        | MEMBER_SIGTERM_SENT;
    let mark = Membership {
        session: Some(agent),
        flags,
    };
    w.row_with(agent, 1, "claude", |row| row.membership = Some(mark));
    assert_eq!(known(&w), Some(mark));
    let settled = Some((Some(agent), MEMBER_ROOT | MEMBER_SIGTERM_SENT));
    assert_eq!(wanted(&w, agent), settled, "a signal was sent all the same");
    w.model
        .set_membership(agent, w.model.wanted_membership(agent));
    assert_eq!(known(&w), w.model.wanted_membership(agent));
    w.row(agent, 1, "claude");
    assert!(known(&w).is_some(), "a row without one says nothing of it");
    w.row_with(agent, 1, "claude", |row| {
        row.membership = Some(Membership::default())
    });
    assert_eq!(known(&w), None, "it is not in there");
}

#[test]
fn who_is_foreign_is_forgotten_and_who_matters_is_watched() {
    let mut w = World::new();
    let login = w.spawn(INIT, "login");
    let shell = w.spawn(login, "bash");
    let stranger = w.spawn(shell, "make");
    let below = w.spawn(stranger, "cc");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "npm");
    let tmux = w.spawn(agent, "tmux");
    let pane = w.spawn(tmux, "bash");
    let container = w.namespace(stranger);
    let own = ProcessKey {
        pid: OWN_PID,
        start: 5,
    };
    let service = w.spawn(INIT, "systemd");
    w.fork_as(own, service, service);
    let gone = [stranger, below, pane];
    let stay = [INIT, login, shell, tmux, container, own, service];
    for key in gone {
        assert!(w.model.is_untracked(key), "{}", key.pid);
    }
    for key in stay.into_iter().chain([agent, tool]) {
        assert!(!w.model.is_untracked(key), "{}", key.pid);
    }
    w.session_events();
    w.model.forget_untracked();
    assert_consistent(&w.model);
    assert!(w.session_events().is_empty());
    for key in gone {
        assert!(w.model.tree.get(key).is_none(), "{}", key.pid);
    }
    for key in stay {
        assert!(
            w.model.tree.get(key).unwrap().state.member.watched,
            "{}",
            key.pid
        );
    }
    assert!(!w.model.tree.get(tool).unwrap().state.member.watched);
    let left = w.model.tree.get(container).unwrap();
    assert_eq!((left.parent, left.orphaned), (None, None));
    // Nobody took it for dead: what is told of it brings it back.
    w.exec(stranger, "claude");
    assert!(w.is_member(stranger));
    assert!(w.model.tree.get(shell).unwrap().state.member.watched);
}

#[test]
fn what_is_in_a_scope_by_pid_is_not_foreign() {
    let first = World::new().new_key();
    let mut w = scoped(vec![first], vec![]);
    let shell = w.spawn(INIT, "bash");
    let (inside, outside) = (w.spawn(shell, "npm"), w.spawn(INIT, "npm"));
    w.model.forget_untracked();
    assert!(w.model.tree.get(inside).is_some());
    assert!(w.model.tree.get(outside).is_none());
    let mut w = scoped(vec![], vec![0]);
    let inside = w.spawn(INIT, "npm");
    w.model.forget_untracked();
    assert!(w.model.tree.get(inside).is_none(), "the kernel cannot tell");
}

#[test]
fn a_dismissed_candidate_is_forgotten_and_no_other() {
    let mut w = World::new();
    let candidate = w.spawn(INIT, "bash");
    let child = w.spawn(candidate, "npm");
    let agent = w.spawn(child, "claude");
    w.model.forget(candidate);
    w.model.forget(agent);
    assert_eq!(w.model.tree.len(), 4, "a member descends from it");
    w.dies_by_signal(agent);
    w.model.forget(candidate);
    assert_consistent(&w.model);
    let child = w.model.tree.get(child).unwrap();
    assert_eq!((child.parent, child.orphaned), (None, None));
    assert!(w.model.tree.get(candidate).is_none());
}

#[test]
fn the_parent_of_a_root_is_watched() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "npm");
    w.spawn(tool, "codex");
    let watched = |key| w.model.tree.get(key).unwrap().state.member.watched;
    assert_eq!([INIT, shell, tool].map(watched), [false, true, false]);
}
