//! Answers requests of the API with copies of the model's state.
//!
//! Reads no file and formats no text, as a slow reply would delay signals. The API's thread does both.

mod explanation;
#[cfg(test)]
mod tests;
mod view;

use std::time::Duration;

use super::Engine;
use super::keeps::UnsavedKeep;
use super::queue::Queued;
use crate::api::messages::{EngineReply, EngineRequest, RefusedReload, RequestKind, ScanContext};
use crate::api::peer::{Peer, SignalTarget};
use crate::api::{KeepResult, ProblemDetails, Status, StatusCode};
use crate::config::Mode;
use crate::export::{EventBody, EventRecord, KeepDuration, ProcessRef};
use crate::reap::ReapOutcome;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::facts::{FactSet, Facts};
use reaper_model::leftover::LeftoverVerdict as Left;
use reaper_model::policy::Verdict;
use reaper_model::session::SessionId;
use reaper_model::user_keep::UserKeep;
use view::View;

impl Engine {
    /// Answers a request after applying all events so far. The reply to a reload is sent later. Does nothing if the
    /// client has disconnected. Returns the number of records read.
    pub(super) fn on_request(&mut self, request: EngineRequest) -> u64 {
        let EngineRequest {
            peer,
            kind,
            reply: sender,
        } = request;
        if kind == RequestKind::Reload {
            self.reload(sender);
            return 0;
        }
        // The client may have disconnected.
        if sender.is_closed() {
            return 0;
        }
        let mut read = self.settle();
        self.set_model_time();
        let reply = self.reply(peer, kind);
        // The probes must know of a change before it is reported as done.
        read += self.settle();
        self.send_reply(reply.unwrap_or_else(EngineReply::Refused), sender);
        read
    }

    /// Executes a request and returns the reply. The error is the reply to a refused request.
    fn reply(&mut self, peer: Peer, kind: RequestKind) -> Result<EngineReply, ProblemDetails> {
        if let RequestKind::ExplainWith { key, sockets, at } = &kind {
            let read = FactSet::LISTENING | FactSet::LOCAL_SOCKETS;
            self.model.set_facts(*key, read, Facts::clone(sockets), *at);
        }
        let view = View::new(&self.model, peer).in_mode(self.settings.mode);
        Ok(match kind {
            RequestKind::Status => EngineReply::Status {
                status: Box::new(self.status(&view)),
                began: self.started_at,
                members: view.members().map(|node| node.key.pid).collect(),
                refused: self.refused_reload(peer),
            },
            RequestKind::Tree { agent, all } => {
                EngineReply::Tree(view.tree(agent.as_deref(), all)?)
            }
            RequestKind::Explain { pid }
            | RequestKind::ExplainWith {
                key: ProcessKey { pid, .. },
                ..
            } => self.explain(&view, pid)?,
            RequestKind::Agents => EngineReply::Agents(view.agents()),
            RequestKind::TestRules { pid } => {
                EngineReply::TestRules(pid, peer, self.model.rules.shared_rules())
            }
            RequestKind::Keeps => EngineReply::Keeps(view.keeps()),
            RequestKind::Keep {
                target,
                lasts,
                tree,
            } => EngineReply::Keep(self.keep(peer, target, lasts, tree)?),
            RequestKind::Unkeep { target } => {
                let pid = target.key.pid;
                let done = self.unkeep(peer, target)?;
                let view = View::new(&self.model, peer).in_mode(self.settings.mode);
                let released = match self.explain(&view, pid) {
                    Ok(EngineReply::Explain(snapshot)) => Some(snapshot),
                    _ => None,
                };
                EngineReply::Unkeep(done, released)
            }
            RequestKind::Scan { reap, .. } => {
                let rows = view.scan();
                if reap {
                    self.reevaluate_all()?;
                }
                EngineReply::Scan(rows, Box::new(self.scan_context()))
            }
            RequestKind::ScanContext => EngineReply::ScanContext(Box::new(self.scan_context())),
            RequestKind::Emit(records) => {
                self.emit_all(records);
                EngineReply::Emitted
            }
            RequestKind::Config => EngineReply::Config(Box::new(self.config_in_force())),
            // Handled by the caller, as the reply comes later.
            RequestKind::Reload => {
                return Err(ProblemDetails::new(
                    StatusCode::CONFLICT,
                    "the config is already being reloaded; try again in a few seconds",
                ));
            }
        })
    }

    /// Returns the refusal of the config at the last reload. Other users than those who may see the config get no error.
    fn refused_reload(&self, peer: Peer) -> Option<RefusedReload> {
        let refused = self.refused.clone()?;
        let error = match peer.is_privileged() {
            true => refused.error,
            false => String::new(),
        };
        Some(RefusedReload { error, ..refused })
    }

    /// Returns the status that a user may see. The API's thread fills in start time, uptime, capabilities and
    /// zombies.
    pub(super) fn status_for(&self, peer: Peer) -> Status {
        self.status(&View::new(&self.model, peer).in_mode(self.settings.mode))
    }

