//! Going on where the service before this one was, whenever it was killed.
//!
//! Its sessions are in one map, their members, as of now, in another, and what happened meanwhile is in the
//! ring, which is read last: events tell nothing new of what the maps have said already.

use std::sync::Arc;

use reaper_common::{SESSION_SIGNALLED, SESSION_TOLD, SessionState};

use super::ingest::{Counts, Queued, Tally};
use super::map_sync::exit_status_from_wait;
use super::reconcile::Reconciled;
use super::survey::{Surveyor, Whom};
use super::{Engine, EngineError};
use crate::config::Mode;
use crate::export::{EventBody, ProcessRef, Resumed, SessionRef};
use reaper_host::source::probes::model_key;
use reaper_host::source::procfs::Liveness;
use reaper_host::sys;
use reaper_model::event::{Event, EventKind, ProcessKey, Provenance, RestoredSession, Uids};
use reaper_model::session::Succession;

/// Times that marks are written for processes that have appeared while others were.
const MARK_ROUNDS_MAX: usize = 100;

impl Engine {
    /// Takes in all that runs, and all that a service before this one has left. What happens meanwhile
    /// waits in the ring and is merged afterwards.
    pub(super) fn restore(&mut self) -> Result<(), EngineError> {
        let began = sys::boot_time();
        let lost = self.source.lost();
        let maps = self.source.maps();
        let told = maps.map_or(0, |maps| maps.lost_reported().min(lost.total));
        let probes = self.source.probes();
        let resumed = probes
            .filter(|probes| probes.is_resumed())
            .map(|probes| Resumed {
                sessions: 0,
                backlog: probes.ring().waiting(),
                lost: lost.total - told,
            });
        // Of which kinds the others were is not known any more.
        self.lost.total = told;
        if told == lost.total {
            self.lost = lost;
        }
        self.untracked_members = self.source.untracked_members();
        if resumed.is_some() {
            self.model.begin_restore();
        }
        let states = self.restore_sessions();
        // Of what was skipped before now, what is found here has to serve.
        self.skipped_probes = self.source.skipped();
        let complete = self.is_mapped();
        if !complete {
            // Whoever is followed only from now on has children of whom nobody would tell.
            self.set_seeded(false)?;
        }
        let surveyor = Surveyor::new(&*self.source, complete)?;
        let mut survey = surveyor.survey(Whom::Everybody)?;
        if survey.unreadable > 0 {
            // Whoever is not known now is nobody's from now on, and the machine may only have been busy.
            let again = surveyor.survey(Whom::Everybody)?;
            if again.unreadable < survey.unreadable {
                survey = again;
            }
        }
        let pinned = self.pinned();
        let Reconciled { marks, .. } = self.reconcile(survey, |engine| {
            // Before what has happened since: who was born to the kept is kept.
            engine.restore_keeps();
            let probes = engine.source.probes();
            let left_behind = probes.is_some_and(|probes| probes.replaced_other_abi());
            let can_signal = probes.is_some_and(|probes| probes.can_signal());
            let ring_size = probes.map(|probes| probes.ring().size());
            engine.emit(EventBody::Ready {
                mode: engine.settings.mode.name(),
                mode_reason: engine.settings.mode_reason.clone(),
                source: engine.source.name(),
                passed_over: engine.settings.rejected_sources.clone(),
                processes: engine.model.tree.len(),
                scope: engine.settings.scope_names.clone(),
                resumed: resumed.map(|resumed| Resumed {
                    sessions: states.len(),
                    ..resumed
                }),
                pinned,
                kernel_reap: engine.settings.kernel_reap && can_signal,
                ring_size,
            });
            if left_behind {
                tracing::warn!(
                    "a service of another ABI version was at work here: what had left its tree before now is not known"
                );
            }
            engine.drain();
            engine.ingest.out.flush_backlog();
            // What is read says so only if it was written after the loss.
            engine.look_for_loss();
        });
        // Whoever is in the map and nowhere else has gone without being told of, or has come so.
        for key in marks.keys() {
            let unknown = self.model.tree.get(*key).is_none();
            if unknown
                && self
                    .procfs
                    .probe(*key)
                    .is_ok_and(|glance| glance == Liveness::Gone)
                && let Some(maps) = self.source.maps_mut()
            {
                maps.remove(*key)?;
            }
        }
        self.resume(&states);
        self.finish_restore();
        self.after_outputs();
        if self.source.is_filtered() {
            self.model.forget_untracked();
        }
        self.write_all_memberships()?;
        let reaps = self.settings.kernel_reap && self.settings.mode == Mode::Enforce;
        if let Some(maps) = self.source.maps_mut() {
            maps.set_kernel_reap(reaps)?;
        }
        self.settle();
        if resumed.is_some() {
            self.emit(EventBody::CaughtUp {
                records: self.count.events,
                duration: sys::boot_time().saturating_sub(began),
            });
            self.ingest.out.flush();
        }
        Ok(())
    }

