//! A restart loses nothing: a model that is built from what the service before it has left, and from
//! what the kernel has kept, comes to what one comes to that has seen it all.

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

/// Programs of whose names some rule knows.
const NAMED: [&[u8]; 4] = [b"claude", b"codex", b"tmux", b"apt"];
const AGENTS: [&[u8]; 2] = [b"claude", b"codex"];

/// The map of members, as the probes keep it.
#[derive(Default)]
struct Map(BTreeMap<ProcessKey, Membership>);

impl Map {
    fn get(&self, key: ProcessKey) -> Membership {
        self.0.get(&key).copied().unwrap_or_default()
    }

    /// Does what a probe does at an event, whose record then carries what the map has.
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

    /// Does what the service does after an event.
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

/// A session by names that hold over a restart.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    root: ProcessKey,
    agent: String,
    outer: Option<ProcessKey>,
    gone: bool,
    members: BTreeSet<u32>,
}

/// By their first roots.
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

/// What the service leaves in the map of sessions.
fn left(model: &Model) -> Vec<RestoredSession> {
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
            opened_at: session.opened_at,
            exited: session.root_exit.map(|gone| (gone.at, gone.exit_status)),
            was_signalled: session.root_exit.is_some_and(|gone| gone.was_signalled),
            is_evaluated: false,
        })
        .collect()
}

/// A history, and what is left of it to one that takes over at its end from one that ended at some point.
struct Story {
    truth: Truth,
    whole: Model,
    left: Vec<RestoredSession>,
    map: Map,
    backlog: Vec<Event>,
}

impl Story {
    fn of(truth: Truth, ended: usize, probe_writes: bool) -> Story {
        let mut whole = Model::new(rules(), Scope::default(), OWN_PID);
        let (mut with_service, mut alone) = (Map::default(), Map::default());
        let (mut restored, mut backlog) = (vec![], vec![]);
        for (n, event) in truth.events.iter().enumerate() {
            if n == ended {
                restored = left(&whole);
            }
            if n >= ended {
                backlog.push(alone.record(event));
            }
            whole.apply(&with_service.record(event), &mut Vec::new());
            with_service.write(&mut whole);
            assert_consistent(&whole);
            if n < ended {
                alone.0.clone_from(&with_service.0);
            }
        }
        if probe_writes {
            for event in &backlog {
                if let EventKind::Exit {
                    key,
                    exit_status: ended,
                    ..
                } = event.kind
                {
                    let living = restored.iter_mut().filter(|left| left.root == key);
                    living.for_each(|left| _ = left.exited.get_or_insert((event.time, ended)));
                }
            }
        }
        Story {
            truth,
            whole,
            left: restored,
            map: alone,
            backlog,
        }
    }

    /// The model of the next service, once it has caught up.
    fn restart(&self, keep: impl Fn(usize) -> usize) -> Model {
        let mut model = Model::new(rules(), Scope::default(), OWN_PID);
        model.begin_restore();
        let now = self.truth.now;
        let mut tell = |event: &Event| {
            model.apply(event, &mut Vec::new());
            assert_consistent(&model);
        };
        for left in &self.left {
            tell(&Event {
                time: now,
                provenance: Provenance::Inferred,
                kind: EventKind::Restored(Box::new(left.clone())),
            });
        }
        let mut rows: Vec<_> = self.truth.live.values().collect();
        rows.sort_by_key(|process| process.key.pid);
        for process in rows {
            let mut row = self.truth.row(process);
            if let EventKind::Discovered(seen) = &mut row.kind {
                seen.key = process.key;
                seen.exact = true;
                seen.membership = Some(self.map.get(process.key));
            }
            tell(&row);
        }
        for (n, event) in self.backlog.iter().enumerate() {
            (0..keep(n)).for_each(|_| tell(event));
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
    fn a_restart_comes_to_what_there_would_be_without_one(
        acts in acts(),
        ended in any::<prop::sample::Index>(),
        probe_writes in any::<bool>(),
        times in 1..3_usize,
    ) {
        let truth = Truth::of(&acts, 100);
        let ended = ended.index(truth.events.len());
        let story = Story::of(truth, ended, probe_writes);
        let model = story.restart(|_| times);
        let stops = story.backlog.iter().any(|event| {
            matches!(&event.kind, EventKind::Exec { image, .. } if image.comm == b"tmux")
        });
        let (found, whole) = (sessions(&model), sessions(&story.whole));
        // What was born below a name, to one that has become a boundary since, cannot be told from what
        // was born below the boundary: it is kept.
        let doubt = |pid: &u32| stops && story.map.is_unsure(*pid);
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
        for node in story.whole.tree.iter() {
            let key = node.key;
            let found = model.tree.get(key);
            prop_assert!(found.is_some(), "{} lives", key);
            if node.state.member.boundary.is_some() {
                prop_assert!(found.is_some_and(|found| found.state.member.watched && found.state.member.session.is_none()));
            }
            if !stops && node.state.member.session.is_some() {
                prop_assert_eq!(model.wanted_membership(key), story.whole.wanted_membership(key));
            }
        }
        prop_assert_eq!(model.tree.len(), story.whole.tree.len());
    }

    /// Also where the ring was too small for what happened meanwhile.
    #[test]
    fn a_restart_after_a_loss_reaps_no_stranger(
        acts in acts(),
        ended in any::<prop::sample::Index>(),
        kept in prop::collection::vec(any::<bool>(), 600),
    ) {
        let truth = Truth::of(&acts, 100);
        let lineage = below_agents(&truth.events);
        let ended = ended.index(truth.events.len());
        let story = Story::of(truth, ended, true);
        let model = story.restart(|n| kept[n % kept.len()].into());
        for node in model.tree.iter() {
            if model.decide(node.key).verdict == Verdict::Reap {
                prop_assert!(lineage.contains(&node.key.pid), "{} is a stranger", node.key);
            }
        }
        prop_assert_eq!(model.tree.len(), story.truth.live.len());
    }
}
