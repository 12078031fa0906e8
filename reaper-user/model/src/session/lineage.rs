//! Lineage of processes that live or have lived lately.

use super::member::Lineage;
use crate::Tree;
use crate::event::ProcessKey;

impl Tree {
    /// Returns the session that a process belongs to which lives or has lived lately; `None` if nothing is known of it.
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
