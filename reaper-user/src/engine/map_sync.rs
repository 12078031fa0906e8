//! Writes the model's state to the kernel's maps.
//!
//! The probes act on the maps, and the next service restores its state from them. The kernel copies a membership to
//! each child at fork. The service writes only what differs: new sessions, boundaries, and results of rules.

use std::cmp::Reverse;
use std::mem;

use hashbrown::HashSet;
use reaper_common::{
    EXIT_STATUS_UNKNOWN, MEMBER_GENERATION_MASK, RULE_MAX, SESSION_CLOSE_EMITTED,
    SESSION_KERNEL_REAP, SESSION_KILL_ON_FORK, SESSION_ROOT_SIGNALLED, SessionState,
};

use super::{Engine, EngineError};
use crate::config::Mode;
use crate::reap::Stage;
use reaper_host::source::probes::raw_key;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{ExitStatus, Membership, ProcessKey};
use reaper_model::session::{Session, SessionId};

/// State of the synchronisation with the kernel's maps.
#[derive(Default)]
pub struct MapSync {
    /// Sessions that have changed since they were last written.
    pub dirty: HashSet<SessionId>,
    /// Processes that got an entry in the map, and may have exited before that.
    unchecked: Vec<ProcessKey>,
    /// Sessions whose escalation has reached SIGKILL.
    kill_on_fork: HashSet<SessionId>,
    /// Number of `kill_on_fork` sessions that the probes know of.
    announced: usize,
}

impl Engine {
    /// Writes all changes to the maps. Errors are logged.
    pub(super) fn sync_maps(&mut self) {
        if let Err(error) = self.try_sync_maps() {
            tracing::error!(
                "cannot save the newest sessions and their processes in the kernel: {error}; a service that restarts now does \
                 not know them"
            );
        }
    }

    fn try_sync_maps(&mut self) -> Result<(), EngineError> {
        // Before the memberships: a membership that names an unknown session is useless to the next service.
        let sessions = self.write_sessions();
        self.write_memberships()?;
        self.write_kill_on_fork()?;
        sessions
    }

    /// Tells the probes to kill members that fork or exec, in sessions whose escalation has reached SIGKILL. Kept
    /// members are excepted. Errors are logged.
    pub(super) fn sync_kill_on_fork(&mut self) {
        if let Err(error) = self.write_kill_on_fork() {
            tracing::error!(
                "cannot tell the probes which sessions have reached SIGKILL, to kill what these fork at once: {error}; the service \
                 kills it a little later"
            );
        }
    }

    /// Updates which sessions the probes kill on fork. If that changes, writes the memberships, then the
    /// sessions.
    fn write_kill_on_fork(&mut self) -> Result<(), EngineError> {
        if self.update_kill_on_fork() {
            // Kept members must be marked as such before the probes may kill the others.
            self.write_memberships()?;
            self.write_sessions()?;
        }
        Ok(())
    }

    /// Writes the memberships of changed processes. Returns the number of processes that are new in the map. If the
    /// source filters, processes that need no entry are dropped from the model.
    pub(super) fn write_memberships(&mut self) -> Result<usize, EngineError> {
        let mut new = Vec::new();
        let round = self.model.evaluation();
        let mut changed = self.ingest.map_changes.take();
        // Youngest first: below an unneeded process, others that are unneeded are then no longer in the model.
        changed.sort_unstable_by_key(|key| Reverse((key.start, key.pid)));
        let wanted = changed.into_iter();
        let wanted = wanted.map(|key| (key, round.wanted_membership(key)));
        let wanted: Vec<_> = wanted.collect();
        let mut changed = wanted.into_iter();
        while let Some((key, wanted)) = changed.next() {
            let Some(node) = self.model.tree.get(key) else {
                continue;
            };
            let key = node.key;
            self.source.watch_exit(key, wanted.is_some());
            let known = node.membership.filter(|membership| membership.flags != 0);
            let without_generation = known.map(|membership| Membership {
                flags: membership.flags & !MEMBER_GENERATION_MASK,
                ..membership
            });
            if wanted != without_generation
                && let Some(exact) = node.exact_key()
            {
                let Some(maps) = self.source.maps_mut() else {
                    continue;
                };
                let has_room = match maps.set_membership(exact, wanted, known) {
                    Ok(has_room) => has_room,
                    Err(error) => {
                        // All that is not written is tried again.
                        let rest = changed.map(|(key, _)| key);
                        self.ingest
                            .map_changes
                            .extend([key].into_iter().chain(rest));
                        self.map_sync.unchecked.append(&mut new);
                        return Err(error.into());
                    }
                };
                let execs = known.map_or(0, |membership| membership.flags & MEMBER_GENERATION_MASK);
                let written = wanted.filter(|_| has_room).map(|membership| Membership {
                    flags: membership.flags | execs,
                    ..membership
                });
                self.model.set_membership(key, written);
                if known.is_none() && wanted.is_some() && has_room {
                    new.push(key);
                }
            }
            if wanted.is_none() && self.source.is_filtered() {
                self.model.forget(key);
            }
        }
        let count = new.len();
        self.map_sync.unchecked.append(&mut new);
        Ok(count)
    }

