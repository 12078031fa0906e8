//! Turns each output of the model into records for the event stream and into work for the engine.
//!
//! Records are emitted at once. Decisions, updates of the kernel's maps and reads of /proc wait for the end of the
//! drain.

mod session;
mod tree;

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;

use super::EngineSettings;
use super::attribution::Unattributed;
use super::queue::{Queue, Queued};
use crate::config::{EventScope, Mode};
use crate::export::{EventBody, EventRecord, Lifecycle, ProcessRef, SessionRef, Sink};
use crate::reap::Reaper;
use reaper_model::event::{Event, ExitStatus, ProcessKey, Provenance};
use reaper_model::policy::{Reason, Verdict};
use reaper_model::session::{Session, SessionId};
use reaper_model::{Model, Node, Output};

/// Handler of the model's outputs, with the work that they leave to the engine.
pub struct Ingest {
    pub reaper: Reaper,
    pub out: Sink,
    events: EventScope,
    mode: Mode,
    /// Whether descendants of processes in the scope are tracked even without an agent.
    tracks_scope: bool,
    /// Whether discovered processes are reported as new. Off while pre-existing processes are read.
    pub emits_discovered: bool,
    pub queued: Queue<Queued>,
    /// Last decisions about living members.
    pub decided: HashMap<ProcessKey, (Verdict, Reason)>,
    /// Living members that count as processes that would have been reaped, in observe mode.
    pub would_reap: HashSet<ProcessKey>,
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
    pub map_changes: Queue<ProcessKey>,
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
    pub fn new(reaper: Reaper, out: Sink, settings: &EngineSettings) -> Ingest {
        Ingest {
            reaper,
            out,
            events: settings.events,
            mode: settings.mode,
            tracks_scope: !settings.scope.roots.is_empty(),
            emits_discovered: false,
            queued: Queue::default(),
            decided: HashMap::new(),
            would_reap: HashSet::new(),
            awaiting_successor: Vec::new(),
            without_adopter: Vec::new(),
            new_images: Vec::new(),
            unattributed: Unattributed::default(),
            late_discovered: HashSet::new(),
            notes_late_discovered: false,
            map_changes: Queue::default(),
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
