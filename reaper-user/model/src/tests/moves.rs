//! Facts that become outdated: the unit after a move to another cgroup, and the environment after an exec.

use super::rules::{read, ruled, set_unit, world};
use super::units::OWN_UNIT;
use super::world::{INIT, USER, World, image};
use crate::event::{EventKind, Image, Membership, ProcessKey};
use crate::facts::{Fact, FactSet, Facts};

use reaper_common::{MEMBER_GENERATION_STEP, MEMBER_TRACKED};

fn move_to_cgroup(w: &mut World, key: ProcessKey, cgroup_id: u64) {
    w.kernel(EventKind::Move {
        key,
        cgroup_id,
        membership: None,
    });
}

fn is_kernel_killable(w: &World, key: ProcessKey) -> bool {
    w.model.is_kernel_killable(w.model.tree.get(key).unwrap())
}

#[test]
fn cgroup_move_makes_the_unit_unread() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = w.spawn(INIT, "claude");
    let [app, leaf] = [(); 2].map(|()| w.spawn(agent, "x"));
    for key in [agent, app, leaf] {
        set_unit(&mut w, key, "session-3.scope");
    }
    let before = w.now;
    move_to_cgroup(&mut w, app, 9);
    w.kill(agent);
    assert_eq!(w.why(leaf), "reap root_exited");
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    // A read that started before the move is dropped.
    let found = Facts {
        unit: Fact::Known("session-3.scope".into()),
        ..Facts::NOTHING
    };
    w.model.set_facts(app, FactSet::UNIT, found, before);
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    set_unit(&mut w, app, "app-code.scope");
    assert_eq!(w.why(app), "keep keep_rule own-unit");
}

#[test]
fn unit_is_read_again_when_due_if_moves_are_not_reported() {
    let mut w = world(ruled(OWN_UNIT));
    w.model.set_misses_moves(true);
    let agent = w.spawn(INIT, "claude");
    let app = w.spawn(agent, "x");
    for key in [agent, app] {
        set_unit(&mut w, key, "session-3.scope");
    }
    w.kill(agent);
    assert_eq!(w.decide(app).needs, FactSet::UNIT);
    set_unit(&mut w, app, "app-code.scope");
    assert_eq!(w.why(app), "keep keep_rule own-unit");
}

#[test]
fn child_forked_before_a_move_keeps_its_unit() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = w.spawn(INIT, "claude");
    let app = w.spawn(agent, "x");
    for key in [agent, app] {
        set_unit(&mut w, key, "session-3.scope");
    }
    let before = w.fork(app);
    move_to_cgroup(&mut w, app, 9);
    let after = w.fork(app);
    set_unit(&mut w, app, "app-code.scope");
    w.kill(agent);
    assert_eq!(w.why(before), "reap root_exited");
    assert_eq!(w.decide(after).needs, FactSet::UNIT);
}

#[test]
fn keep_marker_reported_by_an_exec_is_not_read_again() {
    let spawn = |w: &mut World, parent, keep_marker| {
        let child = w.fork(parent);
        let image = Image {
            keep_marker,
            ..(*image("x", 0)).clone()
        };
        w.exec_image(child, image);
        child
    };
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let [plain, kept, unread] = [Fact::Known(false), Fact::Known(true), Fact::Unread]
        .map(|keep_marker| spawn(&mut w, agent, keep_marker));
    let child_of_kept = w.fork(kept);
    let is_read = |w: &World, key| w.model.tree.get(key).unwrap().keep_marker() != Fact::Unread;
    assert_eq!(
        [plain, kept, unread].map(|key| is_read(&w, key)),
        [true, true, false]
    );
    assert_eq!(
        [plain, kept, unread].map(|key| is_kernel_killable(&w, key)),
        [true, false, false]
    );
    w.kill(agent);
    assert_eq!(w.why(plain), "reap root_exited");
    assert_eq!(
        [kept, child_of_kept].map(|key| w.why(key)),
        ["keep keep_marker"; 2]
    );
    assert_eq!(w.decide(unread).needs, FactSet::MARKERS);
}

/// Reports an exec without the keep marker. `execs` is the number of execs in the map entry.
fn exec_without_marker(w: &mut World, key: ProcessKey, execs: u32) {
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
        membership: Some(membership(execs)),
    });
}

fn membership(execs: u32) -> Membership {
    Membership {
        session: None,
        flags: MEMBER_TRACKED | (execs * MEMBER_GENERATION_STEP),
    }
}

#[test]
fn missed_exec_makes_the_environment_unread() {
    let unseen: [fn(&mut World, ProcessKey); 4] = [
        // Each record and each scan row has the number of execs.
        |w, key| {
            w.kernel(EventKind::Reparent {
                child: key,
                old_parent: None,
                adopter: Some(INIT),
                membership: Some(membership(2)),
            });
        },
        |w, key| {
            w.kernel(EventKind::Move {
                key,
                cgroup_id: 0,
                membership: Some(membership(3)),
            });
        },
        |w, key| {
            w.row_with(key, INIT.pid, "x", |entry| {
                (entry.key, entry.exact, entry.membership) = (key, true, Some(membership(2)));
            });
        },
        // Events were lost.
        |w, _| w.model.forget_program_facts(),
    ];
    for (n, unseen) in unseen.into_iter().enumerate() {
        let mut w = world(read(""));
        let agent = w.spawn(INIT, "claude");
        let tool = w.fork(agent);
        exec_without_marker(&mut w, tool, 1);
        assert!(is_kernel_killable(&w, tool), "{n}");
        unseen(&mut w, tool);
        let below = w.fork(tool);
        w.kill(agent);
        for key in [tool, below] {
            assert_eq!(w.decide(key).needs, FactSet::MARKERS, "{n}");
        }
    }
}

#[test]
fn reported_events_leave_the_environment_known() {
    let mut w = world(read(""));
    let agent = w.spawn(INIT, "claude");
    let tool = w.fork(agent);
    exec_without_marker(&mut w, tool, 1);
    exec_without_marker(&mut w, tool, 2);
    w.kernel(EventKind::Move {
        key: tool,
        cgroup_id: 0,
        membership: Some(membership(3)),
    });
    exec_without_marker(&mut w, tool, 4);
    w.kill(agent);
    assert_eq!(w.why(tool), "reap root_exited");
}
