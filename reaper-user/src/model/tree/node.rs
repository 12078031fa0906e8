//! What is known of one process, and what can change about it.

use std::sync::Arc;

use crate::model::event::{Ended, Image, Key, Provenance, Uids};
use crate::model::policy::Kept;
use crate::model::session::SessionId;

/// When and from whom a process was orphaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphaned {
    pub old_parent: Key,
    /// Nanoseconds since boot.
    pub at: u64,
}

/// A living process. A zombie is none: it has exited.
#[derive(Clone, Debug)]
pub struct Node {
    pub key: Key,
    /// Start time to the ns, known once a probe has told of it.
    pub(super) exact_start: Option<u64>,
    /// Who has it now; `None` while that is unknown.
    pub parent: Option<Key>,
    /// Who had it first; never changes.
    pub birth_parent: Option<Key>,
    pub uids: Uids,
    pub image: Arc<Image>,
    /// Inode number of its pidfds, 0 while unknown.
    pub pidfd_inode: u64,
    /// The innermost session it is a member of.
    pub session: Option<SessionId>,
    /// Membership stopped here, by the rule of this name.
    pub boundary: Option<Arc<str>>,
    pub orphaned: Option<Orphaned>,
    /// What the keeping rules said of it, as a member of which session: asked for when it becomes one
    /// and when it runs another program, so that nothing is left to ask when every microsecond counts.
    pub(in crate::model) weighed: Option<(SessionId, Option<Kept>)>,
    pub provenance: Provenance,
    pub kernel_thread: bool,
    pub namespace_init: bool,
    /// Within what this program was told to consider.
    pub in_scope: bool,
    /// Its image is its own, not the one it was born with.
    pub(super) execed: bool,
    pub(super) children: Vec<u32>,
    /// Where it stands among its parent's children.
    pub(super) slot: u32,
    /// Living and kept processes that have it for a birth parent.
    pub(super) born: u32,
}

impl Node {
    /// Pids of the living children, in no order.
    pub fn children(&self) -> &[u32] {
        &self.children
    }

    pub(super) fn is(&self, key: Key) -> bool {
        match self.exact_start {
            Some(start) => start == key.start || self.key == key,
            None => self.key.same_tick(key),
        }
    }

    /// Whether a row of the process table is about it.
    pub(super) fn is_row(&self, row: Key) -> bool {
        let start = self.exact_start.unwrap_or(self.key.start);
        Key { start, ..self.key }.same_tick(row)
    }

    /// Whether it runs another program by now than it was known to: an exec went unseen.
    pub(super) fn is_another_program(&self, found: &Image) -> bool {
        let differs = |a: &[u8], b: &[u8]| !a.is_empty() && !b.is_empty() && a != b;
        let whole = !self.image.exe.starts_with("…".as_bytes());
        self.image.comm.is_empty()
            || whole && differs(&self.image.exe, &found.exe)
            // Programs rewrite their arguments, but hardly before they run.
            || !self.execed && differs(&self.image.argv, &found.argv)
    }
}

/// From whom an event says that a process comes.
#[derive(Clone, Copy)]
pub(super) struct Birth {
    /// Who has it.
    pub(super) parent: Option<Key>,
    /// Who had it first.
    pub(super) birth_parent: Option<Key>,
    pub(super) creator: Option<Key>,
}

/// What is remembered of a process that has exited lately.
pub(super) struct Gone {
    pub(super) start: u64,
    pub(super) session: Option<SessionId>,
}

/// What is kept of a process that has exited.
#[derive(Clone, Debug)]
pub struct Exited {
    pub key: Key,
    pub birth_parent: Option<Key>,
    pub image: Arc<Image>,
    pub session: Option<SessionId>,
    pub ended: Ended,
    pub(super) born: u32,
}

/// What an event has changed.
#[derive(Clone, Debug)]
pub enum Change {
    /// A process is new to the tree.
    Born {
        key: Key,
        creator: Option<Key>,
        provenance: Provenance,
    },
    /// It runs another program.
    Execed { key: Key },
    /// It is gone. Its children were orphaned by that, just now.
    Exited {
        node: Box<Node>,
        ended: Ended,
        peak_rss: u64,
        provenance: Provenance,
        orphans: Vec<Key>,
    },
    /// It has another parent.
    Reparented {
        key: Key,
        old_parent: Option<Key>,
        adopter: Option<Key>,
    },
}
