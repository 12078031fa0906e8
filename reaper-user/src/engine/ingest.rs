//! Turns each output of the model into records for the event stream and into work for the engine.
//!
//! Records are emitted at once. Decisions, updates of the kernel's maps and reads of /proc wait for the end of the
//! drain.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;
use reaper_common::MEMBER_SIGKILL_SENT;

use super::attribution::Unattributed;
use crate::config::{EventScope, Mode};
use crate::export::{
    Adopter, DecisionNames, EventBody, EventRecord, FreedMemory, Lifecycle, ProcessRef, SessionRef,
    Sink,
};
use crate::reap::{Reaper, SentBy, SentSignal};
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use reaper_model::policy::{Reason, Verdict};
use reaper_model::session::{Session, SessionEvent, SessionId, Succession};
use reaper_model::{Model, Node, Output, TreeChange};

/// Limit of forks by which a program becomes a daemon.
const DAEMON_FORKS_MAX: usize = 4;

/// Decision that is made once the source is drained.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queued {
    Process(ProcessKey),
    /// All members of a session and of the sessions nested in it.
    Session(SessionId),
}

/// Queue of decisions without duplicates, in the order of arrival.
#[derive(Default)]
pub struct Queue {
    waiting: HashSet<Queued>,
    /// Items in order of arrival. An item that is not in `waiting` was removed.
    order: Vec<Queued>,
}

impl Queue {
    /// Adds an item if it is not queued yet.
    pub fn push(&mut self, queued: Queued) {
        if self.waiting.insert(queued) {
            self.order.push(queued);
        }
    }

    pub fn remove(&mut self, queued: Queued) {
        self.waiting.remove(&queued);
    }

    pub fn contains(&self, queued: Queued) -> bool {
        self.waiting.contains(&queued)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns all items.
    pub fn take(&mut self) -> Vec<Queued> {
        let mut order = std::mem::take(&mut self.order);
        order.retain(|queued| self.waiting.remove(queued));
        order
    }
}

impl Extend<Queued> for Queue {
    fn extend<T: IntoIterator<Item = Queued>>(&mut self, all: T) {
        all.into_iter().for_each(|queued| self.push(queued));
    }
}

/// Counters of a session, and its progress towards the report that it is closed.
#[derive(Default)]
pub struct Tally {
    pub reaped: u32,
    pub failed: u32,
    /// Number of members that would have been reaped, in observe mode.
    pub would_have_reaped: u32,
    /// Memory of the reaped members.
    pub memory: FreedMemory,
    /// Number of records lost while the session was open.
    pub lost: u64,
    /// Session without living members that is not reported as closed yet, for lack of confirmed exits or of a last
    /// scan.
    pub closing_session: Option<SessionRef>,
    /// Exit time of the last member, in ns since boot. Set together with `closing_session`.
    pub last_exit_at: u64,
    /// Whether the members have been evaluated since the root exited.
    pub is_evaluated: bool,
    /// Counts in the last report that the session is closed. Only the journal gets reports after the first one.
    pub reported: Option<Counts>,
}

/// Numbers of members in the report that a session is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
}

/// Handler of the model's outputs, with the work that they leave to the engine.
pub struct Ingest {
    pub reaper: Reaper,
    pub out: Sink,
    events: EventScope,
    /// Whether descendants of processes in the scope are tracked even without an agent.
    tracks_scope: bool,
    /// Whether discovered processes are reported as new. Off while pre-existing processes are read.
    pub emits_discovered: bool,
    pub queued: Queue,
    /// Last decisions about living members.
    pub decided: HashMap<ProcessKey, (Verdict, Reason)>,
    /// Sessions whose root has exited and that another agent may continue.
    pub awaiting_successor: Vec<SessionId>,
    /// Orphans whose adopter is not known yet.
    pub without_adopter: Vec<ProcessKey>,
    /// Members that run another program, changed their cgroup or were discovered late. Their facts may be prefetched.
    pub new_images: Vec<ProcessKey>,
    /// Discovered processes that may belong to a session. Inherited facts must be read from /proc to find out.
    pub unattributed: Unattributed,
    /// Living processes whose fork event was lost: another event reported them first.
    pub late_discovered: HashSet<ProcessKey>,
    /// Whether to record `late_discovered`. Set if the source reports the forks of all processes.
    pub notes_late_discovered: bool,
    /// Processes whose entry in the kernel's map may be outdated.
    pub map_changes: Vec<ProcessKey>,
    /// Sessions whose entry in the kernel's map is outdated.
    pub changed_sessions: Vec<SessionId>,
    /// Sessions without living members, with the exit time of the last member in ns since boot.
    pub closed_sessions: Vec<(SessionId, SessionRef, u64)>,
    pub sessions_opened: u64,
    /// Number of signals that probes sent.
    pub kernel_signals: u64,
    /// Members that a probe has signalled. The decision to reap them was emitted with the signal.
    pub decision_emitted: HashSet<ProcessKey>,
    /// Exits of unclaimed members that a probe or an earlier service had signalled.
    pub unclaimed_exits: Vec<(ProcessRef, SessionId, ExitStatus, Signal)>,
}

