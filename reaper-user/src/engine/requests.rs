//! Where questions meet the model: what is asked through the socket is answered by copies of what is known.
//!
//! No file is read here and nothing is put into words: whoever asks is not to keep a signal waiting.

mod explanation;
#[cfg(test)]
mod tests;
mod view;

use std::time::Duration;

use super::Engine;
use super::ingest::Queued;
use super::keeps::UnsavedKeep;
use crate::api::messages::{EngineReply, EngineRequest, RequestKind, ScanContext};
use crate::api::peer::{Peer, SignalTarget};
use crate::api::{ErrorResponse, KeepDone, Status};
use crate::config::Mode;
use crate::export::{EventBody, EventRecord, KeepDuration, ProcessRef};
use crate::reap::ReapOutcome;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::leftover::LeftoverVerdict as Left;
use reaper_model::policy::Verdict;
use reaper_model::session::SessionId;
use reaper_model::user_keep::UserKeep;
use view::View;

impl Engine {
    /// Answers a question, from all that the kernel has told by now.
    /// Gives how many records were read for that.
    pub(super) fn on_request(&mut self, ask: EngineRequest) -> u64 {
        let EngineRequest {
            peer,
            question,
            answer,
        } = ask;
        if question == RequestKind::Reload {
            self.reload(answer);
            return 0;
        }
        // Whoever has asked may have given up.
        if answer.is_closed() {
            return 0;
        }
        let mut read = self.settle();
        self.model.set_now(self.kernel.clock.boot_time());
        let said = self.reply(peer, question);
        // The probes know of what was ordered before it is said to be done.
        read += self.settle();
        self.send_reply(said.unwrap_or_else(EngineReply::Refused), answer);
        read
    }

    fn reply(&mut self, peer: Peer, question: RequestKind) -> Result<EngineReply, ErrorResponse> {
        let view = View::new(&self.model, peer);
        Ok(match question {
            RequestKind::Status => EngineReply::Status {
                status: Box::new(self.status(&view)),
                began: self.started_at,
                members: view.members().map(|node| node.key.pid).collect(),
            },
            RequestKind::Tree { agent, all } => {
                EngineReply::Tree(view.tree(agent.as_deref(), all)?)
            }
            RequestKind::Explain { pid } => {
                let story = view.explain(pid)?;
                let node = self.model.tree.get(story.row.key);
                let ladder = node.and_then(|node| self.model.escalation_of(node));
                let grace = self.ingest.reaper.grace(ladder, self.settings.times);
                EngineReply::Explain(Box::new(crate::api::messages::ExplainSnapshot {
                    enforce: self.settings.mode == Mode::Enforce,
                    mode_reason: self.settings.mode_reason.clone(),
                    grace,
                    gap: self.gap.is_some(),
                    unwatched: self.settings.config.reap_leftovers
                        && story.row.key.start < self.started_at,
                    ..story
                }))
            }
            RequestKind::Agents => EngineReply::Agents(view.agents()),
            RequestKind::Keeps => EngineReply::Keeps(view.keeps()),
            RequestKind::Keep {
                target,
                lasts,
                tree,
            } => EngineReply::Keep(self.keep(peer, target, lasts, tree)?),
            RequestKind::Unkeep { target } => EngineReply::Keep(self.unkeep(peer, target)?),
            RequestKind::Scan { reap, .. } => {
                let rows = view.scan();
                if reap {
                    self.reevaluate_all()?;
                }
                EngineReply::Scan(rows, Box::new(self.scan_context()))
            }
            RequestKind::Watched => EngineReply::Watched(Box::new(self.scan_context())),
            RequestKind::Emit(records) => {
                self.emit_all(records);
                EngineReply::Emitted
            }
            // Answered elsewhere: it takes more than a look.
            RequestKind::Reload => {
                return Err(ErrorResponse::new("conflict", "it is being seen to"));
            }
        })
    }

