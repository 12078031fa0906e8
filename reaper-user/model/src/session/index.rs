//! The open sessions, and the indexes by which they are found.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{RootExit, Session, SessionId};
use crate::event::{ProcessKey, TICK_NS};

/// Number of properties by which a session is found.
const KEYS: usize = 5;

/// A property by which open sessions are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum IndexKey {
    /// The root, which may have exited.
    Root(ProcessKey),
    FirstRoot(ProcessKey),
    Outer(SessionId),
    Cgroup(u64),
    /// The real uid of a root that has not exited.
    Living(u32),
}

/// What holds for the members of a session because of it or of a session around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Nesting {
    pub(super) due: Option<Due>,
    /// The innermost session that another agent may continue.
    pub(super) awaiting: Option<SessionId>,
    /// Whether a `reaper run` ends them when its command exits.
    pub(super) is_ended_by_run: bool,
}

/// Why the members of a session are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The outermost session whose root is gone.
    pub(super) outermost: SessionId,
    /// The first end of a root.
    pub(super) first: RootExit,
}

impl Session {
    fn index_keys(&self) -> [Option<IndexKey>; KEYS] {
        [
            Some(IndexKey::Root(self.root)),
            Some(IndexKey::FirstRoot(self.first_root)),
            self.outer.map(IndexKey::Outer),
            (self.cgroup_id != 0).then_some(IndexKey::Cgroup(self.cgroup_id)),
            (self.root_exit.is_none()).then_some(IndexKey::Living(self.uids.real)),
        ]
    }

    /// Returns what holds for its members, from the session around it.
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
        }
    }

    /// Returns why its members are due, from why those of the session around it are.
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

/// The open sessions. One changes only through [`SessionIndex::update`], so that no index goes stale.
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

    /// All of them, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.by_id.values()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns the sessions with this property, oldest first.
    pub(super) fn ids(&self, key: IndexKey) -> impl Iterator<Item = SessionId> {
        let all = (key, SessionId(0))..=(key, SessionId(u32::MAX));
        self.by_key.range(all).map(|(_, id)| *id)
    }

    /// As [`SessionIndex::ids`].
    pub(super) fn all(&self, key: IndexKey) -> impl Iterator<Item = &Session> {
        self.ids(key).filter_map(|id| self.get(id))
    }

    /// Returns the oldest session of this name, which may be known better than it was when the session opened.
    pub(super) fn by_name(&self, name: ProcessKey) -> Option<&Session> {
        let start = name.start - name.start % TICK_NS;
        let coarse = IndexKey::FirstRoot(ProcessKey { start, ..name });
        let named = self.ids(IndexKey::FirstRoot(name)).chain(self.ids(coarse));
        self.get(named.min()?)
    }

    pub(super) fn insert(&mut self, mut session: Session) {
        let id = session.id;
        session.nesting = Nesting::default();
        self.add_keys(id, session.index_keys());
        self.by_id.insert(id, session);
        self.update_nesting(id);
    }

    /// Removes a session in which no other is nested.
    pub(super) fn remove(&mut self, id: SessionId) -> Option<Session> {
        let session = self.by_id.remove(&id)?;
        self.remove_keys(id, session.index_keys());
        Some(session)
    }

    /// Changes a session. Returns `None` if it is not open.
    pub(super) fn update<T>(
        &mut self,
        id: SessionId,
        change: impl FnOnce(&mut Session) -> T,
    ) -> Option<T> {
        let session = self.by_id.get_mut(&id)?;
        let is_run = |of: &Session| &*of.agent == super::RUN;
        let state = |of: &Session| (of.index_keys(), of.root_exit, of.succession, is_run(of));
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

    /// Changes all sessions.
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

    /// Updates what holds for the members of a changed session, and of the sessions in it.
    fn update_nesting(&mut self, changed: SessionId) {
        let mut stale = vec![changed];
        while let Some(id) = stale.pop() {
            let Some(session) = self.get(id) else {
                continue;
            };
            let outer = session.outer.and_then(|outer| self.get(outer));
            let nesting = session.nesting_in(outer);
            // Whether it is the command of a `reaper run` depends on the root of that.
            if nesting != session.nesting || id == changed {
                stale.extend(self.ids(IndexKey::Outer(id)));
                if let Some(session) = self.by_id.get_mut(&id) {
                    session.nesting = nesting;
                }
            }
        }
    }
}
