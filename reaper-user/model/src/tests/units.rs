//! The condition `own_unit`, which compares the unit of a member with that of its root. The root may have exited before its
//! unit was read.

use proptest::prelude::*;
use reaper_common::MEMBER_ROOT;

use super::restored::{restore, stored};
use super::rules::{ruled, set_facts, set_unit, world};
use super::survival::{exact_row, exec, key, membership};
use super::world::{INIT, World, assert_consistent, image};
use crate::event::{ExitStatus, Image, ProcessKey, RestoredSession};
use crate::facts::{Fact, FactSet, Facts};
use crate::policy::{Reason, Verdict};

pub(super) const OWN_UNIT: &str = "[[rule]]\nname = 'own-unit'\naction = 'keep'\nown_unit = true\n";

/// Starts a child that executes a program in a cgroup.
fn spawn_in_cgroup(w: &mut World, parent: ProcessKey, program: &str, cgroup_id: u64) -> ProcessKey {
    let child = w.fork(parent);
    let image = Image {
        cgroup_id,
        ..Image::clone(&image(program, 0))
    };
    w.exec_image(child, image);
    child
}

/// Reports that the unit of a process cannot be read.
fn set_unreadable(w: &mut World, key: ProcessKey) {
    set_facts(w, key, FactSet::UNIT, Facts::unreadable());
}

/// Returns the process whose unit the decision about a member waits for.
fn requested_for(w: &World, key: ProcessKey) -> Option<ProcessKey> {
    let decision = w.decide(key);
    if decision.needs.is_empty() {
        return None;
    }
    let found = (decision.verdict, decision.reason, decision.needs);
    assert_eq!(found, (Verdict::Wait, Reason::Unread, FactSet::UNIT));
    Some(decision.relative.unwrap_or(key))
}

#[test]
fn own_unit_is_one_that_differs_from_the_roots() {
    let mut w = world(ruled(OWN_UNIT));
    let shell = spawn_in_cgroup(&mut w, INIT, "bash", 7);
    let agent = spawn_in_cgroup(&mut w, shell, "claude", 7);
    let [same, service, scoped, bare, unread] =
        [7, 8, 9, 10, 11].map(|id| spawn_in_cgroup(&mut w, agent, "x", id));
    w.kill(agent);
    assert_eq!(
        w.why(same),
        "reap root_exited",
        "the same cgroup needs no read"
    );
    assert_eq!(requested_for(&w, service), Some(service));
    set_unit(&mut w, service, "web.service");
    // Each process in the agent's cgroup has the agent's unit.
    assert_eq!(requested_for(&w, service), Some(agent));
    set_unreadable(&mut w, agent);
    assert_eq!(requested_for(&w, service), Some(shell));
    set_unreadable(&mut w, shell);
    assert_eq!(requested_for(&w, service), Some(same));
    set_unit(&mut w, same, "session-3.scope");
    set_unit(&mut w, scoped, "session-3.scope");
    set_unit(&mut w, bare, "");
    set_unreadable(&mut w, unread);
    let keys = [service, scoped, bare, unread];
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

/// Returns another agent and two members of an exited agent.
///
/// The exited agent was in the cgroup of the other agent, and its unit could not be read. The unit of the other agent was
/// read before. The members are in other cgroups: one in the unit of the agents, one in another unit.
fn tree_with_cgroup_sibling() -> (World, ProcessKey, [ProcessKey; 2]) {
    let mut w = world(ruled(OWN_UNIT));
    let other = spawn_in_cgroup(&mut w, INIT, "codex", 7);
    set_unit(&mut w, other, "vte-1.scope");
    let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
    let members = [8, 9].map(|id| spawn_in_cgroup(&mut w, agent, "x", id));
    w.kill(agent);
    for (key, unit_name) in members.into_iter().zip(["vte-1.scope", "web.service"]) {
        set_unit(&mut w, key, unit_name);
    }
    set_unreadable(&mut w, agent);
    (w, other, members)
}

#[test]
fn cgroup_sibling_is_read_again_for_the_unit_of_the_root() {
    let (mut w, other, [tool, service]) = tree_with_cgroup_sibling();
    assert_eq!(requested_for(&w, tool), Some(other));
    set_unit(&mut w, other, "vte-1.scope");
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(service), "keep keep_rule own-unit");
}