    fn status(&self, view: &View<'_>) -> Status {
        let count = &self.count;
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: self.kernel.processes.own_pid(),
            mode: self.settings.mode.name().into(),
            mode_reason: self.settings.mode_reason.clone(),
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
            signals: count.signals + self.ingest.kernel_signals,
            reaped: count.reaped,
            kept: self.kept(),
            failed: count.failed,
            would_have_reaped: self.would_have_reaped,
            memory: count.memory,
            zombies: 0,
            pin_dir: self.pinned(),
        }
    }

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

    /// Tells what was found and done by others of this program, and counts it.
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
                EventBody::Leftover {
                    leftover: stray, ..
                } if !enforce && stray.verdict == Left::Reap => {
                    self.would_have_reaped += 1;
                }
                _ => {}
            }
            self.ingest.out.push(record);
        }
        self.ingest.out.flush();
    }

    /// Keeps a process because a user wants it, and says so in the stream.
    fn keep(
        &mut self,
        peer: Peer,
        target: SignalTarget,
        lasts: Option<Duration>,
        tree: bool,
    ) -> Result<KeepDone, ErrorResponse> {
        let key = self.authorize_target(peer, &target)?;
        let keep = UserKeep {
            until_monotonic_ns: lasts.map(|lasts| self.kernel.clock.after(lasts)),
            with_descendants: tree,
            by_uid: peer.uid,
            made_at: self.kernel.clock.wall_time(),
        };
        let processes = self.model.keep(key, keep);
        if processes == 0 {
            return Err(self.no_session_error(&target));
        }
        // What was kept with all below it stays so.
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
        Ok(done(key, processes))
    }

    fn unkeep(&mut self, peer: Peer, target: SignalTarget) -> Result<KeepDone, ErrorResponse> {
        let key = self.authorize_target(peer, &target)?;
        if let Some(top) = self.model.kept_with(key) {
            let what = format!(
                "process {} is kept with process {}: take that back with `reaper unkeep {}`, and it goes for all of its tree",
                key.pid, top.pid, top.pid
            );
            return Err(ErrorResponse::new("conflict", what));
        }
        let wish = self.model.keep_to_revoke(key);
        let processes = self.model.unkeep(key);
        if processes == 0 {
            let what = format!("nobody has asked to keep process {}", key.pid);
            return Err(ErrorResponse::new("not_found", what));
        }
        self.emit_keep(key, peer, None, processes);
        self.unsaved_keep = wish.map(
            |UserKeep {
                 by_uid: by,
                 made_at: made,
                 ..
             }| UnsavedKeep::Unkeep { by, made },
        );
        self.on_keep_changed(key);
        Ok(done(key, processes))
    }

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

    /// Who it is that an order is about, if the one who gives it may: what another has asked for is theirs to
    /// take back.
    fn authorize_target(
        &self,
        peer: Peer,
        target: &SignalTarget,
    ) -> Result<ProcessKey, ErrorResponse> {
        let pid = target.key.pid;
        let key = match self.model.tree.by_pid(pid).map(|node| node.key) {
            Some(key) if key.has_same_tick(target.key) => key,
            Some(key) if key.start > target.key.start => {
                let what = format!("there is no process {pid} any more");
                return Err(ErrorResponse::new("not_found", what));
            }
            _ => return Err(self.no_session_error(target)),
        };
        match self.model.keep_to_revoke(key) {
            Some(keep) if keep.by_uid != peer.uid && !peer.is_root() => {
                let what = format!(
                    "process {pid} is kept because user {} has asked for it: only they or root may change that",
                    keep.by_uid
                );
                Err(ErrorResponse::new("eperm", what))
            }
            _ => Ok(key),
        }
    }

    /// Why nothing is to be ordered of a process that lived when it was asked for.
    fn no_session_error(&self, target: &SignalTarget) -> ErrorResponse {
        let SignalTarget { key, comm, .. } = target;
        let pid = key.pid;
        let what = if self.gap.is_some() {
            format!(
                "process {pid} ({comm}) lives, but events are missing and whose it is is being looked for: try again"
            )
        } else {
            let strays = if self.settings.config.reap_leftovers && key.start < self.started_at {
                "; older than this service, it may be reaped as what an agent left behind: `reaper scan` tells, and \
                 `reap_leftovers = false` and a restart prevent it"
            } else {
                ": nothing would reap it"
            };
            format!("process {pid} ({comm}) lives but belongs to no session{strays}")
        };
        ErrorResponse::new("conflict", what)
    }

    /// A user's wish has changed what is to become of a process, and perhaps of what descends from it.
    fn on_keep_changed(&mut self, key: ProcessKey) {
        let Some(session) = self
            .model
            .tree
            .get(key)
            .and_then(|node| node.state.member.session)
        else {
            return;
        };
        // The wish may be for one that this session is nested in.
        let outermost = self.model.sessions.with_enclosing(session).last();
        let session = outermost.map_or(session, |outermost| outermost.id);
        let members: Vec<ProcessKey> = self.members_within(session).collect();
        // What was never decided about is nobody's concern yet.
        let known = |key: &&ProcessKey| self.ingest.decided.contains_key(*key);
        let known = members.iter().filter(known).copied();
        let known: Vec<_> = known.map(Queued::Process).collect();
        self.ingest.queued.extend(known);
        self.ingest.map_changes.extend(members);
    }

    /// Members of a session and of those nested in it.
    fn members_within(&self, session: SessionId) -> impl Iterator<Item = ProcessKey> {
        let sessions = self.model.sessions.with_nested(session);
        let members = sessions.flat_map(|session| session.members());
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        members.map(|node| node.key)
    }

    /// Decides about all that is due once more, whatever was decided before.
    fn reevaluate_all(&mut self) -> Result<(), ErrorResponse> {
        if self.settings.mode == Mode::Observe {
            let reason = self.settings.mode_reason.as_deref();
            let reason = reason.unwrap_or("start it with --enforce to have anything reaped");
            let what = format!("this service only observes: {reason}");
            return Err(ErrorResponse::new("conflict", what));
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

fn done(key: ProcessKey, processes: usize) -> KeepDone {
    KeepDone {
        durable: false,
        pid: key.pid,
        processes: processes as u64,
    }
}
