//! What is known of one process, and what can change about it.

use std::sync::Arc;

use reaper_common::{MEMBER_GENERATION_MASK, MEMBER_GENERATION_STEP};

use crate::event::{ExitStatus, Image, Membership, ProcEntry, ProcessKey, Provenance, Uids};

/// When and from whom a process was orphaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphaned {
    pub old_parent: ProcessKey,
    /// Nanoseconds since boot.
    pub at: u64,
    /// Whether the old parent is the init of its PID namespace: the kernel kills all processes in that, and none of
    /// them gets another parent.
    pub namespace_ending: bool,
}

/// State that other modules keep for each process. The tree creates it, hands it on at forks and condenses it at the exit.
pub trait NodeState: Clone + Default {
    /// What is left of it when the process has exited.
    type Remains: Clone + Default;

    /// Returns the state of a process that appears below a living parent.
    fn below(parent: Option<&Self>) -> Self;

    /// Returns what a child inherits that is born at `born`, in ns since boot. `uids` are those of the parent;
    /// `is_current`: no exec of the parent after that birth is known.
    fn at_birth(&self, born: u64, is_current: bool) -> Self;

    /// The fork of the process is reported. `is_new`: the process was not known before.
    fn on_fork(&mut self, inherited: Option<Self>, is_new: bool);

    /// The process runs `new`. `is_later`: that is later than what is known of `old`, which it ran before.
    fn on_exec(&mut self, old: &Image, new: &Image, is_later: bool);

    /// The process has run another program, which no event has reported.
    fn on_unseen_exec(&mut self);

    /// The uids of the process were read again.
    fn on_uids(&mut self);

    /// The process is in another cgroup since `time`, in ns since boot.
    fn on_move(&mut self, time: u64);

    /// Adds what the flags of the kernel's map say: `MEMBER_*` of `reaper-common`.
    fn add_flags(&mut self, flags: u32);

    /// Whether the history of the process is kept after its exit.
    fn is_member(&self) -> bool;

    /// Returns what is left of it after the exit.
    fn remains(&self) -> Self::Remains;

    /// Makes what is left belong to no session.
    fn disown(remains: &mut Self::Remains);
}

/// A living process. A zombie is none: it has exited.
#[derive(Clone, Debug)]
pub struct Node<S> {
    pub key: ProcessKey,
    /// Start time to the ns, known once a probe has reported the process.
    pub(super) exact_start: Option<u64>,
    /// Its parent now; `None` while that is unknown.
    pub parent: Option<ProcessKey>,
    /// Its first parent; never changes.
    pub birth_parent: Option<ProcessKey>,
    pub uids: Uids,
    pub image: Arc<Image>,
    /// Time when the image was reported or read last, in ns since boot; 0 for the one that it was born with.
    pub(super) image_at: u64,
    /// Inode number of its pidfds, 0 while unknown.
    pub pidfd_inode: u64,
    /// Its entry in the kernel's map as far as is known; `None` too where it has none.
    pub membership: Option<Membership>,
    pub orphaned: Option<Orphaned>,
    pub provenance: Provenance,
    pub kernel_thread: bool,
    pub namespace_init: bool,
    /// How the process came to be known.
    pub(crate) reported: Reported,
    pub(super) links: Links,
    /// State that sessions, policy and keeps hold for it.
    pub state: S,
}

/// What has been reported of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reported {
    /// Whether a probe has reported it.
    pub(crate) by_probe: bool,
    /// Whether its fork was reported: its birth parent is no adopter.
    pub(crate) forked: bool,
    /// Whether its image is its own, not the one that it was born with.
    pub(crate) execed: bool,
    /// Whether all that is known is that it was the root of a session when the service before this one ended.
    pub(super) placeholder: bool,
}

/// Place of a process in the tree.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    pub(super) children: Vec<u32>,
    /// Index among the children of its parent.
    pub(super) index_in_parent: u32,
    /// Number of living and kept processes that have it for a birth parent.
    pub(super) born: u32,
}

impl<S: NodeState> Node<S> {
    /// Pids of the living children, in no order.
    pub fn children(&self) -> &[u32] {
        &self.links.children
    }

    /// Its key with the start to the ns, if that is known: what the kernel calls it.
    pub fn exact_key(&self) -> Option<ProcessKey> {
        let start = self.exact_start?;
        Some(ProcessKey { start, ..self.key })
    }

