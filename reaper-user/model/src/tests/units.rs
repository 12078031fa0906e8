//! A unit of its own is one that is not that of its agent, which may have gone before its own was read.

use proptest::prelude::*;
use reaper_common::MEMBER_ROOT;

use super::restored::{left, restore};
use super::rules::{ruled, tell, unit, world};
use super::survival::{exact, exec, key, mark};
use super::world::{INIT, World, assert_consistent, image};
use crate::event::{ExitStatus, Image, ProcessKey, RestoredSession};
use crate::facts::{Fact, FactSet, Facts};
use crate::policy::{Reason, Verdict};

pub(super) const OWN_UNIT: &str = "[[rule]]\nname = 'own-unit'\naction = 'keep'\nown_unit = true\n";

/// A child that runs a program in a cgroup.
fn in_cgroup(w: &mut World, parent: ProcessKey, program: &str, cgroup_id: u64) -> ProcessKey {
    let child = w.fork(parent);
    let image = Image {
        cgroup_id,
        ..Image::clone(&image(program, 0))
    };
    w.runs(child, image);
    child
}

/// Its unit cannot be read.
fn unreadable(w: &mut World, key: ProcessKey) {
    tell(w, key, FactSet::UNIT, Facts::unreadable());
}

/// Whose unit is to be read before anything is said of a member.
fn wanted_for(w: &World, key: ProcessKey) -> Option<ProcessKey> {
    let decision = w.decide(key);
    if decision.needs.is_empty() {
        return None;
    }
    let said = (decision.verdict, decision.reason, decision.needs);
    assert_eq!(said, (Verdict::Wait, Reason::Unread, FactSet::UNIT));
    Some(decision.relative.unwrap_or(key))
}

#[test]
fn a_unit_of_its_own_is_one_that_is_not_its_agents() {
    let mut w = world(ruled(OWN_UNIT));
    let shell = in_cgroup(&mut w, INIT, "bash", 7);
    let agent = in_cgroup(&mut w, shell, "claude", 7);
    let [same, service, scoped, bare, untold] =
        [7, 8, 9, 10, 11].map(|id| in_cgroup(&mut w, agent, "x", id));
    w.dies_by_signal(agent);
    assert_eq!(w.why(same), "reap root_exited", "nothing is read for it");
    assert_eq!(wanted_for(&w, service), Some(service));
    unit(&mut w, service, "web.service");
    // That of a process in the same cgroup is the agent's.
    assert_eq!(wanted_for(&w, service), Some(agent));
    unreadable(&mut w, agent);
    assert_eq!(wanted_for(&w, service), Some(shell));
    unreadable(&mut w, shell);
    assert_eq!(wanted_for(&w, service), Some(same));
    unit(&mut w, same, "session-3.scope");
    unit(&mut w, scoped, "session-3.scope");
    unit(&mut w, bare, "");
    unreadable(&mut w, untold);
    let keys = [service, scoped, bare, untold];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "keep keep_rule own-unit",
            "reap root_exited",
            "reap root_exited",
            "keep unreadable own-unit"
        ]
    );
}

/// An agent has ended before its unit could be read, in the cgroup of another whose own was read before it began. Gives that
/// one, and what the agent has left in cgroups below: in its own unit, and in another.
fn beside_one_that_was_read() -> (World, ProcessKey, [ProcessKey; 2]) {
    let mut w = world(ruled(OWN_UNIT));
    let other = in_cgroup(&mut w, INIT, "codex", 7);
    unit(&mut w, other, "vte-1.scope");
    let agent = in_cgroup(&mut w, INIT, "claude", 7);
    let left = [8, 9].map(|id| in_cgroup(&mut w, agent, "x", id));
    w.dies_by_signal(agent);
    for (key, its) in left.into_iter().zip(["vte-1.scope", "web.service"]) {
        unit(&mut w, key, its);
    }
    unreadable(&mut w, agent);
    (w, other, left)
}

#[test]
fn one_whose_unit_was_read_before_the_session_began_tells_that_too() {
    let (mut w, other, [tool, service]) = beside_one_that_was_read();
    assert_eq!(wanted_for(&w, tool), Some(other));
    unit(&mut w, other, "vte-1.scope");
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(service), "keep keep_rule own-unit");
}

#[test]
fn one_that_has_left_the_cgroup_unseen_tells_nothing_of_who_was_there() {
    let (mut w, other, left) = beside_one_that_was_read();
    unit(&mut w, other, "web.service");
    assert_eq!(
        left.map(|key| w.why(key)),
        ["keep unreadable own-unit"; 2],
        "nobody else is there"
    );
}

#[test]
fn whoever_cannot_be_read_is_not_asked_again() {
    let (mut w, other, left) = beside_one_that_was_read();
    let more = [(); 2].map(|()| in_cgroup(&mut w, INIT, "bash", 7));
    for key in [other, more[0], more[1]] {
        assert_eq!(left.map(|tool| wanted_for(&w, tool)), [Some(key); 2]);
        unreadable(&mut w, key);
    }
    assert_eq!(left.map(|key| w.why(key)), ["keep unreadable own-unit"; 2]);
    // Nor who has gone.
    let (mut w, other, left) = beside_one_that_was_read();
    w.exit(other);
    assert_eq!(left.map(|key| w.why(key)), ["keep unreadable own-unit"; 2]);
}

