//! The process tree: who lives, who begot whom, and who has whom for a parent now.
//!
//! Events may come doubled, late, or not at all; the tree takes from each what it adds and ignores the
//! rest. A process that was found in /proc keeps the start time that was found there as part of its
//! key, and takes on its exact one beside it when a probe tells of it.

mod node;

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;

use super::event::{Ended, Event, EventKind, Image, Key, Provenance, Seen, TICK_NS, Uids};
use super::session::SessionId;
use node::{Birth, Gone};
pub use node::{Change, Exited, Node, Orphaned};

type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Exited processes kept for the stories of their descendants.
const EXITED_MAX: usize = 16_384;
/// Exited processes of which it is remembered that they were, for what is told of them too late.
const RECENT_MAX: usize = 1024;

/// See the module.
#[derive(Default)]
pub struct Tree {
    live: Map<u32, Node>,
    exited: Map<Key, Exited>,
    /// Keys of `exited`, oldest first; some may be gone from there.
    order: VecDeque<Key>,
    /// By pid and tick of the start.
    recent: Map<Key, Gone>,
    /// Keys of `recent`, oldest first.
    recent_order: VecDeque<Key>,
}

impl Tree {
    /// Living processes.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// The living process with this key.
    pub fn get(&self, key: Key) -> Option<&Node> {
        self.live.get(&key.pid).filter(|node| node.is(key))
    }

    /// The living process that has this pid now.
    pub fn by_pid(&self, pid: u32) -> Option<&Node> {
        self.live.get(&pid)
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Node> {
        self.live.get_mut(&key.pid).filter(|node| node.is(key))
    }

    /// What is kept of an exited process.
    pub fn exited(&self, key: Key) -> Option<&Exited> {
        self.exited.get(&key)
    }

    /// What a process that lives, or is kept, is called; empty if it is neither.
    pub fn comm(&self, key: Key) -> &[u8] {
        let image = self.get(key).map(|node| &node.image);
        image
            .or_else(|| self.exited(key).map(|exited| &exited.image))
            .map_or(&[], |image| &image.comm)
    }

    #[cfg(test)]
    pub(super) fn kept(&self) -> [usize; 4] {
        let (exited, recent) = (self.exited.len(), self.recent.len());
        [exited, self.order.len(), recent, self.recent_order.len()]
    }

    /// All living processes, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.live.values()
    }

    /// The living parents of a process, nearest first. Ends where the tree does, and at a loop, which
    /// damaged input could make.
    pub fn ancestors(&self, key: Key) -> impl Iterator<Item = &Node> {
        let parent = |node: &Node| node.parent.and_then(|key| self.get(key));
        let first = self.get(key).and_then(parent);
        std::iter::successors(first, move |node| parent(node)).take(self.live.len())
    }

    /// Session of a process that lives or has lived lately; `None` if nothing is known of it.
    pub(super) fn session_of(&self, key: Key) -> Option<Option<SessionId>> {
        if let Some(node) = self.get(key) {
            return Some(node.session);
        }
        let recent = self.gone(key).map(|gone| gone.session);
        recent.or_else(|| self.exited.get(&key).map(|exited| exited.session))
    }

    /// What is remembered of an exited process. Starts that are whole ticks may be known no better.
    fn gone(&self, key: Key) -> Option<&Gone> {
        self.recent.get(&tick(key)).filter(|gone| {
            gone.start == key.start
                || gone.start.is_multiple_of(TICK_NS)
                || key.start.is_multiple_of(TICK_NS)
        })
    }

    /// From whom an unknown process comes that is found with a parent: from that, unless it is the init
    /// of a pid namespace, which also adopts what others bring in.
    fn found(&self, parent: Option<Key>) -> Birth {
        let init = |key: &Key| self.get(*key).is_some_and(|node| node.namespace_init);
        let birth_parent = parent.filter(|key| !init(key));
        Birth {
            parent,
            birth_parent,
            creator: birth_parent,
        }
    }

