//! What the marks of the kernel's map and exact starts say of processes that nothing else is known of.

use reaper_common::{
    MEMBER_CANDIDATE, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE, MEMBER_NAME_MATCHED, MEMBER_ROOT,
    MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_TRACKED, MEMBER_UNCERTAIN,
};

use super::world::{INIT, USER, World, image};
use crate::TreeChange;
use crate::event::{
    Event, EventKind, ExitStatus, Membership, ProcEntry, ProcessKey, Provenance, TICK_NS,
};
use crate::{Output, Scope};

/// A start that is no whole tick, and a pid.
pub(super) fn key(pid: u32) -> ProcessKey {
    ProcessKey {
        pid,
        start: 50 * TICK_NS + u64::from(pid) * 1000 + 1,
    }
}

pub(super) fn mark(session: Option<ProcessKey>, flags: u32) -> Option<Membership> {
    let flags = flags | MEMBER_TRACKED;
    Some(Membership { session, flags })
}

/// Not in the map.
pub(super) const NOBODY: Option<Membership> = Some(Membership {
    session: None,
    flags: 0,
});

pub(super) fn exact(
    w: &mut World,
    key: ProcessKey,
    parent: u32,
    program: &str,
    mark: Option<Membership>,
) {
    w.row_with(key, parent, program, |row| {
        *row = ProcEntry {
            key,
            exact: true,
            membership: mark,
            ..row.clone()
        };
    });
}

/// A fork that nothing is known of but what the record says.
fn fork(
    w: &mut World,
    child: ProcessKey,
    creator: Option<ProcessKey>,
    parent: Option<ProcessKey>,
    mark: Option<Membership>,
) {
    w.kernel(EventKind::Fork {
        child,
        parent,
        creator,
        uids: USER,
        pidfd_inode: 0,
        namespace_init: false,
        membership: mark,
    });
}

pub(super) fn exec(
    w: &mut World,
    key: ProcessKey,
    parent: Option<ProcessKey>,
    program: &str,
    mark: Option<Membership>,
) {
    w.kernel(EventKind::Exec {
        key,
        parent,
        uids: USER,
        pidfd_inode: 0,
        image: image(program, 0),
        membership: mark,
    });
}

pub(super) fn exit(w: &mut World, key: ProcessKey, mark: Option<Membership>) -> Vec<&'static str> {
    let (parent, ended, peak_rss) = (None, ExitStatus::Exited(0), 0);
    told(
        w,
        EventKind::Exit {
            key,
            parent,
            exit_status: ended,
            peak_rss,
            membership: mark,
        },
    )
}

/// What an event changes in the tree, and whether of a member.
fn told(w: &mut World, kind: EventKind) -> Vec<&'static str> {
    let mut told = vec![];
    let event = Event {
        time: w.now,
        provenance: Provenance::Kernel,
        kind,
    };
    let mut out = Vec::new();
    w.model.apply(&event, &mut out);
    for output in &out {
        if let Output::Tree(change) = output {
            told.push(match change {
                TreeChange::Born { .. } => "born",
                TreeChange::Execed { .. } => "execed",
                TreeChange::Moved { .. } => "moved",
                TreeChange::Exited { node, .. } if node.state.member.session.is_some() => {
                    "member exited"
                }
                TreeChange::Exited { .. } => "exited",
                TreeChange::Reparented { orphaned: true, .. } => "orphaned",
                TreeChange::Reparented { .. } => "reparented",
                TreeChange::SignalSent { .. } => "signalled",
            });
        }
    }
    told
}

#[test]
fn a_fork_by_nobody_known_is_what_the_map_says() {
    let stranger = Some(key(90));
    for (by, flags, member) in [
        (None, 0, true),
        (stranger, 0, true),
        (stranger, MEMBER_NAME_MATCHED, true),
        // Perhaps: it is kept.
        (stranger, MEMBER_UNCERTAIN, true),
    ] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let child = w.new_key();
        fork(&mut w, child, by, by, mark(Some(agent), flags));
        assert_eq!(w.is_member(child), member, "{by:?} {flags}");
        let unsure = w
            .model
            .tree
            .get(child)
            .unwrap()
            .state
            .member
            .is_lineage_uncertain;
        assert_eq!(unsure, flags == MEMBER_UNCERTAIN);
    }
    let mut w = World::new();
    let child = w.new_key();
    fork(&mut w, child, None, None, mark(Some(key(91)), 0));
    assert!(!w.is_member(child), "of a session that nobody knows");
}

