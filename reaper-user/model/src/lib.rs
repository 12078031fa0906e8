//! The model: the process tree, the sessions in it, and the decisions that rules make about their members.
//!
//! Pure: no I/O, no clock, no threads. Time comes in with the events, and nothing here can fail. The same events give the
//! same decisions.

#![forbid(unsafe_code)]

pub mod activity;
pub mod agent;
mod asked;
mod cached_facts;
mod clock;
pub mod conversation;
pub mod end_order;
pub mod event;
mod fact;
pub mod facts;
mod foreign;
mod idle;
pub mod keeps;
mod late;
mod mark;
mod matched_rules;
pub mod policy;
pub mod rules;
pub mod session;
mod state;
pub mod stray;
mod trace;
pub mod tree;
pub mod user_keep;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use hashbrown::HashMap;
use reaper_common::MEMBER_NAMED;

use agent::{Class, Ruleset};
use clock::Clock;
use event::{Ended, Event, EventKind, Image, Key, Mark, Restored, TICK_NS, Uids};
use facts::Needs;
use keeps::Wish;
use late::Awaited;
pub use late::Reclassified;
use matched_rules::Weighed;
use policy::{Decision, Round};
use session::{Origin, Ran, RootGone, Sessions, Turn};
pub use state::{Change, Exited, Node, ProcessState, Tree};

/// What the program is told to consider; everything where nothing is named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Processes; what descends from them is in scope too.
    pub roots: Vec<Key>,
    /// Ids of cgroups; what runs a program in one of them is in scope, and what descends from that.
    pub cgroups: Vec<u64>,
    /// Real uid of the processes that can be agents; `None`: all.
    pub uid: Option<u32>,
}

impl Scope {
    pub fn is_everything(&self) -> bool {
        self.roots.is_empty() && self.cgroups.is_empty()
    }

    /// Whether the kernel can tell who is in scope: descent decides that, once some processes are named.
    fn is_by_pid(&self) -> bool {
        !self.roots.is_empty()
    }

    fn names(&self, node: &Node, image: &Image) -> bool {
        let named = self.is_everything()
            || self.roots.iter().any(|root| root.same_tick(node.key))
            || self.cgroups.contains(&image.cgroup_id);
        named && self.uid.is_none_or(|uid| uid == node.uids.real)
    }
}

/// What followed from an event, in the order in which it did.
///
/// An output holds what its reader needs of a process or a session that is gone: it is read when the model has moved on.
#[derive(Clone, Debug)]
pub enum Output {
    Tree(Change),
    Session(Turn),
}

/// See the module.
pub struct Model {
    pub tree: Tree,
    pub sessions: Sessions,
    pub rules: Ruleset,
    scope: Scope,
    clock: Clock,
    own_pid: u32,
    /// See [`Model::set_infers`].
    infers: bool,
    /// See [`Model::set_told_until`].
    told_until: u64,
    /// This program and its ancestors.
    own: Vec<Key>,
    wishes: Vec<Wish>,
    changes: Vec<Change>,
    turns: Vec<Turn>,
    /// Untracked processes whose script is to be read.
    awaited: HashMap<Key, Awaited>,
    /// See [`Model::take_released`].
    released: Vec<Key>,
    /// See [`Model::set_moves_unseen`].
    moves_unseen: bool,
}

impl Model {
    /// An empty model. `own_pid` is this program's: it and its ancestors are never reaped.
    pub fn new(rules: Ruleset, scope: Scope, own_pid: u32) -> Model {
        let sessions = Sessions::of(scope.uid);
        Model {
            tree: Tree::default(),
            sessions,
            rules,
            scope,
            clock: Clock::default(),
            own_pid,
            infers: false,
            told_until: 0,
            own: Vec::new(),
            wishes: Vec::new(),
            changes: Vec::new(),
            turns: Vec::new(),
            awaited: HashMap::new(),
            released: Vec::new(),
            moves_unseen: false,
        }
    }

    /// Nobody tells of a process that goes to another cgroup: what is known of the members' is not believed any more
    /// when they become due.
    pub fn set_moves_unseen(&mut self, unseen: bool) {
        self.moves_unseen = unseen;
    }

    /// Whether who is found without a known maker may be taken for a member on evidence: where processes are only
    /// looked at, and may come and go unseen.
    pub fn set_infers(&mut self, infers: bool) {
        self.infers = infers;
    }