    /// Takes in one event and tells what it has changed: nothing, for one that brings nothing new.
    pub fn apply(&mut self, event: &Event, changes: &mut Vec<Change>) {
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
            } => {
                let image = [creator, parent]
                    .into_iter()
                    .flatten()
                    .find_map(|key| self.get(key))
                    .map(|node| Arc::clone(&node.image))
                    .unwrap_or_default();
                let birth = Birth {
                    parent,
                    birth_parent: parent,
                    creator,
                };
                let known = self.get(child).map(|node| node.exact_start.is_some());
                let Some(node) = self.meet(child, time, birth, provenance, image, changes) else {
                    return;
                };
                node.pidfd_inode = pidfd_inode;
                node.namespace_init = namespace_init;
                match known {
                    None => node.uids = uids,
                    Some(true) => {}
                    Some(false) => {
                        // Found in /proc before its fork was read; only now it is known who made it.
                        changes.push(Change::Born {
                            key: node.key,
                            creator,
                            provenance,
                        });
                        self.begot(child, parent);
                    }
                }
            }
            EventKind::Exec {
                key,
                parent,
                uids,
                pidfd_inode,
                ref image,
            } => {
                let birth = self.found(parent);
                let own = Arc::clone(image);
                let Some(node) = self.meet(key, time, birth, provenance, own, changes) else {
                    return;
                };
                node.image = Arc::clone(image);
                node.execed = true;
                node.uids = uids;
                node.weighed = None;
                node.pidfd_inode = pidfd_inode;
                changes.push(Change::Execed { key: node.key });
            }
            EventKind::Exit {
                key,
                ended,
                peak_rss,
                ..
            } => {
                if let Some(node) = self.get_mut(key) {
                    if provenance == Provenance::Kernel {
                        node.exact_start.get_or_insert(key.start);
                    }
                    self.exit(key.pid, time, ended, peak_rss, provenance, changes);
                }
            }
            EventKind::Reparent {
                child,
                old_parent,
                adopter,
            } => {
                self.reparent(child, old_parent, adopter, time, provenance, changes);
            }
            EventKind::Seen(ref seen) => self.seen(seen, time, provenance, changes),
        }
    }

    /// The node of a process that an event tells of: known, known less exactly, or new. `None` if the
    /// event is about one that has exited already.
    fn meet(
        &mut self,
        key: Key,
        time: u64,
        birth: Birth,
        provenance: Provenance,
        image: Arc<Image>,
        changes: &mut Vec<Change>,
    ) -> Option<&mut Node> {
        match self.live.get(&key.pid) {
            Some(known) if known.is(key) => {}
            Some(known) if known.key.start > key.start => return None,
            _ if self.gone(key).is_some() => return None,
            predecessor => {
                if predecessor.is_some() {
                    // Its exit was not seen, but its pid has been given away.
                    self.exit(
                        key.pid,
                        time,
                        Ended::Unknown,
                        0,
                        Provenance::Inferred,
                        changes,
                    );
                }
                self.insert(key, birth, provenance, image);
                changes.push(Change::Born {
                    key,
                    creator: birth.creator,
                    provenance,
                });
            }
        }
        let node = self.live.get_mut(&key.pid)?;
        if provenance == Provenance::Kernel {
            node.exact_start.get_or_insert(key.start);
        }
        Some(node)
    }

    fn insert(&mut self, key: Key, birth: Birth, provenance: Provenance, image: Arc<Image>) {
        let holder = birth.parent.and_then(|parent| self.get(parent));
        let parent = holder.map(|node| node.key);
        let in_scope = holder.is_some_and(|node| node.in_scope);
        let birth_parent = birth.birth_parent.map(|key| self.own_key(key));
        self.live.insert(
            key.pid,
            Node {
                key,
                exact_start: (provenance == Provenance::Kernel).then_some(key.start),
                parent: None,
                birth_parent,
                uids: Uids::default(),
                image,
                pidfd_inode: 0,
                session: None,
                boundary: None,
                orphaned: None,
                weighed: None,
                provenance,
                kernel_thread: false,
                namespace_init: false,
                in_scope,
                execed: false,
                children: Vec::new(),
                slot: 0,
                born: 0,
            },
        );
        self.attach(key.pid, parent);
        if let Some(count) = birth_parent.and_then(|key| self.born_count(key)) {
            *count += 1;
        }
    }

    /// The key under which a process is known here, if it lives.
    fn own_key(&self, key: Key) -> Key {
        self.get(key).map_or(key, |node| node.key)
    }

    /// The fork of a process has come to light that was found with a parent, perhaps an adopter.
    fn begot(&mut self, child: Key, parent: Option<Key>) {
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
        self.release(found);
        // If it has had another since, that is told next.
        if parent.is_some_and(|key| self.get(key).is_some()) {
            self.attach(pid, parent);
        }
    }

    fn born_count(&mut self, key: Key) -> Option<&mut u32> {
        if self.get(key).is_some() {
            return self.get_mut(key).map(|node| &mut node.born);
        }
        self.exited.get_mut(&key).map(|exited| &mut exited.born)
    }

    /// Gives a process a parent; takes it from the one it had.
    fn attach(&mut self, pid: u32, parent: Option<Key>) {
        let Some(node) = self.live.get(&pid) else {
            return;
        };
        let (slot, old) = (node.slot as usize, node.parent);
        if let Some(old) = old.and_then(|key| self.get_mut(key)) {
            old.children.swap_remove(slot);
            if let Some(moved) = old.children.get(slot).copied()
                && let Some(moved) = self.live.get_mut(&moved)
            {
                moved.slot = slot as u32;
            }
        }
        let mut slot = 0;
        let parent = parent.filter(|key| key.pid != pid).and_then(|key| {
            let parent = self.get_mut(key)?;
            slot = parent.children.len() as u32;
            parent.children.push(pid);
            Some(parent.key)
        });
        if let Some(node) = self.live.get_mut(&pid) {
            (node.parent, node.slot) = (parent, slot);
        }
    }

    fn exit(
        &mut self,
        pid: u32,
        time: u64,
        ended: Ended,
        peak_rss: u64,
        provenance: Provenance,
        changes: &mut Vec<Change>,
    ) {
        let parent = self.live.get(&pid).and_then(|node| node.parent);
        self.attach(pid, None);
        let Some(mut node) = self.live.remove(&pid) else {
            return;
        };
        node.parent = parent;
        let mut orphans = Vec::with_capacity(node.children.len());
        for child in std::mem::take(&mut node.children) {
            let Some(child) = self.live.get_mut(&child) else {
                continue;
            };
            child.parent = None;
            child.orphaned = Some(Orphaned {
                old_parent: node.key,
                at: time,
            });
            orphans.push(child.key);
        }
        self.keep(&node, ended);
        changes.push(Change::Exited {
            node: Box::new(node),
            ended,
            peak_rss,
            provenance,
            orphans,
        });
    }

    /// Keeps of an exited member what its descendants' stories need.
    fn keep(&mut self, node: &Node, ended: Ended) {
        let Node {
            key,
            birth_parent,
            session,
            born,
            ..
        } = *node;
        self.remember(node);
        let (Some(session), true) = (session, born > 0) else {
            return self.release(birth_parent);
        };
        let image = Arc::clone(&node.image);
        self.exited.insert(
            key,
            Exited {
                key,
                birth_parent,
                image,
                session: Some(session),
                ended,
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

    fn remember(&mut self, node: &Node) {
        let start = node.exact_start.unwrap_or(node.key.start);
        let key = tick(Key { start, ..node.key });
        // What turns up with a pid namespace's init for a parent need not come from it.
        let session = node.session.filter(|_| !node.namespace_init);
        if self.recent.insert(key, Gone { start, session }).is_none() {
            self.recent_order.push_back(key);
        }
        if self.recent_order.len() > RECENT_MAX
            && let Some(oldest) = self.recent_order.pop_front()
        {
            self.recent.remove(&oldest);
        }
    }

    /// One less has this process for a birth parent; lets go of all that nobody needs any more.
    fn release(&mut self, mut key: Option<Key>) {
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

    fn reparent(
        &mut self,
        child: Key,
        old_parent: Option<Key>,
        adopter: Option<Key>,
        time: u64,
        provenance: Provenance,
        changes: &mut Vec<Change>,
    ) {
        // If it is unknown, its fork was lost.
        let birth = self.found(old_parent);
        let image = Arc::default();
        if self
            .meet(child, time, birth, provenance, image, changes)
            .is_none()
        {
            return;
        }
        let adopter_key = adopter.and_then(|key| self.get(key)).map(|node| node.key);
        let old_parent = old_parent.map(|key| self.own_key(key));
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
        if let (None, Some(old_parent)) = (node.orphaned, old_parent) {
            node.orphaned = Some(Orphaned {
                old_parent,
                at: time,
            });
        }
        self.attach(key.pid, adopter_key);
        changes.push(Change::Reparented {
            key,
            old_parent,
            adopter: adopter_key.or(adopter),
        });
    }

    /// A row of the process table: adds what is missing and what happened unseen.
    fn seen(&mut self, seen: &Seen, time: u64, provenance: Provenance, changes: &mut Vec<Change>) {
        let parent = self.live.get(&seen.parent).map(|node| node.key);
        let gone = self.gone(seen.key).is_some();
        match self.live.get_mut(&seen.key.pid) {
            Some(known) if known.is_row(seen.key) => {
                let key = known.key;
                known.uids = seen.uids;
                known.weighed = None;
                if known.is_another_program(&seen.image) {
                    known.image = Arc::clone(&seen.image);
                    known.execed = true;
                    changes.push(Change::Execed { key });
                }
                if known.parent.is_none() && parent.is_some() {
                    let orphaned = known.orphaned;
                    self.attach(key.pid, parent);
                    if let Some(Orphaned { old_parent, .. }) = orphaned {
                        changes.push(Change::Reparented {
                            key,
                            old_parent: Some(old_parent),
                            adopter: parent,
                        });
                    }
                }
                return;
            }
            Some(known) if known.key.start > seen.key.start => return,
            // Exited, but for what the kernel still tidies up.
            _ if gone => return,
            Some(_) => self.exit(
                seen.key.pid,
                time,
                Ended::Unknown,
                0,
                Provenance::Inferred,
                changes,
            ),
            None => {}
        }
        let birth = self.found(parent);
        self.insert(seen.key, birth, provenance, Arc::clone(&seen.image));
        if let Some(node) = self.live.get_mut(&seen.key.pid) {
            node.uids = seen.uids;
            node.weighed = None;
            node.kernel_thread = seen.kernel_thread;
            node.namespace_init = seen.namespace_init;
            node.execed = true;
        }
        changes.push(Change::Born {
            key: seen.key,
            creator: birth.creator,
            provenance,
        });
    }
}

/// A key as far as /proc knows it.
fn tick(key: Key) -> Key {
    Key {
        start: key.start - key.start % TICK_NS,
        ..key
    }
}