#[test]
fn cgroup_sibling_that_moved_unseen_gives_no_unit() {
    let (mut w, other, members) = tree_with_cgroup_sibling();
    set_unit(&mut w, other, "web.service");
    assert_eq!(
        members.map(|key| w.why(key)),
        ["keep unreadable own-unit"; 2],
        "no other process is in the cgroup"
    );
}

#[test]
fn unreadable_process_is_not_requested_again() {
    let (mut w, other, members) = tree_with_cgroup_sibling();
    let more = [(); 2].map(|()| spawn_in_cgroup(&mut w, INIT, "bash", 7));
    for key in [other, more[0], more[1]] {
        assert_eq!(members.map(|tool| requested_for(&w, tool)), [Some(key); 2]);
        set_unreadable(&mut w, key);
    }
    assert_eq!(
        members.map(|key| w.why(key)),
        ["keep unreadable own-unit"; 2]
    );
    // An exited process is not requested either.
    let (mut w, other, members) = tree_with_cgroup_sibling();
    w.exit(other);
    assert_eq!(
        members.map(|key| w.why(key)),
        ["keep unreadable own-unit"; 2]
    );
}

#[test]
fn unit_of_root_delivered_after_its_exit_is_used() {
    // The agent is alone in its cgroup, and its member is in a cgroup below it, as with `reaper run --cgroup`.
    let start = || {
        let mut w = world(ruled(OWN_UNIT));
        let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
        let tool = spawn_in_cgroup(&mut w, agent, "x", 8);
        let read = w.now;
        w.kill(agent);
        set_unit(&mut w, tool, "ci.service");
        assert_eq!(requested_for(&w, tool), Some(agent));
        (w, agent, tool, read)
    };
    let (mut w, agent, tool, read) = start();
    let found = Facts {
        unit: Fact::Known("ci.service".into()),
        ..Facts::NOTHING
    };
    w.model.set_facts(agent, FactSet::UNIT, found, read);
    assert_eq!(w.why(tool), "reap root_exited");
    // The unit was not read, and no other process is in the cgroup.
    let (mut w, agent, tool, _) = start();
    set_unreadable(&mut w, agent);
    assert_eq!(w.why(tool), "keep unreadable own-unit");
}

#[test]
fn restored_exited_root_does_not_leave_members_waiting() {
    let mut w = world(ruled(OWN_UNIT));
    let [root, tool] = [60, 61].map(key);
    let gone = Some((key(61).start + 5, ExitStatus::Exited(3)));
    restore(
        &mut w,
        RestoredSession {
            exited: gone,
            ..stored(root)
        },
    );
    exact_row(&mut w, tool, 1, "npm", membership(Some(root), 0));
    set_unit(&mut w, tool, "ci.service");
    assert_eq!(requested_for(&w, tool), Some(root));
    // The ring still has the root's last exec.
    let unit_name = membership(Some(root), MEMBER_ROOT);
    exec(&mut w, root, Some(INIT), "claude", unit_name);
    assert_eq!(w.why(tool), "keep unreadable own-unit");
}

#[test]
fn stored_unit_of_an_exited_root_is_compared_by_its_hash() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
    assert_eq!(w.model.sessions.by_root(agent).unwrap().unit_hash(), 0);
    set_unit(&mut w, agent, "ci.service");
    let unit_hash = w.model.sessions.by_root(agent).unwrap().unit_hash();
    let mut w = world(ruled(OWN_UNIT));
    let [root, tool, other] = [60, 61, 62].map(key);
    let gone = Some((key(62).start + 5, ExitStatus::Exited(3)));
    let session = RestoredSession {
        exited: gone,
        unit_hash,
        ..stored(root)
    };
    restore(&mut w, session);
    for (member, unit) in [(tool, "ci.service"), (other, "web.service")] {
        exact_row(&mut w, member, 1, "npm", membership(Some(root), 0));
        set_unit(&mut w, member, unit);
    }
    assert_eq!(w.why(tool), "reap root_exited");
    assert_eq!(w.why(other), "keep keep_rule own-unit");
}