    /// Up to this time, in ns since boot, another source has told of everybody: who began before it and is not known here
    /// is a stranger, whatever it resembles.
    pub fn set_told_until(&mut self, time: u64) {
        self.told_until = time;
    }

    /// Whether a process that was found may have come and lost its makers unseen.
    pub fn may_have_escaped(&self, key: Key) -> bool {
        self.infers && key.start + TICK_NS > self.told_until
    }

    /// Applies one event. Appends what follows from it to `out`.
    pub fn apply(&mut self, event: &Event, out: &mut Vec<Output>) {
        let Event {
            time, provenance, ..
        } = *event;
        match event.kind {
            EventKind::Restored(ref restored) => return self.restore(restored, event, out),
            EventKind::Reparent {
                child,
                old_parent: Some(old_parent),
                ..
            } if self.sessions.restoring => {
                let mut turns = Vec::new();
                self.sessions
                    .left_to(&mut self.tree, old_parent, child, &mut turns);
                out.extend(turns.into_iter().map(Output::Session));
            }
            // Its end was known sooner, by its pidfd or a look.
            EventKind::Exec { key, ref image, .. } if self.tree.has_exited(key) => {
                let leaves = self.rules.leaves_session(image).is_some();
                self.tree.ran_last(key, image, leaves);
            }
            // All that was told of it but its end was lost.
            EventKind::Exit {
                key,
                parent,
                mark: Some(mark),
                ..
            } if self.tree.get(key).is_none() && self.sessions.has(mark) => {
                let mark = Some(mark);
                self.take(event, out, |tree, changes| {
                    tree.turn_up(key, parent, mark, time, provenance, changes);
                });
            }
            _ => {}
        }
        self.take(event, out, |tree, changes| tree.apply(event, changes));
    }

    /// Takes up again a session that the service before this one has left.
    fn restore(&mut self, restored: &Restored, event: &Event, out: &mut Vec<Output>) {
        if self.sessions.by_first_root(restored.first_root).is_some() {
            return;
        }
        if restored.gone.is_none() {
            self.take(event, out, |tree, changes| {
                tree.place(restored, event.time, changes);
            });
        }
        let mut turns = Vec::new();
        let (tree, rules) = (&mut self.tree, &self.rules);
        self.sessions
            .restore(tree, rules, restored, event.time, &mut turns);
        self.weigh(restored.root);
        out.extend(turns.into_iter().map(Output::Session));
    }

    /// To be called before anything is told where a service before this one has left its maps and a
    /// ring, be it without sessions: what is found first is then newer than what the ring tells.
    pub fn begin_restore(&mut self) {
        self.sessions.begin_restore();
    }

    /// To be called when all has been told that there is of the sessions taken up again: what ran, and
    /// what has happened since. Those that are over close.
    pub fn finish_restore(&mut self, out: &mut Vec<Output>) {
        let mut turns = Vec::new();
        self.sessions.finish_restore(&self.tree, &mut turns);
        out.extend(turns.into_iter().map(Output::Session));
    }

    /// Applies an event to the tree by `report`, and what has changed by that to the rest of the model.
    fn take(
        &mut self,
        event: &Event,
        out: &mut Vec<Output>,
        report: impl FnOnce(&mut Tree, &mut Vec<Change>),
    ) {
        let mut changes = std::mem::take(&mut self.changes);
        let mut turns = std::mem::take(&mut self.turns);
        report(&mut self.tree, &mut changes);
        for change in changes.drain(..) {
            self.follow(&change, event, &mut turns);
            self.follow_own(&change, event);
            self.follow_awaited(&change);
            out.push(Output::Tree(change));
            self.finish_turns(&mut turns, out);
        }
        (self.changes, self.turns) = (changes, turns);
    }

    /// Puts out what happened to sessions, and closes those that have ended by it.
    fn finish_turns(&mut self, turns: &mut Vec<Turn>, out: &mut Vec<Output>) {
        out.extend(turns.drain(..).map(Output::Session));
        self.sessions.close_finished(turns);
        if !turns.is_empty() {
            self.forget_finished_keeps();
        }
        out.extend(turns.drain(..).map(Output::Session));
    }

