//! Facts of roots, which those of members are compared with.

use std::path::Path;
use std::sync::Arc;

use super::{IndexKey, Session, SessionId, Sessions};
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};
use crate::ruleset::SessionKind;

/// Returns the hash of a unit's name (FNV-1a), which is never 0. All versions of this program must agree on it.
fn hash_of(unit: &str) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    unit.bytes().fold(0x811c_9dc5, step).max(1)
}

impl Session {
    /// Sets the unit of the root. Unread or unreadable replaces only unread.
    pub(super) fn set_unit(&mut self, unit: &Fact<Arc<str>>) {
        if matches!(unit, Fact::Known(_)) || self.unit == Fact::Unread {
            self.unit = unit.clone();
        }
    }

    /// Returns the hash of the root's unit; 0 if the unit is unknown.
    pub fn unit_hash(&self) -> u32 {
        match &self.unit {
            Fact::Known(unit) => hash_of(unit),
            Fact::Unread | Fact::Unreadable => self.stored_unit_hash,
        }
    }

    /// Returns whether a unit is that of the root; `None` if the root's unit is unknown.
    pub(crate) fn is_in_unit(&self, unit: &str) -> Option<bool> {
        match &self.unit {
            Fact::Known(own) => Some(**own == *unit),
            _ if self.stored_unit_hash != 0 => Some(self.stored_unit_hash == hash_of(unit)),
            _ => None,
        }
    }

    /// Sets the environment markers and the working directory of the root. Unread or unreadable replaces only unread.
    pub(super) fn set_inherited(&mut self, inherited: &Fact<Arc<InheritedFacts>>) {
        if matches!(inherited, Fact::Known(_)) || self.inherited == Fact::Unread {
            self.inherited = inherited.clone();
        }
    }

    /// Returns the working directory of the root; `None` if it is unknown or not distinctive.
    pub(super) fn directory(&self) -> Option<&Arc<Path>> {
        match &self.inherited {
            Fact::Known(inherited) => inherited.directory.as_ref(),
            Fact::Unread | Fact::Unreadable => None,
        }
    }
}

impl Sessions {
    /// Sets the unit of the open sessions whose living root the process is. Sessions whose root is in the same cgroup
    /// get it too, unless their unit is known.
    pub(crate) fn update_unit(&mut self, node: &Node, unit: &Fact<Arc<str>>) {
        let cgroup_id = node.image.cgroup_id;
        let of_root = self.open.ids(IndexKey::Root(node.key));
        let unread = self.open.ids(IndexKey::UnreadUnit(cgroup_id));
        let unreadable = self.open.ids(IndexKey::UnreadableUnit(cgroup_id));
        // Only a known unit replaces an unreadable one.
        let unreadable = unreadable.take_while(|_| matches!(unit, Fact::Known(_)));
        let all: Vec<SessionId> = of_root.chain(unread).chain(unreadable).collect();
        for id in all {
            self.open.update(id, |session| {
                let is_root = session.root == node.key && session.root_exit.is_none();
                let shares_cgroup = session.cgroup_id != 0 && session.cgroup_id == cgroup_id;
                if is_root || shares_cgroup && !matches!(session.unit, Fact::Known(_)) {
                    session.set_unit(unit);
                }
            });
        }
    }

    /// Sets the environment markers and the working directory of the open and recently closed sessions with this root.
    /// Unread or unreadable replaces only unread.
    pub(crate) fn update_inherited(
        &mut self,
        root: ProcessKey,
        inherited: &Fact<Arc<InheritedFacts>>,
    ) {
        let open: Vec<SessionId> = self.open.ids(IndexKey::Root(root)).collect();
        for id in open {
            let set = |session: &mut Session| session.set_inherited(inherited);
            self.open.update(id, set);
            self.note_followed(id);
        }
        let closed = self.closed.iter_mut();
        for session in closed.filter(|session| session.root == root) {
            session.set_inherited(inherited);
        }
    }

    /// Records the start of a session for those that it follows: their agent has exited before, in the same directory and
    /// of the same user. The session of an agent inside another one follows none.
    fn note_followed(&mut self, id: SessionId) {
        let is_outermost = self.with_enclosing(id).skip(1).all(Session::is_run);
        let Some(session) = self.get(id).filter(|session| {
            is_outermost && session.kind == SessionKind::Agent && !session.is_run()
        }) else {
            return;
        };
        let started = match session.is_discovered {
            true => session.first_root.start,
            false => session.opened_at,
        };
        if let Some(ended) = session.ended_in() {
            self.open.note_follower(ended, started);
        }
    }

    /// See [`SessionIndex::followed_at`](super::index::SessionIndex::followed_at).
    pub(crate) fn followed_at(&self, session: &Session) -> u64 {
        self.open.followed_at(session)
    }

    /// Sets the unit and the inherited facts in the sessions of a root that has exited since they were requested.
    /// Members are still compared with them. Other facts are ignored.
    pub(crate) fn update_exited_root(
        &mut self,
        root: ProcessKey,
        requested: FactSet,
        found: &Facts,
    ) {
        let all: Vec<SessionId> = self.open.ids(IndexKey::Root(root)).collect();
        for id in all {
            self.open.update(id, |session| {
                if session.root_exit.is_some() && requested.contains(FactSet::UNIT) {
                    session.set_unit(&found.unit);
                }
            });
        }
        if requested.contains(FactSet::INHERITED) {
            self.update_inherited(root, &found.inherited);
        }
    }
}
