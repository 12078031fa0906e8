//! What each step of the model means for the rest: what is told, what is to be decided, what the
//! kernel has to hear of.

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;
use reaper_common::MEMBER_SIGKILL_SENT;

use crate::config::EventScope;
use crate::export::{
    Adopter, DecisionNames, EventBody, EventRecord, FreedMemory, Lifecycle, ProcessRef, SessionRef,
    Sink,
};
use crate::reap::{Reaper, SentBy, SentSignal};
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use reaper_model::policy::{Reason, Verdict};
use reaper_model::session::{Session, SessionEvent, SessionId, Succession};
use reaper_model::{Model, Node, Output, TreeChange};

/// What has to be decided about once the ring is drained.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queued {
    Process(ProcessKey),
    /// All members of a session and of those nested in it.
    Session(SessionId),
}

/// All that has to be decided about, each once, in the order in which it came.
#[derive(Default)]
pub struct Queue {
    waiting: HashSet<Queued>,
    /// Some may not be in `waiting` any more.
    order: Vec<Queued>,
}

impl Queue {
    /// Adds one, unless it waits already.
    pub fn push(&mut self, queued: Queued) {
        if self.waiting.insert(queued) {
            self.order.push(queued);
        }
    }

    /// Removes one, if it waits.
    pub fn remove(&mut self, queued: Queued) {
        self.waiting.remove(&queued);
    }