    /// What a change in the tree means for scope and sessions.
    fn follow(&mut self, change: &Change, event: &Event, turns: &mut Vec<Turn>) {
        let now = event.time;
        match *change {
            Change::Born { key, creator, .. } => {
                let Some(image) = self.image_of(key) else {
                    return;
                };
                self.widen(key, &image);
                let origin = match event.kind {
                    EventKind::Fork { .. } => Origin::Forked,
                    _ => Origin::Found,
                };
                let mark = event.kind.mark();
                self.sessions
                    .born(&mut self.tree, key, creator, origin, mark);
                let found = matches!(event.kind, EventKind::Seen(_)) && mark.is_none();
                if found && self.may_have_escaped(key) {
                    let in_scope = self.is_in_scope(key);
                    self.sessions.infer(&mut self.tree, key, in_scope);
                }
                let told = creator.filter(|_| origin == Origin::Forked);
                self.inherit_keep(key, told);
                // What is found running has become what it is before anybody looked.
                if matches!(event.kind, EventKind::Seen(_)) {
                    let ran = if self.is_copy(key) {
                        Ran::Copied
                    } else {
                        Ran::Found
                    };
                    self.execed(key, (&image, ran), now, turns);
                }
                self.weigh(key);
            }
            Change::Execed { key } => {
                let Some(image) = self.image_of(key) else {
                    return;
                };
                let told = match event.kind {
                    EventKind::Exec { ref image, .. } => image,
                    _ => &image,
                };
                self.widen(key, told);
                if self.sessions.settle(&mut self.tree, key, event.kind.mark()) {
                    self.inherit_keep(key, None);
                }
                self.execed(key, (told, Ran::Told), now, turns);
                // The event is older than the image read since: a boundary or a server that it found stands.
                if !Arc::ptr_eq(told, &image) && self.rules.leaves_session(&image).is_some() {
                    self.execed(key, (&image, Ran::Found), now, turns);
                }
                self.weigh(key);
            }
            Change::Exited {
                ref node,
                ended,
                ref orphans,
                ..
            } => {
                let (tree, rules) = (&mut self.tree, &self.rules);
                let end = (ended, &orphans[..]);
                self.sessions.exited(tree, rules, node, end, now, turns);
                if self.moves_unseen {
                    self.doubt_cgroups(turns, now);
                }
            }
            Change::Reparented { key, .. } => {
                let mark = event.kind.mark();
                if self.sessions.settle(&mut self.tree, key, mark) {
                    self.inherit_keep(key, None);
                    self.weigh(key);
                }
            }
            Change::Moved { key } => {
                if let Some(image) = self.image_of(key) {
                    self.widen(key, &image);
                }
            }
            Change::Signalled { .. } => {}
        }
    }

    /// Whether a process that was found may be a member by what it has from its makers, which has to be read to tell.
    pub fn is_suspect(&self, key: Key) -> bool {
        let may_be = self.may_have_escaped(key) && self.is_in_scope(key);
        let node = self.tree.get(key).filter(|_| may_be);
        node.is_some_and(|node| self.sessions.is_suspect(&self.tree, node))
    }

    /// Of agents outside of the scope nothing is known: what could be theirs is nobody's.
    fn is_in_scope(&self, key: Key) -> bool {
        let named = || {
            self.tree
                .get(key)
                .is_some_and(|node| node.state.member.in_scope)
        };
        self.scope.is_everything() || named()
    }

    /// What has to be read of whom before [`Model::conclude`] can tell whose a suspect is; nothing of one that is none
    /// any more.
    pub fn wanted_of(&self, key: Key) -> Vec<(Key, Needs)> {
        let node = self.tree.get(key);
        let suspect = node.filter(|node| self.sessions.is_suspect(&self.tree, node));
        suspect.map_or_else(Vec::new, |node| self.sessions.wanted_of(&self.tree, node))
    }

    /// Tells whose a suspect is from what was read. Gives who is a member by that, parents before their children.
    pub fn conclude(&mut self, key: Key) -> Vec<Key> {
        let in_scope = self.is_in_scope(key);
        let joined = self.sessions.conclude(&mut self.tree, key, in_scope);
        for key in &joined {
            self.inherit_keep(*key, None);
            self.weigh(*key);
        }
        joined
    }

