//! Records in the ring, as the probes write them.

use core::mem::{offset_of, size_of};

/// Maximum number of bytes of argv that are copied. A longer argv is truncated; the record has its full length.
pub const ARGV_MAX: usize = 8192;
/// Maximum number of bytes of an exec's file name that are copied.
pub const FILENAME_MAX: usize = 256;
/// Number of bytes of an executable's path after which copying stops, at the end of a component.
pub const EXE_MAX: usize = 1024;

/// Kind of a record. The numbers are part of the ABI, and index the drop counters.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// [`ForkRecord`].
    Fork = 1,
    /// [`ExecRecord`], with its strings.
    Exec = 2,
    /// [`ExitRecord`].
    Exit = 3,
    /// [`ReparentRecord`].
    Reparent = 4,
    /// [`MoveRecord`].
    Move = 5,
}

impl RecordKind {
    /// Number of drop counters: index 0 for all dropped records, the number of a kind for those of that kind, and
    /// [`COUNTER_UNTRACKED`] for the processes for which the map of members had no room.
    pub const COUNTERS: u32 = 7;
    /// All kinds, in the order of their numbers.
    pub const ALL: [RecordKind; 5] = [
        RecordKind::Fork,
        RecordKind::Exec,
        RecordKind::Exit,
        RecordKind::Reparent,
        RecordKind::Move,
    ];

    /// Returns the name of the kind in the event stream.
    pub const fn name(self) -> &'static str {
        match self {
            RecordKind::Fork => "fork",
            RecordKind::Exec => "exec",
            RecordKind::Exit => "exit",
            RecordKind::Reparent => "reparent",
            RecordKind::Move => "cgroup_migrate",
        }
    }
}

/// Index of a drop counter: see [`RecordKind::COUNTERS`].
pub const COUNTER_UNTRACKED: u32 = 6;
const _: () = assert!((RecordKind::ALL.len() as u32) < COUNTER_UNTRACKED);
const _: () = assert!(COUNTER_UNTRACKED < RecordKind::COUNTERS);

/// Identity of a process: pid and start time. All zero for no process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawKey {
    /// Pid of the process in the service's pid namespace; 0 if it is not visible there.
    pub pid: u32,
    /// Padding, 0.
    pub _pad: u32,
    /// `start_boottime` of the thread group leader, in ns.
    pub start_ns: u64,
}

impl RawKey {
    /// No process.
    pub const NONE: RawKey = RawKey {
        pid: 0,
        _pad: 0,
        start_ns: 0,
    };

    /// Returns a hash that hardly any other process shares.
    #[inline(always)]
    pub const fn check(&self) -> u32 {
        (self.start_ns as u32) ^ ((self.start_ns >> 32) as u32).rotate_left(16) ^ self.pid
    }
}

/// Start of every record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Length of the whole record in bytes, including the variable part.
    pub len: u32,
    /// Number of a [`RecordKind`].
    pub kind: u16,
    /// [`crate::ABI_VERSION`] of the object that wrote the record.
    pub abi: u16,
    /// Time of the event (ns since boot).
    pub time_ns: u64,
    /// Number of dropped records of all kinds when this one was written.
    pub lost: u64,
}

/// Membership of a process: its value in the map of members, and a part of each record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Innermost session of the process, identified by its first root. [`RawKey::NONE`] for a process that is tracked for
    /// another reason.
    pub session: RawKey,
    /// Flags `MEMBER_*`, with a generation in [`MEMBER_GENERATION_MASK`]. 0 for a process that is not in the map.
    pub flags: u32,
    /// [`RawKey::check`] of the process. The kernel can reuse the memory of a replaced map value for another process
    /// while a probe reads it.
    pub check: u32,
}