    /// Returns the processes that are new in the kernel's map since the last call and have exited. Removes them from
    /// the map; an error is logged. No probe reports an exit that preceded the entry.
    pub(super) fn exited_before_membership(&mut self) -> Vec<ProcessKey> {
        let mut exited = mem::take(&mut self.map_sync.unchecked);
        exited.retain(|key| {
            let liveness = self.kernel.processes.probe(*key);
            liveness.is_ok_and(|liveness| liveness == Liveness::Gone)
        });
        for key in &exited {
            let node = self.model.tree.get(*key);
            if let Some(exact) = node.and_then(|node| node.exact_key())
                && let Some(maps) = self.source.maps_mut()
                && let Err(error) = maps.remove(exact)
            {
                tracing::error!(
                    "cannot remove process {}, which has exited, from the probes' map: {error}; its entry takes up room until the daemon restarts",
                    key.pid
                );
            }
        }
        exited
    }

    /// Tells the probes whether all pre-existing members are in the map. Once they are, filtering probes report no
    /// other process.
    pub(super) fn set_seeded(&mut self, seeded: bool) -> Result<(), EngineError> {
        let maps = self.source.maps_mut();
        maps.map_or(Ok(()), |maps| Ok(maps.set_seeded(seeded)?))
    }

    /// Writes the changed sessions to the map. If it has no room for one, the others are still written.
    fn write_sessions(&mut self) -> Result<(), EngineError> {
        self.map_sync
            .dirty
            .extend(self.ingest.changed_sessions.drain(..));
        let mut result = Ok(());
        for id in mem::take(&mut self.map_sync.dirty) {
            let Some(session) = self.model.sessions.get(id) else {
                continue;
            };
            let state = self.kernel_state_of(session);
            let first_root = session.first_root;
            let Some(maps) = self.source.maps_mut() else {
                break;
            };
            let written = maps.set_session(first_root, Some(&state));
            // A session without room in the map must not prevent the others from being written.
            result = result.and(written);
        }
        if self.map_sync.announced != self.map_sync.kill_on_fork.len() {
            self.map_sync.announced = self.map_sync.kill_on_fork.len();
            if let Some(maps) = self.source.maps_mut() {
                maps.set_kill_on_fork(self.map_sync.announced as u64)?;
            }
        }
        Ok(result?)
    }

    /// Updates the set of due sessions whose escalation has reached SIGKILL. Queues the changed sessions and their
    /// members for the maps. Returns whether the set has changed; false if there are no maps. It is empty in observe
    /// mode.
    fn update_kill_on_fork(&mut self) -> bool {
        // There are no probes to inform.
        if self.source.maps().is_none() {
            return false;
        }
        let mut killed_sessions = HashSet::new();
        for (id, stage) in self.ingest.reaper.stages() {
            if matches!(stage, Stage::Kill { .. }) && self.settings.mode == Mode::Enforce {
                let nested = self.model.sessions.with_nested(id);
                // An escalation may be for members of a living agent that a rule reaps. The other members must survive.
                let due = |id: &SessionId| self.model.sessions.due(*id).is_some();
                killed_sessions.extend(nested.map(|session| session.id).filter(due));
            }
        }
        let before = mem::replace(&mut self.map_sync.kill_on_fork, killed_sessions);
        let killed_sessions = &self.map_sync.kill_on_fork;
        for id in killed_sessions.symmetric_difference(&before) {
            self.map_sync.dirty.insert(*id);
            if let Some(session) = self.model.sessions.get(*id) {
                self.ingest.note_members_changed(&self.model, session);
            }
        }
        *killed_sessions != before
    }