    /// Whether one waits.
    pub fn contains(&self, queued: Queued) -> bool {
        self.waiting.contains(&queued)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns all.
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

/// What was done about a session.
#[derive(Default)]
pub struct Tally {
    pub reaped: u32,
    pub failed: u32,
    /// Memory of those reaped.
    pub memory: FreedMemory,
    /// Records that were lost while it was open.
    pub lost: u64,
    /// Nothing of it lives any more, but not all ends are confirmed, or who has escaped from it is still looked for.
    pub closing_session: Option<SessionRef>,
    /// Then: when the last of its members had ended, in ns since boot.
    pub last_exit_at: u64,
    /// Its members were decided about as those of one whose root is gone.
    pub is_evaluated: bool,
    /// Counts of the last report that it is closed. The stream has the first report only, the journal each change.
    pub reported: Option<Counts>,
}

/// Numbers of members in a report that a session is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
}

/// See the module.
pub struct Ingest {
    pub reaper: Reaper,
    pub out: Sink,
    events: EventScope,
    /// Who descends from a process in scope is followed, whether or not an agent has begun there.
    scoped: bool,
    /// Who is found now is news: it came since the last look.
    pub emits_discovered: bool,
    pub queued: Queue,
    /// What was decided last about a living member.
    pub decided: HashMap<ProcessKey, (Verdict, Reason)>,
    /// Sessions whose root has exited and that another agent may continue.
    pub awaiting_successor: Vec<SessionId>,
    /// Orphans whose adopter is not known yet.
    pub without_adopter: Vec<ProcessKey>,
    /// Members that run another program, or have only now been found to be members.
    pub new_images: Vec<ProcessKey>,
    /// Of whom what they have from their makers may tell whose they are.
    pub unattributed: Vec<ProcessKey>,
    /// Who lives and has come to be known by something else than a fork or a look: of whom the fork was lost.
    pub late_discovered: HashSet<ProcessKey>,
    /// These are taken note of: the source tells of the forks of all.
    pub notes_late_discovered: bool,
    /// Of whom the kernel's map may have to say something else than it does.
    pub map_changes: Vec<ProcessKey>,
    /// Sessions that are not any more what was left of them in the kernel.
    pub changed_sessions: Vec<SessionId>,
    /// Sessions of which nothing lives, and when the last of each had ended.
    pub closed_sessions: Vec<(SessionId, SessionRef, u64)>,
    /// Sessions opened.
    pub sessions_opened: u64,
    /// Signals that probes have sent.
    pub kernel_signals: u64,
    /// To whom: that they are to be reaped has been told with the signal.
    pub decision_emitted: HashSet<ProcessKey>,
    /// Ends of processes that somebody else has signalled, and that nobody had claimed yet.
    pub unclaimed_exits: Vec<(ProcessRef, SessionId, ExitStatus, Signal)>,
}

impl Ingest {
    pub fn new(reaper: Reaper, out: Sink, events: EventScope, scoped: bool) -> Ingest {
        Ingest {
            reaper,
            out,
            events,
            scoped,
            emits_discovered: false,
            queued: Queue::default(),
            decided: HashMap::new(),
            awaiting_successor: Vec::new(),
            without_adopter: Vec::new(),
            new_images: Vec::new(),
            unattributed: Vec::new(),
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

    /// Handles an output of the model.
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

    fn on_change(&mut self, model: &Model, event: &Event, change: &TreeChange) {
        let Event {
            time,
            provenance: told_by,
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
                        self.unattributed.push(key)
                    }
                    EventKind::Discovered(_) | EventKind::Fork { .. } => {}
                    _ if self.notes_late_discovered => drop(self.late_discovered.insert(key)),
                    _ => {}
                }
                // The process table is no news, nor is what was known before.
                if provenance != Provenance::Procfs || self.emits_discovered {
                    let how = match node.state.member.inferred {
                        Some(_) => Provenance::Inferred,
                        None => provenance,
                    };
                    self.emit_lifecycle(model, node, time, Lifecycle::Fork, how);
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
                // It may have become a server.
                if node.state.member.root && model.has_rules_for_root(key) {
                    self.queued.push(Queued::Process(key));
                }
                // As the program of its root says whether the probes may end a session.
                self.changed_sessions
                    .extend(node.state.member.session.filter(|_| node.state.member.root));
                self.note_map_change(node);
                self.emit_lifecycle(model, node, time, Lifecycle::Exec, told_by);
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
                self.emit_lifecycle(model, node, time, Lifecycle::Move, told_by);
            }
            TreeChange::Exited {
                ref node,
                exit_status: ended,
                peak_rss,
                provenance,
                ref orphans,
            } => {
                self.emit_lifecycle(
                    model,
                    node,
                    time,
                    Lifecycle::Exit {
                        exit_status: ended,
                        peak_rss,
                    },
                    provenance,
                );
                let claimed = self.reaper.is_claimed(node.key);
                self.decision_emitted.remove(&node.key);
                self.late_discovered.remove(&node.key);
                self.reaper.on_exit(node, ended, orphans);
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
                    let who = ProcessRef::new(model, node);
                    self.unclaimed_exits.push((who, session, ended, signal));
                }
                // Kept, or to be decided about again.
                let was_left = self
                    .decided
                    .remove(&node.key)
                    .is_none_or(|(verdict, _)| verdict != Verdict::Reap);
                if let Some(id) = node.state.member.session
                    && was_left
                    && model.sessions.due(id).is_some()
                {
                    self.queued.push(Queued::Session(id));
                }
                orphans
                    .iter()
                    .for_each(|orphan| self.on_orphan(model, node, *orphan, time));
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
                    // Its parent's exit is not known, or not yet.
                    self.on_reparented_orphan(model, old_parent, key, time);
                }
                // By the key that the tree knows it by.
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
                    provenance: told_by,
                };
                self.emit(time, body);
            }
        }
    }

    /// It may be a member from now on.
    fn on_joined(&mut self, model: &Model, node: &Node) {
        if node.state.member.session.is_some_and(|_| {
            model.rules.has_rules_for_living(false) || model.escalation_of(node).is_some()
        }) {
            self.queued.push(Queued::Process(node.key));
        }
        self.note_map_change(node);
    }

    /// Handles a process that is found to be a member later than it began.
    pub fn on_late_join(&mut self, model: &Model, key: ProcessKey, time: u64) {
        let Some(node) = model.tree.get(key) else {
            return;
        };
        self.on_joined(model, node);
        self.new_images.push(key);
        let how = match node.state.member.inferred {
            Some(_) => Provenance::Inferred,
            None => node.provenance,
        };
        self.emit_lifecycle(model, node, time, Lifecycle::Fork, how);
    }

    fn on_orphan(&mut self, model: &Model, parent: &Node, orphan: ProcessKey, time: u64) {
        self.without_adopter.push(orphan);
        if self.emit_orphan(model, parent.key, &parent.image.comm, orphan, time) {
            self.queued.push(Queued::Process(orphan));
        }
    }

    fn on_reparented_orphan(
        &mut self,
        model: &Model,
        old_parent: ProcessKey,
        orphan: ProcessKey,
        time: u64,
    ) {
        let command = model.tree.comm(old_parent);
        // The exit of a root is reported after its children, which the probe may have signalled. Until then a member of
        // its session would pass for detached; its exit re-evaluates all of them.
        let exits_with = model
            .tree
            .get(old_parent)
            .and_then(|parent| parent.state.member.session);
        let own = model
            .tree
            .get(orphan)
            .and_then(|node| node.state.member.session);
        let is_member = |outer| {
            let mut outwards = own
                .into_iter()
                .flat_map(|id| model.sessions.with_enclosing(id));
            outwards.any(|session| session.id == outer)
        };
        if self.emit_orphan(model, old_parent, command, orphan, time)
            && !exits_with.is_some_and(is_member)
        {
            self.queued.push(Queued::Process(orphan));
        }
    }

    /// Tells of an orphan, if it is a member.
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

    /// Notes whose mark in the kernel may have to change: of strangers there is none.
    fn note_map_change(&mut self, node: &Node) {
        let marked = node.membership.is_some_and(|mark| mark.flags != 0);
        let followed =
            node.state.member.session.is_some() || self.scoped && node.state.member.in_scope;
        if marked || followed || node.state.member.boundary.is_some() || node.state.member.watched {
            self.map_changes.push(node.key);
        }
    }

    /// Notes all members of a session.
    pub fn note_members_changed(&mut self, model: &Model, session: &Session) {
        let members = session.members().filter_map(|pid| model.tree.by_pid(pid));
        for node in members {
            self.map_changes.push(node.key);
            self.new_images.push(node.key);
        }
    }

    /// A probe has sent a signal.
    fn on_kernel_signal(&mut self, model: &Model, key: ProcessKey, signal: u8, time: u64) {
        let node = model.tree.get(key);
        let signal = Signal::try_from(i32::from(signal));
        if let (Some(node), Ok(signal)) = (node, signal) {
            self.kernel_signals += 1;
            self.map_changes.push(key);
            if !self.reaper.has_reported(key) && self.decision_emitted.insert(key) {
                // On what the service has left word of: at the root's exit, or when nothing else helped.
                let reason = match signal {
                    Signal::SIGTERM => Reason::RootExited,
                    _ => Reason::ForkedAfterRootExit,
                };
                let names = DecisionNames {
                    verdict: "reap",
                    reason: reason.name(),
                    rule: None,
                    memory: None,
                };
                let who = ProcessRef::new(model, node);
                self.emit(
                    time,
                    EventBody::Decision {
                        process: who,
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
            let who = ProcessRef::new(model, node);
            self.emit(time, EventBody::Signal { process: who, sent });
        }
    }

    /// Takes in what became of a session.
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
                // Some may have been found before it was known whose they are.
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
                // An end that was told of before was none.
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
                let Some(gone) = session.root_exit else {
                    return;
                };
                let (root, ended, kind) = (session.root, gone.exit_status, session.kind);
                let session = SessionRef::from(session);
                self.emit(
                    time,
                    EventBody::SessionRootExit {
                        session,
                        kind,
                        root,
                        exit_status: ended,
                        members,
                    },
                );
            }
            // Told, and decided about, when all is taken in.
            SessionEvent::Restored { .. } => {}
            SessionEvent::Closed { session } => {
                let name = SessionRef::from(&**session);
                self.closed_sessions
                    .push((session.id, name, session.last_exit_at))
            }
        }
    }

    fn is_emitted(&self, node: &Node) -> bool {
        node.state.member.session.is_some()
            || (self.events == EventScope::All && node.state.member.in_scope)
    }

    fn emit_lifecycle(
        &mut self,
        model: &Model,
        node: &Node,
        time: u64,
        what: Lifecycle,
        provenance: Provenance,
    ) {
        if self.is_emitted(node) {
            self.emit(
                time,
                EventBody::Lifecycle {
                    what,
                    process: ProcessRef::new(model, node),
                    provenance,
                },
            );
        }
    }

    fn emit(&mut self, time: u64, body: EventBody) {
        self.out.push(EventRecord { time, body });
    }
}
