//! Data of one process, and changes to it.

use std::sync::Arc;

use reaper_common::{MEMBER_GENERATION_MASK, MEMBER_GENERATION_STEP};

use crate::event::{ExitStatus, Image, Membership, ProcEntry, ProcessKey, Provenance, Uids};

/// Loss of the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphaned {
    /// Parent that exited.
    pub old_parent: ProcessKey,
    /// Time of the loss, in nanoseconds since boot.
    pub at: u64,
    /// Whether the old parent is the init of its PID namespace. The kernel then kills all processes in the namespace,
    /// and gives them no other parent.
    pub namespace_ending: bool,
}

/// State that other modules keep for each process. The tree creates it, copies it at a fork and reduces it at the exit.
pub trait NodeState: Clone + Default {
    /// Part of the state that is kept after the exit.
    type Remains: Clone + Default;

    /// Returns the state of a new process below a living parent.
    fn below(parent: Option<&Self>) -> Self;

    /// Returns what a child inherits that is forked at `born`, in ns since boot. `is_current` says that no exec of the
    /// parent after that time is known.
    fn at_birth(&self, born: u64, is_current: bool) -> Self;

    /// Takes over what the process inherited at its fork; `None` if that is unknown. `is_new` says that the process was
    /// not known before.
    fn on_fork(&mut self, inherited: Option<Self>, is_new: bool);

    /// Forgets what belongs to the program `old` when the process executes `new`, and takes over what the exec reports.
    /// `is_later` says that the exec is newer than `old`.
    fn on_exec(&mut self, old: &Image, new: &Image, is_later: bool);

    /// Forgets what belongs to the previous program after an exec that no event reported.
    fn on_unseen_exec(&mut self);

    /// Forgets what depends on the uids, which were read again.
    fn on_uids(&mut self);

    /// Records a move to another cgroup at `time`, in ns since boot, and forgets what belongs to the old one.
    fn on_move(&mut self, time: u64);

    /// Adds the `MEMBER_*` flags of an entry in the kernel's map.
    fn add_flags(&mut self, flags: u32);

    /// Returns whether the process is a member of a session. Only then is its history kept after its exit.
    fn is_member(&self) -> bool;

    /// Returns the part that is kept after the exit.
    fn remains(&self) -> Self::Remains;

    /// Detaches the remains from their session, so that descendants of the process are untracked.
    fn disown(remains: &mut Self::Remains);
}

/// Living process. A zombie has exited.
#[derive(Clone, Debug)]
pub struct Node<S> {
    /// Identity of the process.
    pub key: ProcessKey,
    /// Start time to the nanosecond, known once a probe has reported the process.
    pub(super) exact_start: Option<u64>,
    /// Current parent; `None` while it is unknown.
    pub parent: Option<ProcessKey>,
    /// First parent; changes only if the fork is reported after the process was discovered.
    pub birth_parent: Option<ProcessKey>,
    /// Last known uids.
    pub uids: Uids,
    /// Last known program; that of the parent until the first exec.
    pub image: Arc<Image>,
    /// Time when the image was reported or read last, in ns since boot; 0 for an image inherited at the fork.
    pub(super) image_at: u64,
    /// Inode number of the process's pidfds, 0 while unknown.
    pub pidfd_inode: u64,
    /// Last known entry in the kernel's map; `None` also if there is no entry.
    pub membership: Option<Membership>,
    /// Loss of the parent, if it has lost one.
    pub orphaned: Option<Orphaned>,
    /// Source that reported the process.
    pub provenance: Provenance,
    /// Whether it is a thread of the kernel.
    pub kernel_thread: bool,
    /// Whether it is the init of a PID namespace below that of the service.
    pub namespace_init: bool,
    /// Ways in which the process became known.
    pub(crate) reported: Reported,
    pub(super) links: Links,
    /// State that sessions, policy and users' keeps hold for the process.
    pub state: S,
}

/// Reports about a process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reported {
    /// Whether a probe has reported the process.
    pub(crate) by_probe: bool,
    /// Whether the fork was reported. The birth parent then is not an adopter.
    pub(crate) forked: bool,
    /// Whether the image is its own, not inherited at the fork.
    pub(crate) execed: bool,
    /// Whether the node stands for the root of a restored session that is not confirmed to be alive.
    pub(super) placeholder: bool,
}

/// Position of a process in the tree.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    pub(super) children: Vec<u32>,
    /// Index in the parent's `children`.
    pub(super) index_in_parent: u32,
    /// Number of living and remembered processes with this birth parent.
    pub(super) born: u32,
}

impl<S: NodeState> Node<S> {
    /// Returns the pids of the living children, in no order.
    pub fn children(&self) -> &[u32] {
        &self.links.children
    }

    /// Returns the key as the kernel has it, with the start to the nanosecond, if that is known.
    pub fn exact_key(&self) -> Option<ProcessKey> {
        let start = self.exact_start?;
        Some(ProcessKey { start, ..self.key })
    }

    /// Returns whether `key` names this process: by its exact start or its key in the tree. While the exact start is
    /// unknown, any start within the same tick matches.
    pub(crate) fn has_key(&self, key: ProcessKey) -> bool {
        match self.exact_start {
            Some(start) => start == key.start || self.key == key,
            None => self.key.has_same_tick(key),
        }
    }