    /// Whether a member's child still is the program of its parent: it has forked and not run another
    /// yet, and is no agent of its own.
    fn is_copy(&self, key: Key) -> bool {
        let Some(node) = self.tree.get(key) else {
            return false;
        };
        // The kernel would know that it has run an agent itself, being a member.
        let is_plain =
            |mark: Mark| !mark.has(MEMBER_NAMED) && mark.session.is_some_and(|name| !node.is(name));
        node.mark.is_some_and(is_plain) || self.runs_parents_program(node)
    }

    /// Whether the parent of a process is a member and runs the same program with the same arguments.
    fn runs_parents_program(&self, node: &Node) -> bool {
        let parent = node.parent.and_then(|parent| self.tree.get(parent));
        parent.is_some_and(|parent| {
            let (own, other) = (&node.image, &parent.image);
            parent.state.member.session.is_some()
                && (&own.comm, &own.exe, &own.argv) == (&other.comm, &other.exe, &other.argv)
        })
    }

    fn image_of(&self, key: Key) -> Option<Arc<Image>> {
        self.tree.get(key).map(|node| Arc::clone(&node.image))
    }

    fn execed(&mut self, key: Key, (image, ran): (&Image, Ran), now: u64, turns: &mut Vec<Turn>) {
        let class = self.rules.classify(image);
        self.became(key, (class, ran), now, turns);
    }

    fn became(&mut self, key: Key, class: (Class, Ran), now: u64, turns: &mut Vec<Turn>) {
        self.sessions
            .execed(&mut self.tree, &self.rules, key, class, now, turns);
        if let Some(Turn::Opened { session, .. }) = turns.last() {
            self.inherit_awaited_keeps(*session);
        }
    }

    /// Takes a process into the scope that names it, or the cgroup in which it has run a program.
    fn widen(&mut self, key: Key, image: &Image) {
        let scope = &self.scope;
        if let Some(node) = self.tree.get_mut(key) {
            node.state.member.in_scope = node.state.member.in_scope || scope.names(node, image);
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

    /// Asks the rules about the program of a member, for later.
    fn weigh(&mut self, key: Key) {
        let Some(node) = self.tree.get(key) else {
            return;
        };
        if node.state.member.session.is_none() {
            return;
        }
        // Until it runs one of its own, it has the program of its maker.
        let maker = node.parent.and_then(|parent| self.tree.get(parent));
        let same = maker.filter(|maker| Arc::ptr_eq(&maker.image, &node.image));
        let known = same.and_then(|maker| maker.state.cached.weighed.clone());
        let weighed = known.unwrap_or_else(|| Weighed::new(&self.rules, &node.image));
        if let Some(node) = self.tree.get_mut(key) {
            node.state.cached.weighed = Some(weighed);
        }
    }

    /// Takes other rules from here on. Sessions go on, by the rule of the same name where there is one; what is
    /// an agent, a server or a boundary stays one.
    pub fn set_rules(&mut self, rules: Ruleset) {
        self.rules = rules;
        self.sessions.rename(&self.rules);
        let all: Vec<Key> = self.tree.iter().map(|node| node.key).collect();
        for key in &all {
            if let Some(node) = self.tree.get_mut(*key) {
                node.state.cached.weighed = None;
                // The bits of marks are those of the old rules.
                node.state.cached.read_anew(false);
            }
        }
        all.into_iter().for_each(|key| self.weigh(key));
        let awaited: Vec<Key> = self.awaited().collect();
        awaited.into_iter().for_each(|key| self.await_script(key));
    }

    /// Whether a rule about roots may come to decide about a process while it lives.
    pub fn judges_root(&self, key: Key) -> bool {
        self.tree
            .get(key)
            .is_some_and(|node| policy::judges_root(self, node))
    }

    /// For deciding about many from what is known now.
    pub fn round(&self) -> Round<'_> {
        Round::new(self)
    }

    /// Decides about a process from what is known now.
    pub fn decide(&self, key: Key) -> Decision {
        self.round().decide(key)
    }

    /// What would be decided about a member if the root of its session ended now in this way, by what is known.
    /// None, if that is gone already or the member is never signalled.
    pub fn foresee(&self, key: Key, ended: Ended) -> Option<Decision> {
        policy::foresee(&self.round(), key, ended)
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
            Change::Execed { .. } | Change::Moved { .. } | Change::Signalled { .. } => false,
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
