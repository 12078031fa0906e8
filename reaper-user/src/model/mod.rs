//! The model: what is known and what follows from it.
//!
//! Pure: no IO, no clock, no threads. Time comes in with the events, and nothing here can fail.

pub mod agent;
pub mod event;
pub mod policy;
pub mod session;
pub mod tree;

#[cfg(test)]
mod tests;

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
    /// This program and its ancestors.
    own: Vec<Key>,
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
            own: Vec::new(),
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
            self.follow_own(change, event);
            if !exit {
                sink(self, Step::Tree(change));
            }
            for turn in turns.drain(..) {
                sink(self, Step::Session(&turn));
            }
            self.sessions.close_finished(&mut turns);
            for turn in turns.drain(..) {
                sink(self, Step::Session(&turn));
            }
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
                if matches!(event.kind, EventKind::Seen(_)) && !self.is_copy(key) {
                    self.sessions
                        .execed(&mut self.tree, &self.rules, key, now, turns);
                }
                self.weigh(key);
            }
            Change::Execed { key } => {
                self.widen(key);
                self.sessions
                    .execed(&mut self.tree, &self.rules, key, now, turns);
                self.weigh(key);
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

    /// Whether a member's child still is the program of its parent: it has forked and not run another
    /// yet, and is no agent or boundary of its own.
    fn is_copy(&self, key: Key) -> bool {
        let node = self.tree.get(key);
        let parent = node.and_then(|node| self.tree.get(node.parent?));
        node.zip(parent).is_some_and(|(node, parent)| {
            let (own, other) = (&node.image, &parent.image);
            parent.session.is_some()
                && (&own.comm, &own.exe, &own.argv) == (&other.comm, &other.exe, &other.argv)
        })
    }

    fn widen(&mut self, key: Key) {
        let scope = &self.scope;
        if let Some(node) = self.tree.get_mut(key) {
            node.in_scope = node.in_scope || scope.names(node);
        }
    }

    /// Widens the scope by a cgroup: whatever runs a program there from now on is in it.
    pub fn add_cgroup(&mut self, id: u64) {
        self.scope.cgroups.push(id);
    }

    /// Takes note of uids that a process has changed since the last event told of it.
    pub fn set_uids(&mut self, key: Key, uids: Uids) {
        if let Some(node) = self.tree.get_mut(key) {
            node.uids = uids;
        }
        self.weigh(key);
    }

    /// Asks the keeping rules about a member, for later.
    fn weigh(&mut self, key: Key) {
        let Some(node) = self.tree.get(key) else {
            return;
        };
        let Some(session) = node.session else { return };
        let rule = policy::weigh(self, node);
        if let Some(node) = self.tree.get_mut(key) {
            node.weighed = Some((session, rule));
        }
    }

    /// Decides about a process from what is known now.
    pub fn decide(&self, key: Key) -> Decision {
        policy::decide(self, key)
    }

    /// Whether it is this program or one of its ancestors.
    fn is_own(&self, key: Key) -> bool {
        self.own.contains(&key)
    }

    /// Keeps the list of this program's ancestors, which hardly ever changes.
    fn follow_own(&mut self, change: &Change, event: &Event) {
        let touched = match change {
            // Of one that is known it tells whose child it was.
            Change::Born { key, .. } => key.pid == self.own_pid || self.own.contains(key),
            Change::Execed { .. } => false,
            Change::Exited { node, .. } => self.own.contains(&node.key),
            Change::Reparented { key, .. } => self.own.contains(key),
        };
        if touched || matches!(event.kind, EventKind::Seen(_)) {
            self.own.clear();
            if let Some(own) = self.tree.by_pid(self.own_pid) {
                self.own.push(own.key);
                self.own
                    .extend(self.tree.ancestors(own.key).map(|above| above.key));
            }
        }
    }

    fn born_after(&self, node: &Node, due: RootGone) -> bool {
        node.key.start > due.at
    }
}
