//! Events that a source reports, and the vocabulary of the whole service.

use std::sync::Arc;

use super::fact::Fact;

/// Nanoseconds per tick of /proc (`USER_HZ` is 100 on every architecture that Linux supports).
pub const TICK_NS: u64 = 10_000_000;

/// Identity of a process: pid and start time, never a bare pid.
///
/// The pid is a tgid in the PID namespace of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessKey {
    /// Pid of the thread group (tgid).
    pub pid: u32,
    /// Nanoseconds since boot (`CLOCK_BOOTTIME`); a multiple of [`TICK_NS`] if known from /proc alone.
    pub start: u64,
}

impl ProcessKey {
    /// Returns whether both keys can name the same process if one start is known only to the tick. This is enough to
    /// merge two sources, not for identity.
    pub fn has_same_tick(self, other: ProcessKey) -> bool {
        self.pid == other.pid && self.start / TICK_NS == other.start / TICK_NS
    }

    /// Returns the start if it is known to the nanosecond; `None` for a multiple of [`TICK_NS`]. Events of the kernel
    /// too can carry a start that was read from /proc.
    pub fn exact_start(self) -> Option<u64> {
        (!self.start.is_multiple_of(TICK_NS)).then_some(self.start)
    }
}

impl std::fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.pid, self.start)
    }
}

/// Origin of a piece of information.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// Observed by a probe.
    Kernel,
    /// Read from /proc afterwards.
    Procfs,
    /// Inferred from something else, such as a reused pid.
    Inferred,
}

impl Provenance {
    /// Returns the name in the event stream.
    pub fn name(self) -> &'static str {
        match self {
            Provenance::Kernel => "kernel",
            Provenance::Procfs => "procfs",
            Provenance::Inferred => "inferred",
        }
    }
}

/// Program of a process, shared with children that have not executed another one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Short name in the kernel, at most 15 bytes.
    pub comm: Vec<u8>,
    /// Path of the executable with links resolved, empty if unknown.
    pub exe: Vec<u8>,
    /// File name that was passed to exec, empty if unknown.
    pub filename: Vec<u8>,
    /// Arguments, each terminated by NUL, `argv[0]` included; cut at the limit of the source. One buffer, as in the
    /// kernel: see [`Image::args`].
    pub argv: Vec<u8>,
    /// Length of the uncut argv in bytes, NULs included.
    pub argv_full_len: u32,
    /// Whether argv was cut.
    pub truncated: bool,
    /// Absolute path of the script that an interpreter runs, with links resolved; empty if unknown. No event carries
    /// it: it is read later.
    pub script: Vec<u8>,
    /// Whether the program was started with `REAPER_KEEP=1` in its environment, if its exec event says so.
    pub keep_marker: Fact<bool>,
    /// Id of the cgroup (v2) at exec or after the last move, 0 if unknown.
    pub cgroup_id: u64,
    /// Process group id at exec or when read from /proc, 0 if unknown.
    pub pgid: u32,
    /// Session id (`setsid(2)`) at exec or when read from /proc, 0 if unknown.
    pub sid: u32,
    /// Controlling terminal (`tty_nr` of /proc/pid/stat), 0 for none.
    pub tty: u32,
}

impl Image {
    /// Returns the image of a process whose exec is reported before its program is read.
    pub fn unread() -> Image {
        Image {
            truncated: true,
            ..Image::default()
        }
    }

    /// Returns whether the program is still unread. The source then reports the exec again once it is read.
    pub fn is_unread(&self) -> bool {
        self.truncated && self.comm.is_empty() && self.argv.is_empty()
    }

    /// Returns the arguments; the last one may be cut.
    pub fn args(&self) -> impl Iterator<Item = &[u8]> {
        let whole = self.argv.strip_suffix(&[0]).unwrap_or(&self.argv);
        let none = self.argv.is_empty();
        whole.split(|byte| *byte == 0).filter(move |_| !none)
    }
}

/// Real and effective user ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uids {
    /// Real uid, as in `Uid` of /proc/pid/status.
    pub real: u32,
    /// Effective uid, as in `Uid` of /proc/pid/status.
    pub effective: u32,
}

/// Entry of a process in the kernel's map of members. The probes copy it at each fork, so it survives lost events and a
/// stopped service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// First root of the session that the process belongs to by descent.
    pub session: Option<ProcessKey>,
    /// `MEMBER_*` flags of `reaper-common`.
    pub flags: u32,
}

impl Membership {
    /// Returns whether one of these flags is set.
    pub fn has(self, flags: u32) -> bool {
        self.flags & flags != 0
    }
}

/// Session that the previous service left open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredSession {
    /// First root; with its start, the permanent name of the session.
    pub first_root: ProcessKey,
    /// Current root: the first one or its last successor.
    pub root: ProcessKey,
    /// First root of the session that this one is nested in.
    pub outer: Option<ProcessKey>,
    /// Parent of the root when it became one.
    pub parent: Option<ProcessKey>,
    /// Controlling terminal of the root, 0 for none.
    pub tty: u32,
    /// Name of its rule.
    pub rule: Arc<str>,
    /// Uids of the root when the session opened.
    pub uids: Uids,
    /// Id of the root's cgroup when it became one, 0 if unknown.
    pub cgroup_id: u64,
    /// Hash of the root's systemd unit ([`crate::session::Session::unit_hash`]), 0 if unknown.
    pub unit_hash: u32,
    /// Time of the opening, in nanoseconds since boot.
    pub opened_at: u64,
    /// Time (ns since boot) and status of the root's exit, if it has exited.
    pub exited: Option<(u64, ExitStatus)>,
    /// Whether the previous service had signalled the root before its exit.
    pub was_signalled: bool,
    /// Whether the members were evaluated after the exit of the root.
    pub is_evaluated: bool,
}

