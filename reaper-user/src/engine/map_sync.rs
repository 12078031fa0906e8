//! What the model knows, left in the kernel's maps: for the probes to act on, and for the service that
//! comes after this one.

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

/// What has been left there, and what has to be.
#[derive(Default)]
pub struct MapSync {
    /// Sessions that have changed since they were written.
    pub dirty: HashSet<SessionId>,
    /// Processes that have a mark now and may have exited before.
    unchecked: Vec<ProcessKey>,
    kill_on_fork: HashSet<SessionId>,
    /// How many of those the probes have been told of.
    announced: usize,
}

impl Engine {
    /// Leaves word of what has changed. The probes inherit marks by themselves, so that there is little to
    /// write: where a session begins, where membership ends, where a rule knows better than a name.
    pub(super) fn sync_maps(&mut self) {
        if let Err(error) = self.try_sync_maps() {
            tracing::error!(
                "{error}: what is not written there is known only while this service runs"
            );
        }
    }

    fn try_sync_maps(&mut self) -> Result<(), EngineError> {
        // A mark that names a session nobody knows says nothing to the service that comes next.
        let sessions = self.write_sessions();
        self.write_memberships()?;
        self.write_kill_on_fork()?;
        sessions
    }

    /// Has the probes kill the members of the sessions that have come to that.
    pub(super) fn sync_kill_on_fork(&mut self) {
        if let Err(error) = self.write_kill_on_fork() {
            tracing::error!(
                "{error}: what forks outside of this service's sight is not killed at birth"
            );
        }
    }

    fn write_kill_on_fork(&mut self) -> Result<(), EngineError> {
        if self.update_kill_on_fork() {
            // Who is kept has to be marked so before the probes may kill the others.
            self.write_memberships()?;
            self.write_sessions()?;
        }
        Ok(())
    }

