//! Continues the work of an earlier service, however that ended.
//!
//! One pinned map has the sessions, another one the current members, and the ring has the events since then. The ring
//! is read last: events that the maps already reflect change nothing.

use std::collections::HashMap;
use std::sync::Arc;

use reaper_common::{SESSION_CLOSE_EMITTED, SESSION_ROOT_SIGNALLED, SessionState};

use super::map_sync::exit_status_from_wait;
use super::queue::Queued;
use super::scan::{ScanResult, ScanScope, Scanner};
use super::tally::{Counts, Tally};
use super::{Engine, EngineError};
use crate::config::Mode;
use crate::export::{EventBody, EventRecord, ProcessRef, Resumed, ResumedRoot, SessionRef};
use reaper_host::source::probes::model_key;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{
    Event, EventKind, Membership, ProcessKey, Provenance, RestoredSession, Uids,
};
use reaper_model::session::Succession;

/// Limit of further scans at the start if processes could not be read.
const RESCANS_MAX: u32 = 4;

/// State that an earlier service left.
pub(super) struct Restored {
    /// Start of the restoration, in ns since boot.
    began: u64,
    /// State of the earlier service for the stream. `None` if there was none.
    resumed: Option<Resumed>,
    /// Sessions of the earlier service by first root, as the kernel's map had them, oldest first.
    states: Vec<(ProcessKey, SessionState)>,
    /// Directory of the pins before the first drain.
    pinned: Option<String>,
}

impl Engine {
    /// Opens the sessions that an earlier service left, and scans all processes. Scans again if processes are
    /// unreadable, up to [`RESCANS_MAX`] times. Does not apply the scan to the model.
    pub(super) fn begin_restore(&mut self) -> Result<(Restored, ScanResult), EngineError> {
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
        // The kinds of the records that an earlier service has reported are unknown.
        self.lost.total = reported;
        if reported == lost.total {
            self.lost = lost;
        }
        self.untracked_members = self.source.untracked_members();
        if resumed.is_some() {
            self.model.begin_restore();
        }
        let states = self.restore_sessions();
        // Events that were skipped until now are covered by the scan.
        self.skipped_probes = self.source.skipped();
        let complete = self.is_mapped();
        if !complete {
            // No probe reports the children of a process whose membership is written only from now on.
            self.set_seeded(false)?;
        }
        let scanner = Scanner::new(&self.kernel, &*self.source, complete)?;
        let mut scan = scanner.scan(ScanScope::All)?;
        // An unread process never becomes a member. Reads may fail because the machine is busy, so scan again.
        for _ in 0..RESCANS_MAX {
            if scan.unreadable == 0 {
                break;
            }
            let rescan = scanner.scan(ScanScope::All)?;
            if rescan.unreadable < scan.unreadable {
                scan = rescan;
            } else if scan.rows.len() > scan.unreadable as usize {
                // The remaining processes stay unreadable, for example in state D.
                break;
            }
        }
        if scan.unreadable > 0 {
            tracing::warn!(
                "cannot read {} processes, which hang in the kernel (state D) or are hidden (hidepid option of /proc): an agent \
                 among them is not tracked until it executes another program",
                scan.unreadable
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
        Ok((restored, scan))
    }

    /// Reports in the stream that the service is ready.
    pub(super) fn announce_ready(&mut self, restored: &Restored) {
        let probes = self.source.probes();
        let replaced_other_abi = probes.is_some_and(|probes| probes.replaced_other_abi());
        let can_signal = probes.is_some_and(|probes| probes.can_signal());
        let ring_size = probes.map(|probes| probes.ring().size());
        let socket = self.settings.socket.as_ref();
        let ready = EventBody::Ready {
            mode: self.settings.mode.name(),
            mode_reason: self.settings.mode_reason.clone(),
            config: self.settings.config.file.clone(),
            socket: socket.map(|path| path.display().to_string()),
            next_command: self.settings.next_command.clone(),
            source: self.source.name(),
            rejected_sources: self.settings.rejected_sources.clone(),
            processes: self.model.tree.len(),
            version: env!("CARGO_PKG_VERSION"),
            scope: self.settings.scope_names.clone(),
            resumed: restored.resumed,
            pin_dir: restored.pinned.clone(),
            kernel_reap: self.settings.kernel_reap && can_signal,
            ring_size,
        };
        // The agents that run already are reported after it.
        let boot_ns = self.kernel.clock.boot_time();
        self.ingest.out.push_first(EventRecord {
            boot_ns,
            body: ready,
        });
        if replaced_other_abi {
            tracing::warn!(
                "the pinned probes were those of another version of reaper, and are replaced: processes that an agent orphaned before \
                 this start are not tracked; `reaper scan` may find them"
            );
        }
    }

    /// Reports the sessions that an earlier service left, continues their escalations, and queues their evaluation.
    /// Removes unknown processes that have exited from the kernel's map. `memberships` are all entries of that.
    pub(super) fn finish_restore(
        &mut self,
        restored: &Restored,
        memberships: &HashMap<ProcessKey, Membership>,
    ) -> Result<(), EngineError> {
        // A process in the map but not in the model exited or was born without a report.
        for key in memberships.keys() {
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

    /// Tells the probes whether to send first signals: only if that is configured, and in enforce mode.
    pub(super) fn allow_kernel_reap(&mut self) -> Result<(), EngineError> {
        let reaps = self.settings.kernel_reap && self.settings.mode == Mode::Enforce;
        if let Some(maps) = self.source.maps_mut() {
            maps.set_kernel_reap(reaps)?;
        }
        Ok(())
    }

    /// Reports in the stream that the backlog in the ring has been applied. Does nothing if no service left any state.
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

    /// Opens the sessions from the kernel's map again. Returns their first roots and states, oldest first.
    fn restore_sessions(&mut self) -> Vec<(ProcessKey, SessionState)> {
        let maps = self.source.maps();
        let mut states = maps.map_or_else(Vec::new, |maps| maps.sessions());
        // Outer sessions first: nested ones were opened later.
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
                unit_hash: state.unit_hash,
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
                let counts = Counts {
                    reaped: state.reaped,
                    kept: state.kept,
                    failed: state.failed,
                };
                *tally = Tally {
                    reaped: state.reaped,
                    failed: state.failed,
                    lost: state.lost,
                    reported: (state.flags & SESSION_CLOSE_EMITTED != 0).then_some(counts),
                    ..Tally::default()
                };
            }
        }
        states
    }

    /// Reports the resumed sessions, and continues the open escalations. Queues the evaluation of each session whose
    /// root has exited, and of each root to which rules apply.
    fn resume(&mut self, states: &[(ProcessKey, SessionState)]) {
        for (first_root, state) in states {
            let Some(session) = self.model.sessions.by_first_root(*first_root) else {
                continue;
            };
            let root = self.model.tree.get(session.root);
            let (id, due) = (session.id, session.root_exit.is_some());
            let succession = session.succession;
            let body = EventBody::SessionResume {
                session: SessionRef::from(session),
                root: match root {
                    Some(root) if root.state.member.session.is_some() => {
                        ResumedRoot::Alive(ProcessRef::new(&self.model, root))
                    }
                    // It may also have become a boundary. The session continues without it.
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
                if succession == Succession::Awaited {
                    self.ingest.awaiting_successor.push(id);
                }
                self.ingest.queued.push(Queued::Session(id));
            }
        }
    }
}
