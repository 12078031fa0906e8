//! What has been read of a root, for its members to be compared with.

use std::sync::Arc;

use super::{Session, Sessions};
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};

impl Session {
    pub(super) fn set_unit(&mut self, unit: &Fact<Arc<str>>) {
        if matches!(unit, Fact::Known(_)) || self.unit == Fact::Unread {
            self.unit = unit.clone();
        }
    }

    pub(super) fn set_inherited(&mut self, inherited: &Fact<Arc<InheritedFacts>>) {
        if matches!(inherited, Fact::Known(_)) || self.inherited == Fact::Unread {
            self.inherited = inherited.clone();
        }
    }
}

impl Sessions {
    /// The unit of a process has been read: it is also that of the sessions whose root it is, or that have
    /// their root in the same cgroup.
    pub(crate) fn update_unit(&mut self, node: &Node, unit: &Fact<Arc<str>>) {
        let cgroup_id = node.image.cgroup_id;
        for session in self.by_id.values_mut() {
            let is_root = session.root == node.key && session.root_exit.is_none();
            let unknown = !matches!(session.unit, Fact::Known(_));
            if is_root || unknown && cgroup_id != 0 && session.cgroup_id == cgroup_id {
                session.set_unit(unit);
            }
        }
    }

    /// What a root has from its makers has been read.
    pub(crate) fn update_inherited(
        &mut self,
        root: ProcessKey,
        inherited: &Fact<Arc<InheritedFacts>>,
    ) {
        let of_root = |session: &&mut Session| session.root == root;
        let all = self.by_id.values_mut().chain(&mut self.closed);
        for session in all.filter(of_root) {
            session.set_inherited(inherited);
        }
    }

    /// Of a process that is gone by now this has been read: its session is compared with it still.
    pub(crate) fn update_exited_root(&mut self, root: ProcessKey, asked: FactSet, found: &Facts) {
        let of_root = |session: &&mut Session| session.root == root && session.root_exit.is_some();
        for session in self.by_id.values_mut().filter(of_root) {
            if asked.contains(FactSet::UNIT) {
                session.set_unit(&found.unit);
            }
        }
        if asked.contains(FactSet::INHERITED) {
            self.update_inherited(root, &found.inherited);
        }
    }
}
