//! Process tree, sessions, and decisions about their members.
//!
//! The model is pure, so that the same events give the same decisions in the service and in tests: it does no I/O,
//! reads no clock, starts no thread and cannot fail. Time comes in with the events.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

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

/// Part of the host that the service handles; the whole host if nothing is named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Processes that are in scope with all their descendants.
    pub roots: Vec<ProcessKey>,
    /// Ids of cgroups. A process that executes a program in one of them is in scope with its descendants.
    pub cgroups: Vec<u64>,
    /// Real uid of the processes that can be agents; `None`: any.
    pub uid: Option<u32>,
}

impl Scope {
    /// Returns whether the whole host is in scope, for processes of [`Scope::uid`].
    pub fn is_unlimited(&self) -> bool {
        self.roots.is_empty() && self.cgroups.is_empty()
    }

    /// Returns whether the probes track the scope: children inherit it at fork if it names processes.
    fn is_by_pid(&self) -> bool {
        !self.roots.is_empty()
    }

    /// Returns whether the scope names a process, or the cgroup of `image`, and allows its real uid.
    fn contains(&self, node: &Node, image: &Image) -> bool {
        let named = self.is_unlimited()
            || self.roots.iter().any(|root| root.has_same_tick(node.key))
            || self.cgroups.contains(&image.cgroup_id);
        named && self.uid.is_none_or(|uid| uid == node.uids.real)
    }
}

/// Consequence of an event. Outputs come in the order in which they happened.
///
/// The model has moved on when an output is handled, so it carries what its handler needs of an exited process or a
/// closed session.
#[derive(Clone, Debug)]
pub enum Output {
    /// Change of the process tree.
    Tree(TreeChange),
    /// Change of a session.
    Session(SessionEvent),
    /// The session or the program of a process has become certain, because that of an ancestor was read late.
    Settled {
        /// Process that is certain now.
        key: ProcessKey,
        /// Whether this made it a member.
        joined: bool,
    },
}

/// State of all processes and sessions; see the [crate documentation](self).
pub struct Model {
    /// Living processes, exited ones with living descendants, and recent exits.
    pub tree: Tree,
    /// Open and recently closed sessions.
    pub sessions: Sessions,
    /// Rules in force; [`Model::set_rules`] replaces them.
    pub rules: Ruleset,
    scope: Scope,
    clock: ModelTime,
    own_pid: u32,
    /// See [`Model::set_infers_membership`].
    infers_membership: bool,
    /// See [`Model::set_complete_until`].
    complete_until: u64,
    /// The service's own process and its ancestors.
    own_ancestry: Vec<ProcessKey>,
    keep_requests: Vec<KeepRequest>,
    changes: Vec<TreeChange>,
    session_events: Vec<SessionEvent>,
    /// Untracked processes whose script must be read.
    awaited: HashMap<ProcessKey, Awaited>,
    /// See [`Model::take_released`].
    released: Vec<ProcessKey>,
    /// See [`Model::set_misses_moves`].
    misses_moves: bool,
    /// See [`Model::set_has_display`].
    has_display: bool,
}

