//! Entries that the kernel's map of members should have, and untracked processes, which the model may forget.

use reaper_common::{
    MEMBER_CANDIDATE, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE, MEMBER_NAME_MATCHED, MEMBER_ROOT,
    MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_TRACKED, MEMBER_UNCERTAIN,
    MEMBER_WATCHED,
};

use super::world::{INIT, OWN_PID, World, assert_consistent};
use crate::Scope;
use crate::event::{EventKind, Membership, ProcessKey, Uids};

/// Returns the session and the flags of the wanted entry, without `MEMBER_TRACKED` and `MEMBER_KERNEL_KILLABLE`.
///
/// With the rules of these tests, all members are kernel-killable, unless they are kept.
fn wanted(w: &World, key: ProcessKey) -> Option<(Option<ProcessKey>, u32)> {
    let entry = w.model.wanted_membership(key)?;
    assert!(entry.has(MEMBER_TRACKED));
    let kept = entry.flags & (MEMBER_KEPT | MEMBER_UNCERTAIN) != 0;
    assert_eq!(
        entry.has(MEMBER_KERNEL_KILLABLE),
        entry.session.is_some() && !kept
    );
    Some((
        entry.session,
        entry.flags & !(MEMBER_TRACKED | MEMBER_KERNEL_KILLABLE),
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
fn map_entry_has_the_session_and_flags_of_a_process() {
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
    let untracked = w.spawn(shell, "ls");
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
        (untracked, None),
    ];
    for (key, entry) in table {
        assert_eq!(wanted(&w, key), entry, "{}", key.pid);
    }
    w.kill(tool);
    assert_eq!(wanted(&w, tool), None, "an exited process has no entry");
}

#[test]
fn map_entry_of_never_signalled_process_says_kept() {
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
fn map_entry_has_the_sent_signals() {
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
fn successor_is_a_root_and_session_keeps_its_first_root() {
    let mut w = World::new();
    w.tty = 7;
    let first = w.spawn(INIT, "claude");
    let tool = w.spawn(first, "npm");
    let successor = w.spawn(first, "claude --relaunched");
    w.exit(first);
    assert_eq!(wanted(&w, successor), Some((Some(successor), MEMBER_ROOT)));
    assert_eq!(wanted(&w, tool), Some((Some(first), 0)));
    let session = w.model.sessions.by_first_root(first).unwrap();
    assert_eq!(session.root, successor);
}

#[test]
fn only_a_scope_by_pid_is_in_the_map() {
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
fn node_stores_its_current_map_entry() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let known = |w: &World| w.model.tree.get(agent).unwrap().membership;
    assert_eq!(known(&w), None);
    let flags = MEMBER_TRACKED
        | MEMBER_CANDIDATE
        | MEMBER_NAME_MATCHED
        | MEMBER_UNCERTAIN
        | MEMBER_SIGTERM_SENT;
    let entry = Membership {
        session: Some(agent),
        flags,
    };
    w.row_with(agent, 1, "claude", |row| row.membership = Some(entry));
    assert_eq!(known(&w), Some(entry));
    let settled = Some((Some(agent), MEMBER_ROOT | MEMBER_SIGTERM_SENT));
    assert_eq!(wanted(&w, agent), settled, "sent signals stay");
    w.model
        .set_membership(agent, w.model.wanted_membership(agent));
    assert_eq!(known(&w), w.model.wanted_membership(agent));
    w.row(agent, 1, "claude");
    assert!(
        known(&w).is_some(),
        "a row without an entry changes nothing"
    );
    w.row_with(agent, 1, "claude", |row| {
        row.membership = Some(Membership::default())
    });
    assert_eq!(known(&w), None, "the map has no entry");
}

#[test]
fn untracked_processes_are_forgotten_and_parents_watched() {
    let mut w = World::new();
    let login = w.spawn(INIT, "login");
    let shell = w.spawn(login, "bash");
    let untracked = w.spawn(shell, "make");
    let below = w.spawn(untracked, "cc");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "npm");
    let tmux = w.spawn(agent, "tmux");
    let pane = w.spawn(tmux, "bash");
    let container = w.namespace(untracked);
    let own = ProcessKey {
        pid: OWN_PID,
        start: 5,
    };
    let service = w.spawn(INIT, "systemd");
    w.fork_as(own, service, service);
    let gone = [untracked, below, pane];
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
    // A forgotten process does not count as exited, so an event adds it again.
    w.exec(untracked, "claude");
    assert!(w.is_member(untracked));
    assert!(w.model.tree.get(shell).unwrap().state.member.watched);
}

#[test]
fn process_in_a_scope_by_pid_is_tracked() {
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
    assert!(
        w.model.tree.get(inside).is_none(),
        "a scope by cgroup is not in the map"
    );
}

#[test]
fn dismissed_candidate_is_forgotten_unless_it_has_members() {
    let mut w = World::new();
    let candidate = w.spawn(INIT, "bash");
    let child = w.spawn(candidate, "npm");
    let agent = w.spawn(child, "claude");
    w.model.forget(candidate);
    w.model.forget(agent);
    assert_eq!(w.model.tree.len(), 4, "a member descends from it");
    w.kill(agent);
    w.model.forget(candidate);
    assert_consistent(&w.model);
    let child = w.model.tree.get(child).unwrap();
    assert_eq!((child.parent, child.orphaned), (None, None));
    assert!(w.model.tree.get(candidate).is_none());
}

#[test]
fn parent_of_a_root_is_watched() {
    let mut w = World::new();
    let shell = w.spawn(INIT, "bash");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "npm");
    w.spawn(tool, "codex");
    let watched = |key| w.model.tree.get(key).unwrap().state.member.watched;
    assert_eq!([INIT, shell, tool].map(watched), [false, true, false]);
}
