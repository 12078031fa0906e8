//! What each step of the model means for the rest: what is told, what is to be decided, what is watched.

use hashbrown::HashMap;

use crate::config::EventScope;
use crate::export::{Body, Lifecycle, Record, SessionRef, Sink, Who};
use crate::model::event::{Event, Key, Provenance};
use crate::model::policy::{Reason, Verdict};
use crate::model::session::{SessionId, Turn};
use crate::model::tree::{Change, Node};
use crate::model::{Model, Step};
use crate::reap::Reaper;

/// What has to be decided about once the ring is drained.
pub enum Pending {
    Process(Key),
    /// All members of a session and of those nested in it.
    Session(SessionId),
}

/// What was done about a session.
#[derive(Default)]
pub struct Tally {
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
    /// Records that were lost while it was open.
    pub lost: u64,
    /// Nothing of it lives any more, but not all ends are confirmed.
    pub closed: Option<SessionRef>,
    /// That it is over has been told.
    pub told: bool,
}

/// See the module.
pub struct Follow {
    pub reaper: Reaper,
    pub out: Sink,
    events: EventScope,
    pub pending: Vec<Pending>,
    /// What was decided last about a living member.
    pub decided: HashMap<Key, (Verdict, Reason)>,
    /// Orphans whose adopter is not known yet.
    pub parentless: Vec<Key>,
    /// Pids whose exit is to wake the engine, or is not any more.
    pub watch: Vec<(u32, bool)>,
    /// Sessions of which nothing lives.
    pub closed: Vec<(SessionId, SessionRef)>,
    /// Sessions opened.
    pub opened: u64,
}

impl Follow {
    pub fn new(reaper: Reaper, out: Sink, events: EventScope) -> Follow {
        Follow {
            reaper,
            out,
            events,
            pending: Vec::new(),
            decided: HashMap::new(),
            parentless: Vec::new(),
            watch: Vec::new(),
            closed: Vec::new(),
            opened: 0,
        }
    }

    /// Takes one step of the model.
    pub fn step(&mut self, model: &Model, event: &Event, step: Step<'_>) {
        match step {
            Step::Tree(change) => self.change(model, event, change),
            Step::Session(turn) => self.turn(model, event.time, turn),
        }
    }

