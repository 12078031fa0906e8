//! Processes that are known only from their entry in the kernel's map of members, and exact start times.

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

/// Returns a key whose start is not a multiple of the clock tick.
pub(super) fn key(pid: u32) -> ProcessKey {
    ProcessKey {
        pid,
        start: 50 * TICK_NS + u64::from(pid) * 1000 + 1,
    }
}

pub(super) fn membership(session: Option<ProcessKey>, flags: u32) -> Option<Membership> {
    let flags = flags | MEMBER_TRACKED;
    Some(Membership { session, flags })
}

/// Entry of a process that is not in the map.
pub(super) const NOT_IN_MAP: Option<Membership> = Some(Membership {
    session: None,
    flags: 0,
});

pub(super) fn exact_row(
    w: &mut World,
    key: ProcessKey,
    parent: u32,
    program: &str,
    membership: Option<Membership>,
) {
    w.row_with(key, parent, program, |row| {
        *row = ProcEntry {
            key,
            exact: true,
            membership,
            ..row.clone()
        };
    });
}

/// Reports a fork with this map entry.
fn fork(
    w: &mut World,
    child: ProcessKey,
    creator: Option<ProcessKey>,
    parent: Option<ProcessKey>,
    membership: Option<Membership>,
) {
    w.kernel(EventKind::Fork {
        child,
        parent,
        creator,
        uids: USER,
        pidfd_inode: 0,
        namespace_init: false,
        membership,
    });
}

pub(super) fn exec(
    w: &mut World,
    key: ProcessKey,
    parent: Option<ProcessKey>,
    program: &str,
    membership: Option<Membership>,
) {
    w.kernel(EventKind::Exec {
        key,
        parent,
        uids: USER,
        pidfd_inode: 0,
        image: image(program, 0),
        membership,
    });
}

pub(super) fn exit(
    w: &mut World,
    key: ProcessKey,
    membership: Option<Membership>,
) -> Vec<&'static str> {
    let (parent, ended, peak_rss) = (None, ExitStatus::Exited(0), 0);
    changes(
        w,
        EventKind::Exit {
            key,
            parent,
            exit_status: ended,
            peak_rss,
            membership,
        },
    )
}

/// Applies an event and returns the changes of the tree.
fn changes(w: &mut World, kind: EventKind) -> Vec<&'static str> {
    let mut changes = vec![];
    let event = Event {
        time: w.now,
        provenance: Provenance::Kernel,
        kind,
    };
    let mut out = Vec::new();
    w.model.apply(&event, &mut out);
    for output in &out {
        if let Output::Tree(change) = output {
            changes.push(match change {
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
    changes
}

#[test]
fn fork_by_unknown_creator_follows_its_map_entry() {
    let other = Some(key(90));
    for (by, flags, member) in [
        (None, 0, true),
        (other, 0, true),
        (other, MEMBER_NAME_MATCHED, true),
        // The lineage is uncertain: the member is kept.
        (other, MEMBER_UNCERTAIN, true),
    ] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let child = w.new_key();
        fork(&mut w, child, by, by, membership(Some(agent), flags));
        assert_eq!(w.is_member(child), member, "{by:?} {flags}");
        let uncertain = w
            .model
            .tree
            .get(child)
            .unwrap()
            .state
            .member
            .is_lineage_uncertain;
        assert_eq!(uncertain, flags == MEMBER_UNCERTAIN);
    }
    let mut w = World::new();
    let child = w.new_key();
    fork(&mut w, child, None, None, membership(Some(key(91)), 0));
    assert!(!w.is_member(child), "the session is unknown");
}

#[test]
fn known_creator_takes_precedence_over_the_map() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let [ours, theirs] = [w.new_key(), key(70)];
    fork(&mut w, ours, Some(agent), Some(agent), NOT_IN_MAP);
    let other = w.spawn(INIT, "bash");
    fork(
        &mut w,
        theirs,
        Some(other),
        Some(agent),
        membership(Some(agent), 0),
    );
    assert_eq!([ours, theirs].map(|key| w.is_member(key)), [true, false]);
}

#[test]
fn map_takes_precedence_over_the_parent_of_a_fork() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let child = w.new_key();
    fork(&mut w, child, Some(key(90)), Some(agent), NOT_IN_MAP);
    assert!(!w.is_member(child));
}

