//! Removes untracked processes from the tree where the probes report tracked processes only: their exits would go
//! unnoticed.

use hashbrown::HashSet;

use super::Model;
use super::event::ProcessKey;
use crate::Node;

impl Model {
    /// Removes all living untracked processes. The remaining processes that are not members are watched from now on.
    /// Emits no output.
    pub fn forget_untracked(&mut self) {
        let mut above = HashSet::new();
        for member in self
            .tree
            .iter()
            .filter(|node| node.state.member.session.is_some())
        {
            for node in self.tree.ancestors(member.key) {
                if !above.insert(node.key) {
                    break;
                }
            }
        }
        let others = self
            .tree
            .iter()
            .filter(|node| node.state.member.session.is_none());
        let (stay, go): (Vec<ProcessKey>, Vec<ProcessKey>) =
            others.map(|node| node.key).partition(|key| {
                above.contains(key) || self.tree.get(*key).is_some_and(|node| self.is_needed(node))
            });
        for key in go {
            self.tree.forget(key.pid);
        }
        for key in stay {
            if let Some(node) = self.tree.get_mut(key) {
                node.state.member.watched = true;
            }
        }
    }

    /// Removes a process if it is untracked, such as a candidate that is not an agent. Emits no output.
    pub fn forget(&mut self, key: ProcessKey) {
        if self.is_untracked(key) {
            self.tree.forget(key.pid);
        }
    }

    /// Returns whether a living process matters to no session and not to the service itself. Then it is no member,
    /// boundary or root, no ancestor of a member, and not tracked for an awaited process. It is not in a scope that
    /// names processes, and is no init and no ancestor of the service.
    pub fn is_untracked(&self, key: ProcessKey) -> bool {
        let node = self.tree.get(key);
        node.is_some_and(|node| !self.is_needed(node) && !self.is_above_member(node))
    }

    /// Returns whether a process is tracked even without a descendant that is a member. [`Model::is_untracked`] lists
    /// the reasons.
    fn is_needed(&self, node: &Node) -> bool {
        node.state.member.session.is_some()
            || node.state.member.boundary.is_some()
            || node.state.member.root
            || node.namespace_init
            || node.key.pid == 1
            || self.scope.is_by_pid() && node.state.member.in_scope
            || self.is_own_ancestry(node.key)
            || self.awaited_above(node).is_some()
    }

    /// Returns whether a living descendant is a member.
    fn is_above_member(&self, top: &Node) -> bool {
        let mut below = top.children().to_vec();
        // A loop, which corrupt input could create, ends at the top.
        while let Some(node) = below.pop().and_then(|pid| self.tree.by_pid(pid)) {
            if node.state.member.session.is_some() {
                return true;
            }
            if node.key != top.key {
                below.extend(node.children());
            }
        }
        false
    }
}
