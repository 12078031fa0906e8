//! Sessions that an earlier service stored and the next one restores.

use reaper_common::{MEMBER_NAME_MATCHED, MEMBER_ROOT, MEMBER_WATCHED};

use super::survival::{NOT_IN_MAP, exact_row, exec, exit, key, membership};
use super::world::{INIT, USER, World, session_event_names};
use crate::event::{EventKind, ExitStatus, ProcessKey, Provenance, RestoredSession, TICK_NS};

pub(super) fn stored(root: ProcessKey) -> RestoredSession {
    RestoredSession {
        first_root: root,
        root,
        outer: None,
        parent: None,
        tty: 0,
        rule: "claude".into(),
        uids: USER,
        cgroup_id: 0,
        unit_hash: 0,
        opened_at: 7,
        exited: None,
        was_signalled: false,
        is_evaluated: false,
    }
}

pub(super) fn restore(w: &mut World, stored: RestoredSession) {
    w.report(Provenance::Inferred, EventKind::Restored(Box::new(stored)));
}

/// Ends the restore and returns the session events.
fn finish(w: &mut World) -> Vec<String> {
    let mut out = Vec::new();
    w.model.finish_restore(&mut out);
    session_event_names(&w.model, &out)
}

#[test]
fn restored_session_continues() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    restore(&mut w, stored(root));
    restore(&mut w, stored(root));
    exact_row(
        &mut w,
        root,
        1,
        "claude --resume",
        membership(Some(root), MEMBER_ROOT),
    );
    exact_row(&mut w, tool, 1, "npm", membership(Some(root), 0));
    assert_eq!(finish(&mut w), [""; 0]);
    assert_eq!(
        w.session_events(),
        ["restored claude"],
        "restored once and not opened"
    );
    let session = w.model.sessions.by_first_root(root).unwrap();
    assert_eq!((session.opened_at, session.members().count()), (7, 2));
    assert_eq!(w.model.tree.get(root).unwrap().parent, Some(INIT));
    w.kill(root);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn missing_root_of_a_restored_session_has_exited() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    restore(&mut w, stored(root));
    exact_row(&mut w, tool, 1, "npm", membership(Some(root), 0));
    assert_eq!(w.model.tree.comm(root), b"claude");
    w.exit_with(root, ExitStatus::Unknown, None);
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
    assert_eq!(w.why(tool), "reap root_exited");
    w.kill(tool);
    assert_eq!(
        w.session_events(),
        [""; 0],
        "no session closes during the restore"
    );
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn restored_root_with_a_reused_pid_has_exited() {
    let mut w = World::new();
    let successor = ProcessKey {
        start: key(60).start + TICK_NS,
        ..key(60)
    };
    exact_row(&mut w, successor, 1, "bash", NOT_IN_MAP);
    restore(&mut w, stored(key(60)));
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn members_of_a_restored_exited_root_are_due_at_once() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    let (at, status) = (key(61).start + 5, ExitStatus::Exited(3));
    let gone = Some((at, status));
    restore(
        &mut w,
        RestoredSession {
            exited: gone,
            ..stored(root)
        },
    );
    exact_row(&mut w, tool, 1, "npm", membership(Some(root), 0));
    let due = w.decide(tool).due.unwrap();
    assert_eq!((due.at, due.exit_status), (at, status));
    assert_eq!(w.why(tool), "reap root_exited");
    // The ring still has the root's last exec and its exit.
    exec(
        &mut w,
        root,
        Some(INIT),
        "claude",
        membership(Some(root), MEMBER_ROOT),
    );
    assert_eq!(
        exit(&mut w, root, membership(Some(root), MEMBER_ROOT)),
        ["member exited"]
    );
    assert_eq!(w.session_events(), ["restored claude"], "its exit is known");
    w.kill(tool);
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn restored_sessions_keep_nesting() {
    let mut w = World::new();
    let [outer, inner, tool, lone] = [60, 61, 62, 63].map(key);
    restore(&mut w, stored(outer));
    let nested = |root, outer| RestoredSession {
        outer: Some(outer),
        rule: "no-rule-any-more".into(),
        ..stored(root)
    };
    restore(&mut w, nested(inner, outer));
    restore(&mut w, nested(lone, key(90)));
    exact_row(&mut w, tool, 1, "npm", membership(Some(inner), 0));
    w.kill(outer);
    assert_eq!(
        [inner, tool].map(|key| w.decide(key).due.is_some()),
        [true; 2]
    );
    assert!(w.decide(lone).due.is_none(), "its outer session is unknown");
    let inner = w.model.sessions.by_first_root(inner).unwrap();
    assert_eq!((&*inner.agent, inner.rule), ("no-rule-any-more", None));
}

#[test]
fn exit_of_the_root_of_two_restored_sessions_ends_both() {
    let mut w = World::new();
    let [first, successor, tool] = [60, 61, 62].map(key);
    let outer = RestoredSession {
        root: successor,
        ..stored(first)
    };
    let inner = RestoredSession {
        outer: Some(first),
        ..stored(successor)
    };
    restore(&mut w, outer);
    restore(&mut w, inner);
    exact_row(
        &mut w,
        successor,
        1,
        "claude",
        membership(Some(successor), MEMBER_ROOT),
    );
    exact_row(&mut w, tool, 1, "npm", membership(Some(first), 0));
    w.session_events();
    w.exit(successor);
    assert_eq!(w.session_events(), ["root_exited claude"; 2]);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(finish(&mut w), ["closed claude"]);
}

/// The agent relaunched itself while no service ran: the child is discovered below its adopter.
#[test]
fn successor_discovered_before_the_roots_exit_takes_over() {
    let exited_normally = ExitStatus::Exited(0);
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    for (program, tty, status, handed_over) in [
        ("claude --new", 7, exited_normally, true),
        ("claude --new", 7, ExitStatus::Exited(1), true),
        ("claude --new", 7, killed, false),
        ("claude --new", 7, ExitStatus::Unknown, false),
        ("claude --new", 8, exited_normally, false),
        ("codex", 7, exited_normally, false),
        ("npm", 7, exited_normally, false),
    ] {
        // Events: exec of the child (x), exit of the root (e), reparenting (p). The exec may be lost, the reparenting may
        // come first, and all may come twice.
        for order in ["xep", "ep", "xpe", "xxeepp"] {
            let case = format!("{program} in {tty}, {status:?}, {order}");
            let mut w = World::new();
            let [root, successor, tool] = [60, 61, 62].map(key);
            restore(
                &mut w,
                RestoredSession {
                    tty: 7,
                    ..stored(root)
                },
            );
            let named = membership(Some(root), MEMBER_NAME_MATCHED);
            w.tty = tty;
            exact_row(&mut w, successor, 1, program, named);
            exact_row(&mut w, tool, 1, "npm", membership(Some(root), 0));
            for what in order.chars() {
                match what {
                    'x' => w.exec(successor, program),
                    'e' => w.exit_with(root, status, None),
                    _ => w.adopt(successor, root, INIT),
                }
            }
            let session = w.model.sessions.by_first_root(root).unwrap();
            assert_eq!(session.root_exit.is_none(), handed_over, "{case}");
            assert_eq!(session.root == successor, handed_over, "{case}");
            let relaunched = w
                .session_events()
                .iter()
                .filter(|t| *t == "relaunched claude")
                .count();
            assert_eq!(relaunched == 1, handed_over, "{case}");
            assert_eq!(w.decide(successor).due.is_none(), handed_over, "{case}");
            assert_eq!(finish(&mut w), [""; 0]);
            w.exit(successor);
            assert_eq!(w.why(tool), "reap root_exited", "{case}");
        }
    }
}

#[test]
fn restored_root_that_became_a_boundary_is_no_member() {
    let mut w = World::new();
    restore(&mut w, stored(key(60)));
    exact_row(&mut w, key(60), 1, "bash", membership(None, MEMBER_WATCHED));
    assert!(!w.is_member(key(60)));
    w.kill(key(60));
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
}

#[test]
fn root_stays_in_its_session_if_a_sibling_session_names_it() {
    let mut w = World::new();
    let [root, first, inner] = [60, 61, 62].map(key);
    let sibling_session = |first_root, outer| RestoredSession {
        first_root,
        outer,
        ..stored(root)
    };
    exact_row(&mut w, root, 1, "claude", NOT_IN_MAP);
    let of_root = |w: &World| {
        let session = w.model.tree.get(root).unwrap().state.member.session;
        session.and_then(|id| w.model.sessions.get(id).map(|one| one.first_root))
    };
    let before = of_root(&w);
    restore(&mut w, sibling_session(first, None));
    assert_eq!(of_root(&w), before);
    restore(&mut w, sibling_session(inner, before));
    assert_eq!(of_root(&w), Some(inner), "the innermost session");
}