#[test]
fn what_is_known_of_the_maker_is_worth_more_than_the_map() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let [ours, theirs] = [w.new_key(), key(70)];
    fork(&mut w, ours, Some(agent), Some(agent), NOBODY);
    let stranger = w.spawn(INIT, "bash");
    fork(
        &mut w,
        theirs,
        Some(stranger),
        Some(agent),
        mark(Some(agent), 0),
    );
    assert_eq!([ours, theirs].map(|key| w.is_member(key)), [true, false]);
}

#[test]
fn the_map_is_worth_more_than_the_parent_of_one_whose_maker_is_not_known() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.new_key();
    fork(&mut w, child, Some(key(90)), Some(agent), NOBODY);
    assert!(!w.is_member(child));
}

#[test]
fn a_row_of_nobody_known_is_what_the_map_says_if_it_is_sure() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let inner = w.spawn(agent, "codex");
    let of = |flags| mark(Some(agent), flags);
    let rows = [
        (INIT, of(0), Some(agent)),
        (INIT, of(MEMBER_NAME_MATCHED), Some(agent)),
        (inner, of(0), Some(agent)),
        (agent, NOBODY, None),
        (agent, None, Some(agent)),
        (INIT, None, None),
        // Not sure: what its parent is, if that can be.
        (agent, of(MEMBER_UNCERTAIN), Some(agent)),
        (inner, of(MEMBER_UNCERTAIN), Some(inner)),
        // And if it cannot, perhaps of what it names.
        (INIT, of(MEMBER_UNCERTAIN), Some(agent)),
        (agent, mark(Some(inner), MEMBER_UNCERTAIN), Some(inner)),
    ];
    for (n, (parent, mark, root)) in rows.into_iter().enumerate() {
        let key = key(50 + n as u32);
        exact(&mut w, key, parent.pid, "npm", mark);
        assert_eq!(w.root_of(key), root, "row {n}");
        assert_eq!(
            w.model
                .tree
                .get(key)
                .unwrap()
                .state
                .member
                .is_lineage_uncertain,
            n >= 8,
            "row {n}"
        );
    }
}

#[test]
fn what_runs_or_is_orphaned_and_is_not_known_is_what_the_map_says() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let of = mark(Some(agent), 0);
    let named = mark(Some(agent), MEMBER_NAME_MATCHED);
    let keys = [60, 61, 62, 63, 64].map(key);
    exec(&mut w, keys[0], Some(INIT), "npm", of);
    exec(&mut w, keys[1], Some(agent), "npm", NOBODY);
    exec(&mut w, keys[2], Some(INIT), "tmux", named);
    for (child, mark) in [(keys[3], of), (keys[4], NOBODY)] {
        w.kernel(EventKind::Reparent {
            child,
            old_parent: Some(agent),
            adopter: Some(INIT),
            membership: mark,
        });
    }
    let members = keys.map(|key| w.is_member(key));
    assert_eq!(members, [true, false, false, true, false]);
    assert!(
        w.model
            .tree
            .get(keys[2])
            .unwrap()
            .state
            .member
            .boundary
            .is_some()
    );
}

#[test]
fn the_end_of_a_member_that_nothing_else_was_told_of_is_told() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let (known, lost) = (w.spawn(agent, "npm"), w.new_key());
    let of = mark(Some(agent), 0);
    assert_eq!(exit(&mut w, known, of), ["member exited"]);
    assert_eq!(exit(&mut w, known, of), [""; 0], "told twice");
    assert_eq!(exit(&mut w, lost, of), ["born", "member exited"]);
    assert_eq!(exit(&mut w, lost, of), [""; 0], "told twice");
    let unsure = mark(Some(agent), MEMBER_UNCERTAIN);
    for mark in [None, NOBODY, unsure, mark(Some(key(90)), 0)] {
        let stranger = w.new_key();
        assert_eq!(exit(&mut w, stranger, mark), [""; 0], "{mark:?}");
    }
}

