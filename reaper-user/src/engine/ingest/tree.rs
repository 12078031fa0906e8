//! Handles changes of the process tree, and the signals that probes have sent.

use std::sync::Arc;

use nix::sys::signal::Signal;
use reaper_common::MEMBER_SIGKILL_SENT;

use super::Ingest;
use crate::config::Mode;
use crate::engine::queue::Queued;
use crate::export::{
    Adopter, Ancestor, DecisionNames, EventBody, LEFT_RUNNING, Lifecycle, ProcessRef,
};
use crate::reap::{SentBy, SentSignal};
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use reaper_model::policy::{Reason, Verdict};
use reaper_model::{Model, Node, TreeChange};

/// Limit of forks by which a program becomes a daemon.
const DAEMON_FORKS_MAX: usize = 4;

impl Ingest {
    /// Emits and queues what follows from a change of the process tree, as [`Ingest::on_output`].
    pub(super) fn on_change(&mut self, model: &Model, event: &Event, change: &TreeChange) {
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
                if exit_status == ExitStatus::Exited(0) {
                    self.emit_note(model, node, time);
                }
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
                self.would_reap.remove(&node.key);
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

    /// Emits an orphan record if the process is a member, and queues its evaluation. Its adopter is looked up later.
    fn on_orphan(&mut self, model: &Model, parent: &Node, orphan: ProcessKey, time: u64) {
        self.without_adopter.push(orphan);
        if self.emit_orphan(model, parent.key, &parent.image.comm, orphan, time) {
            self.queued.push(Queued::Process(orphan));
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

    /// Reports a member that has exited with status 0, if a rule says that what it started may still run.
    fn emit_note(&mut self, model: &Model, node: &Node, time: u64) {
        let session = node.state.member.session;
        let Some(rule) = session.and_then(|_| model.rules.note(&node.image)) else {
            return;
        };
        let decision = DecisionNames {
            verdict: Verdict::Report.name(),
            mode: self.mode.name(),
            reason: LEFT_RUNNING,
            rule: Some(Arc::clone(model.rules.name(rule))),
            wait: None,
            memory: None,
            ancestors: Ancestor::all(&model.tree, node.birth_parent),
        };
        let process = ProcessRef::new(model, node);
        self.emit(time, EventBody::Decision { process, decision });
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
                    ancestors: Ancestor::all(&model.tree, node.birth_parent),
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
}
