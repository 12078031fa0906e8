//! Open sessions and their indexes.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher as _;

use super::{RootExit, Session, SessionId};
use crate::event::{ProcessKey, TICK_NS};
use crate::facts::Fact;

/// Number of properties by which a session is indexed.
const KEYS: usize = 8;

/// Property by which open sessions are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum IndexKey {
    /// Root, which may have exited.
    Root(ProcessKey),
    FirstRoot(ProcessKey),
    Outer(SessionId),
    /// Cgroup of a root that started in another one than its parent.
    NewCgroup(u64),
    /// Cgroup of a root whose unit is unread.
    UnreadUnit(u64),
    /// Cgroup of a root whose unit is unreadable.
    UnreadableUnit(u64),
    /// Real uid of the root, and start of the first root in ticks since boot.
    User(u32, u64),
    /// Real uid of a root that has not exited.
    Living(u32),
    /// Real uid and hash of the working directory of a root that has exited.
    EndedIn(u32, u64),
}

/// State of the members of a session that depends on the sessions around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Nesting {
    /// Reason for which the members are due; `None` if they are not.
    pub(super) due: Option<Due>,
    /// Innermost session, from this one outwards, that another agent may continue.
    pub(super) awaiting: Option<SessionId>,
    /// Whether a `reaper run` ends the members when its command exits.
    pub(super) is_ended_by_run: bool,
    /// Latest exit among the roots of this session and those around it, in ns since boot; 0 for none.
    pub(super) last_root_exit_at: u64,
    /// Number of sessions around this one.
    pub(super) depth: u32,
}

/// Reason for which the members of a session are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// Outermost session whose root has exited.
    pub(super) outermost: SessionId,
    /// Earliest exit among the ended roots of this session and those around it.
    pub(super) first: RootExit,
}

impl Session {
    fn index_keys(&self) -> [Option<IndexKey>; KEYS] {
        let real = self.uids.real;
        let cgroup = Some(self.cgroup_id).filter(|id| *id != 0);
        let above = self.parent.as_ref().map(|parent| parent.image.cgroup_id);
        let is_new = above.is_some_and(|above| above != 0 && above != self.cgroup_id);
        [
            Some(IndexKey::Root(self.root)),
            Some(IndexKey::FirstRoot(self.first_root)),
            self.outer.map(IndexKey::Outer),
            cgroup.filter(|_| is_new).map(IndexKey::NewCgroup),
            match self.unit {
                Fact::Known(_) => None,
                Fact::Unread => cgroup.map(IndexKey::UnreadUnit),
                Fact::Unreadable => cgroup.map(IndexKey::UnreadableUnit),
            },
            Some(IndexKey::User(real, self.first_root.start / TICK_NS)),
            (self.root_exit.is_none()).then_some(IndexKey::Living(real)),
            self.root_exit.and_then(|_| self.ended_in()),
        ]
    }

    /// Returns the key of the sessions that ended in the directory of this one and under its user; `None` if the
    /// directory is unknown. A directory with the same hash only lengthens delays.
    pub(super) fn ended_in(&self) -> Option<IndexKey> {
        let hash = foldhash::fast::FixedState::default().hash_one(self.directory()?.as_os_str());
        Some(IndexKey::EndedIn(self.uids.real, hash))
    }

    /// Returns the state of the members. `outer` is the session around this one.
    fn nesting_in(&self, outer: Option<&Session>) -> Nesting {
        let above = outer.map(|outer| outer.nesting).unwrap_or_default();
        Nesting {
            due: self.due_within(above.due),
            awaiting: self
                .succession
                .is_open()
                .then_some(self.id)
                .or(above.awaiting),
            is_ended_by_run: above.is_ended_by_run || self.is_command_of(outer),
            last_root_exit_at: self
                .root_exit
                .map_or(0, |exit| exit.at)
                .max(above.last_root_exit_at),
            depth: outer.map_or(0, |outer| outer.nesting.depth + 1),
        }
    }

    /// Returns why the members are due: the session that `outer` names, or else this one, with the earlier exit of
    /// both. `outer` is the reason of the session around this one.
    fn due_within(&self, outer: Option<Due>) -> Option<Due> {
        let own = self.end().map(|first| Due {
            outermost: self.id,
            first,
        });
        match (own, outer) {
            (Some(own), Some(outer)) if own.first.at <= outer.first.at => Some(Due {
                first: own.first,
                ..outer
            }),
            (own, outer) => outer.or(own),
        }
    }
}

/// Open sessions. They change only through [`SessionIndex::update`], which keeps the indexes up to date.
///
/// Invariant: no session is nested in itself, directly or through others.
#[derive(Debug, Default)]
pub(super) struct SessionIndex {
    by_id: BTreeMap<SessionId, Session>,
    by_key: BTreeSet<(IndexKey, SessionId)>,
    /// Last start of an agent in ns since boot, by the [`IndexKey::EndedIn`] of the sessions that it follows.
    followers: BTreeMap<IndexKey, u64>,
}

impl SessionIndex {
    pub(super) fn get(&self, id: SessionId) -> Option<&Session> {
        self.by_id.get(&id)
    }

