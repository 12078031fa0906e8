//! What the event stream must say, whatever the tree.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{Expectation, ProcessSpec, process_spec};
use crate::daemon::Event;
use crate::proc::ProcessKey;
use crate::world::World;

/// Why something is kept for the time being that could not be read.
const UNREAD: &str = "unreadable";
/// Decisions that say no more than that nothing is to be done.
const IDLE: [&str; 3] = ["root_alive", "not_a_member", "successor_awaited"];

/// A decision about one process: what, why, and by which rule.
pub type Decided = (ProcessKey, String, String, Option<String>);

/// What was decided about the processes of a role, each once.
pub fn decisions(world: &World, events: &[Event], role: &str) -> BTreeSet<Decided> {
    let processes: HashMap<i32, ProcessKey> = world
        .processes(role)
        .into_iter()
        .map(|id| (id.pid, id))
        .collect();
    let mut found = BTreeSet::new();
    for e in events.iter().filter(|e| e.event == "decision") {
        let who = e
            .pid
            .and_then(|pid| processes.get(&pid))
            .filter(|who| e.is_about(**who));
        let (Some(who), Some(decision), Some(reason)) = (who, &e.decision, &e.reason) else {
            continue;
        };
        if !IDLE.contains(&reason.as_str()) {
            found.insert((*who, decision.clone(), reason.clone(), e.rule.clone()));
        }
    }
    found
}

/// What may be told besides, or left out.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// That something could not be read at first may have been told before.
    pub unread: bool,
    /// What was decided before the last may not have been, and that somebody was an orphan before it was due may not
    /// have been seen: it was looked at too late for that.
    pub earlier: bool,
}

/// About each process of the part was decided what had to be, and nothing else.
pub fn assert_decisions(world: &World, events: &[Event], part: &ProcessSpec, leeway: Tolerance) {
    if part.expect == Expectation::KilledByTest {
        return;
    }
    let wanted = part.decisions();
    let text = |decision: &str, reason: &str, rule: Option<&str>| {
        let words = [decision, reason].into_iter().chain(rule);
        words.collect::<Vec<_>>().join(" ")
    };
    let mut by_process: BTreeMap<ProcessKey, BTreeSet<String>> = BTreeMap::new();
    let at_once = !leeway.unread || wanted.iter().any(|said| said.reason == UNREAD);
    let all = decisions(world, events, part.role).into_iter();
    for (who, decision, reason, rule) in all.filter(|d| at_once || d.2 != UNREAD) {
        let any_rule = |said: &&process_spec::DecisionSpec| {
            said.rule.is_none() && said.decision == decision && said.reason == reason
        };
        let rule = rule.filter(|_| !wanted.iter().any(|said| any_rule(&said)));
        let said = text(&decision, &reason, rule.as_deref());
        by_process.entry(who).or_default().insert(said);
    }
    let texts = |all: &[process_spec::DecisionSpec]| -> BTreeSet<String> {
        let texts = all
            .iter()
            .map(|said| text(said.decision, said.reason, said.rule));
        texts.collect()
    };
    let last = texts(wanted.last().map_or(&[], std::slice::from_ref));
    let wanted = texts(&wanted);
    let undecided = undecided(events, part);
    for who in world.processes(part.role) {
        if undecided.contains(&who) {
            continue;
        }
        let got = by_process.remove(&who).unwrap_or_default();
        assert!(
            got == wanted || leeway.earlier && got.is_subset(&wanted) && got.is_superset(&last),
            "decisions about '{}' (pid {}): {got:?}, not {wanted:?}",
            part.role,
            who.pid
        );
        if let Expectation::Boundary(rule) = part.expect {
            let wall = |e: &Event| e.is("boundary", who) && e.rule.as_deref() == Some(rule);
            assert!(
                events.iter().any(wall),
                "membership did not stop at '{}' by the rule {rule}",
                part.role
            );
        }
        if let Expectation::Server(rule) = part.expect {
            let opened = events.iter().find(|e| e.is("session.open", who));
            let opened = opened.map(|e| (e.session_kind.as_deref(), e.rule.as_deref()));
            assert_eq!(
                opened,
                Some((Some("server"), Some(rule))),
                "session of '{}'",
                part.role
            );
        }
        let signalled = || events.iter().any(|e| e.is("signal", who));
        assert!(
            part.dies() || !signalled(),
            "'{}' (pid {}) was signalled",
            part.role,
            who.pid
        );
    }
}

/// Nobody of those that live on was signalled, or was to be.
pub fn unsignalled(world: &World, events: &[Event], parts: &[ProcessSpec]) {
    for part in parts.iter().filter(|part| part.lives()) {
        for who in world.processes(part.role) {
            let touched = events.iter().find(|e| e.is_about(who) && touches(e));
            assert!(
                touched.is_none(),
                "'{}' was touched: {touched:?}",
                part.role
            );
        }
    }
}