/// Process is in the map.
pub const MEMBER_TRACKED: u32 = 1;
/// Root of a session. Its exit wakes the reader at once.
pub const MEMBER_ROOT: u32 = 1 << 1;
/// Process whose exit and orphans are reported, without further consequences.
pub const MEMBER_WATCHED: u32 = 1 << 2;
/// Process in the scope of the service. Inherited.
pub const MEMBER_SCOPE: u32 = 1 << 3;
/// Member of a session that the probe opened because of the program's name. Not confirmed by the service yet. Inherited.
pub const MEMBER_CANDIDATE: u32 = 1 << 4;
/// Process whose program has a name that some rule can match. The service has not classified it yet.
pub const MEMBER_NAME_MATCHED: u32 = 1 << 5;
/// Process that was [`MEMBER_NAME_MATCHED`] or set-user-ID earlier, or a descendant of one: it may be kept, or be below a
/// boundary. Inherited.
pub const MEMBER_UNCERTAIN: u32 = 1 << 6;
/// Kept process, or a descendant of one. The probes never signal it. Inherited.
pub const MEMBER_KEPT: u32 = 1 << 7;
/// SIGTERM has been sent.
pub const MEMBER_SIGTERM_SENT: u32 = 1 << 8;
/// SIGKILL has been sent.
pub const MEMBER_SIGKILL_SENT: u32 = 1 << 9;
/// Process that the probes may signal. They signal no process without this flag.
///
/// The service sets it after it has found no reason to keep the process other than its program's name. Inherited. An exec
/// clears it, unless the probe sees that the reasons stay the same. A move to another cgroup clears it too.
pub const MEMBER_KERNEL_KILLABLE: u32 = 1 << 10;
/// Process that runs its program through `nohup` or `setsid`. Set by the service; the probes only carry it on.
pub const MEMBER_DETACHED: u32 = 1 << 11;
/// Process that `sudo` below its agent has executed, or a descendant. Set by the service; the probes only carry it on.
pub const MEMBER_BY_SUDO: u32 = 1 << 12;
/// Number of execs and cgroup moves since the process is tracked, wrapping around, in the bits above the flags. The
/// service does not write a membership that was computed for an earlier generation.
pub const MEMBER_GENERATION_MASK: u32 = 0xffff_0000;
/// Increment of the generation.
pub const MEMBER_GENERATION_STEP: u32 = 1 << 16;
/// Flags that a child inherits.
pub const MEMBER_INHERITED: u32 = MEMBER_TRACKED
    | MEMBER_SCOPE
    | MEMBER_CANDIDATE
    | MEMBER_UNCERTAIN
    | MEMBER_KEPT
    | MEMBER_KERNEL_KILLABLE;

/// A new process. Written in the creator's context, before the child can run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForkRecord {
    /// Header of kind [`RecordKind::Fork`].
    pub header: Header,
    /// New process.
    pub child: RawKey,
    /// Parent of the child.
    pub parent: RawKey,
    /// Process that called fork. Differs from the parent only with `CLONE_PARENT`.
    pub creator: RawKey,
    /// Inode number of the child's pidfds (Linux 6.9); 0 before.
    pub pidfd_inode: u64,
    /// Real uid of the child, in the initial user namespace.
    pub uid: u32,
    /// Effective uid of the child, in the initial user namespace.
    pub euid: u32,
    /// Flags `PROCESS_*`.
    pub flags: u32,
    /// Signal that the probe sent to the creator because its session is being killed; 0 if none was sent.
    pub signal: u32,
    /// Membership of the child, as inherited.
    pub member: Member,
}

/// Init process of a pid namespace below the initial one.
pub const PROCESS_NAMESPACE_INIT: u32 = 1;
/// The probe sent its signal also to the child.
pub const PROCESS_CHILD_SIGNALLED: u32 = 2;
/// Process created in another cgroup than its creator's (`CLONE_INTO_CGROUP`).
pub const PROCESS_OTHER_CGROUP: u32 = 4;

/// A living process in the output of the table program. Not a record of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRow {
    /// Listed process.
    pub process: RawKey,
    /// Its parent.
    pub parent: RawKey,
    /// Inode number of its pidfds (Linux 6.9); 0 before.
    pub pidfd_inode: u64,
    /// Flags `PROCESS_*`.
    pub flags: u32,
    /// Padding, 0.
    pub _pad: u32,
}