    pub(crate) fn has_key(&self, key: ProcessKey) -> bool {
        match self.exact_start {
            Some(start) => start == key.start || self.key == key,
            None => self.key.has_same_tick(key),
        }
    }

    /// Its start as well as it is known.
    pub(crate) fn start(&self) -> u64 {
        self.exact_start.unwrap_or(self.key.start)
    }

    /// Whether a row of the process table is about it.
    pub(super) fn matches_entry(&self, row: &ProcEntry) -> bool {
        let start = self.start();
        match self.exact_start {
            Some(_) if row.exact => self.key.pid == row.key.pid && start == row.key.start,
            _ => ProcessKey { start, ..self.key }.has_same_tick(row.key),
        }
    }

    /// Returns when its program became known, or when it executed one that is unread, in ns since boot.
    pub(crate) fn image_at(&self) -> u64 {
        self.image_at
    }

    /// Whether what is from this time tells nothing older than what is known of its program, its uids and
    /// what the kernel's map has for it.
    pub(crate) fn is_current_at(&self, time: u64) -> bool {
        time >= self.image_at
    }

    /// Takes note of what the kernel's map had for it at a time, after so many changes of its program or its cgroup
    /// that are being told of.
    pub(super) fn set_membership(&mut self, mark: Option<Membership>, time: u64, changes: u32) {
        let Some(mark) = mark else { return };
        if self.is_current_at(time) {
            let execs = |flags: u32| flags & MEMBER_GENERATION_MASK;
            let known = self.membership.map(|known| known.flags);
            let expected = known.map(|known| known.wrapping_add(changes * MEMBER_GENERATION_STEP));
            if expected.is_some_and(|flags| execs(flags) != execs(mark.flags)) {
                self.state.on_unseen_exec();
            }
            self.membership = Some(mark).filter(|mark| mark.flags != 0);
        }
        self.state.add_flags(mark.flags);
    }

    /// Whether it runs another program by now than it was known to: an exec went unseen.
    pub(super) fn has_other_program(&self, found: &Image) -> bool {
        let differs = |a: &[u8], b: &[u8]| !a.is_empty() && !b.is_empty() && a != b;
        let whole = !self.image.exe.starts_with("…".as_bytes());
        self.image.comm.is_empty()
            || whole && differs(&self.image.exe, &found.exe)
            // Programs rewrite their arguments, but hardly before they run.
            || !self.reported.execed && differs(&self.image.argv, &found.argv)
    }
}

/// From whom an event says that a process comes.
#[derive(Clone, Copy, Default)]
pub(super) struct Birth {
    /// Who has it.
    pub(super) parent: Option<ProcessKey>,
    /// Who had it first.
    pub(super) birth_parent: Option<ProcessKey>,
    pub(super) creator: Option<ProcessKey>,
}

/// A process that has exited lately.
pub(super) struct RecentExit<R> {
    pub(super) start: u64,
    pub(super) image: Arc<Image>,
    pub(super) remains: R,
}

/// A process that has exited and has living descendants.
#[derive(Clone, Debug)]
pub struct Exited<R> {
    pub key: ProcessKey,
    pub birth_parent: Option<ProcessKey>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub(crate) remains: R,
    pub exit_status: ExitStatus,
    pub(super) born: u32,
}

/// What an event has changed.
#[derive(Clone, Debug)]
pub enum TreeChange<S> {
    /// A process is new to the tree.
    Born {
        key: ProcessKey,
        creator: Option<ProcessKey>,
        provenance: Provenance,
    },
    /// It runs another program.
    Execed { key: ProcessKey },
    /// It is in another cgroup.
    Moved { key: ProcessKey },
    /// It is gone. Its children were orphaned by that, just now.
    Exited {
        node: Box<Node<S>>,
        exit_status: ExitStatus,
        peak_rss: u64,
        provenance: Provenance,
        orphans: Vec<ProcessKey>,
    },
    /// It has another parent.
    Reparented {
        key: ProcessKey,
        old_parent: Option<ProcessKey>,
        adopter: Option<ProcessKey>,
        /// That made it an orphan: nobody has told of its parent's exit.
        orphaned: bool,
    },
    /// A probe has sent it a signal, of this number.
    SignalSent { key: ProcessKey, signal: u8 },
}
