//! What has been read of a root, for its members to be compared with.

use std::sync::Arc;

use super::{Session, Sessions};
use crate::Node;
use crate::event::Key;
use crate::facts::{Facts, Inherited, Known, Needs};

impl Session {
    pub(super) fn learn_unit(&mut self, unit: &Known<Arc<str>>) {
        if matches!(unit, Known::Is(_)) || self.unit == Known::Unasked {
            self.unit = unit.clone();
        }
    }

    pub(super) fn learn_inherited(&mut self, inherited: &Known<Arc<Inherited>>) {
        if matches!(inherited, Known::Is(_)) || self.inherited == Known::Unasked {
            self.inherited = inherited.clone();
        }
    }
}

impl Sessions {
    /// The unit of a process has been read: it is also that of the sessions whose root it is, or that have
    /// their root in the same cgroup.
    pub(crate) fn learn_unit(&mut self, node: &Node, unit: &Known<Arc<str>>) {
        let cgroup_id = node.image.cgroup_id;
        for session in self.by_id.values_mut() {
            let is_root = session.root == node.key && session.root_gone.is_none();
            let unknown = !matches!(session.unit, Known::Is(_));
            if is_root || unknown && cgroup_id != 0 && session.cgroup_id == cgroup_id {
                session.learn_unit(unit);
            }
        }
    }

    /// What a root has from its makers has been read.
    pub(crate) fn learn_inherited(&mut self, root: Key, inherited: &Known<Arc<Inherited>>) {
        let of_root = |session: &&mut Session| session.root == root;
        let all = self.by_id.values_mut().chain(&mut self.closed);
        for session in all.filter(of_root) {
            session.learn_inherited(inherited);
        }
    }

    /// Of a process that is gone by now this has been read: its session is compared with it still.
    pub(crate) fn learn_of_gone_root(&mut self, root: Key, asked: Needs, found: &Facts) {
        let of_root = |session: &&mut Session| session.root == root && session.root_gone.is_some();
        for session in self.by_id.values_mut().filter(of_root) {
            if asked.has(Needs::UNIT) {
                session.learn_unit(&found.unit);
            }
        }
        if asked.has(Needs::INHERITED) {
            self.learn_inherited(root, &found.inherited);
        }
    }
}
