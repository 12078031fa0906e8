//! Sessions that another service left, as the next one finds them.

use reaper_common::{MEMBER_NAME_MATCHED, MEMBER_ROOT, MEMBER_WATCHED};

use super::survival::{NOBODY, exact, exec, exit, key, mark};
use super::world::{INIT, USER, World, named};
use crate::event::{EventKind, ExitStatus, ProcessKey, Provenance, RestoredSession, TICK_NS};

pub(super) fn left(root: ProcessKey) -> RestoredSession {
    RestoredSession {
        first_root: root,
        root,
        outer: None,
        parent: None,
        tty: 0,
        rule: "claude".into(),
        uids: USER,
        cgroup_id: 0,
        opened_at: 7,
        exited: None,
        was_signalled: false,
        is_evaluated: false,
    }
}

pub(super) fn restore(w: &mut World, left: RestoredSession) {
    w.tell(Provenance::Inferred, EventKind::Restored(Box::new(left)));
}

/// What closes when all has been told.
fn finish(w: &mut World) -> Vec<String> {
    let mut out = Vec::new();
    w.model.finish_restore(&mut out);
    named(&w.model, &out)
}

#[test]
fn a_restored_session_goes_on() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    restore(&mut w, left(root));
    restore(&mut w, left(root));
    exact(
        &mut w,
        root,
        1,
        "claude --resume",
        mark(Some(root), MEMBER_ROOT),
    );
    exact(&mut w, tool, 1, "npm", mark(Some(root), 0));
    assert_eq!(finish(&mut w), [""; 0]);
    assert_eq!(
        w.session_events(),
        ["restored claude"],
        "once, and not opened"
    );
    let session = w.model.sessions.by_first_root(root).unwrap();
    assert_eq!((session.opened_at, session.members().count()), (7, 2));
    assert_eq!(w.model.tree.get(root).unwrap().parent, Some(INIT));
    w.dies_by_signal(root);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn a_restored_root_that_is_not_there_is_gone() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    restore(&mut w, left(root));
    exact(&mut w, tool, 1, "npm", mark(Some(root), 0));
    assert_eq!(w.model.tree.comm(root), b"claude");
    w.end(root, ExitStatus::Unknown, None);
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
    assert_eq!(w.why(tool), "reap root_exited");
    w.dies_by_signal(tool);
    assert_eq!(w.session_events(), [""; 0], "not all has been told");
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn a_restored_root_whose_pid_is_anothers_is_gone() {
    let mut w = World::new();
    let successor = ProcessKey {
        start: key(60).start + TICK_NS,
        ..key(60)
    };
    exact(&mut w, successor, 1, "bash", NOBODY);
    restore(&mut w, left(key(60)));
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn what_was_left_by_a_root_that_is_gone_is_due_at_once() {
    let mut w = World::new();
    let [root, tool] = [60, 61].map(key);
    let (at, ended) = (key(61).start + 5, ExitStatus::Exited(3));
    let gone = Some((at, ended));
    restore(
        &mut w,
        RestoredSession {
            exited: gone,
            ..left(root)
        },
    );
    exact(&mut w, tool, 1, "npm", mark(Some(root), 0));
    let due = w.decide(tool).due.unwrap();
    assert_eq!((due.at, due.exit_status), (at, ended));
    assert_eq!(w.why(tool), "reap root_exited");
    // The ring still has its last exec and its end.
    exec(
        &mut w,
        root,
        Some(INIT),
        "claude",
        mark(Some(root), MEMBER_ROOT),
    );
    assert_eq!(
        exit(&mut w, root, mark(Some(root), MEMBER_ROOT)),
        ["member exited"]
    );
    assert_eq!(w.session_events(), ["restored claude"], "its end is known");
    w.dies_by_signal(tool);
    assert_eq!(finish(&mut w), ["closed claude"]);
}

#[test]
fn restored_sessions_are_nested_as_they_were() {
    let mut w = World::new();
    let [outer, inner, tool, lone] = [60, 61, 62, 63].map(key);
    restore(&mut w, left(outer));
    let nested = |root, outer| RestoredSession {
        outer: Some(outer),
        rule: "no-rule-any-more".into(),
        ..left(root)
    };
    restore(&mut w, nested(inner, outer));
    restore(&mut w, nested(lone, key(90)));
    exact(&mut w, tool, 1, "npm", mark(Some(inner), 0));
    w.dies_by_signal(outer);
    assert_eq!(
        [inner, tool].map(|key| w.decide(key).due.is_some()),
        [true; 2]
    );
    assert!(w.decide(lone).due.is_none(), "its outer one is not known");
    let inner = w.model.sessions.by_first_root(inner).unwrap();
    assert_eq!((&*inner.agent, inner.rule), ("no-rule-any-more", None));
}

#[test]
fn a_root_of_two_sessions_is_a_member_of_the_inner_one_and_its_end_is_the_end_of_both() {
    let mut w = World::new();
    let [first, heir, tool] = [60, 61, 62].map(key);
    let outer = RestoredSession {
        root: heir,
        ..left(first)
    };
    let inner = RestoredSession {
        outer: Some(first),
        ..left(heir)
    };
    restore(&mut w, outer);
    restore(&mut w, inner);
    exact(&mut w, heir, 1, "claude", mark(Some(heir), MEMBER_ROOT));
    exact(&mut w, tool, 1, "npm", mark(Some(first), 0));
    w.session_events();
    w.exit(heir);
    assert_eq!(w.session_events(), ["root_exited claude"; 2]);
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(finish(&mut w), ["closed claude"]);
}

/// The agent handed over to its child and left while no service ran: the child is found with its adopter.
#[test]
fn a_session_is_handed_over_also_where_the_heir_is_found_before_the_root_has_left() {
    let left_by_itself = ExitStatus::Exited(0);
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    for (program, tty, ended, handed_over) in [
        ("claude --new", 7, left_by_itself, true),
        ("claude --new", 7, ExitStatus::Exited(1), true),
        ("claude --new", 7, killed, false),
        ("claude --new", 7, ExitStatus::Unknown, false),
        ("claude --new", 8, left_by_itself, false),
        ("codex", 7, left_by_itself, false),
        ("npm", 7, left_by_itself, false),
    ] {
        // All is told; the exec was lost; what became of the child is told first, or all of it twice.
        for order in ["xep", "ep", "xpe", "xxeepp"] {
            let case = format!("{program} in {tty}, {ended:?}, {order}");
            let mut w = World::new();
            let [root, heir, tool] = [60, 61, 62].map(key);
            restore(
                &mut w,
                RestoredSession {
                    tty: 7,
                    ..left(root)
                },
            );
            let named = mark(Some(root), MEMBER_NAME_MATCHED);
            w.tty = tty;
            exact(&mut w, heir, 1, program, named);
            exact(&mut w, tool, 1, "npm", mark(Some(root), 0));
            for what in order.chars() {
                match what {
                    'x' => w.exec(heir, program),
                    'e' => w.end(root, ended, None),
                    _ => w.adopt(heir, root, INIT),
                }
            }
            let session = w.model.sessions.by_first_root(root).unwrap();
            assert_eq!(session.root_exit.is_none(), handed_over, "{case}");
            assert_eq!(session.root == heir, handed_over, "{case}");
            let relaunched = w
                .session_events()
                .iter()
                .filter(|t| *t == "relaunched claude")
                .count();
            assert_eq!(relaunched == 1, handed_over, "{case}");
            assert_eq!(w.decide(heir).due.is_none(), handed_over, "{case}");
            assert_eq!(finish(&mut w), [""; 0]);
            w.exit(heir);
            assert_eq!(w.why(tool), "reap root_exited", "{case}");
        }
    }
}

#[test]
fn a_restored_root_that_had_become_a_boundary_is_no_member() {
    let mut w = World::new();
    restore(&mut w, left(key(60)));
    exact(&mut w, key(60), 1, "bash", mark(None, MEMBER_WATCHED));
    assert!(!w.is_member(key(60)));
    w.dies_by_signal(key(60));
    assert_eq!(
        w.session_events(),
        ["restored claude", "root_exited claude"]
    );
}

#[test]
fn root_stays_in_its_session_when_one_beside_it_names_it() {
    let mut w = World::new();
    let [root, first, inner] = [60, 61, 62].map(key);
    let beside = |first_root, outer| RestoredSession {
        first_root,
        outer,
        ..left(root)
    };
    exact(&mut w, root, 1, "claude", NOBODY);
    let of_root = |w: &World| {
        let session = w.model.tree.get(root).unwrap().state.member.session;
        session.and_then(|id| w.model.sessions.get(id).map(|one| one.first_root))
    };
    let before = of_root(&w);
    restore(&mut w, beside(first, None));
    assert_eq!(of_root(&w), before);
    restore(&mut w, beside(inner, before));
    assert_eq!(of_root(&w), Some(inner), "the innermost");
}