    /// Removes a closed session from the kernel's map. An error is logged.
    pub(super) fn forget_session(&mut self, first_root: ProcessKey) {
        let maps = self.source.maps_mut();
        if let Some(Err(error)) = maps.map(|maps| maps.set_session(first_root, None)) {
            tracing::error!(
                "cannot remove the closed session of process {} from the probes' map: {error}; after a restart, the service may \
                 report it as closed again",
                first_root.pid
            );
        }
    }

    /// Returns the state of a session as the kernel's map stores it.
    fn kernel_state_of(&self, session: &Session) -> SessionState {
        let outer = session.outer.and_then(|id| self.model.sessions.get(id));
        let key = |key: ProcessKey| {
            raw_key(
                self.model
                    .tree
                    .get(key)
                    .and_then(|n| n.exact_key())
                    .unwrap_or(key),
            )
        };
        let due = self.model.sessions.due(session.id);
        let stage = due.and_then(|(escalation, _)| self.ingest.reaper.stage(escalation.id));
        let kill_at_ns = match stage {
            Some(Stage::Term { kill_at }) => kill_at,
            // A time in the past.
            Some(Stage::Kill { .. }) => 1,
            None => 0,
        };
        let root = self.model.tree.get(session.root);
        let parent = root.and_then(|root| root.birth_parent);
        let mut flags = 0;
        if self.map_sync.kill_on_fork.contains(&session.id) {
            flags |= SESSION_KILL_ON_FORK;
        }
        if self.allows_kernel_reap(session) {
            flags |= SESSION_KERNEL_REAP;
        }
        if self
            .sessions
            .get(&session.id)
            .is_some_and(|tally| tally.reported.is_some())
        {
            flags |= SESSION_CLOSE_EMITTED;
        }
        if session.root_exit.is_some_and(|exit| exit.was_signalled) {
            flags |= SESSION_ROOT_SIGNALLED;
        }
        let mut rule = [0; RULE_MAX];
        let name = session.agent.as_bytes();
        let len = name.len().min(RULE_MAX);
        rule[..len].copy_from_slice(&name[..len]);
        let none = super::tally::Tally::default();
        let tally = self.sessions.get(&session.id).unwrap_or(&none);
        SessionState {
            root: key(session.root),
            outer: outer.map_or(Default::default(), |outer| raw_key(outer.first_root)),
            parent: parent.map_or(Default::default(), key),
            opened_ns: session.opened_at,
            root_exit_ns: session.root_exit.map_or(0, |exit| exit.at),
            kill_at_ns,
            lost: tally.lost,
            exit_status: session
                .root_exit
                .map_or(0, |exit| wait_status(exit.exit_status)),
            uid: session.uids.real,
            euid: session.uids.effective,
            flags,
            cgroup_id: session.cgroup_id,
            check: raw_key(session.first_root).check(),
            reaped: tally.reaped,
            kept: tally.reported.map_or(0, |counts| counts.kept),
            failed: tally.failed,
            tty: root.map_or(0, |root| root.image.tty),
            unit_hash: session.unit_hash(),
            rule,
        }
    }

    /// Returns whether the probe may send the first signal when the root of a session exits. That needs enforce mode,
    /// the setting `kernel_reap`, and probes that can signal. The root must be a living member of its session that is
    /// not kept.
    fn allows_kernel_reap(&self, session: &Session) -> bool {
        self.settings.kernel_reap
            && self
                .source
                .probes()
                .is_some_and(|probes| probes.can_signal())
            && self.settings.mode == Mode::Enforce
            && session.root_exit.is_none()
            && self.model.tree.get(session.root).is_some_and(|root| {
                root.state.member.session == Some(session.id) && !self.model.is_kept(root)
            })
    }
}

/// Returns an exit status in the format of `wait(2)`.
fn wait_status(exit_status: ExitStatus) -> u32 {
    match exit_status {
        ExitStatus::Exited(code) => u32::from(code) << 8,
        ExitStatus::Signalled { signal, core } => u32::from(signal) | if core { 0x80 } else { 0 },
        ExitStatus::Unknown => EXIT_STATUS_UNKNOWN,
    }
}

/// Returns the exit status for a status in the format of `wait(2)`.
pub(super) fn exit_status_from_wait(status: u32) -> ExitStatus {
    match status {
        EXIT_STATUS_UNKNOWN => ExitStatus::Unknown,
        status => ExitStatus::from_wait_status(status),
    }
}
