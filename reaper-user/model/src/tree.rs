//! Process tree: living processes with their birth parents and current parents.
//!
//! Events can come twice, late, or not at all. The tree applies what is new in each and ignores the rest. A discovered
//! process keeps the start time from /proc in its key; a probe adds the exact start later.

mod discovered;
mod exited;
mod node;
mod queries;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::HashMap;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};

use super::event::{Event, EventKind, ExitStatus, Image, ProcessKey, Provenance, Uids};
use exited::RecentMap;
pub(super) use exited::tick;
use node::{Birth, Links, RecentExit, Reported};
pub use node::{Exited, Node, NodeState, Orphaned, TreeChange};

type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Maximum number of exited processes that are kept for the history of their descendants.
const EXITED_MAX: usize = 16_384;
/// Maximum number of recent exits, and of disowned processes, that are remembered. Late events must not revive them.
const RECENT_MAX: usize = 1024;

/// Process tree; see the [module documentation](self).
pub struct Tree<S: NodeState> {
    /// Living processes by pid.
    live: Map<u32, Node<S>>,
    /// Living processes by the cgroup id of their image (0 if unknown) and pid.
    by_cgroup: BTreeSet<(u64, u32)>,
    /// Exited members with living descendants, at most [`EXITED_MAX`].
    exited: Map<ProcessKey, Exited<S::Remains>>,
    /// Keys of `exited`, oldest first. Some may have been removed from `exited`.
    order: VecDeque<ProcessKey>,
    /// Recent exits by pid and start tick.
    recent: RecentMap<RecentExit<S::Remains>>,
    /// Processes whose session was removed from their map entry, by exact key. Their descendants are untracked,
    /// although the kernel may have copied the old entry to them before.
    disowned: RecentMap<()>,
}

impl<S: NodeState> Default for Tree<S> {
    fn default() -> Tree<S> {
        Tree {
            live: Map::default(),
            by_cgroup: BTreeSet::new(),
            exited: Map::default(),
            order: VecDeque::new(),
            recent: RecentMap::default(),
            disowned: RecentMap::default(),
        }
    }
}