impl Ingest {
    pub fn new(reaper: Reaper, out: Sink, events: EventScope, tracks_scope: bool) -> Ingest {
        Ingest {
            reaper,
            out,
            events,
            tracks_scope,
            emits_discovered: false,
            queued: Queue::default(),
            decided: HashMap::new(),
            awaiting_successor: Vec::new(),
            without_adopter: Vec::new(),
            new_images: Vec::new(),
            unattributed: Unattributed::default(),
            late_discovered: HashSet::new(),
            notes_late_discovered: false,
            map_changes: Vec::new(),
            changed_sessions: Vec::new(),
            closed_sessions: Vec::new(),
            sessions_opened: 0,
            kernel_signals: 0,
            decision_emitted: HashSet::new(),
            unclaimed_exits: Vec::new(),
        }
    }

    /// Emits the records that follow from an output of the model, and queues the work in the fields of [`Ingest`]. The
    /// output was caused by `event`.
    pub fn on_output(&mut self, model: &Model, event: &Event, output: &Output) {
        match output {
            Output::Tree(change) => self.on_change(model, event, change),
            Output::Session(session_event) => {
                self.on_session_event(model, event.time, session_event)
            }
            Output::Settled { key, joined: true } => self.on_late_join(model, *key, event.time),
            Output::Settled { key, .. } => {
                self.new_images.push(*key);
                if self.decided.contains_key(key) {
                    self.queued.push(Queued::Process(*key));
                }
            }
        }
    }

