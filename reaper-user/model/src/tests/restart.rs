//! A restart loses nothing: a model restored from the kernel's maps and the backlog has the same sessions as a model that
//! applied all events.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use reaper_common::{
    MEMBER_CANDIDATE, MEMBER_INHERITED, MEMBER_NAME_MATCHED, MEMBER_ROOT, MEMBER_TRACKED,
    MEMBER_UNCERTAIN, MEMBER_WATCHED,
};

use super::truth::{Truth, acts, below_agents};
use super::world::{OWN_PID, assert_consistent, rules};
use crate::event::{
    Event, EventKind, ExitStatus, Membership, ProcessKey, Provenance, RestoredSession,
};
use crate::policy::Verdict;
use crate::session::Session;
use crate::{Model, Scope};

/// Programs that the name table of the rules contains.
const NAMED: [&[u8]; 4] = [b"claude", b"codex", b"tmux", b"apt"];
const AGENTS: [&[u8]; 2] = [b"claude", b"codex"];

/// The map of members, as the probes keep it.
#[derive(Default)]
struct Map(BTreeMap<ProcessKey, Membership>);

impl Map {
    fn get(&self, key: ProcessKey) -> Membership {
        self.0.get(&key).copied().unwrap_or_default()
    }

    /// Updates the map like a probe at this event. Returns the event with the map entry.
    fn record(&mut self, event: &Event) -> Event {
        let mut event = event.clone();
        match &mut event.kind {
            EventKind::Fork {
                child,
                creator,
                membership: mark,
                ..
            } => {
                let creator = creator.map(|key| self.get(key)).unwrap_or_default();
                if creator.has(MEMBER_TRACKED) && !creator.has(MEMBER_WATCHED) {
                    let unsure = creator.has(MEMBER_NAME_MATCHED | MEMBER_UNCERTAIN);
                    let flags = creator.flags & MEMBER_INHERITED
                        | if unsure { MEMBER_UNCERTAIN } else { 0 };
                    self.0.insert(*child, Membership { flags, ..creator });
                }
                *mark = Some(self.get(*child));
            }
            EventKind::Exec {
                key,
                image,
                membership: mark,
                ..
            } => {
                let named = |names: &[&[u8]]| names.contains(&&image.comm[..]);
                let old = self.get(*key);
                if old.session.is_some() {
                    let unsure = if old.has(MEMBER_NAME_MATCHED) {
                        MEMBER_UNCERTAIN
                    } else {
                        0
                    };
                    let is_named = if named(&NAMED) {
                        MEMBER_NAME_MATCHED
                    } else {
                        0
                    };
                    let flags = old.flags & !MEMBER_NAME_MATCHED | unsure | is_named;
                    self.0.insert(*key, Membership { flags, ..old });
                } else if named(&AGENTS) {
                    let flags = MEMBER_TRACKED | MEMBER_ROOT | MEMBER_CANDIDATE;
                    self.0.insert(
                        *key,
                        Membership {
                            session: Some(*key),
                            flags,
                        },
                    );
                }
                *mark = Some(self.get(*key));
            }
            EventKind::Exit {
                key,
                membership: mark,
                ..
            } => {
                *mark = Some(self.get(*key));
                self.0.remove(key);
            }
            EventKind::Reparent {
                child,
                membership: mark,
                ..
            } => *mark = Some(self.get(*child)),
            _ => {}
        }
        event
    }

    fn is_unsure(&self, pid: u32) -> bool {
        let mut all = self.0.iter();
        all.any(|(key, mark)| key.pid == pid && mark.has(MEMBER_UNCERTAIN))
    }

    /// Writes the wanted entries of all processes, like the service after an event.
    fn write(&mut self, model: &mut Model) {
        let keys: Vec<ProcessKey> = model.tree.iter().map(|node| node.key).collect();
        for key in keys {
            let mark = model.wanted_membership(key);
            match mark {
                Some(mark) => self.0.insert(key, mark),
                None => self.0.remove(&key),
            };
            model.set_membership(key, mark);
        }
    }
}

