//! Queries of the tree.

use std::sync::Arc;

use hashbrown::HashSet;

use super::{Exited, Image, Map, Node, NodeState, ProcessKey, Tree};

impl<S: NodeState> Tree<S> {
    /// Returns the number of living processes.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Returns whether no living process is known.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// Returns the living process with this key.
    pub fn get(&self, key: ProcessKey) -> Option<&Node<S>> {
        self.live.get(&key.pid).filter(|node| node.has_key(key))
    }

    /// Returns the living process with this pid.
    pub fn by_pid(&self, pid: u32) -> Option<&Node<S>> {
        self.live.get(&pid)
    }

    pub(crate) fn get_mut(&mut self, key: ProcessKey) -> Option<&mut Node<S>> {
        self.live.get_mut(&key.pid).filter(|node| node.has_key(key))
    }

    /// Returns an exited member with living descendants, by its key in the tree.
    pub fn exited(&self, key: ProcessKey) -> Option<&Exited<S::Remains>> {
        self.exited.get(&key)
    }

    /// Returns the image of a living process, or the last one of an exited process.
    pub(super) fn image(&self, key: ProcessKey) -> Option<&Arc<Image>> {
        let image = self.get(key).map(|node| &node.image);
        let exited = || self.exited(key).map(|exited| &exited.image);
        let gone = || self.gone(key).map(|gone| &gone.image);
        image.or_else(exited).or_else(gone)
    }

    /// Returns the `comm` of a living process, or of an exited member with living descendants. Empty if it is neither.
    pub fn comm(&self, key: ProcessKey) -> &[u8] {
        let image = self.get(key).map(|node| &node.image);
        image
            .or_else(|| self.exited(key).map(|exited| &exited.image))
            .map_or(&[], |image| &image.comm)
    }

    #[cfg(test)]
    pub(crate) fn cgroups(&self) -> &std::collections::BTreeSet<(u64, u32)> {
        &self.by_cgroup
    }

    #[cfg(test)]
    pub(crate) fn kept(&self) -> [usize; 4] {
        let [recent, order] = self.recent.kept();
        [self.exited.len(), self.order.len(), recent, order]
    }

    /// Returns all living processes, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Node<S>> {
        self.live.values()
    }

    /// Returns the living processes in a cgroup, lowest pid first.
    pub(crate) fn in_cgroup(&self, cgroup_id: u64) -> impl Iterator<Item = &Node<S>> {
        let all = (cgroup_id, 0)..=(cgroup_id, u32::MAX);
        let pids = self.by_cgroup.range(all).map(|(_, pid)| *pid);
        pids.filter_map(|pid| self.by_pid(pid))
    }

    /// Returns the living ancestors by current parents, nearest first. Terminates on a loop, which corrupt input could
    /// create.
    pub fn ancestors(&self, key: ProcessKey) -> impl Iterator<Item = &Node<S>> {
        let parent = |node: &Node<S>| node.parent.and_then(|key| self.get(key));
        let first = self.get(key).and_then(parent);
        std::iter::successors(first, move |node| parent(node)).take(self.live.len())
    }

    /// Returns a test whether a process descends from `ancestor` by birth parents, through living processes and exited
    /// members. The test visits no process twice, so that testing a whole tree takes no longer if it is deep.
    pub(crate) fn descent_from(&self, ancestor: ProcessKey) -> impl FnMut(ProcessKey) -> bool {
        let creator = |key: ProcessKey| match self.get(key) {
            Some(node) => node.birth_parent,
            None => self.exited(key)?.birth_parent,
        };
        let mut known: Map<ProcessKey, bool> = Map::default();
        known.insert(ancestor, true);
        move |key| {
            let (mut above, mut path) = (creator(key), Vec::new());
            let descends = loop {
                let Some(key) = above else { break false };
                if let Some(descends) = known.get(&key) {
                    break *descends;
                }
                // A loop, which corrupt input could create, ends here.
                known.insert(key, false);
                path.push(key);
                above = creator(key);
            };
            for key in path.into_iter().filter(|_| descends) {
                known.insert(key, true);
            }
            descends
        }
    }

    /// Returns the living descendants of several processes, each one once. A process of `tops` is among them only if it
    /// descends from another one.
    pub fn descendants_of_all(&self, tops: Vec<ProcessKey>) -> Vec<ProcessKey> {
        let (mut visited, mut found) = (HashSet::new(), tops);
        let (mut at, first) = (0, found.len());
        while let Some(node) = found.get(at).copied() {
            let children = self.get(node).into_iter().flat_map(Node::children);
            let children = children.filter_map(|pid| self.by_pid(*pid));
            let new = children.filter(|child| visited.insert(child.key));
            found.extend(new.map(|child| child.key));
            at += 1;
        }
        found.split_off(first)
    }

    /// Returns the living descendants of a process, parents before children. Terminates on a loop, which corrupt input
    /// could create.
    pub fn descendants(&self, key: ProcessKey) -> impl Iterator<Item = &Node<S>> {
        let top = self.get(key);
        let child = |of: &Node<S>, slot: usize| self.by_pid(*of.links.children.get(slot)?);
        let next = move |node: &&Node<S>| {
            let top = top?;
            if let Some(first) = child(node, 0) {
                return Some(first);
            }
            let mut last = *node;
            while last.key != top.key {
                let parent = self.get(last.parent?)?;
                if let Some(next) = child(parent, last.links.index_in_parent as usize + 1) {
                    return Some(next);
                }
                last = parent;
            }
            None
        };
        let first = top.and_then(|top| child(top, 0));
        let all = std::iter::successors(first, next).take(self.live.len());
        all.take_while(move |node| node.key != key)
    }
}
