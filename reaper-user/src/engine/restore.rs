//! Going on where the service before this one was, whenever it was killed.
//!
//! Its sessions are in one map, their members, as of now, in another, and what happened meanwhile is in the
//! ring, which is read last: events tell nothing new of what the maps have said already.

use std::collections::HashMap;
use std::sync::Arc;

use reaper_common::{SESSION_CLOSE_EMITTED, SESSION_ROOT_SIGNALLED, SessionState};

use super::ingest::{Counts, Queued, Tally};
use super::map_sync::exit_status_from_wait;
use super::survey::{Survey, SurveyScope, Surveyor};
use super::{Engine, EngineError};
use crate::config::Mode;
use crate::export::{EventBody, ProcessRef, Resumed, ResumedRoot, SessionRef};
use reaper_host::source::probes::model_key;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{
    Event, EventKind, Membership, ProcessKey, Provenance, RestoredSession, Uids,
};
use reaper_model::session::Succession;

/// Further surveys at the start if processes could not be read.
const SURVEYS_MAX: u32 = 4;

/// What an earlier service has left.
pub(super) struct Restored {
    /// Start of the restoring, in nanoseconds since boot.
    began: u64,
    resumed: Option<Resumed>,
    states: Vec<(ProcessKey, SessionState)>,
    /// Directory of the pins before anything was drained.
    pinned: Option<String>,
}

impl Engine {
    /// Opens the sessions that an earlier service has left, and takes a survey of all processes.
    pub(super) fn begin_restore(&mut self) -> Result<(Restored, Survey), EngineError> {
        let began = self.kernel.clock.boot_time();
        let lost = self.source.lost();
        let maps = self.source.maps();
        let reported = maps.map_or(0, |maps| maps.lost_reported().min(lost.total));
        let probes = self.source.probes();
        let resumed = probes
            .filter(|probes| probes.is_resumed())
            .map(|probes| Resumed {
                sessions: 0,
                backlog: probes.ring().waiting(),
                lost: lost.total - reported,
            });
        // The kinds of the records that an earlier service has reported are not known any more.
        self.lost.total = reported;
        if reported == lost.total {
            self.lost = lost;
        }
        self.untracked_members = self.source.untracked_members();
        if resumed.is_some() {
            self.model.begin_restore();
        }
        let states = self.restore_sessions();
        // What was skipped before now is found by the survey.
        self.skipped_probes = self.source.skipped();
        let complete = self.is_mapped();
        if !complete {
            // No probe reports the children of a process that is followed only from now on.
            self.set_seeded(false)?;
        }
        let surveyor = Surveyor::new(&self.kernel, &*self.source, complete)?;
        let mut survey = surveyor.survey(SurveyScope::All)?;
        // A process that is not known now never becomes a member, and the machine may only have been busy.
        for _ in 0..SURVEYS_MAX {
            if survey.unreadable == 0 {
                break;
            }
            let again = surveyor.survey(SurveyScope::All)?;
            if again.unreadable < survey.unreadable {
                survey = again;
            } else if survey.rows.len() > survey.unreadable as usize {
                // Few are stuck, and stay so.
                break;
            }
        }
        if survey.unreadable > 0 {
            tracing::warn!(
                "{} processes cannot be read: an agent that runs among them is not followed until it executes another program",
                survey.unreadable
            );
        }
        let restored = Restored {
            began,
            resumed: resumed.map(|resumed| Resumed {
                sessions: states.len(),
                ..resumed
            }),
            states,
            pinned: self.pinned(),
        };
        Ok((restored, survey))
    }

    /// Reports that the service is up.
    pub(super) fn announce_ready(&mut self, restored: &Restored) {
        let probes = self.source.probes();
        let replaced_other_abi = probes.is_some_and(|probes| probes.replaced_other_abi());
        let can_signal = probes.is_some_and(|probes| probes.can_signal());
        let ring_size = probes.map(|probes| probes.ring().size());
        self.emit(EventBody::Ready {
            mode: self.settings.mode.name(),
            mode_reason: self.settings.mode_reason.clone(),
            source: self.source.name(),
            rejected_sources: self.settings.rejected_sources.clone(),
            processes: self.model.tree.len(),
            version: env!("CARGO_PKG_VERSION"),
            scope: self.settings.scope_names.clone(),
            resumed: restored.resumed,
            pin_dir: restored.pinned.clone(),
            kernel_reap: self.settings.kernel_reap && can_signal,
            ring_size,
        });
        if replaced_other_abi {
            tracing::warn!(
                "a service of another ABI version was at work here: what had left its tree before now is not known"
            );
        }
    }

    /// Goes on with the sessions that an earlier service has left. `marks` are all processes that the kernel's map has.
    pub(super) fn finish_restore(
        &mut self,
        restored: &Restored,
        marks: &HashMap<ProcessKey, Membership>,
    ) -> Result<(), EngineError> {
        // A process in the map that the model does not have has exited unreported, or was born unreported.
        for key in marks.keys() {
            let unknown = self.model.tree.get(*key).is_none();
            if unknown
                && self
                    .kernel
                    .processes
                    .probe(*key)
                    .is_ok_and(|liveness| liveness == Liveness::Gone)
                && let Some(maps) = self.source.maps_mut()
            {
                maps.remove(*key)?;
            }
        }
        self.resume(&restored.states);
        self.model.finish_restore(&mut self.outputs);
        self.on_session_events(self.kernel.clock.boot_time());
        self.after_outputs();
        if self.source.is_filtered() {
            self.model.forget_untracked();
        }
        Ok(())
    }

    /// Lets the probes send first signals, if they are to.
    pub(super) fn allow_kernel_reap(&mut self) -> Result<(), EngineError> {
        let reaps = self.settings.kernel_reap && self.settings.mode == Mode::Enforce;
        if let Some(maps) = self.source.maps_mut() {
            maps.set_kernel_reap(reaps)?;
        }
        Ok(())
    }

    /// Reports that all has been read that was waiting when the service started.
    pub(super) fn announce_caught_up(&mut self, restored: &Restored) {
        if restored.resumed.is_none() {
            return;
        }
        self.emit(EventBody::CaughtUp {
            records: self.count.events,
            duration: self.kernel.clock.boot_time().saturating_sub(restored.began),
        });
        self.ingest.out.flush();
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
                exited: (state.root_exit_ns != 0)
                    .then(|| (state.root_exit_ns, exit_status_from_wait(state.exit_status))),
                was_signalled: state.flags & SESSION_ROOT_SIGNALLED != 0,
                is_evaluated: state.kill_at_ns != 0 || state.flags & SESSION_CLOSE_EMITTED != 0,
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
                    reported: (state.flags & SESSION_CLOSE_EMITTED != 0).then_some(told),
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
                root: match root {
                    Some(root) if root.state.member.session.is_some() => {
                        ResumedRoot::Alive(ProcessRef::new(&self.model, root))
                    }
                    // Or it has become a boundary, and the session goes on without it.
                    _ => ResumedRoot::Exited {
                        session: SessionRef::from(session),
                        key: session.root,
                    },
                },
                members: session.members().count(),
                root_exited: due,
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
