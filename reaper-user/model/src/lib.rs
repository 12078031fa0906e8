//! The model: the process tree, the sessions in it, and the decisions that rules make about their members.
//!
//! Pure: no I/O, no clock, no threads. Time comes in with the events, and nothing here can fail. The same events give the
//! same decisions.

#![forbid(unsafe_code)]

pub mod activity;
mod awaited;
mod cached_facts;
mod clock;
pub mod conversation;
mod env_marker;
pub mod event;
mod fact;
mod fact_updates;
pub mod facts;
mod idle;
pub mod keeps;
mod late_program;
pub mod leftover;
mod map_entries;
mod matched_rules;
pub mod policy;
pub mod rules;
pub mod ruleset;
pub mod session;
mod state;
pub mod tree;
mod untracked;
pub mod user_keep;
pub mod value;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use hashbrown::HashMap;
use reaper_common::MEMBER_NAME_MATCHED;

use awaited::Awaited;
pub use awaited::Reclassified;
use clock::ModelTime;
use event::{
    Event, EventKind, ExitStatus, Image, Membership, ProcEntry, ProcessKey, RestoredSession,
    TICK_NS, Uids,
};
use facts::FactSet;
use keeps::KeepRequest;
use matched_rules::MatchedRules;
use policy::{Decision, Evaluation};
use ruleset::{Class, Ruleset};
use session::{ImageSource, Origin, RootExit, SessionEvent, SessionId, Sessions};
pub use state::{Exited, Node, ProcessState, Tree, TreeChange};

/// What the program is told to consider; everything where nothing is named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Processes; what descends from them is in scope too.
    pub roots: Vec<ProcessKey>,
    /// Ids of cgroups; what runs a program in one of them is in scope, and what descends from that.
    pub cgroups: Vec<u64>,
    /// Real uid of the processes that can be agents; `None`: all.
    pub uid: Option<u32>,
}

impl Scope {
    pub fn is_unlimited(&self) -> bool {
        self.roots.is_empty() && self.cgroups.is_empty()
    }

    /// Whether the kernel can tell who is in scope: descent decides that, once some processes are named.
    fn is_by_pid(&self) -> bool {
        !self.roots.is_empty()
    }

    fn contains(&self, node: &Node, image: &Image) -> bool {
        let named = self.is_unlimited()
            || self.roots.iter().any(|root| root.has_same_tick(node.key))
            || self.cgroups.contains(&image.cgroup_id);
        named && self.uid.is_none_or(|uid| uid == node.uids.real)
    }
}

/// What followed from an event, in the order in which it did.
///
/// An output holds what its reader needs of a process or a session that is gone: it is read when the model has moved on.
#[derive(Clone, Debug)]
pub enum Output {
    Tree(TreeChange),
    Session(SessionEvent),
    /// The session of a process, or its program, is known better: that of the process it comes from has been read.
    Settled {
        key: ProcessKey,
        /// Whether it is a member only since then.
        joined: bool,
    },
}

/// See the module.
pub struct Model {
    pub tree: Tree,
    pub sessions: Sessions,
    pub rules: Ruleset,
    scope: Scope,
    clock: ModelTime,
    own_pid: u32,
    /// See [`Model::set_infers_membership`].
    infers_membership: bool,
    /// See [`Model::set_complete_until`].
    complete_until: u64,
    /// This program and its ancestors.
    own_ancestry: Vec<ProcessKey>,
    keep_requests: Vec<KeepRequest>,
    changes: Vec<TreeChange>,
    session_events: Vec<SessionEvent>,
    /// Untracked processes whose script is to be read.
    awaited: HashMap<ProcessKey, Awaited>,
    /// See [`Model::take_released`].
    released: Vec<ProcessKey>,
    /// See [`Model::set_misses_moves`].
    misses_moves: bool,
}