    /// Returns the most exact start that is known.
    pub(crate) fn start(&self) -> u64 {
        self.exact_start.unwrap_or(self.key.start)
    }

    /// Returns whether an entry of the process table is about this process.
    pub(super) fn matches_entry(&self, row: &ProcEntry) -> bool {
        let start = self.start();
        match self.exact_start {
            Some(_) if row.exact => self.key.pid == row.key.pid && start == row.key.start,
            _ => ProcessKey { start, ..self.key }.has_same_tick(row.key),
        }
    }

    /// Returns when the program became known, or when a program was executed that is still unread, in ns since boot.
    pub(crate) fn image_at(&self) -> u64 {
        self.image_at
    }

    /// Returns whether information from `time` is not older than the known program, uids and map entry.
    pub(crate) fn is_current_at(&self, time: u64) -> bool {
        time >= self.image_at
    }

    /// Sets the entry that the kernel's map had at `time`, in ns since boot. An entry from before the known program
    /// only adds its flags. `None` changes nothing.
    ///
    /// `changes` is the number of execs and moves that the current event reports. The entry counts them in its
    /// generation. Any other change of the generation shows an unreported exec.
    pub(super) fn set_membership(
        &mut self,
        membership: Option<Membership>,
        time: u64,
        changes: u32,
    ) {
        let Some(membership) = membership else { return };
        if self.is_current_at(time) {
            let execs = |flags: u32| flags & MEMBER_GENERATION_MASK;
            let known = self.membership.map(|known| known.flags);
            let expected = known.map(|known| known.wrapping_add(changes * MEMBER_GENERATION_STEP));
            if expected.is_some_and(|flags| execs(flags) != execs(membership.flags)) {
                self.state.on_unseen_exec();
            }
            self.membership = Some(membership).filter(|membership| membership.flags != 0);
        }
        self.state.add_flags(membership.flags);
    }

    /// Returns whether `found` is another program than the known one, so that an exec was missed.
    pub(super) fn has_other_program(&self, found: &Image) -> bool {
        let differs = |a: &[u8], b: &[u8]| !a.is_empty() && !b.is_empty() && a != b;
        let whole = !self.image.exe.starts_with("…".as_bytes());
        self.image.comm.is_empty()
            || whole && differs(&self.image.exe, &found.exe)
            // Programs may overwrite their arguments, but rarely before they execute.
            || !self.reported.execed && differs(&self.image.argv, &found.argv)
    }
}

/// Ancestry of a process according to an event.
#[derive(Clone, Copy, Default)]
pub(super) struct Birth {
    /// Current parent.
    pub(super) parent: Option<ProcessKey>,
    /// First parent.
    pub(super) birth_parent: Option<ProcessKey>,
    pub(super) creator: Option<ProcessKey>,
}

/// Process that exited recently.
pub(super) struct RecentExit<R> {
    /// Most exact start that was known, in ns since boot.
    pub(super) start: u64,
    pub(super) image: Arc<Image>,
    pub(super) remains: R,
}

/// Member that has exited and has living descendants.
#[derive(Clone, Debug)]
pub struct Exited<R> {
    /// Identity of the process.
    pub key: ProcessKey,
    /// First parent, if it is known.
    pub birth_parent: Option<ProcessKey>,
    /// Last program.
    pub image: Arc<Image>,
    /// Last known uids.
    pub uids: Uids,
    pub(crate) remains: R,
    /// Status of the exit.
    pub exit_status: ExitStatus,
    pub(super) born: u32,
}

/// Change that an event made to the tree.
#[derive(Clone, Debug)]
pub enum TreeChange<S> {
    /// A process is new, or its fork was reported after it was discovered.
    Born {
        /// New process.
        key: ProcessKey,
        /// Process that called fork, if it is known.
        creator: Option<ProcessKey>,
        /// Source of the event.
        provenance: Provenance,
    },
    /// The process executed another program.
    Execed {
        /// Process that called exec.
        key: ProcessKey,
    },
    /// The process moved to another cgroup.
    Moved {
        /// Process that moved.
        key: ProcessKey,
    },
    /// The process exited, which orphaned its children.
    Exited {
        /// Last state of the process.
        node: Box<Node<S>>,
        /// Status of the exit.
        exit_status: ExitStatus,
        /// Maximum resident memory in bytes, 0 if unknown.
        peak_rss: u64,
        /// Source of the event.
        provenance: Provenance,
        /// Children that were alive at the exit.
        orphans: Vec<ProcessKey>,
    },
    /// The process has another parent.
    Reparented {
        /// Process with a new parent.
        key: ProcessKey,
        /// Parent before, if it is known.
        old_parent: Option<ProcessKey>,
        /// New parent, if it is visible in this PID namespace.
        adopter: Option<ProcessKey>,
        /// Whether the process became an orphan by this: the exit of its parent was not reported.
        orphaned: bool,
    },
    /// A probe sent the process a signal, given by number.
    SignalSent {
        /// Process that got the signal.
        key: ProcessKey,
        /// Signal number.
        signal: u8,
    },
}
