//! What a source tells the model: the words of the whole program.

use std::sync::Arc;

use super::fact::Fact;

/// Nanoseconds of a tick of /proc (`USER_HZ` is 100 on every architecture Linux runs on).
pub const TICK_NS: u64 = 10_000_000;

/// Identity of a process: pid and start time. Never a bare pid.
///
/// Pids are tgids, numbered as this program's pid namespace numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessKey {
    pub pid: u32,
    /// Nanoseconds since boot (`CLOCK_BOOTTIME`). What is known from /proc alone is a whole tick.
    pub start: u64,
}

impl ProcessKey {
    /// Whether both can name one process where one of them may be known to the tick only. Good for
    /// merging what two sources say, not for identity.
    pub fn has_same_tick(self, other: ProcessKey) -> bool {
        self.pid == other.pid && self.start / TICK_NS == other.start / TICK_NS
    }

    /// The start, if it is known to the ns. Also an event of the kernel can be about a process whose start
    /// was only ever read from /proc.
    pub fn exact_start(self) -> Option<u64> {
        (!self.start.is_multiple_of(TICK_NS)).then_some(self.start)
    }
}

impl std::fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.pid, self.start)
    }
}

/// Where a piece of knowledge comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
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
    /// Absolute path of the script that an interpreter runs, links resolved; empty if unknown. No event has it: it is
    /// read later.
    pub script: Vec<u8>,
    /// Whether `REAPER_KEEP=1` is in the environment that it was started with, where its exec told of that.
    pub keep_marker: Fact<bool>,
    /// Id of the cgroup (v2) at exec, or since a move to another one; 0 if unknown.
    pub cgroup_id: u64,
    pub pgid: u32,
    pub sid: u32,
    /// Controlling terminal as `tty_nr` of /proc/pid/stat has it, 0 for none.
    pub tty: u32,
}

impl Image {
    /// Returns the image of a process whose exec is reported before its program could be read.
    pub fn unread() -> Image {
        Image {
            truncated: true,
            ..Image::default()
        }
    }

    /// Whether the program could not be read yet: its exec is reported again when it has been.
    pub fn is_unread(&self) -> bool {
        self.truncated && self.comm.is_empty() && self.argv.is_empty()
    }

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

/// What the kernel's map of members says of a process: the probes hand it on at each fork, so that it
/// holds also where events were lost or nobody was there to read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// The session it belongs to by descent, named by the process that was its root first.
    pub session: Option<ProcessKey>,
    /// `MEMBER_*` of `reaper-common`.
    pub flags: u32,
}

impl Membership {
    /// Whether it has one of these flags.
    pub fn has(self, flags: u32) -> bool {
        self.flags & flags != 0
    }
}

/// A session as the service before this one left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredSession {
    /// With the start, the session's name for ever.
    pub first_root: ProcessKey,
    pub root: ProcessKey,
    /// First root of the session that it is nested in.
    pub outer: Option<ProcessKey>,
    /// Parent of the root when it became one.
    pub parent: Option<ProcessKey>,
    /// Controlling terminal of the root, 0 for none.
    pub tty: u32,
    /// Name of its rule.
    pub rule: Arc<str>,
    pub uids: Uids,
    /// Id of the root's cgroup when it became one, 0 if unknown.
    pub cgroup_id: u64,
    /// Nanoseconds since boot.
    pub opened_at: u64,
    /// When and how the root ended, if it has.
    pub exited: Option<(u64, ExitStatus)>,
    /// Whether the service before this one had sent the root a signal before it ended.
    pub was_signalled: bool,
    /// Whether its members were judged after the end of the root.
    pub is_evaluated: bool,
}

/// How a process ended, as `wait(2)` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    Exited(u8),
    Signalled {
        signal: u8,
        core: bool,
    },
    /// It is gone, and nobody saw how.
    Unknown,
}

impl ExitStatus {
    /// From the 16 bits of a wait status.
    pub fn from_wait_status(status: u32) -> ExitStatus {
        match (status & 0x7f) as u8 {
            0 => ExitStatus::Exited((status >> 8) as u8),
            signal => ExitStatus::Signalled {
                signal,
                core: status & 0x80 != 0,
            },
        }
    }
}

/// A process as /proc has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcEntry {
    /// When the look at it began, nanoseconds since boot: what it found is no older.
    pub read_at: u64,
    /// Start is a whole number of [`TICK_NS`], unless it is exact.
    pub key: ProcessKey,
    /// Whether the start is known to the ns.
    pub exact: bool,
    /// Inode number of its pidfds, 0 if unknown.
    pub pidfd_inode: u64,
    /// `None` where the kernel's map is not to be had or does not hold all members: then what it does
    /// not know proves nothing.
    pub membership: Option<Membership>,
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
        child: ProcessKey,
        /// `None` where it is not visible from this pid namespace.
        parent: Option<ProcessKey>,
        /// Who called fork; the parent but for `CLONE_PARENT`.
        creator: Option<ProcessKey>,
        uids: Uids,
        /// Inode number of the child's pidfds, 0 where the kernel gives none.
        pidfd_inode: u64,
        namespace_init: bool,
        /// Of the child.
        membership: Option<Membership>,
    },
    Exec {
        key: ProcessKey,
        parent: Option<ProcessKey>,
        uids: Uids,
        pidfd_inode: u64,
        image: Arc<Image>,
        membership: Option<Membership>,
    },
    Exit {
        key: ProcessKey,
        parent: Option<ProcessKey>,
        exit_status: ExitStatus,
        /// Bytes, 0 if unknown.
        peak_rss: u64,
        membership: Option<Membership>,
    },
    Reparent {
        child: ProcessKey,
        old_parent: Option<ProcessKey>,
        adopter: Option<ProcessKey>,
        /// Of the child.
        membership: Option<Membership>,
    },
    /// It is in another cgroup.
    Move {
        key: ProcessKey,
        /// Id of that (v2), 0 if unknown.
        cgroup_id: u64,
        membership: Option<Membership>,
    },
    /// A probe has sent a signal to it.
    SignalSent {
        key: ProcessKey,
        /// Its number.
        signal: u8,
    },
    Discovered(ProcEntry),
    Restored(Box<RestoredSession>),
}

impl EventKind {
    /// What the kernel's map had for the process that it tells of.
    pub fn membership(&self) -> Option<Membership> {
        match self {
            EventKind::Fork {
                membership: mark, ..
            }
            | EventKind::Exec {
                membership: mark, ..
            }
            | EventKind::Exit {
                membership: mark, ..
            }
            | EventKind::Reparent {
                membership: mark, ..
            }
            | EventKind::Move {
                membership: mark, ..
            } => *mark,
            EventKind::Discovered(seen) => seen.membership,
            EventKind::SignalSent { .. } | EventKind::Restored(_) => None,
        }
    }
}