impl Model {
    /// An empty model. `own_pid` is this program's: it and its ancestors are never reaped.
    pub fn new(rules: Ruleset, scope: Scope, own_pid: u32) -> Model {
        let sessions = Sessions::for_uid(scope.uid);
        Model {
            tree: Tree::default(),
            sessions,
            rules,
            scope,
            clock: ModelTime::default(),
            own_pid,
            infers_membership: false,
            complete_until: 0,
            own_ancestry: Vec::new(),
            keep_requests: Vec::new(),
            changes: Vec::new(),
            session_events: Vec::new(),
            awaited: HashMap::new(),
            released: Vec::new(),
            misses_moves: false,
        }
    }

    /// Returns the session on whose ladder a member belongs that is due.
    pub fn escalation_of(&self, node: &Node) -> Option<SessionId> {
        let (ladder, _) = self.sessions.due(node.state.member.session?)?;
        Some(ladder.id)
    }

    /// Nobody tells of a process that goes to another cgroup: what is known of the members' is not believed any more
    /// when they become due.
    pub fn set_misses_moves(&mut self, unseen: bool) {
        self.misses_moves = unseen;
    }

    /// Whether who is found without a known maker may be taken for a member on evidence: where processes are only
    /// looked at, and may come and go unseen.
    pub fn set_infers_membership(&mut self, infers: bool) {
        self.infers_membership = infers;
    }

    /// Up to this time, in ns since boot, another source has told of everybody: who began before it and is not known here
    /// is a stranger, whatever it resembles.
    pub fn set_complete_until(&mut self, time: u64) {
        self.complete_until = time;
    }