/// A session, described by keys that are the same after a restart.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    root: ProcessKey,
    agent: String,
    outer: Option<ProcessKey>,
    gone: bool,
    members: BTreeSet<u32>,
}

/// Returns the sessions by their first roots.
fn sessions(model: &Model) -> BTreeMap<ProcessKey, Known> {
    let name = |id| model.sessions.get(id).map(|session| session.first_root);
    let known = |session: &Session| Known {
        root: session.root,
        agent: session.agent.to_string(),
        outer: session.outer.and_then(name),
        gone: session.root_exit.is_some(),
        members: session.members().collect(),
    };
    let all = model.sessions.iter();
    all.map(|session| (session.first_root, known(session)))
        .collect()
}

/// Returns the sessions as the service stores them in the kernel's map.
fn stored_sessions(model: &Model) -> Vec<RestoredSession> {
    let of = |id| model.sessions.get(id).map(|session| session.first_root);
    model
        .sessions
        .iter()
        .map(|session| RestoredSession {
            first_root: session.first_root,
            root: session.root,
            outer: session.outer.and_then(of),
            parent: model.tree.get(session.root).and_then(|root| root.parent),
            tty: 0,
            rule: session.agent.clone(),
            uids: session.uids,
            cgroup_id: session.cgroup_id,
            unit_hash: session.unit_hash(),
            opened_at: session.opened_at,
            exited: session.root_exit.map(|gone| (gone.at, gone.exit_status)),
            was_signalled: session.root_exit.is_some_and(|gone| gone.was_signalled),
            is_evaluated: false,
        })
        .collect()
}

/// A history of events, and the data that a later service gets if the first one ends in between.
struct Scenario {
    truth: Truth,
    whole: Model,
    stored: Vec<RestoredSession>,
    map: Map,
    backlog: Vec<Event>,
}

impl Scenario {
    fn of(truth: Truth, service_end: usize, probe_writes_exits: bool) -> Scenario {
        let mut whole = Model::new(rules(), Scope::default(), OWN_PID);
        let (mut with_service, mut alone) = (Map::default(), Map::default());
        let (mut stored, mut backlog) = (vec![], vec![]);
        for (n, event) in truth.events.iter().enumerate() {
            if n == service_end {
                stored = stored_sessions(&whole);
            }
            if n >= service_end {
                backlog.push(alone.record(event));
            }
            whole.apply(&with_service.record(event), &mut Vec::new());
            with_service.write(&mut whole);
            assert_consistent(&whole);
            if n < service_end {
                alone.0.clone_from(&with_service.0);
            }
        }
        if probe_writes_exits {
            for event in &backlog {
                if let EventKind::Exit {
                    key, exit_status, ..
                } = event.kind
                {
                    let of_root = stored.iter_mut().filter(|session| session.root == key);
                    of_root.for_each(|session| {
                        _ = session.exited.get_or_insert((event.time, exit_status));
                    });
                }
            }
        }
        Scenario {
            truth,
            whole,
            stored,
            map: alone,
            backlog,
        }
    }