/// Exit status of a process, as in `wait(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    /// Exited by itself with this status.
    Exited(u8),
    /// Killed by a signal.
    Signalled {
        /// Signal number.
        signal: u8,
        /// Whether the kernel dumped core.
        core: bool,
    },
    /// The exit was not observed.
    Unknown,
}

impl ExitStatus {
    /// Decodes the 16 bits of a wait status.
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

/// Process as read from /proc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcEntry {
    /// Start of the read, in nanoseconds since boot: what was read is no older.
    pub read_at: u64,
    /// Key whose start is a multiple of [`TICK_NS`], unless `exact`.
    pub key: ProcessKey,
    /// Whether the start is known to the nanosecond.
    pub exact: bool,
    /// Inode number of its pidfds, 0 if unknown.
    pub pidfd_inode: u64,
    /// Entry in the kernel's map. `None` if the map is not readable or may lack members: absence then proves nothing.
    pub membership: Option<Membership>,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    /// Uids at the time of the read.
    pub uids: Uids,
    /// Program that it runs.
    pub image: Arc<Image>,
    /// Whether it is a thread of the kernel, which is never reaped.
    pub kernel_thread: bool,
    /// Whether it is the init of a PID namespace below that of the service.
    pub namespace_init: bool,
}

/// Something that happened or was discovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time of the event, in nanoseconds since boot.
    pub time: u64,
    /// Source of the event.
    pub provenance: Provenance,
    /// Event with its data.
    pub kind: EventKind,
}

/// Kind of an event, with the processes that it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A process was forked.
    Fork {
        /// New process.
        child: ProcessKey,
        /// Parent of the child; `None` if it is not visible in this PID namespace.
        parent: Option<ProcessKey>,
        /// Process that called fork; the parent, except under `CLONE_PARENT`.
        creator: Option<ProcessKey>,
        /// Uids of the child.
        uids: Uids,
        /// Inode number of the child's pidfds, 0 if the kernel does not provide it.
        pidfd_inode: u64,
        /// Whether the child is the init of a PID namespace below that of the service.
        namespace_init: bool,
        /// Map entry of the child.
        membership: Option<Membership>,
    },
    /// A process executed a program, or its program was read only now.
    Exec {
        /// Process that called exec.
        key: ProcessKey,
        /// Parent at that time; `None` if it is not visible in this PID namespace.
        parent: Option<ProcessKey>,
        /// Uids after the exec, which may differ for set-user-id programs.
        uids: Uids,
        /// Inode number of the process's pidfds, 0 if unknown.
        pidfd_inode: u64,
        /// New program.
        image: Arc<Image>,
        /// Map entry of the process.
        membership: Option<Membership>,
    },
    /// A process exited: all of its threads.
    Exit {
        /// Process that exited.
        key: ProcessKey,
        /// Parent at the exit; `None` if it is not visible in this PID namespace.
        parent: Option<ProcessKey>,
        /// Status for its parent.
        exit_status: ExitStatus,
        /// Maximum resident memory in bytes, 0 if unknown.
        peak_rss: u64,
        /// Map entry of the process.
        membership: Option<Membership>,
    },
    /// An orphan got a new parent.
    Reparent {
        /// Orphan.
        child: ProcessKey,
        /// Parent that exited, if it is known.
        old_parent: Option<ProcessKey>,
        /// New parent: a subreaper or an init; `None` if it is not visible in this PID namespace.
        adopter: Option<ProcessKey>,
        /// Map entry of the child.
        membership: Option<Membership>,
    },
    /// The process moved to another cgroup.
    Move {
        /// Process that moved.
        key: ProcessKey,
        /// Id of the new cgroup (v2), 0 if unknown.
        cgroup_id: u64,
        /// Map entry of the process.
        membership: Option<Membership>,
    },
    /// A probe sent a signal to the process.
    SignalSent {
        /// Process that got the signal.
        key: ProcessKey,
        /// Signal number.
        signal: u8,
    },
    /// A scan found a living process.
    Discovered(ProcEntry),
    /// The previous service has left this session open.
    Restored(Box<RestoredSession>),
}

impl EventKind {
    /// Returns the map entry of the process that the event is about; `None` if the event has none.
    pub fn membership(&self) -> Option<Membership> {
        match self {
            EventKind::Fork { membership, .. }
            | EventKind::Exec { membership, .. }
            | EventKind::Exit { membership, .. }
            | EventKind::Reparent { membership, .. }
            | EventKind::Move { membership, .. } => *membership,
            EventKind::Discovered(seen) => seen.membership,
            EventKind::SignalSent { .. } | EventKind::Restored(_) => None,
        }
    }
}
