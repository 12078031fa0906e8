//! Processes that are discovered after the fact: by a scan of /proc, or as roots of restored sessions.

use std::sync::Arc;

use super::Tree;
use super::node::{Birth, Node, NodeState, Orphaned, TreeChange};
use crate::event::{
    ExitStatus, Image, Membership, ProcEntry, ProcessKey, Provenance, RestoredSession,
};

/// Maximum length of a `comm`, in bytes.
const COMM_MAX: usize = 15;

impl<S: NodeState> Tree<S> {
    /// Returns the ancestry of an unknown process discovered with this parent. The init of a PID namespace does not
    /// count as birth parent, because it also adopts processes that entered the namespace.
    pub(super) fn birth_of_discovered(&self, parent: Option<ProcessKey>) -> Birth {
        let init = |key: &ProcessKey| self.get(*key).is_some_and(|node| node.namespace_init);
        let birth_parent = parent.filter(|key| !init(key));
        Birth {
            parent,
            birth_parent,
            creator: birth_parent,
        }
    }

    /// Returns the key under which the tree has the living process that a key from /proc names. Any other key is
    /// returned unchanged. Events from /proc have starts of whole ticks.
    pub(super) fn resolve_key(&self, key: ProcessKey, provenance: Provenance) -> ProcessKey {
        let coarse = provenance == Provenance::Procfs && key.exact_start().is_none();
        let known = self.live.get(&key.pid).filter(|_| coarse);
        let start = |node: &Node<S>| ProcessKey {
            start: node.start(),
            ..node.key
        };
        let known = known.filter(|node| start(node).has_same_tick(key));
        known.map_or(key, |node| node.key)
    }

    /// Adds a process that an event names, unless it is known or has exited. A known one gets the `membership` too.
    /// `parent` is its parent before the event, `time` the time of the event.
    pub(crate) fn add_unknown(
        &mut self,
        key: ProcessKey,
        parent: Option<ProcessKey>,
        membership: Option<Membership>,
        time: u64,
        provenance: Provenance,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        let birth = self.birth_of_discovered(parent);
        let image = Arc::default();
        if let Some(node) = self.get_or_insert(key, time, birth, provenance, image, changes) {
            node.set_membership(membership, time, 0);
        }
    }

    /// Adds a placeholder for the root of a restored session, unless it has exited. A scan then completes it or reports
    /// its exit.
    pub(crate) fn add_restored_root(
        &mut self,
        restored: &RestoredSession,
        time: u64,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        let key = restored.root;
        if self.is_known(key, time, changes) != Some(false) {
            return;
        }
        let name = restored.rule.as_bytes();
        let image = Arc::new(Image {
            comm: name[..name.len().min(COMM_MAX)].into(),
            tty: restored.tty,
            ..Image::default()
        });
        let birth = Birth {
            parent: restored.parent,
            birth_parent: restored.parent,
            creator: None,
        };
        self.insert(key, birth, Provenance::Inferred, image);
        if let Some(node) = self.live.get_mut(&key.pid) {
            node.exact_start = key.exact_start();
            node.uids = restored.uids;
            node.reported.placeholder = true;
        }
    }

    /// Applies an entry of the process table: adds an unknown process, missing data and unreported changes. Does
    /// nothing for a process that has exited. An earlier process with the same pid counts as exited.
    pub(super) fn on_proc_entry(
        &mut self,
        seen: &ProcEntry,
        time: u64,
        provenance: Provenance,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        let parent = self.live.get(&seen.parent).map(|node| node.key);
        let gone = self.gone(seen.key).is_some();
        match self.live.get_mut(&seen.key.pid) {
            Some(known) if known.reported.placeholder && known.matches_entry(seen) => {
                let (key, known_parent) = (known.key, known.parent);
                let birth = self.birth_of_discovered(parent);
                // A known parent was the birth parent. If the process was orphaned since, that event follows.
                if known_parent.is_none() {
                    self.set_birth_parent(key, birth.birth_parent);
                    self.set_parent(key.pid, parent);
                }
                self.set_from_entry(key, birth, seen, provenance, changes);
                return;
            }
            Some(known) if known.matches_entry(seen) => {
                let (key, orphaned) = (known.key, known.orphaned);
                let is_adopted = known.parent.is_none() && parent.is_some();
                known.take(seen);
                // The process may have executed another program since the read.
                if known.is_current_at(seen.read_at) && known.has_other_program(&seen.image) {
                    known.state.on_unseen_exec();
                    known.reported.execed = true;
                    self.update_image(key.pid, |own| *own = Arc::clone(&seen.image));
                    changes.push(TreeChange::Execed { key });
                }
                if is_adopted {
                    self.set_parent(key.pid, parent);
                    if let Some(Orphaned { old_parent, .. }) = orphaned {
                        changes.push(TreeChange::Reparented {
                            key,
                            old_parent: Some(old_parent),
                            adopter: parent,
                            orphaned: false,
                        });
                    }
                }
                return;
            }
            Some(known) if known.start() > seen.key.start => return,
            // The kernel has not finished removing an exited process.
            _ if gone => return,
            Some(_) => self.exit(
                seen.key.pid,
                time,
                ExitStatus::Unknown,
                0,
                Provenance::Inferred,
                changes,
            ),
            None => {}
        }
        let birth = self.birth_of_discovered(parent);
        self.insert(seen.key, birth, provenance, Arc::clone(&seen.image));
        self.set_from_entry(seen.key, birth, seen, provenance, changes);
    }

    /// Copies an entry of the process table to a new node.
    fn set_from_entry(
        &mut self,
        key: ProcessKey,
        birth: Birth,
        seen: &ProcEntry,
        provenance: Provenance,
        changes: &mut Vec<TreeChange<S>>,
    ) {
        self.update_image(key.pid, |own| *own = Arc::clone(&seen.image));
        if let Some(node) = self.live.get_mut(&key.pid) {
            node.take(seen);
            node.kernel_thread = seen.kernel_thread;
            node.namespace_init = seen.namespace_init;
            node.reported.execed = true;
            node.reported.placeholder = false;
            node.provenance = provenance;
        }
        changes.push(TreeChange::Born {
            key,
            creator: birth.creator,
            provenance,
        });
    }
}

impl<S: NodeState> Node<S> {
    /// Adds what an entry of the process table says about a known or new process.
    fn take(&mut self, seen: &ProcEntry) {
        if seen.exact {
            self.exact_start.get_or_insert(seen.key.start);
        }
        if self.pidfd_inode == 0 {
            self.pidfd_inode = seen.pidfd_inode;
        }
        self.set_membership(seen.membership, seen.read_at, 0);
        if self.is_current_at(seen.read_at) {
            self.image_at = seen.read_at;
            self.uids = seen.uids;
            self.state.on_uids();
        }
    }
}
