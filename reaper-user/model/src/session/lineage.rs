//! Lineage of processes that are alive or exited recently.

use std::sync::Arc;

use super::member::Lineage;
use crate::Tree;
use crate::event::{Image, ProcessKey};

/// Limit of ancestors in [`Tree::member_ancestors`], which bounds the cost of a decision.
pub const ANCESTORS_MAX: usize = 16;

impl Tree {
    /// Returns the birth ancestors of a member that are in one session, nearest first, at most [`ANCESTORS_MAX`]:
    /// `birth_parent`, and those above it up to the root. Each has its last image, and whether it has exited. Stops at an
    /// exited ancestor that the tree no longer has.
    pub fn member_ancestors(
        &self,
        birth_parent: Option<ProcessKey>,
    ) -> impl Iterator<Item = (ProcessKey, &Arc<Image>, bool)> {
        let session = birth_parent.and_then(|key| self.lineage_of(key)?.session);
        let mut next = birth_parent.filter(|_| session.is_some());
        let ancestor = move || {
            let key = next?;
            if let Some(node) = self.get(key) {
                next = node.birth_parent;
                let is_member = node.lineage().session == session;
                return is_member.then_some((node.key, &node.image, false));
            }
            let exited = self.exited(key)?;
            next = exited.birth_parent;
            let is_member = exited.remains.lineage.session == session;
            is_member.then_some((key, &exited.image, true))
        };
        std::iter::from_fn(ancestor).take(ANCESTORS_MAX)
    }

    /// Returns the lineage of a process that is alive, exited recently, or has exited and has living descendants.
    /// Returns `None` if it is unknown. A disowned process (see [`Tree::disown`]) has a lineage without a session.
    pub(crate) fn lineage_of(&self, key: ProcessKey) -> Option<Lineage> {
        if let Some(node) = self.get(key) {
            return Some(node.lineage());
        }
        let recent = self.recent_remains(key).map(|remains| remains.lineage);
        let exited = || self.exited(key).map(|exited| exited.remains.lineage);
        let recent = recent.or_else(exited);
        recent.or_else(|| self.is_disowned(key).then(Lineage::default))
    }
}