    fn change(&mut self, model: &Model, event: &Event, change: &Change) {
        let Event {
            time,
            provenance: told_by,
            ..
        } = *event;
        match *change {
            Change::Born {
                key, provenance, ..
            } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                if node
                    .session
                    .is_some_and(|id| model.sessions.due(id).is_some())
                {
                    self.pending.push(Pending::Process(key));
                }
                // The process table is no news, nor is what was known before.
                if provenance != Provenance::Procfs {
                    self.lifecycle(model, node, time, Lifecycle::Fork, provenance);
                }
            }
            Change::Execed { key } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                if self.decided.contains_key(&key) {
                    self.pending.push(Pending::Process(key));
                }
                self.lifecycle(model, node, time, Lifecycle::Exec, told_by);
            }
            Change::Exited {
                ref node,
                ended,
                peak_rss,
                provenance,
                ref orphans,
            } => {
                self.lifecycle(
                    model,
                    node,
                    time,
                    Lifecycle::Exit { ended, peak_rss },
                    provenance,
                );
                self.reaper.exited(node.key, ended, orphans);
                let was_kept = self
                    .decided
                    .remove(&node.key)
                    .is_some_and(|(verdict, _)| verdict == Verdict::Keep);
                if let Some(id) = node.session
                    && was_kept
                    && model.sessions.due(id).is_some()
                {
                    self.pending.push(Pending::Session(id));
                }
                orphans
                    .iter()
                    .for_each(|orphan| self.orphaned(model, node, *orphan, time));
            }
            Change::Reparented {
                key,
                old_parent,
                adopter,
            } => {
                let Some(node) = model.tree.get(key).filter(|node| self.is_told(node)) else {
                    return;
                };
                // By the key that the tree knows it by.
                let old_parent = node.orphaned.map(|from| from.old_parent).or(old_parent);
                let name = |key: Option<Key>| match key {
                    Some(key) => model.tree.comm(key).to_vec(),
                    None => Vec::new(),
                };
                let body = Body::Reparent {
                    who: Who::new(model, node),
                    old_parent,
                    old_parent_command: name(old_parent),
                    adopter,
                    adopter_command: name(adopter),
                    provenance: told_by,
                };
                self.tell(time, body);
            }
        }
    }

    fn orphaned(&mut self, model: &Model, parent: &Node, orphan: Key, time: u64) {
        let Some(node) = model.tree.get(orphan).filter(|node| node.session.is_some()) else {
            return;
        };
        self.pending.push(Pending::Process(orphan));
        self.parentless.push(orphan);
        let (who, old_parent) = (Who::new(model, node), Some(parent.key));
        self.tell(
            time,
            Body::Orphan {
                who,
                old_parent,
                parent_command: parent.image.comm.clone(),
            },
        );
    }

    fn turn(&mut self, model: &Model, time: u64, turn: &Turn) {
        match turn {
            Turn::Opened { session } => {
                let Some(session) = model.sessions.get(*session) else {
                    return;
                };
                let Some(root) = model.tree.get(session.root) else {
                    return;
                };
                self.opened += 1;
                self.watch.push((session.root.pid, true));
                let outer = session
                    .outer
                    .and_then(|id| model.sessions.get(id))
                    .map(SessionRef::from);
                let (who, rule) = (Who::new(model, root), session.agent.clone());
                self.tell(time, Body::SessionOpen { who, rule, outer });
            }
            Turn::Boundary { key, session, rule } => {
                let Some(node) = model.tree.get(*key) else {
                    return;
                };
                let session = model.sessions.get(*session).map(SessionRef::from);
                self.tell(
                    time,
                    Body::Boundary {
                        who: Who::new(model, node),
                        session,
                        rule: rule.clone(),
                    },
                );
            }
            Turn::Relaunched {
                session,
                old_root,
                root,
            } => {
                self.watch.extend([(old_root.pid, false), (root.pid, true)]);
                let Some(session) = model.sessions.get(*session).map(SessionRef::from) else {
                    return;
                };
                let Some(node) = model.tree.get(*root) else {
                    return;
                };
                self.tell(
                    time,
                    Body::SessionRelaunch {
                        session,
                        who: Who::new(model, node),
                        old_root: *old_root,
                    },
                );
            }
            Turn::RootGone { session } => {
                self.pending.push(Pending::Session(*session));
                let Some(session) = model.sessions.get(*session) else {
                    return;
                };
                self.watch.push((session.root.pid, false));
                let members = model
                    .sessions
                    .inwards(session.id)
                    .map(|s| s.members().count())
                    .sum();
                let Some(gone) = session.root_gone else {
                    return;
                };
                let (root, ended, session) = (session.root, gone.ended, SessionRef::from(session));
                self.tell(
                    time,
                    Body::SessionRootGone {
                        session,
                        root,
                        ended,
                        members,
                    },
                );
            }
            Turn::Closed { session } => {
                self.closed.push((session.id, SessionRef::from(&**session)))
            }
        }
    }

    fn is_told(&self, node: &Node) -> bool {
        node.session.is_some() || (self.events == EventScope::All && node.in_scope)
    }

    fn lifecycle(
        &mut self,
        model: &Model,
        node: &Node,
        time: u64,
        what: Lifecycle,
        provenance: Provenance,
    ) {
        if self.is_told(node) {
            self.tell(
                time,
                Body::Lifecycle {
                    what,
                    who: Who::new(model, node),
                    provenance,
                },
            );
        }
    }

    fn tell(&mut self, time: u64, body: Body) {
        self.out.push(Record { time, body });
    }
}