    /// Whether a process that was found may have come and lost its makers unseen.
    pub fn may_have_escaped(&self, key: ProcessKey) -> bool {
        self.infers_membership && key.start + TICK_NS > self.complete_until
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
            } if self.sessions.is_restoring => {
                let mut session_events = Vec::new();
                self.sessions
                    .on_reparent(&mut self.tree, old_parent, child, &mut session_events);
                out.extend(session_events.into_iter().map(Output::Session));
            }
            // Its end was known sooner, by its pidfd or a look.
            EventKind::Exec { key, ref image, .. } if self.tree.has_exited(key) => {
                let leaves = self.rules.leaves_session(image).is_some();
                self.tree.set_last_image(key, image, leaves);
            }
            // All that was told of it but its end was lost.
            EventKind::Exit {
                key,
                parent,
                membership: Some(mark),
                ..
            } if self.tree.get(key).is_none() && self.sessions.has_open(mark) => {
                let mark = Some(mark);
                self.apply_to_tree(event, out, |tree, changes| {
                    tree.add_unknown(key, parent, mark, time, provenance, changes);
                });
            }
            _ => {}
        }
        let late = self.late_program(event);
        self.apply_to_tree(event, out, |tree, changes| tree.apply(event, changes));
        if let Some((key, left, since)) = late {
            self.settle_below(key, left, since, out);
        }
    }

    /// Takes up again a session that the service before this one has left.
    fn restore(&mut self, restored: &RestoredSession, event: &Event, out: &mut Vec<Output>) {
        if self.sessions.by_first_root(restored.first_root).is_some() {
            return;
        }
        if restored.exited.is_none() {
            self.apply_to_tree(event, out, |tree, changes| {
                tree.add_restored_root(restored, event.time, changes);
            });
        }
        let mut session_events = Vec::new();
        let (tree, rules) = (&mut self.tree, &self.rules);
        self.sessions
            .restore(tree, rules, restored, event.time, &mut session_events);
        self.match_rules(restored.root);
        out.extend(session_events.into_iter().map(Output::Session));
    }

    /// To be called before anything is told where a service before this one has left its maps and a
    /// ring, be it without sessions: what is found first is then newer than what the ring tells.
    pub fn begin_restore(&mut self) {
        self.sessions.begin_restore();
    }

    /// To be called when all has been told that there is of the sessions taken up again: what ran, and
    /// what has happened since. Those that are over close.
    pub fn finish_restore(&mut self, out: &mut Vec<Output>) {
        let mut session_events = Vec::new();
        self.sessions
            .finish_restore(&self.tree, &mut session_events);
        out.extend(session_events.into_iter().map(Output::Session));
    }

    /// Applies an event to the tree by `report`, and what has changed by that to the rest of the model.
    fn apply_to_tree(
        &mut self,
        event: &Event,
        out: &mut Vec<Output>,
        report: impl FnOnce(&mut Tree, &mut Vec<TreeChange>),
    ) {
        let mut changes = std::mem::take(&mut self.changes);
        let mut session_events = std::mem::take(&mut self.session_events);
        report(&mut self.tree, &mut changes);
        if let EventKind::Discovered(ProcEntry { key, .. }) | EventKind::Move { key, .. } =
            event.kind
        {
            self.sessions.note_mark(&self.tree, key);
        }
        for change in changes.drain(..) {
            self.on_change(&change, event, &mut session_events);
            self.update_own_ancestry(&change, event);
            self.follow_awaited(&change, event.time);
            out.push(Output::Tree(change));
            self.emit_session_events(&mut session_events, out);
        }
        (self.changes, self.session_events) = (changes, session_events);
    }

    /// Puts out what happened to sessions, and closes those that have ended by it.
    fn emit_session_events(
        &mut self,
        session_events: &mut Vec<SessionEvent>,
        out: &mut Vec<Output>,
    ) {
        out.extend(session_events.drain(..).map(Output::Session));
        self.sessions.close_finished(session_events);
        if !session_events.is_empty() {
            self.forget_finished_keeps();
        }
        out.extend(session_events.drain(..).map(Output::Session));
    }

    /// What a change in the tree means for scope and sessions.
    fn on_change(
        &mut self,
        change: &TreeChange,
        event: &Event,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let now = event.time;
        match *change {
            TreeChange::Born { key, creator, .. } => {
                let Some(image) = self.image_of(key) else {
                    return;
                };
                self.extend_scope(key, &image);
                let origin = match event.kind {
                    EventKind::Fork { .. } => Origin::Forked,
                    _ => Origin::Discovered,
                };
                let mark = event.kind.membership();
                self.sessions
                    .on_birth(&mut self.tree, key, creator, origin, mark);
                let found = matches!(event.kind, EventKind::Discovered(_)) && mark.is_none();
                if found && self.may_have_escaped(key) {
                    let in_scope = self.is_in_scope(key);
                    self.sessions.infer(&mut self.tree, key, in_scope);
                }
                let told = creator.filter(|_| origin == Origin::Forked);
                self.inherit_keep(key, told);
                // What is found running has become what it is before anybody looked.
                if matches!(event.kind, EventKind::Discovered(_)) {
                    let ran = if self.is_copy(key) {
                        ImageSource::Copied
                    } else {
                        ImageSource::Discovered
                    };
                    self.on_exec(key, (&image, ran), now, session_events);
                }
                self.match_rules(key);
            }
            TreeChange::Execed { key } => {
                let Some(image) = self.image_of(key) else {
                    return;
                };
                let told = match event.kind {
                    EventKind::Exec { ref image, .. } => image,
                    _ => &image,
                };
                self.extend_scope(key, told);
                if self
                    .sessions
                    .settle(&mut self.tree, key, event.kind.membership())
                {
                    self.inherit_keep(key, None);
                }
                self.on_exec(key, (told, ImageSource::Reported), now, session_events);
                // The event is older than the image read since: a boundary or a server that it found stands.
                if !Arc::ptr_eq(told, &image) && self.rules.leaves_session(&image).is_some() {
                    self.on_exec(key, (&image, ImageSource::Discovered), now, session_events);
                }
                self.match_rules(key);
            }
            TreeChange::Exited {
                ref node,
                exit_status: ended,
                ref orphans,
                ..
            } => {
                let (tree, rules) = (&mut self.tree, &self.rules);
                let end = (ended, &orphans[..]);
                self.sessions
                    .on_exit(tree, rules, node, end, now, session_events);
                if self.misses_moves {
                    self.forget_cgroups(session_events, now);
                }
            }
            TreeChange::Reparented { key, .. } => {
                let mark = event.kind.membership();
                if self.sessions.settle(&mut self.tree, key, mark) {
                    self.inherit_keep(key, None);
                    self.match_rules(key);
                }
            }
            TreeChange::Moved { key } => {
                if let Some(image) = self.image_of(key) {
                    self.extend_scope(key, &image);
                }
            }
            TreeChange::SignalSent { .. } => {}
        }
    }

    /// Whether a process that was found may be a member by what it has from its makers, which has to be read to tell.
    pub fn is_unattributed(&self, key: ProcessKey) -> bool {
        let may_be = self.may_have_escaped(key) && self.is_in_scope(key);
        let node = self.tree.get(key).filter(|_| may_be);
        node.is_some_and(|node| self.sessions.is_unattributed(&self.tree, node))
    }

    /// Of agents outside of the scope nothing is known: what could be theirs is nobody's.
    fn is_in_scope(&self, key: ProcessKey) -> bool {
        let named = || {
            self.tree
                .get(key)
                .is_some_and(|node| node.state.member.in_scope)
        };
        self.scope.is_unlimited() || named()
    }

    /// What has to be read of whom before [`Model::attribute`] can tell whose a suspect is; nothing of one that is none
    /// any more.
    pub fn facts_to_attribute(&self, key: ProcessKey) -> Vec<(ProcessKey, FactSet)> {
        let node = self.tree.get(key);
        let suspect = node.filter(|node| self.sessions.is_unattributed(&self.tree, node));
        suspect.map_or_else(Vec::new, |node| {
            self.sessions.facts_to_attribute(&self.tree, node)
        })
    }

    /// Tells whose a suspect is from what was read. Gives who is a member by that, parents before their children.
    pub fn attribute(&mut self, key: ProcessKey) -> Vec<ProcessKey> {
        let in_scope = self.is_in_scope(key);
        let joined = self.sessions.attribute(&mut self.tree, key, in_scope);
        for key in &joined {
            self.inherit_keep(*key, None);
            self.match_rules(*key);
        }
        joined
    }

    /// Whether a member's child still is the program of its parent: it has forked and not run another
    /// yet, and is no agent of its own.
    fn is_copy(&self, key: ProcessKey) -> bool {
        let Some(node) = self.tree.get(key) else {
            return false;
        };
        // The kernel would know that it has run an agent itself, being a member.
        let is_plain = |mark: Membership| {
            !mark.has(MEMBER_NAME_MATCHED) && mark.session.is_some_and(|name| !node.has_key(name))
        };
        node.membership.is_some_and(is_plain) || self.runs_parents_program(node)
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

    fn image_of(&self, key: ProcessKey) -> Option<Arc<Image>> {
        self.tree.get(key).map(|node| Arc::clone(&node.image))
    }

    fn on_exec(
        &mut self,
        key: ProcessKey,
        (image, ran): (&Image, ImageSource),
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let class = self.rules.classify(image);
        self.on_class(key, (class, ran), now, session_events);
    }

    fn on_class(
        &mut self,
        key: ProcessKey,
        class: (Class, ImageSource),
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        self.sessions
            .on_class(&mut self.tree, &self.rules, key, class, now, session_events);
        if let Some(SessionEvent::Opened { session, .. }) = session_events.last() {
            self.inherit_awaited_keeps(*session);
        }
    }

    /// Takes a process into the scope that names it, or the cgroup in which it has run a program.
    fn extend_scope(&mut self, key: ProcessKey, image: &Image) {
        let scope = &self.scope;
        if let Some(node) = self.tree.get_mut(key) {
            node.state.member.in_scope = node.state.member.in_scope || scope.contains(node, image);
        }
    }

    /// Widens the scope by a cgroup: whatever runs a program there from now on is in it.
    pub fn add_cgroup(&mut self, id: u64) {
        self.scope.cgroups.push(id);
    }

    /// Takes note of uids that a process has changed since the last event told of it.
    pub fn set_uids(&mut self, key: ProcessKey, uids: Uids) {
        if let Some(node) = self.tree.get_mut(key) {
            node.uids = uids;
        }
        self.match_rules(key);
    }

    /// Asks the rules about the program of a member, for later.
    fn match_rules(&mut self, key: ProcessKey) {
        let Some(node) = self.tree.get(key) else {
            return;
        };
        if node.state.member.session.is_none() {
            return;
        }
        // Until it runs one of its own, it has the program of its maker.
        let maker = node.parent.and_then(|parent| self.tree.get(parent));
        let same = maker.filter(|maker| Arc::ptr_eq(&maker.image, &node.image));
        let known = same.and_then(|maker| maker.state.cached.matched_rules.clone());
        let weighed = known.unwrap_or_else(|| MatchedRules::new(&self.rules, &node.image));
        if let Some(node) = self.tree.get_mut(key) {
            node.state.cached.matched_rules = Some(weighed);
        }
    }

    /// Takes other rules from here on. Sessions go on, by the rule of the same name where there is one; what is
    /// an agent, a server or a boundary stays one.
    pub fn set_rules(&mut self, rules: Ruleset) {
        self.rules = rules;
        self.sessions.resolve_rules(&self.rules);
        let all: Vec<ProcessKey> = self.tree.iter().map(|node| node.key).collect();
        for key in &all {
            if let Some(node) = self.tree.get_mut(*key) {
                node.state.cached.matched_rules = None;
                // The bits of marks are those of the old rules.
                node.state.cached.forget_program(false);
            }
        }
        all.into_iter().for_each(|key| self.match_rules(key));
        let awaited: Vec<ProcessKey> = self.awaited().collect();
        awaited.into_iter().for_each(|key| self.await_script(key));
    }

    /// Whether a rule about roots may come to decide about a process while it lives.
    pub fn has_rules_for_root(&self, key: ProcessKey) -> bool {
        self.tree
            .get(key)
            .is_some_and(|node| policy::has_rules_for_root(self, node))
    }

    /// For deciding about many from what is known now.
    pub fn evaluation(&self) -> Evaluation<'_> {
        Evaluation::new(self)
    }

    /// Decides about a process from what is known now.
    pub fn decide(&self, key: ProcessKey) -> Decision {
        self.evaluation().decide(key)
    }

    /// What would be decided about a member if the root of its session ended now in this way, by what is known.
    /// None, if that is gone already or the member is never signalled.
    pub fn decide_if_root_exits(&self, key: ProcessKey, ended: ExitStatus) -> Option<Decision> {
        policy::decide_if_root_exits(&self.evaluation(), key, ended)
    }

    /// Whether it is this program or one of its ancestors.
    fn is_own_ancestry(&self, key: ProcessKey) -> bool {
        self.own_ancestry.contains(&key)
    }

    /// Keeps the list of this program's ancestors, which hardly ever changes.
    fn update_own_ancestry(&mut self, change: &TreeChange, event: &Event) {
        let touched = match change {
            // Of one that is known it tells whose child it was.
            TreeChange::Born { key, .. } => {
                key.pid == self.own_pid || self.own_ancestry.contains(key)
            }
            TreeChange::Execed { .. }
            | TreeChange::Moved { .. }
            | TreeChange::SignalSent { .. } => false,
            TreeChange::Exited { node, .. } => self.own_ancestry.contains(&node.key),
            TreeChange::Reparented { key, .. } => self.own_ancestry.contains(key),
        };
        if touched || matches!(event.kind, EventKind::Discovered(_)) {
            self.own_ancestry.clear();
            if let Some(own) = self.tree.by_pid(self.own_pid) {
                self.own_ancestry.push(own.key);
                self.own_ancestry
                    .extend(self.tree.ancestors(own.key).map(|above| above.key));
            }
        }
    }

    fn born_after(&self, node: &Node, due: RootExit) -> bool {
        node.key.start > due.at
    }
}
