//! Lineage of processes that are alive or exited recently.

use super::member::Lineage;
use crate::Tree;
use crate::event::ProcessKey;

impl Tree {
    /// Returns the lineage of a process that is alive or exited recently; `None` if it is unknown.
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