/// An exec. Three byte strings follow: file name, argv and executable.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecRecord {
    /// Header of kind [`RecordKind::Exec`], with the length of the strings included.
    pub header: Header,
    /// Process that runs the new program.
    pub process: RawKey,
    /// Its parent.
    pub parent: RawKey,
    /// Inode number of its pidfds (Linux 6.9); 0 before.
    pub pidfd_inode: u64,
    /// Id of the process's cgroup (v2): the inode number of its directory.
    pub cgroup_id: u64,
    /// Real uid after the exec, in the initial user namespace.
    pub uid: u32,
    /// Effective uid after the exec, in the initial user namespace. Differs from `uid` in set-user-ID programs.
    pub euid: u32,
    /// Process group id in the service's pid namespace; 0 if not visible there.
    pub pgid: u32,
    /// Session id (`setsid(2)`) in the service's pid namespace; 0 if not visible there.
    pub sid: u32,
    /// Controlling terminal, as `tty_nr` in /proc/PID/stat; 0 without one.
    pub tty: u32,
    /// Tid of the thread that called exec, in the initial pid namespace. Differs from the pid if it was not the leader.
    pub old_tid: u32,
    /// Full length of argv in bytes, including NULs.
    pub argv_full_len: u32,
    /// Number of bytes of argv that follow.
    pub argv_len: u32,
    /// Number of bytes of the file name that follow, without NUL. As passed to exec.
    pub filename_len: u16,
    /// Number of bytes of the executable's path that follow: components from the last to the first, each with a NUL.
    pub exe_len: u16,
    /// 1 if the path of the executable has more components than were copied.
    pub exe_cut: u32,
    /// Name of the thread after the exec (`/proc/PID/comm`), padded with NUL.
    pub comm: [u8; 16],
    /// Membership after the exec.
    pub member: Member,
    /// Signal that the probe sent to the process because its session is being killed; 0 if none was sent.
    pub signal: u32,
    /// Result `ENVIRONMENT_*`.
    pub environment: u32,
}

/// Environment unknown: not read, not readable, or too large.
pub const ENVIRONMENT_UNREAD: u32 = 0;
/// Whole environment read, without [`KEEP_MARKER`].
pub const ENVIRONMENT_UNMARKED: u32 = 1;
/// Environment with [`KEEP_MARKER`].
pub const ENVIRONMENT_KEEP: u32 = 2;

/// Environment variable that keeps a process, with its NUL.
pub const KEEP_MARKER: &[u8; 14] = b"REAPER_KEEP=1\0";

/// Exit of a process with its last thread. Written before its children are reparented.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitRecord {
    /// Header of kind [`RecordKind::Exit`].
    pub header: Header,
    /// Process that exits.
    pub process: RawKey,
    /// Its parent.
    pub parent: RawKey,
    /// Exit status as `wait(2)` reports it: exit code << 8, or the signal, plus 0x80 for a core dump.
    pub status: u32,
    /// Number of children of its last thread, zombies included, counted up to a limit. Other threads have handed theirs over
    /// to it, unless they exit at the same time.
    pub children: u32,
    /// Peak resident memory in pages, as far as the kernel has updated it.
    pub peak_rss_pages: u64,
    /// Last membership. The process is no longer in the map.
    pub member: Member,
}

/// Reparenting of a child of an exiting process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReparentRecord {
    /// Header of kind [`RecordKind::Reparent`].
    pub header: Header,
    /// Child that gets a new parent.
    pub child: RawKey,
    /// Exiting parent.
    pub old_parent: RawKey,
    /// Adopter, by the kernel's rules at the parent's exit.
    pub adopter: RawKey,
    /// Membership of the child.
    pub member: Member,
    /// Signal that the probe sent to the child; 0 if none was sent.
    pub signal: u32,
    /// Padding, 0.
    pub _pad: u32,
}

/// Move of a process to another cgroup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveRecord {
    /// Header of kind [`RecordKind::Move`].
    pub header: Header,
    /// Moved process.
    pub process: RawKey,
    /// Id of its new cgroup (v2).
    pub cgroup_id: u64,
    /// Membership after the move.
    pub member: Member,
}

const _: () = {
    assert!(size_of::<RawKey>() == 16);
    assert!(size_of::<Header>() == 24);
    assert!(size_of::<Member>() == 24);
    assert!(size_of::<ForkRecord>() == 120 && offset_of!(ForkRecord, uid) == 80);
    assert!(size_of::<ExecRecord>() == 160 && offset_of!(ExecRecord, comm) == 112);
    assert!(size_of::<ExitRecord>() == 96 && offset_of!(ExitRecord, peak_rss_pages) == 64);
    assert!(size_of::<ReparentRecord>() == 104);
    assert!(size_of::<MoveRecord>() == 72);
    assert!(size_of::<TableRow>() == 48);
    assert!(FILENAME_MAX <= u16::MAX as usize);
    assert!(EXE_MAX + 256 <= u16::MAX as usize);
};
