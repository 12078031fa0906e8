//! Lineage of processes that are alive or exited recently.

use super::member::Lineage;
use crate::Tree;
use crate::event::ProcessKey;

impl Tree {
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