impl Model {
    /// Returns an empty model. `own_pid` is the pid of the service: it and its ancestors are never reaped.
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
            has_display: false,
        }
    }

    /// Returns the session whose escalation (SIGTERM, later SIGKILL) handles a member; `None` if the member is not due.
    /// It is the outermost session whose root has exited; see [`Sessions::due`].
    pub fn escalation_of(&self, node: &Node) -> Option<SessionId> {
        let (ladder, _) = self.sessions.due(node.state.member.session?)?;
        Some(ladder.id)
    }

    /// Sets whether the source misses moves between cgroups. The cgroup of a member is then read again when it becomes
    /// due.
    pub fn set_misses_moves(&mut self, unseen: bool) {
        self.misses_moves = unseen;
    }

    /// Sets whether a discovered process without a known creator may become a member on evidence. That is needed for
    /// sources that poll the process table, where processes can appear and exit between two polls.
    pub fn set_infers_membership(&mut self, infers: bool) {
        self.infers_membership = infers;
    }

    /// Sets the time, in ns since boot, until which another source reported every process. A process that started
    /// before and is unknown here is untracked, whatever its evidence.
    pub fn set_complete_until(&mut self, time: u64) {
        self.complete_until = time;
    }

    /// Returns whether the ancestors of a discovered process may have exited unseen. False unless membership is
    /// inferred and it started after the time of [`Model::set_complete_until`].
    pub fn may_have_escaped(&self, key: ProcessKey) -> bool {
        self.infers_membership && key.start + TICK_NS > self.complete_until
    }

    /// Applies one event and appends its consequences to `out`.
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
            // The exit was noticed earlier, by the pidfd or by a scan.
            EventKind::Exec { key, ref image, .. } if self.tree.has_exited(key) => {
                let leaves = self.rules.leaves_session(image).is_some();
                self.tree.set_last_image(key, image, leaves);
            }
            // All events of the process but its exit were lost.
            EventKind::Exit {
                key,
                parent,
                membership: Some(membership),
                ..
            } if self.tree.get(key).is_none() && self.sessions.has_open(membership) => {
                let membership = Some(membership);
                self.apply_to_tree(event, out, |tree, changes| {
                    tree.add_unknown(key, parent, membership, time, provenance, changes);
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

    /// Reopens a session of the previous service. Does nothing if a session with its first root is open.
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

    /// Starts a restore. Must be called before the first event if the previous service left maps and a ring buffer,
    /// even without sessions: the process table is then newer than the events in the ring.
    pub fn begin_restore(&mut self) {
        self.sessions.begin_restore();
    }

    /// Ends a restore, once the process table and the backlog of the ring are applied. Closes sessions that have ended.
    pub fn finish_restore(&mut self, out: &mut Vec<Output>) {
        let mut session_events = Vec::new();
        self.sessions
            .finish_restore(&self.tree, &mut session_events);
        out.extend(session_events.into_iter().map(Output::Session));
    }

    /// Changes the tree with `report`, and updates the rest of the model for each change.
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
            self.sessions.note_early_member(&self.tree, key);
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

    /// Emits session events and closes the sessions that have ended.
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

    /// Brings scope, sessions and inherited keeps up to date after a change of the tree, and matches the rules again.
    /// Appends what happened to the sessions to `session_events`.
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
                let membership = event.kind.membership();
                self.sessions
                    .on_birth(&mut self.tree, key, creator, origin, membership);
                let may_be_inferred =
                    matches!(event.kind, EventKind::Discovered(_)) && membership.is_none();
                if may_be_inferred && self.may_have_escaped(key) {
                    let in_scope = self.is_in_scope(key);
                    self.sessions.infer(&mut self.tree, key, in_scope);
                }
                let creator = creator.filter(|_| origin == Origin::Forked);
                self.inherit_keep(key, creator);
                // No exec event follows for the program that a discovered process already runs.
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
                let reported = match event.kind {
                    EventKind::Exec { ref image, .. } => image,
                    _ => &image,
                };
                self.extend_scope(key, reported);
                if self
                    .sessions
                    .settle(&mut self.tree, key, event.kind.membership())
                {
                    self.inherit_keep(key, None);
                }
                self.on_exec(key, (reported, ImageSource::Reported), now, session_events);
                // A scan has read a newer image. The process stays a boundary or a server if that one makes it so.
                if !Arc::ptr_eq(reported, &image) && self.rules.leaves_session(&image).is_some() {
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
                let membership = event.kind.membership();
                if self.sessions.settle(&mut self.tree, key, membership) {
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

    /// Returns whether a discovered process may be a member by evidence that has to be read first. False if its
    /// ancestors cannot have exited unseen, or if it is out of scope.
    pub fn is_unattributed(&self, key: ProcessKey) -> bool {
        let may_be = self.may_have_escaped(key) && self.is_in_scope(key);
        let node = self.tree.get(key).filter(|_| may_be);
        node.is_some_and(|node| self.sessions.is_unattributed(&self.tree, node))
    }

    /// Returns whether a process is in scope. Out of scope, its evidence may point to an agent that is not tracked.
    fn is_in_scope(&self, key: ProcessKey) -> bool {
        let named = || {
            self.tree
                .get(key)
                .is_some_and(|node| node.state.member.in_scope)
        };
        self.scope.is_unlimited() || named()
    }

    /// Returns the facts to read, by process, before [`Model::attribute`] can assign a process to a session. Empty if
    /// all are read, or if the process is no longer unattributed.
    pub fn facts_to_attribute(&self, key: ProcessKey) -> Vec<(ProcessKey, FactSet)> {
        let node = self.tree.get(key);
        let unattributed = node.filter(|node| self.sessions.is_unattributed(&self.tree, node));
        unattributed.map_or_else(Vec::new, |node| {
            self.sessions.facts_to_attribute(&self.tree, node)
        })
    }

    /// Assigns an unattributed process to a session by its facts. Returns the new members, parents before children.
    /// Empty if nothing fits.
    pub fn attribute(&mut self, key: ProcessKey) -> Vec<ProcessKey> {
        let in_scope = self.is_in_scope(key);
        let joined = self.sessions.attribute(&mut self.tree, key, in_scope);
        for key in &joined {
            self.inherit_keep(*key, None);
            self.match_rules(*key);
        }
        joined
    }

    /// Returns whether a member's child still runs the program of its parent, because it has not executed one since its
    /// fork.
    fn is_copy(&self, key: ProcessKey) -> bool {
        let Some(node) = self.tree.get(key) else {
            return false;
        };
        // The probes would have flagged the exec of an agent by a member.
        let is_plain = |membership: Membership| {
            !membership.has(MEMBER_NAME_MATCHED)
                && membership.session.is_some_and(|name| !node.has_key(name))
        };
        node.membership.is_some_and(is_plain) || self.runs_parents_program(node)
    }

    /// Returns whether the parent of a process is a member and runs the same program with the same arguments.
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

    /// Applies the class of `image` to the sessions (see [`Sessions::on_class`]).
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

    /// Applies a class to the sessions (see [`Sessions::on_class`]), and the stored keeps of a session that opens.
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

    /// Adds a process to the scope if the scope names it or the cgroup in which it executes `image`.
    fn extend_scope(&mut self, key: ProcessKey, image: &Image) {
        let scope = &self.scope;
        if let Some(node) = self.tree.get_mut(key) {
            node.state.member.in_scope = node.state.member.in_scope || scope.contains(node, image);
        }
    }

    /// Adds a cgroup to the scope. It takes effect for programs executed from now on.
    pub fn add_cgroup(&mut self, id: u64) {
        self.scope.cgroups.push(id);
    }

    /// Sets uids that a process has changed since its last event. Does not evaluate the process again.
    pub fn set_uids(&mut self, key: ProcessKey, uids: Uids) {
        if let Some(node) = self.tree.get_mut(key) {
            node.uids = uids;
        }
        self.match_rules(key);
    }

    /// Matches the rules for members with a member's program, ahead of the decision. Does nothing for a process that is
    /// no member.
    fn match_rules(&mut self, key: ProcessKey) {
        let Some(node) = self.tree.get(key) else {
            return;
        };
        if node.state.member.session.is_none() {
            return;
        }
        // A child that has not executed a program shares the image of its parent.
        let parent = node.parent.and_then(|parent| self.tree.get(parent));
        let same = parent.filter(|parent| Arc::ptr_eq(&parent.image, &node.image));
        let known = same.and_then(|parent| parent.state.cached.matched_rules.clone());
        let matched = known.unwrap_or_else(|| MatchedRules::new(&self.rules, &node.image));
        if let Some(node) = self.tree.get_mut(key) {
            node.state.cached.matched_rules = Some(matched);
        }
    }

    /// Replaces the rules. An open session continues with the rule of the same name, if there is one. Agents, servers
    /// and boundaries keep their class. Forgets the facts about all processes, except units.
    pub fn set_rules(&mut self, rules: Ruleset) {
        self.rules = rules;
        self.sessions.resolve_rules(&self.rules);
        let all: Vec<ProcessKey> = self.tree.iter().map(|node| node.key).collect();
        for key in &all {
            if let Some(node) = self.tree.get_mut(*key) {
                node.state.cached.matched_rules = None;
                // The bits of environment markers belong to the old rules.
                node.state.cached.forget_program(false);
            }
        }
        all.into_iter().for_each(|key| self.match_rules(key));
        let awaited: Vec<ProcessKey> = self.awaited().collect();
        awaited.into_iter().for_each(|key| self.await_script(key));
    }

    /// Returns whether a process is the living root of a session and a rule about roots (`idle` or `server`) matches
    /// its known state.
    pub fn has_rules_for_root(&self, key: ProcessKey) -> bool {
        self.tree
            .get(key)
            .is_some_and(|node| policy::has_rules_for_root(self, node))
    }

    /// Returns an evaluation of the current state, for deciding about several processes.
    pub fn evaluation(&self) -> Evaluation<'_> {
        Evaluation::new(self)
    }

    /// Decides about a process in the current state.
    pub fn decide(&self, key: ProcessKey) -> Decision {
        self.evaluation().decide(key)
    }

    /// Returns the decision about a member if the root of its session exited now with `ended`. Returns `None` if the
    /// process is no member, is already due, is never signalled, or has exited.
    pub fn decide_if_root_exits(&self, key: ProcessKey, ended: ExitStatus) -> Option<Decision> {
        policy::decide_if_root_exits(&self.evaluation(), key, ended)
    }

    /// Returns the longest time between SIGTERM and SIGKILL that a rule gives the program of a process, in ns; 0 if none does.
    pub fn longest_grace(&self, node: &Node) -> u64 {
        policy::longest_grace(self, node)
    }

    /// Sets whether the host has a display server, so that members can have windows. Without one, no rule about windows
    /// holds. Returns whether this has changed. The caller must then update all entries of the kernel's map.
    ///
    /// With a display server, the probes signal no member: any program may open a window at any time, and no event reports
    /// that. The service asks for windows when a decision falls.
    pub fn set_has_display(&mut self, has_display: bool) -> bool {
        std::mem::replace(&mut self.has_display, has_display) != has_display
    }

    /// Returns whether a process in the tree of a session serves a display: an X server with the number in its arguments,
    /// or a compositor with the name of its socket. Such displays are used by tests, not by a person.
    fn serves_display(&self, session: SessionId, display: &[u8]) -> bool {
        let outermost = self.sessions.with_enclosing(session).last();
        let outermost = outermost.map_or(session, |outer| outer.id);
        let serves = |node: &Node| {
            let file = node.image.exe.rsplit(|byte| *byte == b'/').next();
            let is_x = file.is_some_and(|file| file.starts_with(b"X"));
            // A nested X server names the display that it uses behind the one that it serves, as in `:2 -display :0`.
            let mut arguments = node.image.args().skip(1);
            if is_x {
                let served = arguments.next().and_then(|own| own.strip_prefix(b":"));
                return served.is_some_and(|n| display.strip_prefix(b"X") == Some(n));
            }
            arguments.any(|argument| argument.strip_prefix(b"--socket=") == Some(display))
        };
        self.members_within(outermost).any(serves)
    }

    /// Returns whether a process is the service itself or one of its ancestors.
    fn is_own_ancestry(&self, key: ProcessKey) -> bool {
        self.own_ancestry.contains(&key)
    }

    /// Updates the list of the service's ancestors, which rarely changes.
    fn update_own_ancestry(&mut self, change: &TreeChange, event: &Event) {
        let touched = match change {
            // Also emitted for a known process whose fork is reported late, with its parent.
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

    /// Returns whether a process started after this exit of a root.
    fn born_after(&self, node: &Node, due: RootExit) -> bool {
        node.key.start > due.at
    }
}
