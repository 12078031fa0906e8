//! Checks of the event stream that hold for every tree.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{Expectation, ProcessSpec, process_spec};
use crate::daemon::Event;
use crate::proc::ProcessKey;
use crate::world::World;

/// Reason of a temporary keep of a process that cannot be read.
const UNREAD: &str = "unreadable";
/// Reasons of decisions that call for no action.
const IDLE: [&str; 3] = ["root_alive", "not_a_member", "successor_awaited"];

/// Decision about one process: decision, reason and rule.
pub type Decided = (ProcessKey, String, String, Option<String>);

/// Returns the distinct decisions about the processes of a role.
pub fn decisions(world: &World, events: &[Event], role: &str) -> BTreeSet<Decided> {
    let processes: HashMap<i32, ProcessKey> = world
        .processes(role)
        .into_iter()
        .map(|id| (id.pid, id))
        .collect();
    let mut found = BTreeSet::new();
    for e in events.iter().filter(|e| e.event == "decision") {
        let key = e
            .pid
            .and_then(|pid| processes.get(&pid))
            .filter(|key| e.is_about(**key));
        let (Some(key), Some(decision), Some(reason)) = (key, &e.decision, &e.reason) else {
            continue;
        };
        if !IDLE.contains(&reason.as_str()) {
            found.insert((*key, decision.clone(), reason.clone(), e.rule.clone()));
        }
    }
    found
}

/// Deviations that a check accepts.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Additional decisions with the reason `unreadable`.
    pub unread: bool,
    /// Missing decisions before the last one, and missing orphan events: the source polled too late for them.
    pub earlier: bool,
}

/// Asserts that each process of the part has the expected decisions and no others.
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
    for (key, decision, reason, rule) in all.filter(|d| at_once || d.2 != UNREAD) {
        let any_rule = |said: &&process_spec::DecisionSpec| {
            said.rule.is_none() && said.decision == decision && said.reason == reason
        };
        let rule = rule.filter(|_| !wanted.iter().any(|said| any_rule(&said)));
        let said = text(&decision, &reason, rule.as_deref());
        by_process.entry(key).or_default().insert(said);
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
    for key in world.processes(part.role) {
        if undecided.contains(&key) {
            continue;
        }
        let got = by_process.remove(&key).unwrap_or_default();
        assert!(
            got == wanted || leeway.earlier && got.is_subset(&wanted) && got.is_superset(&last),
            "decisions about '{}' (pid {}): {got:?}, not {wanted:?}",
            part.role,
            key.pid
        );
        if let Expectation::Boundary(rule) = part.expect {
            let wall = |e: &Event| e.is("boundary", key) && e.rule.as_deref() == Some(rule);
            assert!(
                events.iter().any(wall),
                "membership did not stop at '{}' by the rule {rule}",
                part.role
            );
        }
        if let Expectation::Server(rule) = part.expect {
            let opened = events.iter().find(|e| e.is("session.open", key));
            let opened = opened.map(|e| (e.session_kind.as_deref(), e.rule.as_deref()));
            assert_eq!(
                opened,
                Some((Some("server"), Some(rule))),
                "session of '{}'",
                part.role
            );
        }
        let signalled = || events.iter().any(|e| e.is("signal", key));
        assert!(
            part.dies() || !signalled(),
            "'{}' (pid {}) was signalled",
            part.role,
            key.pid
        );
    }
}

/// Asserts that no process that must live, or exit by itself, was signalled or had the decision `reap`.
pub fn assert_unsignalled(world: &World, events: &[Event], parts: &[ProcessSpec]) {
    let spared = |part: &&ProcessSpec| part.lives() || part.expect == Expectation::Ends;
    for part in parts.iter().filter(spared) {
        for key in world.processes(part.role) {
            let touched = events.iter().find(|e| e.is_about(key) && touches(e));
            assert!(
                touched.is_none(),
                "'{}' was touched: {touched:?}",
                part.role
            );
        }
    }
}

/// Returns the processes for which no pidfd could be opened, because the file descriptor limit was reached.
pub fn out_of_files(events: &[Event]) -> HashSet<ProcessKey> {
    let starved = events.iter().filter(|e| is_starved(e));
    starved.filter_map(Event::process).collect()
}

