//! The model: what is known and what follows from it.
//!
//! Pure: no IO, no clock, no threads. Time comes in with the events, and nothing here can fail.

pub mod agent;
pub mod event;
pub mod policy;
pub mod session;
pub mod tree;

use agent::Ruleset;
use event::{Event, EventKind, Key, Uids};
use policy::Decision;
use session::{RootGone, Sessions, Turn};
use tree::{Change, Node, Tree};

/// What the program is told to consider; everything where both are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Processes; what descends from them is in scope too.
    pub roots: Vec<Key>,
    /// Ids of cgroups; what runs a program in one of them is in scope, and what descends from that.
    pub cgroups: Vec<u64>,
}

impl Scope {
    fn is_everything(&self) -> bool {
        self.roots.is_empty() && self.cgroups.is_empty()
    }

    fn names(&self, node: &Node) -> bool {
        self.is_everything()
            || self.roots.iter().any(|root| root.same_tick(node.key))
            || self.cgroups.contains(&node.image.cgroup_id)
    }
}

/// What an event came to, in the order in which it did.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    Tree(&'a Change),
    Session(&'a Turn),
}

/// See the module.
pub struct Model {
    pub tree: Tree,
    pub sessions: Sessions,
    pub rules: Ruleset,
    scope: Scope,
    own_pid: u32,
    changes: Vec<Change>,
    turns: Vec<Turn>,
}

impl Model {
    /// An empty model. `own_pid` is this program's: it and its ancestors are never reaped.
    pub fn new(rules: Ruleset, scope: Scope, own_pid: u32) -> Model {
        let (tree, sessions) = Default::default();
        Model {
            tree,
            sessions,
            rules,
            scope,
            own_pid,
            changes: Vec::new(),
            turns: Vec::new(),
        }
    }

    /// Takes in one event; what came of it is handed to `sink` one by one. An exit is handed over while
    /// the session of the process is still what it was, all else when it has become what it is.
    pub fn apply(&mut self, event: &Event, mut sink: impl FnMut(&Model, Step<'_>)) {
        let mut changes = std::mem::take(&mut self.changes);
        let mut turns = std::mem::take(&mut self.turns);
        self.tree.apply(event, &mut changes);
        for change in &changes {
            let exit = matches!(change, Change::Exited { .. });
            if exit {
                sink(self, Step::Tree(change));
            }
            self.follow(change, event, &mut turns);
            if !exit {
                sink(self, Step::Tree(change));
            }
            turns
                .iter()
                .for_each(|turn| sink(self, Step::Session(turn)));
            turns.clear();
        }
        changes.clear();
        (self.changes, self.turns) = (changes, turns);
    }

    /// What a change in the tree means for scope and sessions.
    fn follow(&mut self, change: &Change, event: &Event, turns: &mut Vec<Turn>) {
        let now = event.time;
        match *change {
            Change::Born { key, creator, .. } => {
                self.widen(key);
                self.sessions.born(&mut self.tree, key, creator);
                // What is found running has become what it is before anybody looked.
                if matches!(event.kind, EventKind::Seen(_)) {
                    self.sessions
                        .execed(&mut self.tree, &self.rules, key, now, turns);
                }
            }
            Change::Execed { key } => {
                self.widen(key);
                self.sessions
                    .execed(&mut self.tree, &self.rules, key, now, turns);
            }
            Change::Exited {
                ref node,
                ended,
                ref orphans,
                ..
            } => {
                self.sessions
                    .exited(&self.tree, node, ended, orphans, now, turns);
            }
            Change::Reparented { .. } => {}
        }
    }

    fn widen(&mut self, key: Key) {
        let scope = &self.scope;
        if let Some(node) = self.tree.get_mut(key) {
            node.in_scope = node.in_scope || scope.names(node);
        }
    }

    /// Takes note of uids that a process has changed since the last event told of it.
    pub fn set_uids(&mut self, key: Key, uids: Uids) {
        if let Some(node) = self.tree.get_mut(key) {
            node.uids = uids;
        }
    }

    /// Decides about a process from what is known now.
    pub fn decide(&self, key: Key) -> Decision {
        policy::decide(self, key)
    }

    fn is_own_ancestor(&self, key: Key) -> bool {
        let own = self.tree.by_pid(self.own_pid).map(|node| node.key);
        own.is_some_and(|own| self.tree.ancestors(own).any(|above| above.key == key))
    }

    fn born_after(&self, node: &Node, due: RootGone) -> bool {
        node.key.start > due.at
    }
}