#[test]
fn unit_of_a_living_nested_root_is_read_from_that_root() {
    let mut w = world(ruled(OWN_UNIT));
    let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
    let nested = spawn_in_cgroup(&mut w, agent, "codex", 8);
    let tool = spawn_in_cgroup(&mut w, nested, "x", 9);
    set_unit(&mut w, tool, "run-1.scope");
    assert_eq!(requested_for(&w, tool), None, "its root is alive");
    w.exit_with(agent, ExitStatus::Exited(0), Some(INIT));
    assert_eq!(requested_for(&w, tool), Some(nested));
    set_unit(&mut w, nested, "run-1.scope");
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn relatives_wait_with_a_member_that_waits_for_a_unit() {
    let rules = "[[rule]]\nname = 'servers'\naction = 'keep'\nown_unit = true\nlistening = true\n";
    let mut w = world(ruled(rules));
    let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
    let npm = spawn_in_cgroup(&mut w, agent, "npm", 7);
    let server = spawn_in_cgroup(&mut w, npm, "vite", 8);
    w.kill(agent);
    let found = Facts {
        unit: Fact::Known("web.service".into()),
        listening: Fact::Known(true),
        ..Facts::NOTHING
    };
    set_facts(&mut w, server, FactSet::UNIT | FactSet::LISTENING, found);
    let all = [npm, server];
    assert_eq!(all.map(|key| requested_for(&w, key)), [Some(agent); 2]);
    set_unreadable(&mut w, agent);
    assert_eq!(
        all.map(|key| requested_for(&w, key)),
        [Some(npm), Some(npm)]
    );
    set_unit(&mut w, npm, "session-3.scope");
    let expected = ["keep descendant_kept servers", "keep keep_rule servers"];
    assert_eq!(all.map(|key| w.why(key)), expected);
}

proptest! {
    /// The requests end whatever the answers are, and the last usable answer decides.
    #[test]
    fn requests_for_the_unit_of_a_root_end(
        read in prop::collection::vec(0..4_usize, 4),
        answers in prop::collection::vec(0..4_usize, 12),
    ) {
        let units = [None, Some("here.scope"), Some("own.service"), Some("there.scope")];
        let answer = |w: &mut World, key, nth: usize| match units[nth] {
            Some(unit_name) => set_unit(w, key, unit_name),
            None => set_unreadable(w, key),
        };
        let mut w = world(ruled(OWN_UNIT));
        let beside: Vec<ProcessKey> = read.iter().map(|_| spawn_in_cgroup(&mut w, INIT, "bash", 7)).collect();
        for (key, nth) in beside.iter().zip(&read) {
            answer(&mut w, *key, *nth);
        }
        let agent = spawn_in_cgroup(&mut w, INIT, "claude", 7);
        let tool = spawn_in_cgroup(&mut w, agent, "x", 8);
        w.kill(agent);
        set_unit(&mut w, tool, "own.service");
        let mut used = Vec::new();
        for nth in answers {
            let Some(of) = requested_for(&w, tool) else { break };
            answer(&mut w, of, nth);
            let before = beside.iter().position(|key| *key == of).map(|at| read[at]);
            let holds = before.is_none_or(|before| before == nth);
            used.extend(units[nth].filter(|_| holds));
        }
        assert_consistent(&w.model);
        prop_assert_eq!(requested_for(&w, tool), None);
        let expected = match used.last() {
            Some(&"own.service") => "reap root_exited",
            Some(_) => "keep keep_rule own-unit",
            None => "keep unreadable own-unit",
        };
        prop_assert_eq!(w.why(tool), expected);
    }
}