    /// Returns all sessions, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.by_id.values()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns the ids of the sessions with this property, oldest first.
    pub(super) fn ids(&self, key: IndexKey) -> impl Iterator<Item = SessionId> {
        let all = (key, SessionId(0))..=(key, SessionId(u32::MAX));
        self.by_key.range(all).map(|(_, id)| *id)
    }

    /// Returns the sessions with this property, oldest first.
    pub(super) fn all(&self, key: IndexKey) -> impl Iterator<Item = &Session> {
        self.ids(key).filter_map(|id| self.get(id))
    }

    /// Returns the sessions with this real uid whose first root started in an earlier tick than `start` (ns since boot).
    pub(super) fn of_user_before(&self, real: u32, start: u64) -> impl Iterator<Item = &Session> {
        let key = |tick| (IndexKey::User(real, tick), SessionId(0));
        let earlier = self.by_key.range(key(0)..key(start / TICK_NS));
        earlier.filter_map(|(_, id)| self.get(*id))
    }

    /// Returns the oldest session with this first root. If a session's own start is a whole tick (from /proc), any
    /// start within that tick matches.
    pub(super) fn by_name(&self, name: ProcessKey) -> Option<&Session> {
        let start = name.start - name.start % TICK_NS;
        let coarse = IndexKey::FirstRoot(ProcessKey { start, ..name });
        let named = self.ids(IndexKey::FirstRoot(name)).chain(self.ids(coarse));
        self.get(named.min()?)
    }

    /// Records that an agent has started at `start` (ns since boot) in the directory of the sessions with this key. Does
    /// nothing if there are none.
    pub(super) fn note_follower(&mut self, ended: IndexKey, start: u64) {
        if self.ids(ended).next().is_some() {
            let last = self.followers.entry(ended).or_default();
            *last = start.max(*last);
        }
    }

    /// Returns the last start of another agent of the same user in the same directory, after the exit of the root. In ns
    /// since boot; 0 for none.
    pub(super) fn followed_at(&self, session: &Session) -> u64 {
        let last = session.root_exit.and_then(|exit| {
            let last = self.followers.get(&session.ended_in()?)?;
            (exit.at < *last).then_some(*last)
        });
        last.unwrap_or(0).max(session.followed_at)
    }

    /// Adds a session and computes its nesting state.
    pub(super) fn insert(&mut self, mut session: Session) {
        let id = session.id;
        session.nesting = Nesting::default();
        for key in session.index_keys() {
            self.add_key(id, key);
        }
        self.by_id.insert(id, session);
        self.update_nesting(id);
    }

    /// Removes a session. The caller ensures that no other is nested in it. Returns `None` if it is not open.
    pub(super) fn remove(&mut self, id: SessionId) -> Option<Session> {
        let followed_at = self.followed_at(self.get(id)?);
        let mut session = self.by_id.remove(&id)?;
        session.followed_at = followed_at;
        for key in session.index_keys() {
            self.remove_key(id, key);
        }
        Some(session)
    }

    /// Applies `change` to a session, brings the indexes up to date and returns the result. Returns `None` if it is not
    /// open.
    pub(super) fn update<T>(
        &mut self,
        id: SessionId,
        change: impl FnOnce(&mut Session) -> T,
    ) -> Option<T> {
        let followed_at = self.followed_at(self.get(id)?);
        let session = self.by_id.get_mut(&id)?;
        let state = |of: &Session| (of.index_keys(), of.root_exit, of.succession, of.is_run());
        let before = state(session);
        let result = change(session);
        let after = state(session);
        if before != after {
            session.followed_at = followed_at;
            for (old, new) in before.0.into_iter().zip(after.0) {
                if old != new {
                    self.add_key(id, new);
                    self.remove_key(id, old);
                }
            }
            self.update_nesting(id);
        }
        Some(result)
    }

    /// Applies `change` to each session.
    pub(super) fn update_all(&mut self, mut change: impl FnMut(&mut Session)) {
        let ids: Vec<SessionId> = self.by_id.keys().copied().collect();
        for id in ids {
            self.update(id, &mut change);
        }
    }

    fn add_key(&mut self, id: SessionId, key: Option<IndexKey>) {
        self.by_key.extend(key.map(|key| (key, id)));
    }

    fn remove_key(&mut self, id: SessionId, key: Option<IndexKey>) {
        let Some(key) = key else { return };
        self.by_key.remove(&(key, id));
        if matches!(key, IndexKey::EndedIn(..)) && self.ids(key).next().is_none() {
            self.followers.remove(&key);
        }
    }

    /// Recomputes the nesting state of a changed session and of the sessions nested in it.
    fn update_nesting(&mut self, changed: SessionId) {
        let mut stale = vec![changed];
        while let Some(id) = stale.pop() {
            let Some(session) = self.get(id) else {
                continue;
            };
            let outer = session.outer.and_then(|outer| self.get(outer));
            let nesting = session.nesting_in(outer);
            // The nested sessions also depend on whether the root of this one is a living `reaper run`.
            if nesting != session.nesting || id == changed {
                stale.extend(self.ids(IndexKey::Outer(id)));
                if let Some(session) = self.by_id.get_mut(&id) {
                    session.nesting = nesting;
                }
            }
        }
    }
}