    /// Emits and queues what follows from a change of the process tree, as [`Ingest::on_output`].
    fn on_change(&mut self, model: &Model, event: &Event, change: &TreeChange) {
        let Event {
            time,
            provenance: event_provenance,
            ..
        } = *event;
        match *change {
            TreeChange::Born {
                key, provenance, ..
            } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                self.on_joined(model, node);
                let is_found =
                    provenance == Provenance::Procfs && node.state.member.session.is_some();
                if is_found || model.is_awaited(key) {
                    self.new_images.push(key);
                }
                match event.kind {
                    EventKind::Discovered(_) if model.is_unattributed(key) => {
                        self.unattributed.insert(key)
                    }
                    EventKind::Discovered(_) | EventKind::Fork { .. } => {}
                    _ if self.notes_late_discovered => drop(self.late_discovered.insert(key)),
                    _ => {}
                }
                // Pre-existing processes are not reported, as they are not new.
                if provenance != Provenance::Procfs || self.emits_discovered {
                    let provenance = match node.state.member.inferred {
                        Some(_) => Provenance::Inferred,
                        None => provenance,
                    };
                    self.emit_lifecycle(model, node, time, Lifecycle::Fork, provenance);
                }
            }
            TreeChange::Execed { key } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                let member = node.state.member.session.is_some();
                if self.decided.contains_key(&key)
                    || member && model.rules.has_rules_for_living(node.orphaned.is_some())
                {
                    self.queued.push(Queued::Process(key));
                }
                if member || model.is_awaited(key) {
                    self.new_images.push(key);
                }
                // The new program may be a server.
                if node.state.member.root && model.has_rules_for_root(key) {
                    self.queued.push(Queued::Process(key));
                }
                // The root's program determines whether the probes may signal the members.
                self.changed_sessions
                    .extend(node.state.member.session.filter(|_| node.state.member.root));
                self.note_map_change(node);
                self.emit_lifecycle(model, node, time, Lifecycle::Exec, event_provenance);
            }
            TreeChange::Moved { key } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                if node.state.member.session.is_some() {
                    self.new_images.push(key);
                }
                if self.decided.contains_key(&key) {
                    self.queued.push(Queued::Process(key));
                }
                self.note_map_change(node);
                self.emit_lifecycle(model, node, time, Lifecycle::Move, event_provenance);
            }
            TreeChange::Exited {
                ref node,
                exit_status,
                peak_rss,
                provenance,
                ref orphans,
            } => {
                self.emit_lifecycle(
                    model,
                    node,
                    time,
                    Lifecycle::Exit {
                        exit_status,
                        peak_rss,
                    },
                    provenance,
                );
                let claimed = self.reaper.is_claimed(node.key);
                self.decision_emitted.remove(&node.key);
                self.late_discovered.remove(&node.key);
                // The children inherited the same evidence.
                if self.unattributed.remove(node.key) {
                    self.unattributed.extend(orphans.iter().copied());
                }
                self.reaper.on_exit(node, exit_status, orphans);
                if let Some(session) = node
                    .state
                    .member
                    .session
                    .filter(|_| node.state.member.signals_sent != 0 && !claimed)
                {
                    let signal = match node.state.member.signals_sent & MEMBER_SIGKILL_SENT {
                        0 => Signal::SIGTERM,
                        _ => Signal::SIGKILL,
                    };
                    let process = ProcessRef::new(model, node);
                    self.unclaimed_exits
                        .push((process, session, exit_status, signal));
                }
                // Otherwise the process was kept, or waited for its decision.
                let was_kept_or_undecided = self
                    .decided
                    .remove(&node.key)
                    .is_none_or(|(verdict, _)| verdict != Verdict::Reap);
                if let Some(id) = node.state.member.session
                    && was_kept_or_undecided
                    && model.sessions.due(id).is_some()
                {
                    self.queued.push(Queued::Session(id));
                }
                orphans
                    .iter()
                    .for_each(|orphan| self.on_orphan(model, node, *orphan, time));
                self.on_boundary_exit(model, node, orphans, time);
            }
            TreeChange::SignalSent { key, signal } => {
                self.on_kernel_signal(model, key, signal, time)
            }
            TreeChange::Reparented {
                key,
                old_parent,
                adopter,
                orphaned,
            } => {
                let Some(node) = model.tree.get(key).filter(|node| self.is_emitted(node)) else {
                    return;
                };
                if let Some(old_parent) = old_parent.filter(|_| orphaned) {
                    // The exit of the old parent is unknown, or arrives later.
                    self.on_reparented_orphan(model, old_parent, key, time);
                }
                // The tree's key, as the event may name the old parent with less precision.
                let old_parent = node.orphaned.map(|from| from.old_parent).or(old_parent);
                let ending = node.orphaned.is_some_and(|from| from.namespace_ending);
                let body = EventBody::Reparent {
                    process: ProcessRef::new(model, node),
                    old_parent,
                    old_parent_comm: old_parent
                        .map_or_else(Vec::new, |key| model.tree.comm(key).to_vec()),
                    adopter: adopter.map(|key| Adopter {
                        key,
                        comm: model.tree.comm(key).to_vec(),
                    }),
                    namespace_ending: adopter.is_none() && ending,
                    provenance: event_provenance,
                };
                self.emit(time, body);
            }
        }
    }

    /// Queues a new process for evaluation if it is a member that is due, or if rules apply to living members. Also
    /// queues an update of its map entry.
    fn on_joined(&mut self, model: &Model, node: &Node) {
        if node.state.member.session.is_some_and(|_| {
            model.rules.has_rules_for_living(false) || model.escalation_of(node).is_some()
        }) {
            self.queued.push(Queued::Process(node.key));
        }
        self.note_map_change(node);
    }

    /// Emits a fork record for a process that joins a session later than at its fork. Queues the work for a new member.
    /// `time` is in ns since boot. Does nothing if the process has exited.
    pub fn on_late_join(&mut self, model: &Model, key: ProcessKey, time: u64) {
        let Some(node) = model.tree.get(key) else {
            return;
        };
        self.on_joined(model, node);
        self.new_images.push(key);
        let provenance = match node.state.member.inferred {
            Some(_) => Provenance::Inferred,
            None => node.provenance,
        };
        self.emit_lifecycle(model, node, time, Lifecycle::Fork, provenance);
    }

    /// Emits an orphan record if the process is a member, and queues its evaluation. Its adopter is looked up later.
    fn on_orphan(&mut self, model: &Model, parent: &Node, orphan: ProcessKey, time: u64) {
        self.without_adopter.push(orphan);
        if self.emit_orphan(model, parent.key, &parent.image.comm, orphan, time) {
            self.queued.push(Queued::Process(orphan));
        }
    }

    /// Emits a boundary record for each orphan by which a boundary lives on: it still runs the program of the boundary,
    /// as the server that `tmux` forks does.
    fn on_boundary_exit(
        &mut self,
        model: &Model,
        exited: &Node,
        orphans: &[ProcessKey],
        time: u64,
    ) {
        let orphans = orphans.iter().filter_map(|key| model.tree.get(*key));
        let mut orphans = orphans
            .filter(|orphan| {
                orphan.state.member.session.is_none() && orphan.image.exe == exited.image.exe
            })
            .peekable();
        if orphans.peek().is_none() {
            return;
        }
        let parent = |node: &&Node| node.parent.and_then(|key| model.tree.get(key));
        let mut above = std::iter::successors(Some(exited), parent)
            .take(DAEMON_FORKS_MAX)
            .take_while(|node| node.image.exe == exited.image.exe);
        let Some(rule) = above.find_map(|node| node.state.member.boundary.clone()) else {
            return;
        };
        for orphan in orphans {
            let body = EventBody::Boundary {
                process: ProcessRef::new(model, orphan),
                session: None,
                rule: Arc::clone(&rule),
            };
            self.emit(time, body);
        }
    }

    /// Emits an orphan record if the process is a member. Queues its evaluation, unless the session of its old parent
    /// is the same or encloses it.
    fn on_reparented_orphan(
        &mut self,
        model: &Model,
        old_parent: ProcessKey,
        orphan: ProcessKey,
        time: u64,
    ) {
        let command = model.tree.comm(old_parent);
        // The exit record of a root arrives after the records of its children, which the probe may have signalled.
        // Until then a member of its session would look detached. The root's exit re-evaluates all members.
        let parent_session = model
            .tree
            .get(old_parent)
            .and_then(|parent| parent.state.member.session);
        let own_session = model
            .tree
            .get(orphan)
            .and_then(|node| node.state.member.session);
        // Starting an agent nests the child's session one level deeper; a relaunched root adds one more.
        let is_member = |outer| {
            let around = own_session
                .into_iter()
                .flat_map(|id| model.sessions.with_enclosing(id));
            around.take(3).any(|session| session.id == outer)
        };
        if self.emit_orphan(model, old_parent, command, orphan, time)
            && !parent_session.is_some_and(is_member)
        {
            self.queued.push(Queued::Process(orphan));
        }
    }

    /// Emits an orphan record if the process is a member. Returns whether it is.
    fn emit_orphan(
        &mut self,
        model: &Model,
        parent: ProcessKey,
        command: &[u8],
        orphan: ProcessKey,
        time: u64,
    ) -> bool {
        let Some(node) = model
            .tree
            .get(orphan)
            .filter(|node| node.state.member.session.is_some())
        else {
            return false;
        };
        let body = EventBody::Orphan {
            process: ProcessRef::new(model, node),
            old_parent: Some(parent),
            parent_command: command.to_vec(),
        };
        self.emit(time, body);
        true
    }

    /// Queues an update of the kernel's map entry of a process, unless it has no entry and needs none.
    fn note_map_change(&mut self, node: &Node) {
        let mapped = node.membership.is_some_and(|entry| entry.flags != 0);
        let tracked =
            node.state.member.session.is_some() || self.tracks_scope && node.state.member.in_scope;
        if mapped || tracked || node.state.member.boundary.is_some() || node.state.member.watched {
            self.map_changes.push(node.key);
        }
    }

    /// Notes that all members of a session may need new map entries and facts.
    pub fn note_members_changed(&mut self, model: &Model, session: &Session) {
        let members = session.members().filter_map(|pid| model.tree.by_pid(pid));
        for node in members {
            self.map_changes.push(node.key);
            self.new_images.push(node.key);
        }
    }

    /// Counts and emits a signal that a probe has sent. Emits the decision to reap before it, unless that was done.
    /// Does nothing if the process is unknown.
    fn on_kernel_signal(&mut self, model: &Model, key: ProcessKey, signal: u8, time: u64) {
        let node = model.tree.get(key);
        let signal = Signal::try_from(i32::from(signal));
        if let (Some(node), Ok(signal)) = (node, signal) {
            self.kernel_signals += 1;
            self.map_changes.push(key);
            if !self.reaper.has_reported(key) && self.decision_emitted.insert(key) {
                // Probes signal after the root's exit, and at a fork or exec after SIGKILL was due.
                let reason = match signal {
                    Signal::SIGTERM => Reason::RootExited,
                    _ => Reason::ForkedAfterRootExit,
                };
                let names = DecisionNames {
                    verdict: "reap",
                    // Only a service in this mode lets the probes signal.
                    mode: Mode::Enforce.name(),
                    reason: reason.name(),
                    rule: None,
                    wait: None,
                    memory: None,
                };
                let process = ProcessRef::new(model, node);
                self.emit(
                    time,
                    EventBody::Decision {
                        process,
                        decision: names,
                    },
                );
            }
            let sent = SentSignal {
                key,
                signal,
                latency: None,
                by: SentBy::Kernel,
            };
            let process = ProcessRef::new(model, node);
            self.emit(time, EventBody::Signal { process, sent });
        }
    }

    /// Emits the record of a change of a session, and queues the work that follows, such as evaluations. A closed
    /// session is only queued: its record follows once its members are decided. `time` is in ns since boot.
    pub fn on_session_event(&mut self, model: &Model, time: u64, session_event: &SessionEvent) {
        match session_event {
            SessionEvent::Opened { session, starter } => {
                let Some(session) = model.sessions.get(*session) else {
                    return;
                };
                let Some(root) = model.tree.get(session.root) else {
                    return;
                };
                self.sessions_opened += 1;
                self.changed_sessions.push(session.id);
                if model.has_rules_for_root(session.root) {
                    self.queued.push(Queued::Process(session.root));
                }
                self.map_changes.extend(root.parent);
                // Members that were discovered before the session was known.
                self.note_members_changed(model, session);
                let name = |id: Option<SessionId>| {
                    let session = id.and_then(|id| model.sessions.get(id));
                    session.map(SessionRef::from)
                };
                let body = EventBody::SessionOpen {
                    process: ProcessRef::new(model, root),
                    kind: session.kind,
                    rule: session.agent.clone(),
                    outer: name(session.outer),
                    starter: name(*starter),
                };
                self.emit(time, body);
            }
            SessionEvent::Boundary { key, session, rule } => {
                self.map_changes.push(*key);
                let Some(node) = model.tree.get(*key) else {
                    return;
                };
                let session = model.sessions.get(*session).map(SessionRef::from);
                self.emit(
                    time,
                    EventBody::Boundary {
                        process: ProcessRef::new(model, node),
                        session,
                        rule: rule.clone(),
                    },
                );
            }
            SessionEvent::Relaunched {
                session,
                old_root,
                root,
            } => {
                // The session has a new root, so its end is no longer decided.
                self.queued.remove(Queued::Session(*session));
                self.changed_sessions.push(*session);
                self.map_changes.push(*root);
                if model.has_rules_for_root(*root) {
                    self.queued.push(Queued::Process(*root));
                }
                let Some(session) = model.sessions.find(*session).map(SessionRef::from) else {
                    return;
                };
                let Some(node) = model.tree.get(*root) else {
                    return;
                };
                self.emit(
                    time,
                    EventBody::SessionRelaunch {
                        session,
                        process: ProcessRef::new(model, node),
                        old_root: *old_root,
                    },
                );
            }
            SessionEvent::RootExited { session } => {
                self.queued.push(Queued::Session(*session));
                let Some(session) = model.sessions.find(*session) else {
                    return;
                };
                self.changed_sessions.push(session.id);
                if session.succession == Succession::Awaited {
                    self.awaiting_successor.push(session.id);
                }
                let members = model
                    .sessions
                    .with_nested(session.id)
                    .map(|s| s.members().len())
                    .sum();
                let Some(root_exit) = session.root_exit else {
                    return;
                };
                let (root, exit_status, kind) = (session.root, root_exit.exit_status, session.kind);
                let session = SessionRef::from(session);
                self.emit(
                    time,
                    EventBody::SessionRootExit {
                        session,
                        kind,
                        root,
                        exit_status,
                        members,
                    },
                );
            }
            // Emitted and evaluated once all pre-existing processes are read.
            SessionEvent::Restored { .. } => {}
            SessionEvent::Closed { session } => {
                let name = SessionRef::from(&**session);
                self.closed_sessions
                    .push((session.id, name, session.last_exit_at))
            }
        }
    }

    /// Returns whether the stream has records about the life of a process: of members, or of all processes in scope.
    fn is_emitted(&self, node: &Node) -> bool {
        node.state.member.session.is_some()
            || (self.events == EventScope::All && node.state.member.in_scope)
    }

    fn emit_lifecycle(
        &mut self,
        model: &Model,
        node: &Node,
        time: u64,
        event: Lifecycle,
        provenance: Provenance,
    ) {
        if self.is_emitted(node) {
            self.emit(
                time,
                EventBody::Lifecycle {
                    event,
                    process: ProcessRef::new(model, node),
                    provenance,
                },
            );
        }
    }

    fn emit(&mut self, time: u64, body: EventBody) {
        self.out.push(EventRecord {
            boot_ns: time,
            body,
        });
    }
}