    /// Writes all marks, until those whom the probes follow are all who are to be followed: only then do
    /// the probes leave out the others.
    pub(super) fn write_all_memberships(&mut self) -> Result<(), EngineError> {
        self.ingest.map_changes = self.model.tree.iter().map(|node| node.key).collect();
        if self.source.maps().is_none() {
            self.write_memberships()?;
            return Ok(());
        }
        for _ in 0..MARK_ROUNDS_MAX {
            while self.write_memberships()? > 0 {
                self.on_exits_before_membership();
                self.drain();
            }
            // A probe may have looked for a mark before that was there, and tells of it later, or finds then that it need not.
            if let Some(maps) = self.source.maps().filter(|_| self.source.is_filtered()) {
                maps.await_probes();
                self.drain();
                if self.write_memberships()? > 0 {
                    continue;
                }
            }
            self.set_seeded(true)?;
            // What was born to somebody who was not marked yet has been told of, if it was before this.
            self.drain();
            if self.write_memberships()? == 0 {
                return Ok(());
            }
            self.set_seeded(false)?;
            // Of those who were marked only now, children may have come that nobody told of.
            let survey = Surveyor::new(&*self.source, false)?.survey(Whom::Everybody)?;
            self.reconcile(survey, |_| ());
            if self.source.is_filtered() {
                self.model.forget_untracked();
            }
        }
        self.set_seeded(true)?;
        Ok(())
    }

    /// All is taken in that there is: what is over is told to be.
    fn finish_restore(&mut self) {
        self.model.finish_restore(&mut self.outputs);
        self.on_session_events(sys::boot_time());
    }

    /// Opens the sessions again that were open.
    fn restore_sessions(&mut self) -> Vec<(ProcessKey, SessionState)> {
        let maps = self.source.maps();
        let mut states = maps.map_or_else(Vec::new, |maps| maps.sessions());
        // Outer ones first: whoever is nested has begun later.
        states.sort_by_key(|(first_root, state)| (state.opened_ns, first_root.start));
        for (first_root, state) in &states {
            let end = state.rule.iter().position(|byte| *byte == 0);
            let rule = &state.rule[..end.unwrap_or(state.rule.len())];
            let restored = RestoredSession {
                first_root: *first_root,
                root: model_key(state.root).unwrap_or(*first_root),
                outer: model_key(state.outer),
                parent: model_key(state.parent),
                tty: state.tty,
                rule: Arc::from(String::from_utf8_lossy(rule)),
                uids: Uids {
                    real: state.uid,
                    effective: state.euid,
                },
                cgroup_id: state.cgroup_id,
                opened_at: state.opened_ns,
                exited: (state.gone_ns != 0)
                    .then(|| (state.gone_ns, exit_status_from_wait(state.ended))),
                was_signalled: state.flags & SESSION_SIGNALLED != 0,
                is_evaluated: state.kill_at_ns != 0 || state.flags & SESSION_TOLD != 0,
            };
            self.apply(&Event {
                time: state.opened_ns,
                provenance: Provenance::Inferred,
                kind: EventKind::Restored(Box::new(restored)),
            });
            if let Some(id) = self.model.sessions.by_first_root(*first_root).map(|s| s.id) {
                let tally = self.sessions.entry(id).or_default();
                self.map_sync.dirty.insert(id);
                let told = Counts {
                    reaped: state.reaped,
                    kept: state.kept,
                    failed: state.failed,
                };
                *tally = Tally {
                    reaped: state.reaped,
                    failed: state.failed,
                    lost: state.lost,
                    reported: (state.flags & SESSION_TOLD != 0).then_some(told),
                    ..Tally::default()
                };
            }
        }
        states
    }

    /// Tells what was taken up, and goes on with the ladders that were open.
    fn resume(&mut self, states: &[(ProcessKey, SessionState)]) {
        for (first_root, state) in states {
            let Some(session) = self.model.sessions.by_first_root(*first_root) else {
                continue;
            };
            let root = self.model.tree.get(session.root);
            let (id, due) = (session.id, session.root_exit.is_some());
            let handover = session.succession;
            let body = EventBody::SessionResume {
                session: SessionRef::from(session),
                root: session.root,
                who: root.map(|root| ProcessRef::new(&self.model, root)),
                members: session.members().count(),
                root_gone: due,
            };
            if !due && self.model.has_rules_for_root(session.root) {
                let root = Queued::Process(session.root);
                self.ingest.queued.push(root);
            }
            self.emit(body);
            if due {
                if state.kill_at_ns != 0 {
                    self.ingest.reaper.resume(id, state.kill_at_ns);
                }
                if handover == Succession::Awaited {
                    self.ingest.awaiting_successor.push(id);
                }
                self.ingest.queued.push(Queued::Session(id));
            }
        }
    }
}