impl<S: NodeState> Tree<S> {
    /// Applies one event and appends the changes that it made.
    pub fn apply(&mut self, event: &Event, changes: &mut Vec<TreeChange<S>>) {
        let Event {
            time,
            provenance,
            ref kind,
        } = *event;
        match *kind {
            EventKind::Fork {
                child,
                parent,
                creator,
                uids,
                pidfd_inode,
                namespace_init,
                membership,
            } => {
                let parents = [creator, parent].into_iter().flatten();
                let image = parents.clone().find_map(|key| self.image(key).cloned());
                let image = image.unwrap_or_default();
                let creator_node = parents.filter_map(|key| self.get(key)).next();
                let inherited = creator_node.map(|node| {
                    let is_current = node.is_current_at(time);
                    node.state.at_birth(time, is_current)
                });
                let birth = Birth {
                    parent,
                    birth_parent: parent,
                    creator,
                };
                let known = self.get(child).map(|node| node.reported.by_probe);
                let Some(node) = self.get_or_insert(child, time, birth, provenance, image, changes)
                else {
                    return;
                };
                node.set_membership(membership, time, 0);
                node.pidfd_inode = pidfd_inode;
                node.namespace_init = namespace_init;
                node.reported.forked |= creator.is_some() || parent.is_some();
                node.state.on_fork(inherited, known.is_none());
                match known {
                    None => node.uids = uids,
                    Some(true) => {}
                    Some(false) => {
                        // The process was discovered in /proc before its fork was read. Only the fork names the
                        // creator.
                        changes.push(TreeChange::Born {
                            key: node.key,
                            creator,
                            provenance,
                        });
                        self.set_birth_parent(child, parent);
                    }
                }
            }
            EventKind::Exec {
                key,
                parent,
                uids,
                pidfd_inode,
                ref image,
                membership,
            } => {
                let birth = self.birth_of_discovered(parent);
                let own = Arc::clone(image);
                let key = self.resolve_key(key, provenance);
                let Some(node) = self.get_or_insert(key, time, birth, provenance, own, changes)
                else {
                    return;
                };
                node.set_membership(membership, time, 1);
                node.reported.execed = true;
                if pidfd_inode != 0 {
                    node.pidfd_inode = pidfd_inode;
                }
                let key = node.key;
                // A scan may have read the image of a later exec.
                if node.is_current_at(time) {
                    let is_later = time > node.image_at;
                    node.state.on_exec(&node.image, image, is_later);
                    (node.image_at, node.uids) = (time, uids);
                    self.update_image(key.pid, |own| *own = Arc::clone(image));
                }
                changes.push(TreeChange::Execed { key });
            }
            EventKind::Exit {
                key,
                exit_status: ended,
                peak_rss,
                membership,
                ..
            } => {
                let key = self.resolve_key(key, provenance);
                if let Some(node) = self.get_mut(key) {
                    node.set_membership(membership, time, 0);
                    if provenance == Provenance::Kernel {
                        node.exact_start = node.exact_start.or(key.exact_start());
                    }
                    self.exit(key.pid, time, ended, peak_rss, provenance, changes);
                }
            }
            EventKind::Reparent {
                child,
                old_parent,
                adopter,
                membership,
            } => {
                let child = self.resolve_key(child, provenance);
                let of = |key: Option<ProcessKey>| key.map(|key| self.resolve_key(key, provenance));
                let (old_parent, adopter) = (of(old_parent), of(adopter));
                // For an unknown child the fork event was lost.
                self.add_unknown(child, old_parent, membership, time, provenance, changes);
                self.reparent(child, old_parent, adopter, time, changes);
            }
            EventKind::Move {
                key,
                cgroup_id,
                membership,
            } => {
                if let Some(node) = self.get_mut(key) {
                    node.set_membership(membership, time, 1);
                    changes.push(TreeChange::Moved { key: node.key });
                    self.set_cgroup(key, cgroup_id, time);
                }
            }
            EventKind::SignalSent { key, signal } => {
                if let Some(node) = self.get_mut(key) {
                    node.state.add_flags(match signal {
                        15 => MEMBER_SIGTERM_SENT,
                        9 => MEMBER_SIGKILL_SENT,
                        _ => 0,
                    });
                    changes.push(TreeChange::SignalSent {
                        key: node.key,
                        signal,
                    });
                }
            }
            // Handled by the sessions: see `Tree::add_restored_root`.
            EventKind::Restored(_) => {}
            EventKind::Discovered(ref seen) => self.on_proc_entry(seen, time, provenance, changes),
        }
    }

    /// Returns the node of the process that an event is about, and inserts it if it is unknown. Returns `None` if the
    /// process has exited.
    fn get_or_insert(
        &mut self,
        key: ProcessKey,
        time: u64,
        birth: Birth,
        provenance: Provenance,
        image: Arc<Image>,
        changes: &mut Vec<TreeChange<S>>,
    ) -> Option<&mut Node<S>> {
        if !self.is_known(key, time, changes)? {
            self.insert(key, birth, provenance, image);
            changes.push(TreeChange::Born {
                key,
                creator: birth.creator,
                provenance,
            });
        }
        let node = self.live.get_mut(&key.pid)?;
        if provenance == Provenance::Kernel {
            node.exact_start = node.exact_start.or(key.exact_start());
            (node.reported.by_probe, node.reported.placeholder) = (true, false);
        }
        Some(node)
    }