/// Returns the processes whose decision may be missing: those without a pidfd, and those of a part with `may_exit_first` that
/// exited without a signal of the service.
pub fn undecided(events: &[Event], part: &ProcessSpec) -> HashSet<ProcessKey> {
    let of = |name: &'static str| {
        let all = events.iter().filter(move |e| e.event == name);
        all.filter_map(Event::process)
    };
    let signalled: HashSet<ProcessKey> = of("signal").collect();
    let gone = of("exit").filter(|key| part.may_exit_first && !signalled.contains(key));
    out_of_files(events).into_iter().chain(gone).collect()
}

/// Returns whether the event reports that no pidfd could be opened (EMFILE). The limit frees up when other processes exit.
fn is_starved(e: &Event) -> bool {
    e.outcome.as_deref() == Some("failed") && e.reason.as_deref() == Some("EMFILE")
}

/// Returns whether the event is a signal or a decision to reap.
fn touches(e: &Event) -> bool {
    e.event == "signal" || e.decision.as_deref() == Some("reap")
}

/// Asserts that all of these processes are alive and have no signal and no decision to reap.
pub fn assert_untouched(events: &[Event], keys: &[ProcessKey]) {
    let of_them = |e: &&Event| keys.iter().any(|key| e.is_about(*key));
    for e in events.iter().filter(of_them) {
        assert!(!touches(e), "a process that must live was touched: {e:?}");
    }
    let dead = keys.iter().find(|key| !key.is_alive());
    assert!(dead.is_none(), "a process that must live is dead: {dead:?}");
}

/// Asserts that the process of this role was recognised as an agent by `rule`; by none if `rule` is empty.
pub fn assert_recognised(world: &World, events: &[Event], role: &str, rule: &str) {
    let key = world.process(role);
    let opened = events.iter().find(|e| e.is("session.open", key));
    let by = opened.and_then(|e| e.agent.as_deref());
    assert_eq!(by.unwrap_or_default(), rule, "agent of '{role}'");
}

/// Asserts that the events name the expected adopter of each process of the part.
///
/// A process can exit before the kernel reparents it, and then has no adopter. `all` requires one in any case.
pub fn assert_adopter(world: &World, events: &[Event], part: &ProcessSpec, all: bool) {
    let Some(role) = part.adopter else { return };
    let wanted = if role == "init" {
        1
    } else {
        world.process(role).pid
    };
    for key in world.processes(part.role) {
        let found = adopter(events, key);
        if all || found.is_some() {
            assert_eq!(found, Some(wanted), "adopter of '{}' ({key:?})", part.role);
        }
    }
}

/// Returns the adopter of a process, from its orphan or reparent event.
pub fn adopter(events: &[Event], key: ProcessKey) -> Option<i32> {
    events
        .iter()
        .filter(|e| e.is("orphan", key) || e.is("reparent", key))
        .find_map(|e| e.adopter_pid)
}

/// Asserts that each process of the part was orphaned, evaluated, signalled and ended, in this order.
///
/// With `leeway.earlier` the orphan event may be missing.
pub fn assert_reaped(world: &World, events: &[Event], part: &ProcessSpec, leeway: Tolerance) {
    let mut by_pid: HashMap<i32, Vec<&Event>> = HashMap::new();
    events
        .iter()
        .filter_map(|e| Some((e.pid?, e)))
        .for_each(|(pid, e)| by_pid.entry(pid).or_default().push(e));
    let undecided = undecided(events, part);
    for key in world.processes(part.role) {
        if undecided.contains(&key) {
            continue;
        }
        let mine = by_pid.remove(&key.pid).unwrap_or_default();
        let find = |name: &str| mine.iter().copied().find(|e| e.is(name, key));
        let need = |name: &str| {
            find(name).unwrap_or_else(|| panic!("no {name} of '{}' ({key:?})", part.role))
        };
        if part.adopter.is_some() && !leeway.earlier {
            need("orphan");
        }
        let due = mine
            .iter()
            .find(|e| e.is("decision", key) && e.decision.as_deref() == Some("reap"));
        let due = due.unwrap_or_else(|| panic!("no decision to reap '{}' ({key:?})", part.role));
        // A process that could not be read in time was released and claimed again: the last outcome counts.
        let mut outcomes = mine.iter().copied().filter(|e| e.is("outcome", key));
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
                "outcome of '{}' ({key:?}) is {other:?}, {:?}; its events: {mine:#?}",
                part.role, outcome.reason
            ),
        }
        match find("signal") {
            Some(signal) => {
                // A signal from BPF precedes the service's decision.
                let ahead = signal.sent_by.as_deref() == Some("kernel");
                assert!(
                    (ahead || due.seq < signal.seq) && signal.seq < outcome.seq,
                    "signal of '{}' out of order",
                    part.role
                );
            }
            None => assert!(
                part.may_exit_first,
                "no signal for '{}' ({key:?})",
                part.role
            ),
        }
    }
}