#[test]
fn scan_row_of_unknown_process_follows_a_certain_map_entry() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let inner = w.spawn(agent, "codex");
    let entry = |flags| membership(Some(agent), flags);
    let rows = [
        (INIT, entry(0), Some(agent)),
        (INIT, entry(MEMBER_NAME_MATCHED), Some(agent)),
        (inner, entry(0), Some(agent)),
        (agent, NOT_IN_MAP, None),
        (agent, None, Some(agent)),
        (INIT, None, None),
        // An uncertain entry: the parent's session, if the process can belong to it.
        (agent, entry(MEMBER_UNCERTAIN), Some(agent)),
        (inner, entry(MEMBER_UNCERTAIN), Some(inner)),
        // Otherwise the session of the entry, with uncertain lineage.
        (INIT, entry(MEMBER_UNCERTAIN), Some(agent)),
        (
            agent,
            membership(Some(inner), MEMBER_UNCERTAIN),
            Some(inner),
        ),
    ];
    for (n, (parent, membership, root)) in rows.into_iter().enumerate() {
        let key = key(50 + n as u32);
        exact_row(&mut w, key, parent.pid, "npm", membership);
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
fn exec_or_reparenting_of_unknown_process_follows_the_map() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let entry = membership(Some(agent), 0);
    let named = membership(Some(agent), MEMBER_NAME_MATCHED);
    let keys = [60, 61, 62, 63, 64].map(key);
    exec(&mut w, keys[0], Some(INIT), "npm", entry);
    exec(&mut w, keys[1], Some(agent), "npm", NOT_IN_MAP);
    exec(&mut w, keys[2], Some(INIT), "tmux", named);
    for (child, membership) in [(keys[3], entry), (keys[4], NOT_IN_MAP)] {
        w.kernel(EventKind::Reparent {
            child,
            old_parent: Some(agent),
            adopter: Some(INIT),
            membership,
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
fn exit_of_a_member_known_only_from_the_map_is_reported() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let (known, lost) = (w.spawn(agent, "npm"), w.new_key());
    let entry = membership(Some(agent), 0);
    assert_eq!(exit(&mut w, known, entry), ["member exited"]);
    assert_eq!(exit(&mut w, known, entry), [""; 0], "repeated");
    assert_eq!(exit(&mut w, lost, entry), ["born", "member exited"]);
    assert_eq!(exit(&mut w, lost, entry), [""; 0], "repeated");
    let uncertain = membership(Some(agent), MEMBER_UNCERTAIN);
    for membership in [None, NOT_IN_MAP, uncertain, membership(Some(key(90)), 0)] {
        let other = w.new_key();
        assert_eq!(exit(&mut w, other, membership), [""; 0], "{membership:?}");
    }
}

#[test]
fn scope_is_inherited_through_the_map() {
    let roots = vec![key(90)];
    let mut w = World::scoped(Scope {
        roots,
        ..Scope::default()
    });
    for (pid, flags, opened) in [(60, MEMBER_SCOPE, true), (61, 0, false)] {
        exec(&mut w, key(pid), None, "claude", membership(None, flags));
        assert_eq!(w.is_member(key(pid)), opened);
    }
}

/// `node -c '(sleep &)'`: the records were lost, and the processes in between have exited.
#[test]
fn uncertain_lineage_keeps_until_the_fork_is_read() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let uncertain = membership(Some(agent), MEMBER_UNCERTAIN);
    let [orphan, child, tmux, pane, editor, inner] = [61, 62, 63, 64, 65, 66].map(key);
    exact_row(&mut w, orphan, 1, "sleep", uncertain);
    exact_row(&mut w, child, orphan.pid, "sleep", uncertain);
    // Processes below a boundary are no members.
    exact_row(&mut w, tmux, 1, "tmux", uncertain);
    exact_row(&mut w, pane, tmux.pid, "bash", uncertain);
    exact_row(&mut w, editor, pane.pid, "vi", uncertain);
    let later = w.fork(child);
    // This agent may not be nested.
    exact_row(
        &mut w,
        inner,
        1,
        "codex",
        membership(Some(agent), MEMBER_UNCERTAIN | MEMBER_NAME_MATCHED),
    );
    let tool = w.fork(inner);
    w.kill(agent);
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
    // Descendants stay uncertain after their parent's exit.
    w.exit(child);
    let last = w.fork(later);
    assert_eq!(w.why(last), "keep lineage_uncertain");
    // The fork event is read after all.
    fork(&mut w, orphan, Some(agent), Some(agent), uncertain);
    assert_eq!(w.why(orphan), "reap root_exited");
    let wanted = w.model.wanted_membership(orphan).unwrap();
    assert_eq!(wanted.flags, MEMBER_TRACKED | MEMBER_KERNEL_KILLABLE);
}

/// The kernel may pass a session on below a boundary before the service has updated the map.
#[test]
fn uncertain_entry_below_a_boundary_makes_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let shell = w.new_key();
    let uncertain = membership(Some(agent), MEMBER_UNCERTAIN);
    let forget = |w: &mut World, key| {
        assert!(!w.is_member(key));
        w.model.set_membership(key, None);
        w.model.forget(key);
        assert!(w.model.tree.get(key).is_none());
    };
    fork(&mut w, shell, Some(tmux), Some(tmux), uncertain);
    forget(&mut w, shell);
    let child = w.new_key();
    fork(&mut w, child, Some(shell), Some(shell), uncertain);
    forget(&mut w, child);
    exec(&mut w, child, Some(shell), "vi", uncertain);
    forget(&mut w, child);
    exact_row(&mut w, child, 1, "vi", uncertain);
    forget(&mut w, child);
    let other = w.new_key();
    exec(&mut w, other, Some(shell), "vi", uncertain);
    forget(&mut w, other);
}

/// A scan discovers the children of a candidate before the candidate itself is known.
#[test]
fn descendants_of_a_candidate_join_it_when_it_is_discovered() {
    let candidate = |flags| membership(Some(key(60)), MEMBER_CANDIDATE | flags);
    // Either the candidate lives and its row comes last, or it has exited and the ring reports it.
    for lives in [true, false] {
        let mut w = World::new();
        let subreaper = w.spawn(INIT, "claude");
        w.model.begin_restore();
        exact_row(&mut w, key(61), subreaper.pid, "server", candidate(0));
        exact_row(&mut w, key(62), 1, "server", candidate(0));
        assert!(!w.is_member(key(61)));
        if lives {
            exact_row(&mut w, key(60), 1, "claude", candidate(MEMBER_ROOT));
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
fn late_fork_takes_precedence_over_an_uncertain_map_entry() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tmux = w.spawn(agent, "tmux");
    let uncertain = membership(Some(agent), MEMBER_UNCERTAIN);
    exact_row(&mut w, key(61), agent.pid, "npm", uncertain);
    exact_row(
        &mut w,
        key(62),
        agent.pid,
        "npm",
        membership(Some(agent), 0),
    );
    assert!(w.is_member(key(61)));
    for pid in [61, 62] {
        fork(&mut w, key(pid), Some(tmux), Some(tmux), None);
    }
    assert_eq!([61, 62].map(|pid| w.is_member(key(pid))), [false, true]);
}

#[test]
fn orphan_that_is_a_fork_of_an_agent_is_no_agent() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    exact_row(&mut w, key(61), 1, "codex", membership(Some(agent), 0));
    exact_row(
        &mut w,
        key(62),
        1,
        "codex",
        membership(Some(agent), MEMBER_NAME_MATCHED),
    );
    assert_eq!(
        [61, 62].map(|pid| w.root_of(key(pid))),
        [Some(agent), Some(key(62))]
    );
}

#[test]
fn exact_scan_rows_are_distinguished_within_a_tick() {
    let mut w = World::new();
    exact_row(&mut w, key(60), 1, "claude", None);
    let tool = w.fork(key(60));
    let later = ProcessKey {
        start: key(60).start + 1,
        ..key(60)
    };
    assert!(later.has_same_tick(key(60)));
    exact_row(&mut w, key(60), 1, "claude", None);
    assert_eq!(w.session_events(), ["opened claude"]);
    exact_row(&mut w, later, 1, "bash", None);
    assert_eq!(w.session_events(), ["root_exited claude"]);
    assert_eq!(w.why(tool), "reap root_exited");
    exact_row(&mut w, key(60), 1, "claude", None);
    assert!(w.model.tree.get(key(60)).is_none(), "its pid was reused");
}

#[test]
fn exact_scan_row_completes_an_inexact_one() {
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
fn first_report_of_an_orphan_is_marked_as_such() {
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
    // The record of the exit was lost or comes later.
    assert_eq!(changes(&mut w, reparent(late)), ["orphaned"]);
    assert_eq!(changes(&mut w, reparent(late)), [""; 0]);
    w.exit_with(shell, ExitStatus::Exited(0), None);
    assert_eq!(changes(&mut w, reparent(known)), ["reparented"]);
    assert_eq!(changes(&mut w, reparent(key(60))), ["born", "orphaned"]);
}

#[test]
fn probe_signal_is_reported_for_living_processes_only() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    let signalled = |signal| EventKind::SignalSent { key: tool, signal };
    let has = |w: &World| w.model.tree.get(tool).unwrap().state.member.signals_sent;
    assert_eq!(changes(&mut w, signalled(15)), ["signalled"]);
    assert_eq!(has(&w), MEMBER_SIGTERM_SENT);
    w.model
        .on_signal_sent(tool, MEMBER_SIGKILL_SENT | MEMBER_ROOT);
    assert_eq!(has(&w), MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
    w.kill(tool);
    assert_eq!(changes(&mut w, signalled(9)), [""; 0]);
}