    /// Writes the marks of those that something has happened to; gives how many are followed from now on.
    pub(super) fn write_memberships(&mut self) -> Result<usize, EngineError> {
        let mut new = Vec::new();
        let round = self.model.evaluation();
        let touched = mem::take(&mut self.ingest.map_changes).into_iter();
        let wanted = touched.map(|key| (key, round.wanted_membership(key)));
        let wanted: Vec<_> = wanted.collect();
        for (key, wanted) in wanted {
            let Some(node) = self.model.tree.get(key) else {
                continue;
            };
            let key = node.key;
            self.source.watch_exit(key, wanted.is_some());
            let known = node.membership.filter(|mark| mark.flags != 0);
            let as_told = known.map(|mark| Membership {
                flags: mark.flags & !MEMBER_GENERATION_MASK,
                ..mark
            });
            if wanted != as_told
                && let Some(exact) = node.exact_key()
            {
                let Some(maps) = self.source.maps_mut() else {
                    continue;
                };
                let room = maps.set_membership(exact, wanted, known)?;
                let execs = known.map_or(0, |mark| mark.flags & MEMBER_GENERATION_MASK);
                let written = wanted.filter(|_| room).map(|mark| Membership {
                    flags: mark.flags | execs,
                    ..mark
                });
                self.model.set_membership(key, written);
                if known.is_none() && wanted.is_some() && room {
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

    /// Returns the processes whose exit no probe reports, since they had no mark yet when they exited. Takes them out of
    /// the kernel's map.
    ///
    /// # Errors
    /// The map cannot be written.
    pub(super) fn exited_before_membership(&mut self) -> Result<Vec<ProcessKey>, EngineError> {
        let mut gone = mem::take(&mut self.map_sync.unchecked);
        gone.retain(|key| {
            let glance = self.kernel.processes.probe(*key);
            glance.is_ok_and(|glance| glance == Liveness::Gone)
        });
        for key in &gone {
            let node = self.model.tree.get(*key);
            if let Some(exact) = node.and_then(|node| node.exact_key())
                && let Some(maps) = self.source.maps_mut()
            {
                maps.remove(exact)?;
            }
        }
        Ok(gone)
    }

    pub(super) fn set_seeded(&mut self, seeded: bool) -> Result<(), EngineError> {
        let maps = self.source.maps_mut();
        maps.map_or(Ok(()), |maps| Ok(maps.set_seeded(seeded)?))
    }

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
            // One that finds no room takes nothing from the others.
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

    /// Finds the sessions whose ladder has come to SIGKILL, or is over; whether there are others than before.
    fn update_kill_on_fork(&mut self) -> bool {
        // Nobody is there to be told.
        if self.source.maps().is_none() {
            return false;
        }
        let mut condemned = HashSet::new();
        for (id, stage) in self.ingest.reaper.stages() {
            if matches!(stage, Stage::Kill { .. }) && self.settings.mode == Mode::Enforce {
                let inwards = self.model.sessions.with_nested(id);
                // A rule may have ended what belongs to an agent that lives, and that is no end of the others.
                let due = |id: &SessionId| self.model.sessions.due(*id).is_some();
                condemned.extend(inwards.map(|session| session.id).filter(due));
            }
        }
        let before = mem::replace(&mut self.map_sync.kill_on_fork, condemned);
        let condemned = &self.map_sync.kill_on_fork;
        for id in condemned.symmetric_difference(&before) {
            self.map_sync.dirty.insert(*id);
            if let Some(session) = self.model.sessions.get(*id) {
                self.ingest.note_members_changed(&self.model, session);
            }
        }
        *condemned != before
    }

    /// Takes away what was left of a session that is over.
    pub(super) fn forget_session(&mut self, first_root: ProcessKey) {
        let maps = self.source.maps_mut();
        if let Some(Err(error)) = maps.map(|maps| maps.set_session(first_root, None)) {
            tracing::error!("{error}");
        }
    }

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
        let stage = due.and_then(|(ladder, _)| self.ingest.reaper.stage(ladder.id));
        let kill_at_ns = match stage {
            Some(Stage::Term { kill_at }) => kill_at,
            // Long past.
            Some(Stage::Kill { .. }) => 1,
            None => 0,
        };
        let root = self.model.tree.get(session.root);
        let parent = root.and_then(|root| root.birth_parent);
        let mut flags = 0;
        if self.map_sync.kill_on_fork.contains(&session.id) {
            flags |= SESSION_KILL_ON_FORK;
        }
        if self.ends_in_kernel(session) {
            flags |= SESSION_KERNEL_REAP;
        }
        if self
            .sessions
            .get(&session.id)
            .is_some_and(|tally| tally.reported.is_some())
        {
            flags |= SESSION_CLOSE_EMITTED;
        }
        if session.root_exit.is_some_and(|gone| gone.was_signalled) {
            flags |= SESSION_ROOT_SIGNALLED;
        }
        let mut rule = [0; RULE_MAX];
        let name = session.agent.as_bytes();
        let len = name.len().min(RULE_MAX);
        rule[..len].copy_from_slice(&name[..len]);
        let none = super::ingest::Tally::default();
        let tally = self.sessions.get(&session.id).unwrap_or(&none);
        SessionState {
            root: key(session.root),
            outer: outer.map_or(Default::default(), |outer| raw_key(outer.first_root)),
            parent: parent.map_or(Default::default(), key),
            opened_ns: session.opened_at,
            root_exit_ns: session.root_exit.map_or(0, |gone| gone.at),
            kill_at_ns,
            lost: tally.lost,
            exit_status: session
                .root_exit
                .map_or(0, |gone| wait_status(gone.exit_status)),
            uid: session.uids.real,
            euid: session.uids.effective,
            flags,
            cgroup_id: session.cgroup_id,
            check: raw_key(session.first_root).check(),
            reaped: tally.reaped,
            kept: tally.reported.map_or(0, |told| told.kept),
            failed: tally.failed,
            tty: root.map_or(0, |root| root.image.tty),
            _pad: 0,
            rule,
        }
    }

    /// Whether the probe may send the first signal when the root of a session exits: it is a member as
    /// any other, with nothing kept above it.
    fn ends_in_kernel(&self, session: &Session) -> bool {
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

/// As `wait(2)` tells it.
fn wait_status(ended: ExitStatus) -> u32 {
    match ended {
        ExitStatus::Exited(code) => u32::from(code) << 8,
        ExitStatus::Signalled { signal, core } => u32::from(signal) | if core { 0x80 } else { 0 },
        ExitStatus::Unknown => EXIT_STATUS_UNKNOWN,
    }
}

/// From what `wait(2)` tells.
pub(super) fn exit_status_from_wait(status: u32) -> ExitStatus {
    match status {
        EXIT_STATUS_UNKNOWN => ExitStatus::Unknown,
        status => ExitStatus::from_wait_status(status),
    }
}