/// Of whom no more is told than that they could not be held.
pub fn out_of_files(events: &[Event]) -> HashSet<ProcessKey> {
    let starved = events.iter().filter(|e| is_starved(e));
    starved.filter_map(Event::process).collect()
}

/// Returns the processes of which the decision need not be reported: those that could not be held, and those of a part which
/// may exit first that had exited when their turn came.
pub fn undecided(events: &[Event], part: &ProcessSpec) -> HashSet<ProcessKey> {
    let is_gone = |e: &&Event| {
        part.may_exit_first
            && e.outcome.as_deref() == Some("not_sent")
            && e.reason.as_deref() == Some("already_exited")
    };
    let gone = events.iter().filter(is_gone).filter_map(Event::process);
    out_of_files(events).into_iter().chain(gone).collect()
}

/// Whether somebody could not be held, as this machine lets nobody have so many files. Where others end there is room
/// again.
fn is_starved(e: &Event) -> bool {
    e.outcome.as_deref() == Some("failed") && e.reason.as_deref() == Some("EMFILE")
}

/// Whether somebody was signalled, or is to be.
fn touches(e: &Event) -> bool {
    e.event == "signal" || e.decision.as_deref() == Some("reap")
}

/// All of these live, and nobody was to end them.
pub fn assert_untouched(events: &[Event], who: &[ProcessKey]) {
    let of_them = |e: &&Event| who.iter().any(|who| e.is_about(*who));
    for e in events.iter().filter(of_them) {
        assert!(!touches(e), "somebody was touched: {e:?}");
    }
    let dead = who.iter().find(|who| !who.is_alive());
    assert!(dead.is_none(), "somebody is dead: {dead:?}");
}

/// The process of this role was recognised as an agent by this rule; by none if it has no name.
pub fn recognised(world: &World, events: &[Event], role: &str, rule: &str) {
    let who = world.process(role);
    let opened = events.iter().find(|e| e.is("session.open", who));
    let by = opened.and_then(|e| e.agent.as_deref());
    assert_eq!(by.unwrap_or_default(), rule, "agent of '{role}'");
}

/// Each process of the part was told to have gone to its adopter. One that is ended as fast as it is
/// orphaned may be dead before the kernel gives it away, and then has none: `all` asks for it still.
pub fn assert_adopter(world: &World, events: &[Event], part: &ProcessSpec, all: bool) {
    let Some(role) = part.adopter else { return };
    let wanted = if role == "init" {
        1
    } else {
        world.process(role).pid
    };
    for who in world.processes(part.role) {
        let told = adopter(events, who);
        if all || told.is_some() {
            assert_eq!(told, Some(wanted), "adopter of '{}' ({who:?})", part.role);
        }
    }
}

/// Who has adopted a process: told with the orphan if it was known then, else by the kernel's own word for it, or
/// by a look.
pub fn adopter(events: &[Event], who: ProcessKey) -> Option<i32> {
    let told = events
        .iter()
        .filter(|e| e.is("orphan", who) || e.is("reparent", who));
    told.filter_map(|e| e.adopter_pid).next()
}

/// Each process of the part was orphaned, which may not have been seen, decided, signalled and ended, in this order.
pub fn assert_reaped(world: &World, events: &[Event], part: &ProcessSpec, leeway: Tolerance) {
    let mut by_pid: HashMap<i32, Vec<&Event>> = HashMap::new();
    events
        .iter()
        .filter_map(|e| Some((e.pid?, e)))
        .for_each(|(pid, e)| by_pid.entry(pid).or_default().push(e));
    let starved = out_of_files(events);
    for who in world.processes(part.role) {
        if starved.contains(&who) {
            continue;
        }
        let mine = by_pid.remove(&who.pid).unwrap_or_default();
        let find = |name: &str| mine.iter().copied().find(|e| e.is(name, who));
        let need = |name: &str| {
            find(name).unwrap_or_else(|| panic!("no {name} of '{}' ({who:?})", part.role))
        };
        if part.adopter.is_some() && !leeway.earlier {
            need("orphan");
        }
        let due = mine
            .iter()
            .find(|e| e.is("decision", who) && e.decision.as_deref() == Some("reap"));
        let due = due.unwrap_or_else(|| panic!("no decision to reap '{}' ({who:?})", part.role));
        // One that could not be read when its turn came was let go, and claimed anew.
        let mut outcomes = mine.iter().copied().filter(|e| e.is("outcome", who));
        let again = outcomes.next_back().filter(|_| leeway.unread);
        let outcome = again.unwrap_or_else(|| need("outcome"));
        assert!(
            due.seq < outcome.seq,
            "outcome of '{}' before the decision",
            part.role
        );
        match outcome.outcome.as_deref() {
            Some("ended") => {}
            Some("not_sent") if part.may_exit_first => {}
            other => panic!(
                "outcome of '{}' ({who:?}) is {other:?}, {:?}; its events: {mine:#?}",
                part.role, outcome.reason
            ),
        }
        match find("signal") {
            Some(signal) => {
                // The kernel's own comes before anybody here has heard of anything.
                let ahead = signal.sent_by.as_deref() == Some("kernel");
                assert!(
                    (ahead || due.seq < signal.seq) && signal.seq < outcome.seq,
                    "signal of '{}' out of order",
                    part.role
                );
            }
            None => assert!(
                part.may_exit_first,
                "no signal for '{}' ({who:?})",
                part.role
            ),
        }
    }
}