    /// Returns the model of the next service after it has caught up. `keep` says how often an event is reported.
    fn restart(&self, keep: impl Fn(usize) -> usize) -> Model {
        let mut model = Model::new(rules(), Scope::default(), OWN_PID);
        model.begin_restore();
        let now = self.truth.now;
        let mut apply = |event: &Event| {
            model.apply(event, &mut Vec::new());
            assert_consistent(&model);
        };
        for session in &self.stored {
            apply(&Event {
                time: now,
                provenance: Provenance::Inferred,
                kind: EventKind::Restored(Box::new(session.clone())),
            });
        }
        let mut rows: Vec<_> = self.truth.live.values().collect();
        rows.sort_by_key(|process| process.key.pid);
        for process in rows {
            let mut row = self.truth.row(process);
            if let EventKind::Discovered(entry) = &mut row.kind {
                entry.key = process.key;
                entry.exact = true;
                entry.membership = Some(self.map.get(process.key));
            }
            apply(&row);
        }
        for (n, event) in self.backlog.iter().enumerate() {
            (0..keep(n)).for_each(|_| apply(event));
        }
        let vanished: Vec<ProcessKey> = model.tree.iter().map(|node| node.key).collect();
        for key in vanished
            .into_iter()
            .filter(|key| !self.truth.live.contains_key(key))
        {
            let event = Event {
                time: now,
                provenance: Provenance::Inferred,
                kind: EventKind::Exit {
                    key,
                    parent: None,
                    exit_status: ExitStatus::Unknown,
                    peak_rss: 0,
                    membership: None,
                },
            };
            model.apply(&event, &mut Vec::new());
        }
        model.finish_restore(&mut Vec::new());
        assert_consistent(&model);
        model
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn restart_results_in_the_same_sessions(
        acts in acts(),
        service_end in any::<prop::sample::Index>(),
        probe_writes_exits in any::<bool>(),
        times in 1..3_usize,
    ) {
        let truth = Truth::of(&acts, 100);
        let service_end = service_end.index(truth.events.len());
        let scenario = Scenario::of(truth, service_end, probe_writes_exits);
        let model = scenario.restart(|_| times);
        let stops = scenario.backlog.iter().any(|event| {
            matches!(&event.kind, EventKind::Exec { image, .. } if image.comm == b"tmux")
        });
        let (found, whole) = (sessions(&model), sessions(&scenario.whole));
        // If a process with a matched name became a boundary, its children from before cannot be distinguished from those
        // after, so all are kept.
        let doubt = |pid: &u32| stops && scenario.map.is_unsure(*pid);
        if !stops {
            prop_assert_eq!(&found, &whole);
        }
        for (name, found) in &found {
            let Some(whole) = whole.get(name) else {
                return Err(TestCaseError::fail(format!("{name} is no session")));
            };
            prop_assert!(found.members.is_subset(&whole.members));
            prop_assert!(found.outer.is_none() || found.outer == whole.outer);
        }
        for (name, whole) in &whole {
            let none = BTreeSet::new();
            let members = found.get(name).map_or(&none, |found| &found.members);
            prop_assert!(whole.members.difference(members).all(doubt));
            prop_assert!(found.contains_key(name) || whole.gone);
        }
        for node in scenario.whole.tree.iter() {
            let key = node.key;
            let found = model.tree.get(key);
            prop_assert!(found.is_some(), "{} is missing", key);
            if node.state.member.boundary.is_some() {
                prop_assert!(found.is_some_and(|found| found.state.member.watched && found.state.member.session.is_none()));
            }
            if !stops && node.state.member.session.is_some() {
                prop_assert_eq!(model.wanted_membership(key), scenario.whole.wanted_membership(key));
            }
        }
        prop_assert_eq!(model.tree.len(), scenario.whole.tree.len());
    }

    /// The ring was too small for the backlog.
    #[test]
    fn restart_after_lost_events_reaps_no_unrelated_process(
        acts in acts(),
        service_end in any::<prop::sample::Index>(),
        kept in prop::collection::vec(any::<bool>(), 600),
    ) {
        let truth = Truth::of(&acts, 100);
        let lineage = below_agents(&truth.events);
        let service_end = service_end.index(truth.events.len());
        let scenario = Scenario::of(truth, service_end, true);
        let model = scenario.restart(|n| kept[n % kept.len()].into());
        for node in model.tree.iter() {
            if model.decide(node.key).verdict == Verdict::Reap {
                prop_assert!(lineage.contains(&node.key.pid), "{} descends from no agent", node.key);
            }
        }
        prop_assert_eq!(model.tree.len(), scenario.truth.live.len());
    }
}
