//! What a source tells the model: the words of the whole program.

use std::sync::Arc;

/// Nanoseconds of a tick of /proc (`USER_HZ` is 100 on every architecture Linux runs on).
pub const TICK_NS: u64 = 10_000_000;

/// Identity of a process: pid and start time. Never a bare pid.
///
/// Pids are tgids, numbered as this program's pid namespace numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub pid: u32,
    /// Nanoseconds since boot (`CLOCK_BOOTTIME`). What is known from /proc alone is a whole tick.
    pub start: u64,
}

impl Key {
    /// Whether both can name one process where one of them may be known to the tick only. Good for
    /// merging what two sources say, not for identity.
    pub fn same_tick(self, other: Key) -> bool {
        self.pid == other.pid && self.start / TICK_NS == other.start / TICK_NS
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.pid, self.start)
    }
}

/// Where a piece of knowledge comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// A probe saw it happen.
    Kernel,
    /// Read from /proc afterwards.
    Procfs,
    /// Concluded from something else, such as a pid that turned up again.
    Inferred,
}

impl Provenance {
    pub fn name(self) -> &'static str {
        match self {
            Provenance::Kernel => "kernel",
            Provenance::Procfs => "procfs",
            Provenance::Inferred => "inferred",
        }
    }
}

/// The program that a process runs, shared with the children that have not run another since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The kernel's short name for it, at most 15 bytes.
    pub comm: Vec<u8>,
    /// Path of the executable with links resolved; empty if unknown.
    pub exe: Vec<u8>,
    /// The name that was given to exec, empty if unknown.
    pub filename: Vec<u8>,
    /// Arguments, each ended by NUL, the first of them the name it was called by; cut at the source's
    /// bound. One piece of memory, as the kernel has it: see [`Image::args`].
    pub argv: Vec<u8>,
    /// True length of argv in bytes, each argument's NUL included.
    pub argv_full_len: u32,
    /// Whether argv was cut.
    pub truncated: bool,
    /// Id of the cgroup (v2) at exec, 0 if unknown.
    pub cgroup_id: u64,
    pub pgid: u32,
    pub sid: u32,
    /// Controlling terminal as `tty_nr` of /proc/pid/stat has it, 0 for none.
    pub tty: u32,
}

impl Image {
    /// The arguments one by one; the last one may be cut short.
    pub fn args(&self) -> impl Iterator<Item = &[u8]> {
        let whole = self.argv.strip_suffix(&[0]).unwrap_or(&self.argv);
        let none = self.argv.is_empty();
        whole.split(|byte| *byte == 0).filter(move |_| !none)
    }
}

/// Real and effective user id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uids {
    pub real: u32,
    pub effective: u32,
}

/// How a process ended, as `wait(2)` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Exited(u8),
    Signalled {
        signal: u8,
        core: bool,
    },
    /// It is gone, and nobody saw how.
    Unknown,
}

impl Ended {
    /// From the 16 bits of a wait status.
    pub fn from_wait_status(status: u32) -> Ended {
        match (status & 0x7f) as u8 {
            0 => Ended::Exited((status >> 8) as u8),
            signal => Ended::Signalled {
                signal,
                core: status & 0x80 != 0,
            },
        }
    }
}

/// A process as /proc has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Start is a whole number of [`TICK_NS`].
    pub key: Key,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    pub uids: Uids,
    pub image: Arc<Image>,
    pub kernel_thread: bool,
    /// The init of a pid namespace below this program's own.
    pub namespace_init: bool,
}

/// Something that happened, or was found, at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds since boot.
    pub time: u64,
    pub provenance: Provenance,
    pub kind: EventKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    Fork {
        child: Key,
        /// `None` where it is not visible from this pid namespace.
        parent: Option<Key>,
        /// Who called fork; the parent but for `CLONE_PARENT`.
        creator: Option<Key>,
        uids: Uids,
        /// Inode number of the child's pidfds, 0 where the kernel gives none.
        pidfd_inode: u64,
        namespace_init: bool,
    },
    Exec {
        key: Key,
        parent: Option<Key>,
        uids: Uids,
        pidfd_inode: u64,
        image: Arc<Image>,
    },
    Exit {
        key: Key,
        parent: Option<Key>,
        ended: Ended,
        /// Bytes, 0 if unknown.
        peak_rss: u64,
    },
    Reparent {
        child: Key,
        old_parent: Option<Key>,
        adopter: Option<Key>,
    },
    Seen(Seen),
}
