//! Memory of exited processes.
//!
//! Living descendants need the history of their ancestors, and late events must not revive an exited process.

use std::collections::VecDeque;
use std::sync::Arc;

use super::node::{Exited, Node, NodeState, RecentExit};
use super::{EXITED_MAX, Map, RECENT_MAX, Tree};
use crate::event::{ExitStatus, Image, ProcessKey, TICK_NS};

/// Map of the last [`RECENT_MAX`] entries.
pub(super) struct RecentMap<T> {
    by_key: Map<ProcessKey, T>,
    /// Oldest first.
    order: VecDeque<ProcessKey>,
}

impl<T> Default for RecentMap<T> {
    fn default() -> RecentMap<T> {
        RecentMap {
            by_key: Map::default(),
            order: VecDeque::new(),
        }
    }
}

impl<T> RecentMap<T> {
    fn get(&self, key: ProcessKey) -> Option<&T> {
        self.by_key.get(&key)
    }

    /// Adds or replaces an entry, and drops the oldest one beyond the limit.
    fn insert(&mut self, key: ProcessKey, value: T) {
        if self.by_key.insert(key, value).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > RECENT_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_key.remove(&oldest);
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&ProcessKey, &T)> {
        self.by_key.iter()
    }

    #[cfg(test)]
    pub(super) fn kept(&self) -> [usize; 2] {
        [self.by_key.len(), self.order.len()]
    }
}

impl<S: NodeState> Tree<S> {
    /// Returns a recent exit. A start that is a whole tick matches any start within that tick.
    pub(super) fn gone(&self, key: ProcessKey) -> Option<&RecentExit<S::Remains>> {
        self.recent.get(tick(key)).filter(|gone| {
            gone.start == key.start
                || gone.start.is_multiple_of(TICK_NS)
                || key.start.is_multiple_of(TICK_NS)
        })
    }

    /// Returns the remains of the last recently exited process with this pid that started no later than the tick of
    /// `start`.
    pub(crate) fn last_with_pid(&self, pid: u32, start: u64) -> Option<&S::Remains> {
        let had = self.recent.iter().filter(|(key, _)| key.pid == pid);
        let before = had.filter(|(key, _)| key.start / TICK_NS <= start / TICK_NS);
        let (_, last) = before.max_by_key(|(key, _)| key.start)?;
        Some(&last.remains)
    }

    /// Returns the remains of a recently exited process.
    pub(crate) fn recent_remains(&self, key: ProcessKey) -> Option<&S::Remains> {
        self.gone(key).map(|gone| &gone.remains)
    }

    /// Returns the remains of an exited process with living descendants.
    pub(crate) fn remains_mut(&mut self, key: ProcessKey) -> Option<&mut S::Remains> {
        self.exited.get_mut(&key).map(|exited| &mut exited.remains)
    }

    /// Returns the remains of all remembered exited processes, in no order.
    pub(crate) fn all_remains_mut(&mut self) -> impl Iterator<Item = &mut S::Remains> {
        let exited = self.exited.values_mut();
        let recent = self.recent.by_key.values_mut();
        let exited = exited.map(|exited| &mut exited.remains);
        exited.chain(recent.map(|gone| &mut gone.remains))
    }

    /// Returns the state of all living processes, in no order.
    pub(crate) fn all_states_mut(&mut self) -> impl Iterator<Item = &mut S> {
        self.live.values_mut().map(|node| &mut node.state)
    }

    /// Remembers a process among the recent exits. Keeps its history too, if it was a member and has descendants.
    pub(super) fn remember_exited(&mut self, node: &Node<S>, ended: ExitStatus) {
        let Node {
            key,
            birth_parent,
            uids,
            ..
        } = *node;
        let born = node.links.born;
        self.remember(node);
        if !node.state.is_member() || born == 0 {
            return self.release_birth_parent(birth_parent);
        }
        let image = Arc::clone(&node.image);
        self.exited.insert(
            key,
            Exited {
                key,
                birth_parent,
                image,
                uids,
                remains: node.state.remains(),
                exit_status: ended,
                born,
            },
        );
        self.order.push_back(key);
        while self.exited.len() > EXITED_MAX {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            self.exited.remove(&oldest);
        }
        if self.order.len() > 2 * EXITED_MAX {
            self.order.retain(|key| self.exited.contains_key(key));
        }
    }

    /// Adds a process to the recent exits.
    fn remember(&mut self, node: &Node<S>) {
        let start = node.exact_start.unwrap_or(node.key.start);
        let key = tick(ProcessKey { start, ..node.key });
        // The init of a PID namespace also adopts processes that do not descend from it.
        let mut remains = node.state.remains();
        if node.namespace_init {
            S::disown(&mut remains);
        }
        let gone = RecentExit {
            start,
            image: Arc::clone(&node.image),
            remains,
        };
        self.recent.insert(key, gone);
    }

    /// Returns whether a process is known to have exited.
    pub(crate) fn has_exited(&self, key: ProcessKey) -> bool {
        self.get(key).is_none() && (self.gone(key).is_some() || self.exited.contains_key(&key))
    }

    /// Sets the last image of an exited process when its exec is reported late. `leaves` says that this exec ended its
    /// membership, so that its children are untracked.
    pub(crate) fn set_last_image(&mut self, key: ProcessKey, image: &Arc<Image>, leaves: bool) {
        if self.gone(key).is_some()
            && let Some(gone) = self.recent.by_key.get_mut(&tick(key))
        {
            gone.image = Arc::clone(image);
            if leaves {
                S::disown(&mut gone.remains);
            }
        }
        if let Some(exited) = self.exited.get_mut(&key) {
            exited.image = Arc::clone(image);
            if leaves {
                S::disown(&mut exited.remains);
            }
        }
    }

    /// Remembers that the service removed a process from its session. It is then *disowned*: its descendants are
    /// untracked. `key` has the exact start. The last [`RECENT_MAX`] are remembered.
    pub(crate) fn disown(&mut self, key: ProcessKey) {
        self.disowned.insert(key, ());
    }

    /// Returns whether [`Tree::disown`] was called for this exact key.
    pub(crate) fn is_disowned(&self, key: ProcessKey) -> bool {
        self.disowned.get(key).is_some()
    }

    /// Returns the exited members with living descendants, in no order.
    pub(crate) fn all_exited(&self) -> impl Iterator<Item = &Exited<S::Remains>> {
        self.exited.values()
    }

    /// Drops one reference to a birth parent, and remembered processes without references.
    pub(super) fn release_birth_parent(&mut self, mut key: Option<ProcessKey>) {
        while let Some(count) = key.and_then(|key| self.born_count(key)) {
            *count = count.saturating_sub(1);
            let unneeded = *count == 0;
            key = match key.and_then(|key| self.exited.get(&key)) {
                Some(exited) if unneeded => {
                    let key = exited.key;
                    self.exited
                        .remove(&key)
                        .and_then(|exited| exited.birth_parent)
                }
                _ => None,
            };
        }
    }

    /// Returns the number of known processes with this birth parent, for changes. Returns `None` if the parent is
    /// neither alive nor remembered.
    pub(super) fn born_count(&mut self, key: ProcessKey) -> Option<&mut u32> {
        if self.get(key).is_some() {
            return self.get_mut(key).map(|node| &mut node.links.born);
        }
        self.exited.get_mut(&key).map(|exited| &mut exited.born)
    }
}

/// Returns the key with its start rounded down to a tick, as in /proc.
pub(crate) fn tick(key: ProcessKey) -> ProcessKey {
    ProcessKey {
        start: key.start - key.start % TICK_NS,
        ..key
    }
}