/// The end of the agent of this role was told once, and truly.
pub fn assert_root_exit(
    world: &World,
    events: &[Event],
    role: &str,
    status: (Option<i32>, Option<&str>),
) {
    let agent = world.process(role);
    let told: Vec<&Event> = events
        .iter()
        .filter(|e| e.is("session.root_exit", agent))
        .collect();
    let [gone] = told.as_slice() else {
        panic!("{} events tell that '{role}' is gone", told.len())
    };
    assert_eq!(
        (gone.exit_code, gone.exit_signal.as_deref()),
        status,
        "exit code and signal of '{role}'"
    );
}

/// Before it is told that a session is over, something was decided about each of its members about whom anything is.
pub fn decided_before_the_end(events: &[Event]) {
    let mut judged: HashSet<&str> = HashSet::new();
    let mut over: HashSet<&str> = HashSet::new();
    for e in events {
        let idle = e.reason.as_deref().is_some_and(|r| IDLE.contains(&r));
        match (e.event.as_str(), &e.session_id, &e.entity_id) {
            ("session.close", Some(session), _) => drop(over.insert(session)),
            ("decision", Some(session), Some(who)) if !idle => {
                let first = judged.insert(who);
                assert!(
                    !first || !over.contains(session.as_str()),
                    "decided after the end of its session: {e:?}"
                );
            }
            _ => {}
        }
    }
}

/// What holds for every stream: numbered without a gap, nothing missing, no process told twice, and no signal for
/// anybody who does not descend from an agent.
pub fn assert_well_formed(world: &World, events: &[Event]) {
    let mut seen: HashMap<(&str, &str), u32> = HashMap::new();
    let mut seq = 0;
    for e in events {
        assert_eq!(
            (e.schema, e.seq),
            (2, seq + 1),
            "schema and number of the event after {seq}"
        );
        seq = e.seq;
        let amiss = ["malformed", "gap.open", "member_map.full"];
        assert!(
            !amiss.contains(&e.event.as_str()),
            "something is missing: {e:?}"
        );
        if let ("fork" | "exit", Some(id)) = (e.event.as_str(), &e.entity_id) {
            *seen.entry((e.event.as_str(), id.as_str())).or_default() += 1;
        }
    }
    let twice = seen.iter().find(|(_, n)| **n > 1);
    assert!(twice.is_none(), "told twice: {twice:?}");
    let summary = events
        .last()
        .filter(|e| e.event == "summary")
        .expect("a summary as the last event");
    let starved = events.iter().filter(|e| is_starved(e)).count();
    let failed = summary.failed.map(|failed| failed as usize);
    assert_eq!(failed, Some(starved), "processes that could not be ended");
    only_members_signalled(world, events);
}

/// No signal went to anybody who does not descend from an agent.
pub fn only_members_signalled(world: &World, events: &[Event]) {
    let parents: HashMap<&str, &str> = events
        .iter()
        .filter_map(|e| Some((e.entity_id.as_deref()?, e.birth_parent_id.as_deref()?)))
        .collect();
    let roots: HashSet<&str> = events
        .iter()
        .filter(|e| e.event == "session.open")
        .filter_map(|e| e.entity_id.as_deref())
        .collect();
    const SPARED: [&str; 3] = ["launcher", "canary", "canary-orphan"];
    let (spared, processes): (Vec<_>, Vec<_>) = world
        .all_processes()
        .into_iter()
        .partition(|(role, _)| SPARED.contains(&role.as_str()));
    for e in events.iter().filter(|e| e.event == "signal") {
        assert!(
            e.pid.is_some_and(|pid| pid > 1) && !spared.iter().any(|(_, who)| e.is_about(*who)),
            "signalled an outsider: {e:?}"
        );
        // What the processes report of themselves is judged by role.
        if processes.iter().any(|(_, who)| e.is_about(*who)) {
            continue;
        }
        let mut ancestor = e.entity_id.as_deref();
        while let Some(id) = ancestor.filter(|id| !roots.contains(id)) {
            ancestor = parents.get(id).copied();
        }
        assert!(
            ancestor.is_some(),
            "signalled somebody who does not descend from an agent: {e:?}"
        );
    }
}