    /// Returns whether a process is in the tree, or `None` if it has exited. An earlier process with the same pid is
    /// removed as exited.
    fn is_known(
        &mut self,
        key: ProcessKey,
        time: u64,
        changes: &mut Vec<TreeChange<S>>,
    ) -> Option<bool> {
        match self.live.get(&key.pid) {
            Some(known) if known.has_key(key) => return Some(true),
            Some(known) if known.start() > key.start => return None,
            _ if self.gone(key).is_some() => return None,
            None => {}
            Some(_) => {
                let inferred = Provenance::Inferred;
                self.exit(key.pid, time, ExitStatus::Unknown, 0, inferred, changes);
            }
        }
        Some(false)
    }

    /// Adds a living process. The caller ensures that its pid is not in the tree.
    fn insert(&mut self, key: ProcessKey, birth: Birth, provenance: Provenance, image: Arc<Image>) {
        let holder = birth.parent.and_then(|parent| self.get(parent));
        let parent = holder.map(|node| node.key);
        let state = S::below(holder.map(|node| &node.state));
        let birth_parent = birth.birth_parent.map(|key| self.own_key(key));
        self.by_cgroup.insert((image.cgroup_id, key.pid));
        self.live.insert(
            key.pid,
            Node {
                key,
                exact_start: key
                    .exact_start()
                    .filter(|_| provenance == Provenance::Kernel),
                parent: None,
                birth_parent,
                uids: Uids::default(),
                image,
                image_at: 0,
                pidfd_inode: 0,
                membership: None,
                orphaned: None,
                provenance,
                kernel_thread: false,
                namespace_init: false,
                reported: Reported::default(),
                links: Links::default(),
                state,
            },
        );
        self.set_parent(key.pid, parent);
        if let Some(count) = birth_parent.and_then(|key| self.born_count(key)) {
            *count += 1;
        }
    }

    /// Changes the image of a living process. All changes go through here, which keeps `by_cgroup` up to date.
    fn update_image(&mut self, pid: u32, change: impl FnOnce(&mut Arc<Image>)) {
        let Some(node) = self.live.get_mut(&pid) else {
            return;
        };
        let before = node.image.cgroup_id;
        change(&mut node.image);
        if node.image.cgroup_id != before {
            self.by_cgroup.remove(&(before, pid));
            self.by_cgroup.insert((node.image.cgroup_id, pid));
        }
    }

    /// Sets the cgroup of a living process after a move at `time`, in ns since boot; 0 for unknown. Its unit is then
    /// unread.
    pub(super) fn set_cgroup(&mut self, key: ProcessKey, cgroup_id: u64, time: u64) {
        if let Some(node) = self.get_mut(key) {
            node.state.on_move(time);
            self.update_image(key.pid, |own| Arc::make_mut(own).cgroup_id = cgroup_id);
        }
    }

    /// Removes a living process.
    fn remove(&mut self, pid: u32) -> Option<Node<S>> {
        self.set_parent(pid, None);
        let node = self.live.remove(&pid)?;
        self.by_cgroup.remove(&(node.image.cgroup_id, pid));
        Some(node)
    }

    /// Returns the key that a living process has in the tree; an unknown key is returned unchanged.
    fn own_key(&self, key: ProcessKey) -> ProcessKey {
        self.get(key).map_or(key, |node| node.key)
    }

    /// Sets the birth parent of a discovered process, now that its fork is reported. The parent found before may be an
    /// adopter.
    fn set_birth_parent(&mut self, child: ProcessKey, parent: Option<ProcessKey>) {
        let parent = parent.map(|key| self.own_key(key));
        let Some(node) = self.get_mut(child) else {
            return;
        };
        let (pid, found) = (node.key.pid, node.birth_parent);
        if parent.is_none() || parent == found {
            return;
        }
        node.birth_parent = parent;
        if let Some(count) = parent.and_then(|key| self.born_count(key)) {
            *count += 1;
        }
        self.release_birth_parent(found);
        // If the process has been reparented since, that event follows.
        if parent.is_some_and(|key| self.get(key).is_some()) {
            self.set_parent(pid, parent);
        }
    }