    /// Returns the status. The API's thread fills in start time, uptime, zombies and a refused config.
    fn status(&self, view: &View<'_>) -> Status {
        let count = &self.count;
        let stream = self.ingest.out.losses();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: self.kernel.processes.own_pid(),
            mode: self.settings.mode.name().into(),
            mode_reason: self.settings.mode_reason.clone(),
            config: self.settings.config.file.clone(),
            config_refused: None,
            config_waiting: self
                .settings
                .running
                .restart_only_changes(&self.settings.config),
            source: self.source.name().into(),
            rejected_sources: self
                .settings
                .rejected_sources
                .iter()
                .map(ToString::to_string)
                .collect(),
            scope: self.settings.scope_names.clone(),
            since: String::new(),
            uptime_s: 0,
            processes: self.model.tree.len() as u64,
            sessions_open: view.sessions().count() as u64,
            sessions: self.ingest.sessions_opened,
            events: count.events,
            lost: count.lost,
            gaps: self.gaps,
            gap: self.gap.as_ref().map(|gap| gap.reason().into()),
            stream_dropped: stream.dropped,
            stream_error: stream.error,
            signals: count.signals + self.ingest.kernel_signals,
            reaped: count.reaped,
            kept: self.kept(),
            failed: count.failed,
            would_have_reaped: count.would_have_reaped,
            memory: count.memory,
            capabilities: Vec::new(),
            missing_capabilities: Vec::new(),
            zombies: 0,
            pin_dir: self.pinned(),
        }
    }

    /// Returns what a scan for leftovers needs from the engine: members, rules and settings.
    fn scan_context(&self) -> ScanContext {
        let members = self.model.sessions.iter();
        let members = members.flat_map(|session| session.members());
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        ScanContext {
            members: members.map(|node| node.key).collect(),
            rules: self.model.rules.clone(),
            scope: self.settings.scope.clone(),
            started_ns: self.started_at,
            enforce: self.settings.mode == Mode::Enforce,
            times: self.settings.times,
            gap: self.gap.is_some(),
        }
    }

    /// Emits and counts records of another part of this program, such as the scan for leftovers.
    fn emit_all(&mut self, records: Vec<EventRecord>) {
        let enforce = self.settings.mode == Mode::Enforce;
        for record in records {
            match &record.body {
                EventBody::Outcome {
                    outcome, memory, ..
                } => match outcome {
                    ReapOutcome::Exited(_) => {
                        self.count.reaped += 1;
                        self.count.memory.add(*memory);
                    }
                    ReapOutcome::Failed(_) => self.count.failed += 1,
                    ReapOutcome::NotSent(_) => {}
                },
                EventBody::Leftover { leftover, .. }
                    if !enforce && leftover.verdict == Left::Reap =>
                {
                    self.count.would_have_reaped += 1;
                }
                _ => {}
            }
            self.ingest.out.push(record);
        }
        self.ingest.out.flush();
    }

    /// Keeps a process on behalf of a user, and reports that in the stream. With `tree`, also keeps its descendants.
    /// `lasts` is `None` for a keep without expiry. The keep is stored when the reply is sent.
    ///
    /// # Errors
    /// The process has no session or has exited, or another user keeps it.
    fn keep(
        &mut self,
        peer: Peer,
        target: SignalTarget,
        lasts: Option<Duration>,
        tree: bool,
    ) -> Result<KeepResult, ProblemDetails> {
        let key = self.authorize_target(peer, &target)?;
        let keep = UserKeep {
            until_monotonic_ns: lasts.map(|lasts| self.kernel.clock.after(lasts)),
            with_descendants: tree,
            by_uid: peer.uid,
            made_at: self.kernel.clock.wall_time(),
        };
        let processes = self.model.keep(key, keep);
        if processes == 0 {
            return Err(no_session(&target));
        }
        // A new keep does not end an earlier one for all descendants.
        let keep = self.model.keep_to_revoke(key).unwrap_or(keep);
        let until = lasts.map(|lasts| {
            self.kernel
                .clock
                .boot_time()
                .saturating_add(sys::nanoseconds(lasts))
        });
        self.emit_keep(
            key,
            peer,
            Some(KeepDuration {
                until,
                tree: keep.with_descendants,
            }),
            processes,
        );
        self.save_keep(key, keep);
        self.on_keep_changed(key);
        Ok(keep_done(key, processes))
    }

    /// Revokes the keep of a process, for all processes that the same request covers.
    ///
    /// # Errors
    /// The process is not kept by a user, is kept with an ancestor that is alive, or another user keeps it.
    fn unkeep(&mut self, peer: Peer, target: SignalTarget) -> Result<KeepResult, ProblemDetails> {
        let key = self.authorize_target(peer, &target)?;
        if let Some(top) = self.model.kept_with(key) {
            let message = format!(
                "process {} is kept with its ancestor {}: to end that for the whole tree, run `reaper unkeep {}`",
                key.pid, top.pid, top.pid
            );
            return Err(ProblemDetails::new(StatusCode::CONFLICT, message));
        }
        let keep = self.model.keep_to_revoke(key);
        let processes = self.model.unkeep(key);
        if processes == 0 {
            let message = format!(
                "process {} is not kept by a user, so there is nothing to undo",
                key.pid
            );
            return Err(ProblemDetails::new(StatusCode::NOT_FOUND, message));
        }
        self.emit_keep(key, peer, None, processes);
        self.unsaved_keep = keep.map(
            |UserKeep {
                 by_uid: by,
                 made_at: made,
                 ..
             }| UnsavedKeep::Unkeep { by, made },
        );
        self.on_keep_changed(key);
        Ok(keep_done(key, processes))
    }

    /// Reports a keep in the stream. `kept` is `None` if it was revoked. `processes` is the number of processes it
    /// covers.
    fn emit_keep(
        &mut self,
        key: ProcessKey,
        peer: Peer,
        kept: Option<KeepDuration>,
        processes: usize,
    ) {
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        self.emit(EventBody::Keep {
            process: ProcessRef::new(&self.model, node),
            by: peer.uid,
            kept,
            processes,
        });
    }

    /// Returns the key of the target. If a user keeps it already, only that user and root may change the keep. Access
    /// to the process itself is not checked here.
    ///
    /// # Errors
    /// Another user keeps the process, its pid is in use again, or the model does not know it.
    fn authorize_target(
        &self,
        peer: Peer,
        target: &SignalTarget,
    ) -> Result<ProcessKey, ProblemDetails> {
        let pid = target.key.pid;
        let key = match self.model.tree.by_pid(pid).map(|node| node.key) {
            Some(key) if key.has_same_tick(target.key) => key,
            Some(key) if key.start > target.key.start => {
                let message = format!(
                    "process {pid} has exited, and another process has its pid now; to name that one, run the command again"
                );
                return Err(ProblemDetails::new(StatusCode::NOT_FOUND, message));
            }
            _ => return Err(no_session(target)),
        };
        match self.model.keep_to_revoke(key) {
            Some(keep) if keep.by_uid != peer.uid && !peer.is_root() => {
                let message = format!(
                    "process {pid} is kept by the user with uid {}: only that user or root can change it",
                    keep.by_uid
                );
                Err(ProblemDetails::new(StatusCode::FORBIDDEN, message))
            }
            _ => Ok(key),
        }
    }

    /// Queues the evaluation of the members whose decision may change with a keep. These are all members with a
    /// decision in the outermost session around the process and in those nested in it. Also queues updates of all map
    /// entries there.
    fn on_keep_changed(&mut self, key: ProcessKey) {
        let Some(session) = self
            .model
            .tree
            .get(key)
            .and_then(|node| node.state.member.session)
        else {
            return;
        };
        // The keep may also affect members of enclosing sessions.
        let outermost = self.model.sessions.with_enclosing(session).last();
        let session = outermost.map_or(session, |outermost| outermost.id);
        let members: Vec<ProcessKey> = self.members_within(session).collect();
        // Members without a decision are evaluated once they are due.
        let decided = |key: &&ProcessKey| self.ingest.decided.contains_key(*key);
        let decided = members.iter().filter(decided).copied();
        let decided: Vec<_> = decided.map(Queued::Process).collect();
        self.ingest.queued.extend(decided);
        self.ingest.map_changes.extend(members);
    }

    /// Returns the members of a session and of those nested in it.
    fn members_within(&self, session: SessionId) -> impl Iterator<Item = ProcessKey> {
        let sessions = self.model.sessions.with_nested(session);
        let members = sessions.flat_map(|session| session.members());
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        members.map(|node| node.key)
    }

    /// Queues all members that would be reaped, regardless of earlier decisions.
    ///
    /// # Errors
    /// The service only observes.
    fn reevaluate_all(&mut self) -> Result<(), ProblemDetails> {
        if self.settings.mode == Mode::Observe {
            let reason = self.settings.mode_reason.as_deref();
            let reason = reason.unwrap_or("start it with --enforce to reap processes");
            let message = format!("this service only observes and reaps nothing: {reason}");
            return Err(ProblemDetails::new(StatusCode::CONFLICT, message));
        }
        let members = self
            .model
            .sessions
            .iter()
            .flat_map(|session| session.members());
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        let keys: Vec<ProcessKey> = members.map(|node| node.key).collect();
        let round = self.model.evaluation();
        let due = |key: &ProcessKey| round.decide(*key).verdict == Verdict::Reap;
        let due: Vec<_> = keys.into_iter().filter(due).map(Queued::Process).collect();
        self.ingest.queued.extend(due);
        Ok(())
    }
}

/// Returns the error for a process that has no session. The server adds why it has none.
fn no_session(SignalTarget { key, comm, .. }: &SignalTarget) -> ProblemDetails {
    let message = format!("process {} ({comm}) belongs to no session", key.pid);
    ProblemDetails::new(StatusCode::CONFLICT, message)
}

/// Returns the result of a change of a keep, which is not stored yet.
fn keep_done(key: ProcessKey, processes: usize) -> KeepResult {
    KeepResult {
        durable: false,
        pid: key.pid,
        processes: processes as u64,
        why: None,
        next: None,
    }
}