#[test]
fn the_scope_is_handed_on_by_the_map() {
    let roots = vec![key(90)];
    let mut w = World::scoped(Scope {
        roots,
        ..Scope::default()
    });
    for (pid, flags, opened) in [(60, MEMBER_SCOPE, true), (61, 0, false)] {
        exec(&mut w, key(pid), None, "claude", mark(None, flags));
        assert_eq!(w.is_member(key(pid)), opened);
    }
}

/// `node -c '(sleep &)'`, of which the records were lost: those between are gone.
#[test]
fn what_may_descend_from_an_agent_is_kept_and_says_so_until_it_is_known() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let unsure = mark(Some(agent), MEMBER_UNCERTAIN);
    let [orphan, child, tmux, pane, editor, inner] = [61, 62, 63, 64, 65, 66].map(key);
    exact(&mut w, orphan, 1, "sleep", unsure);
    exact(&mut w, child, orphan.pid, "sleep", unsure);
    // What is below a boundary is nobody's.
    exact(&mut w, tmux, 1, "tmux", unsure);
    exact(&mut w, pane, tmux.pid, "bash", unsure);
    exact(&mut w, editor, pane.pid, "vi", unsure);
    let later = w.fork(child);
    // It may be an agent that is nested in nothing.
    exact(
        &mut w,
        inner,
        1,
        "codex",
        mark(Some(agent), MEMBER_UNCERTAIN | MEMBER_NAME_MATCHED),
    );
    let tool = w.fork(inner);
    w.dies_by_signal(agent);
    for key in [orphan, child, later] {
        assert_eq!(w.why(key), "keep lineage_uncertain", "{}", key.pid);
        let flags = MEMBER_TRACKED | MEMBER_UNCERTAIN | MEMBER_KEPT;
        let kept = Membership {
            session: Some(agent),
            flags,
        };
        assert_eq!(w.model.wanted_membership(key), Some(kept));
    }
    for key in [tmux, pane, editor] {
        assert_eq!(w.why(key), "keep not_a_member", "{}", key.pid);
    }
    for key in [inner, tool] {
        assert_eq!(
            (w.root_of(key), &*w.why(key)),
            (Some(inner), "keep root_alive")
        );
    }
    // Its maker is gone; what that made goes on.
    w.exit(child);
    let last = w.fork(later);
    assert_eq!(w.why(last), "keep lineage_uncertain");
    // Of some the fork is read after all.
    fork(&mut w, orphan, Some(agent), Some(agent), unsure);
    assert_eq!(w.why(orphan), "reap root_exited");
    let wanted = w.model.wanted_membership(orphan).unwrap();
    assert_eq!(wanted.flags, MEMBER_TRACKED | MEMBER_KERNEL_KILLABLE);
}

/// What the service knows to be nobody's, the kernel may have handed on before it heard of that.
#[test]
fn what_was_handed_on_below_a_boundary_is_not_suspected() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let shell = w.new_key();
    let unsure = mark(Some(agent), MEMBER_UNCERTAIN);
    let forget = |w: &mut World, key| {
        assert!(!w.is_member(key));
        w.model.set_membership(key, None);
        w.model.forget(key);
        assert!(w.model.tree.get(key).is_none());
    };
    fork(&mut w, shell, Some(tmux), Some(tmux), unsure);
    forget(&mut w, shell);
    let child = w.new_key();
    fork(&mut w, child, Some(shell), Some(shell), unsure);
    forget(&mut w, child);
    exec(&mut w, child, Some(shell), "vi", unsure);
    forget(&mut w, child);
    exact(&mut w, child, 1, "vi", unsure);
    forget(&mut w, child);
    let other = w.new_key();
    exec(&mut w, other, Some(shell), "vi", unsure);
    forget(&mut w, other);
}

/// The agent came and went, and its rows are read before the ring tells of it.
#[test]
fn what_descends_from_a_candidate_waits_for_it() {
    let candidate = |flags| mark(Some(key(60)), MEMBER_CANDIDATE | flags);
    // It lives, and its row comes last; it is gone, and the ring tells of it.
    for lives in [true, false] {
        let mut w = World::new();
        let subreaper = w.spawn(INIT, "claude");
        w.model.begin_restore();
        exact(&mut w, key(61), subreaper.pid, "server", candidate(0));
        exact(&mut w, key(62), 1, "server", candidate(0));
        assert!(!w.is_member(key(61)));
        if lives {
            exact(&mut w, key(60), 1, "claude", candidate(MEMBER_ROOT));
        } else {
            exec(&mut w, key(60), None, "claude", candidate(MEMBER_ROOT));
            exit(&mut w, key(60), candidate(MEMBER_ROOT));
        }
        for pid in [61, 62] {
            assert_eq!(w.root_of(key(pid)), Some(key(60)), "{lives}");
        }
    }
}