    /// Moves a process from its parent to `parent`. An unknown parent counts as none.
    fn set_parent(&mut self, pid: u32, parent: Option<ProcessKey>) {
        let Some(node) = self.live.get(&pid) else {
            return;
        };
        let (slot, old) = (node.links.index_in_parent as usize, node.parent);
        if let Some(old) = old.and_then(|key| self.get_mut(key)) {
            old.links.children.swap_remove(slot);
            if let Some(moved) = old.links.children.get(slot).copied()
                && let Some(moved) = self.live.get_mut(&moved)
            {
                moved.links.index_in_parent = slot as u32;
            }
        }
        let mut slot = 0;
        let parent = parent.filter(|key| key.pid != pid).and_then(|key| {
            let parent = self.get_mut(key)?;
            slot = parent.links.children.len() as u32;
            parent.links.children.push(pid);
            Some(parent.key)
        });
        if let Some(node) = self.live.get_mut(&pid) {
            (node.parent, node.links.index_in_parent) = (parent, slot);
        }
    }

    /// Removes a living process as exited and remembers it. Its children become orphans, whose parent is unknown until
    /// they are reparented.
    fn exit(
        &mut self,
        pid: u32,
        time: u64,
        ended: ExitStatus,
        peak_rss: u64,
        provenance: Provenance,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        let parent = self.live.get(&pid).and_then(|node| node.parent);
        let Some(mut node) = self.remove(pid) else {
            return;
        };
        node.parent = parent;
        let mut orphans = Vec::with_capacity(node.links.children.len());
        for child in std::mem::take(&mut node.links.children) {
            let Some(child) = self.live.get_mut(&child) else {
                continue;
            };
            child.parent = None;
            child.orphaned = Some(Orphaned {
                old_parent: node.key,
                at: time,
                namespace_ending: node.namespace_init,
            });
            orphans.push(child.key);
        }
        self.remember_exited(&node, ended);
        changes.push(TreeChange::Exited {
            node: Box::new(node),
            exit_status: ended,
            peak_rss,
            provenance,
            orphans,
        });
    }

    /// Removes a living process without a trace. Its children have an unknown parent and are not orphans.
    pub(super) fn forget(&mut self, pid: u32) {
        let Some(node) = self.remove(pid) else {
            return;
        };
        for child in node.links.children {
            if let Some(child) = self.live.get_mut(&child) {
                child.parent = None;
            }
        }
        self.release_birth_parent(node.birth_parent);
    }

    /// Moves an orphan from `old_parent` to its adopter. Does nothing if it has another parent meanwhile, or if the
    /// move is already known.
    fn reparent(
        &mut self,
        child: ProcessKey,
        old_parent: Option<ProcessKey>,
        adopter: Option<ProcessKey>,
        time: u64,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        let adopter_key = adopter.and_then(|key| self.get(key)).map(|node| node.key);
        let old_parent = old_parent.map(|key| self.own_key(key));
        let holder = old_parent.and_then(|key| self.get(key));
        let namespace_ending = holder.is_some_and(|node| node.namespace_init);
        let Some(node) = self.get_mut(child) else {
            return;
        };
        let stays = node.parent == adopter_key;
        if node.parent.is_some() && !stays && node.parent != old_parent {
            return;
        }
        if node.parent.is_some() && stays && node.orphaned.is_some() {
            return;
        }
        let key = node.key;
        let orphaned = node.orphaned.is_none() && old_parent.is_some();
        match (&mut node.orphaned, old_parent) {
            (Some(orphaned), _) => orphaned.namespace_ending |= namespace_ending,
            (None, Some(old_parent)) => {
                node.orphaned = Some(Orphaned {
                    old_parent,
                    at: time,
                    namespace_ending,
                });
            }
            (None, None) => {}
        }
        self.set_parent(key.pid, adopter_key);
        changes.push(TreeChange::Reparented {
            key,
            old_parent,
            adopter: adopter_key.or(adopter),
            orphaned,
        });
    }
}