#[test]
fn what_was_read_of_a_root_and_is_told_after_its_end_is_waited_for() {
    // Alone in its unit, with what it runs in a cgroup below, as by `reaper run --cgroup`.
    let story = || {
        let mut w = world(ruled(OWN_UNIT));
        let agent = in_cgroup(&mut w, INIT, "claude", 7);
        let tool = in_cgroup(&mut w, agent, "x", 8);
        let read = w.now;
        w.dies_by_signal(agent);
        unit(&mut w, tool, "ci.service");
        assert_eq!(wanted_for(&w, tool), Some(agent));
        (w, agent, tool, read)
    };
    let (mut w, agent, tool, read) = story();
    let found = Facts {
        unit: Fact::Known("ci.service".into()),
        ..Facts::NOTHING
    };
    w.model.set_facts(agent, FactSet::UNIT, found, read);
    assert_eq!(w.why(tool), "reap root_exited");
    // It was not, and nobody else can tell.
    let (mut w, agent, tool, _) = story();
    unreadable(&mut w, agent);
    assert_eq!(w.why(tool), "keep unreadable own-unit");
}

#[test]
fn a_root_that_is_gone_and_still_to_be_told_of_is_not_asked_in_vain() {
    let mut w = world(ruled(OWN_UNIT));
    let [root, tool] = [60, 61].map(key);
    let gone = Some((key(61).start + 5, ExitStatus::Exited(3)));
    restore(
        &mut w,
        RestoredSession {
            exited: gone,
            ..left(root)
        },
    );
    exact(&mut w, tool, 1, "npm", mark(Some(root), 0));
    unit(&mut w, tool, "ci.service");
    assert_eq!(wanted_for(&w, tool), Some(root));
    // The ring still has its last exec.
    let its = mark(Some(root), MEMBER_ROOT);
    exec(&mut w, root, Some(INIT), "claude", its);
    assert_eq!(w.why(tool), "keep unreadable own-unit");
}

#[test]
fn the_unit_of_a_nested_root_that_lives_is_read_of_that() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = in_cgroup(&mut w, INIT, "claude", 7);
    let nested = in_cgroup(&mut w, agent, "codex", 8);
    let tool = in_cgroup(&mut w, nested, "x", 9);
    unit(&mut w, tool, "run-1.scope");
    assert_eq!(wanted_for(&w, tool), None, "it lives by right of its agent");
    w.end(agent, ExitStatus::Exited(0), Some(INIT));
    assert_eq!(wanted_for(&w, tool), Some(nested));
    unit(&mut w, nested, "run-1.scope");
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn kin_of_one_that_waits_for_the_unit_of_its_root_waits_with_it() {
    let rules = "[[rule]]\nname = 'servers'\naction = 'keep'\nown_unit = true\nlistening = true\n";
    let mut w = world(ruled(rules));
    let agent = in_cgroup(&mut w, INIT, "claude", 7);
    let npm = in_cgroup(&mut w, agent, "npm", 7);
    let server = in_cgroup(&mut w, npm, "vite", 8);
    w.dies_by_signal(agent);
    let found = Facts {
        unit: Fact::Known("web.service".into()),
        listening: Fact::Known(true),
        ..Facts::NOTHING
    };
    tell(&mut w, server, FactSet::UNIT | FactSet::LISTENING, found);
    let all = [npm, server];
    assert_eq!(all.map(|key| wanted_for(&w, key)), [Some(agent); 2]);
    unreadable(&mut w, agent);
    assert_eq!(all.map(|key| wanted_for(&w, key)), [Some(npm), Some(npm)]);
    unit(&mut w, npm, "session-3.scope");
    let said = ["keep descendant_kept servers", "keep keep_rule servers"];
    assert_eq!(all.map(|key| w.why(key)), said);
}

proptest! {
    /// Whatever is answered, asking ends, and nobody is reaped but by the unit that the root's cgroup has.
    #[test]
    fn asking_for_the_unit_of_a_root_ends(
        read in prop::collection::vec(0..4_usize, 4),
        answers in prop::collection::vec(0..4_usize, 12),
    ) {
        let units = [None, Some("here.scope"), Some("own.service"), Some("there.scope")];
        let tell = |w: &mut World, key, nth: usize| match units[nth] {
            Some(its) => unit(w, key, its),
            None => unreadable(w, key),
        };
        let mut w = world(ruled(OWN_UNIT));
        let beside: Vec<ProcessKey> = read.iter().map(|_| in_cgroup(&mut w, INIT, "bash", 7)).collect();
        for (key, nth) in beside.iter().zip(&read) {
            tell(&mut w, *key, *nth);
        }
        let agent = in_cgroup(&mut w, INIT, "claude", 7);
        let tool = in_cgroup(&mut w, agent, "x", 8);
        w.dies_by_signal(agent);
        unit(&mut w, tool, "own.service");
        let mut told = Vec::new();
        for nth in answers {
            let Some(of) = wanted_for(&w, tool) else { break };
            tell(&mut w, of, nth);
            let before = beside.iter().position(|key| *key == of).map(|at| read[at]);
            let holds = before.is_none_or(|before| before == nth);
            told.extend(units[nth].filter(|_| holds));
        }
        assert_consistent(&w.model);
        prop_assert_eq!(wanted_for(&w, tool), None);
        let said = match told.last() {
            Some(&"own.service") => "reap root_exited",
            Some(_) => "keep keep_rule own-unit",
            None => "keep unreadable own-unit",
        };
        prop_assert_eq!(w.why(tool), said);
    }
}
