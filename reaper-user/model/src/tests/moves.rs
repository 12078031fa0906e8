//! What is known of a process and stops being true: where it lies, and what it was started with.

use super::rules::{read, ruled, unit, world};
use super::units::OWN_UNIT;
use super::world::{INIT, USER, World, image};
use crate::event::{EventKind, Image, Membership, ProcessKey};
use crate::facts::{Fact, FactSet, Facts};

use reaper_common::{MEMBER_GENERATION_STEP, MEMBER_TRACKED};

fn moves(w: &mut World, key: ProcessKey, cgroup_id: u64) {
    w.kernel(EventKind::Move {
        key,
        cgroup_id,
        membership: None,
    });
}

fn is_clear(w: &World, key: ProcessKey) -> bool {
    w.model.is_kernel_killable(w.model.tree.get(key).unwrap())
}

#[test]
fn what_moves_to_another_unit_is_asked_for_it_anew() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = w.spawn(INIT, "claude");
    let [app, leaf] = [(); 2].map(|()| w.spawn(agent, "x"));
    for key in [agent, app, leaf] {
        unit(&mut w, key, "session-3.scope");
    }
    let before = w.now;
    moves(&mut w, app, 9);
    w.dies_by_signal(agent);
    assert_eq!(w.why(leaf), "reap root_exited");
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    // A look that began before it moved says nothing of where it is.
    let found = Facts {
        unit: Fact::Known("session-3.scope".into()),
        ..Facts::NOTHING
    };
    w.model.set_facts(app, FactSet::UNIT, found, before);
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    unit(&mut w, app, "app-code.scope");
    assert_eq!(w.why(app), "keep keep_rule own-unit");
}

#[test]
fn where_nobody_tells_of_moves_the_unit_is_asked_for_anew_when_one_is_due() {
    let mut w = world(ruled(OWN_UNIT));
    w.model.set_misses_moves(true);
    let agent = w.spawn(INIT, "claude");
    let app = w.spawn(agent, "x");
    for key in [agent, app] {
        unit(&mut w, key, "session-3.scope");
    }
    w.dies_by_signal(agent);
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    unit(&mut w, app, "app-code.scope");
    assert_eq!(w.why(app), "keep keep_rule own-unit");
}

#[test]
fn children_born_before_a_move_have_not_moved() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = w.spawn(INIT, "claude");
    let app = w.spawn(agent, "x");
    for key in [agent, app] {
        unit(&mut w, key, "session-3.scope");
    }
    let before = w.fork(app);
    moves(&mut w, app, 9);
    let after = w.fork(app);
    unit(&mut w, app, "app-code.scope");
    w.dies_by_signal(agent);
    assert_eq!(w.why(before), "reap root_exited");
    assert_eq!(w.decide(after).needs, FactSet::UNIT);
}

#[test]
fn the_mark_that_an_exec_tells_of_is_not_read() {
    let told = |w: &mut World, parent, keep_mark| {
        let child = w.fork(parent);
        let image = Image {
            keep_marker: keep_mark,
            ..(*image("x", 0)).clone()
        };
        w.runs(child, image);
        child
    };
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let [plain, kept, untold] = [Fact::Known(false), Fact::Known(true), Fact::Unread]
        .map(|told_of| told(&mut w, agent, told_of));
    let heir = w.fork(kept);
    let told = |w: &World, key| w.model.tree.get(key).unwrap().keep_marker() != Fact::Unread;
    assert_eq!(
        [plain, kept, untold].map(|key| told(&w, key)),
        [true, true, false]
    );
    assert_eq!(
        [plain, kept, untold].map(|key| is_clear(&w, key)),
        [true, false, false]
    );
    w.dies_by_signal(agent);
    assert_eq!(w.why(plain), "reap root_exited");
    assert_eq!([kept, heir].map(|key| w.why(key)), ["keep keep_marker"; 2]);
    assert_eq!(w.decide(untold).needs, FactSet::MARKERS);
}

/// Runs a program that is told to have been started without the mark, the `execs`th time.
fn unmarked(w: &mut World, key: ProcessKey, execs: u32) {
    let image = Image {
        keep_marker: Fact::Known(false),
        ..(*image("x", 0)).clone()
    };
    w.kernel(EventKind::Exec {
        key,
        parent: None,
        uids: USER,
        pidfd_inode: 0,
        image: image.into(),
        membership: Some(mark(execs)),
    });
}

fn mark(execs: u32) -> Membership {
    Membership {
        session: None,
        flags: MEMBER_TRACKED | (execs * MEMBER_GENERATION_STEP),
    }
}

#[test]
fn what_was_started_unseen_may_have_another_environment() {
    let unseen: [fn(&mut World, ProcessKey); 4] = [
        // Any record of it, and a row, has the count of its programs.
        |w, key| {
            w.kernel(EventKind::Reparent {
                child: key,
                old_parent: None,
                adopter: Some(INIT),
                membership: Some(mark(2)),
            });
        },
        |w, key| {
            w.kernel(EventKind::Move {
                key,
                cgroup_id: 0,
                membership: Some(mark(3)),
            });
        },
        |w, key| {
            w.row_with(key, INIT.pid, "x", |seen| {
                (seen.key, seen.exact, seen.membership) = (key, true, Some(mark(2)));
            });
        },
        // Events are missing.
        |w, _| w.model.forget_program_facts(),
    ];
    for (n, unseen) in unseen.into_iter().enumerate() {
        let mut w = world(read(""));
        let agent = w.spawn(INIT, "claude");
        let tool = w.fork(agent);
        unmarked(&mut w, tool, 1);
        assert!(is_clear(&w, tool), "{n}");
        unseen(&mut w, tool);
        let below = w.fork(tool);
        w.dies_by_signal(agent);
        for key in [tool, below] {
            assert_eq!(w.decide(key).needs, FactSet::MARKERS, "{n}");
        }
    }
}

#[test]
fn what_happens_to_it_besides_leaves_the_environment_known() {
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let tool = w.fork(agent);
    unmarked(&mut w, tool, 1);
    unmarked(&mut w, tool, 2);
    w.kernel(EventKind::Move {
        key: tool,
        cgroup_id: 0,
        membership: Some(mark(3)),
    });
    unmarked(&mut w, tool, 4);
    w.dies_by_signal(agent);
    assert_eq!(w.why(tool), "reap root_exited");
}