/// Asserts that the exit of this agent was reported once, with the right status.
pub fn assert_root_exit(
    world: &World,
    events: &[Event],
    role: &str,
    status: (Option<i32>, Option<&str>),
) {
    let agent = world.process(role);
    let exits: Vec<&Event> = events
        .iter()
        .filter(|e| e.is("session.root_exit", agent))
        .collect();
    let [gone] = exits.as_slice() else {
        panic!("{} events report the exit of '{role}'", exits.len())
    };
    assert_eq!(
        (gone.exit_code, gone.exit_signal.as_deref()),
        status,
        "exit code and signal of '{role}'"
    );
}

/// Asserts that each member is decided before its session closes.
pub fn assert_decided_before_close(events: &[Event]) {
    let mut decided: HashSet<&str> = HashSet::new();
    let mut closed: HashSet<&str> = HashSet::new();
    for e in events {
        let idle = e.reason.as_deref().is_some_and(|r| IDLE.contains(&r));
        match (e.event.as_str(), &e.session_id, &e.entity_id) {
            ("session.close", Some(session), _) => drop(closed.insert(session)),
            ("decision", Some(session), Some(key)) if !idle => {
                let first = decided.insert(key);
                assert!(
                    !first || !closed.contains(session.as_str()),
                    "decided after its session closed: {e:?}"
                );
            }
            _ => {}
        }
    }
}

/// Asserts what holds for every stream: no gap in the sequence numbers, no lost record, no duplicate fork or exit, and
/// signals only for descendants of agents.
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
        let losses = ["malformed", "gap.open", "member_map.full"];
        assert!(
            !losses.contains(&e.event.as_str()),
            "records are missing: {e:?}"
        );
        if let ("fork" | "exit", Some(id)) = (e.event.as_str(), &e.entity_id) {
            *seen.entry((e.event.as_str(), id.as_str())).or_default() += 1;
        }
    }
    let twice = seen.iter().find(|(_, n)| **n > 1);
    assert!(twice.is_none(), "reported twice: {twice:?}");
    let summary = events
        .last()
        .filter(|e| e.event == "summary")
        .expect("a summary as the last event");
    let starved = events.iter().filter(|e| is_starved(e)).count();
    let failed = summary.failed.map(|failed| failed as usize);
    assert_eq!(failed, Some(starved), "processes that could not be ended");
    only_members_signalled(world, events);
}

/// Asserts that only descendants of agents were signalled.
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
    const UNTOUCHABLE: [&str; 3] = ["launcher", "canary", "canary-orphan"];
    let (untouchable, processes): (Vec<_>, Vec<_>) = world
        .all_processes()
        .into_iter()
        .partition(|(role, _)| UNTOUCHABLE.contains(&role.as_str()));
    for e in events.iter().filter(|e| e.event == "signal") {
        assert!(
            e.pid.is_some_and(|pid| pid > 1)
                && !untouchable.iter().any(|(_, key)| e.is_about(*key)),
            "signalled the launcher or a canary: {e:?}"
        );
        // Processes with a role are checked by their expectation.
        if processes.iter().any(|(_, key)| e.is_about(*key)) {
            continue;
        }
        let mut ancestor = e.entity_id.as_deref();
        while let Some(id) = ancestor.filter(|id| !roots.contains(id)) {
            ancestor = parents.get(id).copied();
        }
        assert!(
            ancestor.is_some(),
            "signalled a process that does not descend from an agent: {e:?}"
        );
    }
}
