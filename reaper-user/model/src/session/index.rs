//! Open sessions and their indexes.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher as _;
use std::path::Path;

use super::{RootExit, Session, SessionId};
use crate::event::{ProcessKey, TICK_NS};

/// Number of properties by which a session is indexed.
const KEYS: usize = 7;

/// Property by which open sessions are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum IndexKey {
    /// Root, which may have exited.
    Root(ProcessKey),
    FirstRoot(ProcessKey),
    Outer(SessionId),
    Cgroup(u64),
    /// Real uid of the root.
    User(u32),
    /// Real uid of a root that has not exited.
    Living(u32),
    /// Real uid and hash of the working directory of the root.
    Directory(u32, u64),
}

impl IndexKey {
    /// Returns the key of the sessions whose root has this real uid and working directory. Others may share it.
    pub(super) fn directory(real: u32, directory: &Path) -> IndexKey {
        let hash = foldhash::fast::FixedState::default().hash_one(directory);
        IndexKey::Directory(real, hash)
    }
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
        [
            Some(IndexKey::Root(self.root)),
            Some(IndexKey::FirstRoot(self.first_root)),
            self.outer.map(IndexKey::Outer),
            (self.cgroup_id != 0).then_some(IndexKey::Cgroup(self.cgroup_id)),
            Some(IndexKey::User(self.uids.real)),
            (self.root_exit.is_none()).then_some(IndexKey::Living(self.uids.real)),
            self.directory()
                .map(|path| IndexKey::directory(self.uids.real, path)),
        ]
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

    /// Returns the oldest session with this first root. If a session's own start is a whole tick (from /proc), any
    /// start within that tick matches.
    pub(super) fn by_name(&self, name: ProcessKey) -> Option<&Session> {
        let start = name.start - name.start % TICK_NS;
        let coarse = IndexKey::FirstRoot(ProcessKey { start, ..name });
        let named = self.ids(IndexKey::FirstRoot(name)).chain(self.ids(coarse));
        self.get(named.min()?)
    }

    /// Adds a session and computes its nesting state.
    pub(super) fn insert(&mut self, mut session: Session) {
        let id = session.id;
        session.nesting = Nesting::default();
        self.add_keys(id, session.index_keys());
        self.by_id.insert(id, session);
        self.update_nesting(id);
    }

    /// Removes a session. The caller ensures that no other is nested in it. Returns `None` if it is not open.
    pub(super) fn remove(&mut self, id: SessionId) -> Option<Session> {
        let session = self.by_id.remove(&id)?;
        self.remove_keys(id, session.index_keys());
        Some(session)
    }

    /// Applies `change` to a session, brings the indexes up to date and returns the result. Returns `None` if it is not
    /// open.
    pub(super) fn update<T>(
        &mut self,
        id: SessionId,
        change: impl FnOnce(&mut Session) -> T,
    ) -> Option<T> {
        let session = self.by_id.get_mut(&id)?;
        let state = |of: &Session| (of.index_keys(), of.root_exit, of.succession, of.is_run());
        let before = state(session);
        let result = change(session);
        let after = state(session);
        if before != after {
            self.remove_keys(id, before.0);
            self.add_keys(id, after.0);
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

    fn add_keys(&mut self, id: SessionId, keys: [Option<IndexKey>; KEYS]) {
        let keys = keys.into_iter().flatten();
        self.by_key.extend(keys.map(|key| (key, id)));
    }

    fn remove_keys(&mut self, id: SessionId, keys: [Option<IndexKey>; KEYS]) {
        for key in keys.into_iter().flatten() {
            self.by_key.remove(&(key, id));
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