#[test]
fn a_fork_that_is_read_after_the_row_says_better_whose_it_is_unless_the_map_was_sure() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let unsure = mark(Some(agent), MEMBER_UNCERTAIN);
    exact(&mut w, key(61), agent.pid, "npm", unsure);
    exact(&mut w, key(62), agent.pid, "npm", mark(Some(agent), 0));
    assert!(w.is_member(key(61)));
    for pid in [61, 62] {
        fork(&mut w, key(pid), Some(tmux), Some(tmux), None);
    }
    assert_eq!([61, 62].map(|pid| w.is_member(key(pid))), [false, true]);
}

#[test]
fn an_orphan_that_still_is_a_copy_of_an_agent_is_no_agent() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    exact(&mut w, key(61), 1, "codex", mark(Some(agent), 0));
    exact(
        &mut w,
        key(62),
        1,
        "codex",
        mark(Some(agent), MEMBER_NAME_MATCHED),
    );
    assert_eq!(
        [61, 62].map(|pid| w.root_of(key(pid))),
        [Some(agent), Some(key(62))]
    );
}

#[test]
fn exact_rows_are_told_apart_within_a_tick() {
    let mut w = World::new();
    exact(&mut w, key(60), 1, "claude", None);
    let tool = w.fork(key(60));
    let later = ProcessKey {
        start: key(60).start + 1,
        ..key(60)
    };
    assert!(later.has_same_tick(key(60)));
    exact(&mut w, key(60), 1, "claude", None);
    assert_eq!(w.session_events(), ["opened claude"]);
    exact(&mut w, later, 1, "bash", None);
    assert_eq!(w.session_events(), ["root_exited claude"]);
    assert_eq!(w.why(tool), "reap root_exited");
    exact(&mut w, key(60), 1, "claude", None);
    assert!(w.model.tree.get(key(60)).is_none(), "it has a successor");
}

#[test]
fn an_exact_row_completes_one_that_was_not() {
    let mut w = World::new();
    let coarse = w.row(key(60), 1, "claude");
    w.row_with(key(60), 1, "claude", |row| {
        (row.key, row.exact, row.pidfd_inode) = (key(60), true, 5);
    });
    assert_eq!(w.model.tree.len(), 2);
    let node = w.model.tree.get(key(60)).unwrap();
    assert_eq!((node.key, node.pidfd_inode), (coarse, 5));
    let successor = ProcessKey {
        start: key(60).start + 1,
        ..key(60)
    };
    assert!(w.model.tree.get(successor).is_none());
    assert!(w.model.sessions.by_first_root(key(60)).is_some());
}

#[test]
fn who_tells_of_an_orphan_first_says_so() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    let [known, late] = [w.fork(shell), w.fork(shell)];
    let reparent = |child| EventKind::Reparent {
        child,
        old_parent: Some(shell),
        adopter: Some(INIT),
        membership: None,
    };
    // The exit's record was lost, or comes later.
    assert_eq!(told(&mut w, reparent(late)), ["orphaned"]);
    assert_eq!(told(&mut w, reparent(late)), [""; 0]);
    w.end(shell, ExitStatus::Exited(0), None);
    assert_eq!(told(&mut w, reparent(known)), ["reparented"]);
    assert_eq!(told(&mut w, reparent(key(60))), ["born", "orphaned"]);
}

#[test]
fn signals_of_the_probes_are_told_of_the_living() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let signalled = |signal| EventKind::SignalSent { key: tool, signal };
    let has = |w: &World| w.model.tree.get(tool).unwrap().state.member.signals_sent;
    assert_eq!(told(&mut w, signalled(15)), ["signalled"]);
    assert_eq!(has(&w), MEMBER_SIGTERM_SENT);
    w.model
        .on_signal_sent(tool, MEMBER_SIGKILL_SENT | MEMBER_ROOT);
    assert_eq!(has(&w), MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
    w.dies_by_signal(tool);
    assert_eq!(told(&mut w, signalled(9)), [""; 0]);
}
