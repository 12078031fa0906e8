//! The records that travel through the ring, as the probes write them.

use core::mem::{offset_of, size_of};

/// Longest argv that is copied, in bytes; what is longer is cut there and its true length is told.
pub const ARGV_MAX: usize = 8192;
/// Longest file name of an exec that is copied, in bytes.
pub const FILENAME_MAX: usize = 256;
/// Longest path of an executable that is copied, in bytes, with room for one more component.
pub const EXE_MAX: usize = 1024;

/// What a record tells of. The numbers are the ABI; they also index the drop counters.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    Fork = 1,
    Exec = 2,
    Exit = 3,
    Reparent = 4,
    Move = 5,
}

impl RecordKind {
    /// Number of counters: at index 0 all records that found no room, at that of its number those of a
    /// kind, and at [`COUNTER_UNTRACKED`] the processes that found no room in the map of members.
    pub const COUNTERS: u32 = 7;
    /// All kinds, in the order of their numbers.
    pub const ALL: [RecordKind; 5] = [
        RecordKind::Fork,
        RecordKind::Exec,
        RecordKind::Exit,
        RecordKind::Reparent,
        RecordKind::Move,
    ];

    /// The field's word for it, as it stands in the event stream.
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

/// Index into the counters: see [`RecordKind::COUNTERS`].
pub const COUNTER_UNTRACKED: u32 = 6;
const _: () = assert!((RecordKind::ALL.len() as u32) < COUNTER_UNTRACKED);
const _: () = assert!(COUNTER_UNTRACKED < RecordKind::COUNTERS);

/// Identity of a process as the kernel has it: pid and start, never a bare pid. All zero: nobody.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawKey {
    pub pid: u32,
    pub _pad: u32,
    /// `start_boottime` of the thread group's leader, in ns.
    pub start_ns: u64,
}

impl RawKey {
    /// Nobody.
    pub const NONE: RawKey = RawKey {
        pid: 0,
        _pad: 0,
        start_ns: 0,
    };

    /// A number that is hardly another process's too.
    #[inline(always)]
    pub const fn check(&self) -> u32 {
        (self.start_ns as u32) ^ ((self.start_ns >> 32) as u32).rotate_left(16) ^ self.pid
    }
}

/// The beginning of every record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Length of the whole record in bytes, what follows the fixed part included.
    pub len: u32,
    /// A [`RecordKind`].
    pub kind: u16,
    /// [`crate::ABI_VERSION`] of the object that wrote it.
    pub abi: u16,
    /// When it happened, in ns since boot.
    pub time_ns: u64,
    /// How many records of any kind had been dropped when this one was written.
    pub lost: u64,
}

/// What the map of members says of a process: its value there, and a part of each record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// The innermost session that it belongs to by descent, named by the process that was its root
    /// first; nobody for a process that is followed for another reason.
    pub session: RawKey,
    /// `MEMBER_*`, 0 for a process that is not in the map; above them [`MEMBER_GENERATION_MASK`].
    pub flags: u32,
    /// [`RawKey::check`] of the process: the kernel may give the memory of a value that is replaced to
    /// another's while it is read.
    pub check: u32,
}

/// In the map at all.
pub const MEMBER_TRACKED: u32 = 1;
/// Root of a session: its exit wakes the reader at once.
pub const MEMBER_ROOT: u32 = 1 << 1;
/// Its exit is told, and what becomes of its children; no more follows from it.
pub const MEMBER_WATCHED: u32 = 1 << 2;
/// In the scope that the service was given. Inherited.
pub const MEMBER_SCOPE: u32 = 1 << 3;
/// Its session was begun by the probe, which knows names only: the service has not confirmed it. Inherited.
pub const MEMBER_CANDIDATE: u32 = 1 << 4;
/// Some rule knows programs of its name: what it is, only the service can tell, and has not yet.
pub const MEMBER_NAME_MATCHED: u32 = 1 << 5;
/// It was born to one that was [`MEMBER_NAME_MATCHED`], or was one itself: it may be below a boundary. Inherited.
pub const MEMBER_UNCERTAIN: u32 = 1 << 6;
/// Kept, or below one that is: never signalled from the kernel. Inherited.
pub const MEMBER_KEPT: u32 = 1 << 7;
/// SIGTERM has been sent to it.
pub const MEMBER_SIGTERM_SENT: u32 = 1 << 8;
/// SIGKILL has been sent to it.
pub const MEMBER_SIGKILL_SENT: u32 = 1 << 9;
/// The service has looked at all that could spare it beyond its program's name, and found nothing: without this
/// the kernel signals nobody. Inherited; gone with the next program, unless the probe sees that this changes
/// nothing of it, and with a move to another cgroup.
pub const MEMBER_KERNEL_KILLABLE: u32 = 1 << 10;
/// How often it has run another program, or gone to another cgroup, since it is followed, around zero, in the
/// bits above the flags: what the service writes about what was before the last time is not written.
pub const MEMBER_GENERATION_MASK: u32 = 0xffff_0000;
/// One of these.
pub const MEMBER_GENERATION_STEP: u32 = 1 << 16;
/// What a child has of its parent's flags.
pub const MEMBER_INHERITED: u32 = MEMBER_TRACKED
    | MEMBER_SCOPE
    | MEMBER_CANDIDATE
    | MEMBER_UNCERTAIN
    | MEMBER_KEPT
    | MEMBER_KERNEL_KILLABLE;

/// A process came to be. Written in the creator's context, before the child can run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForkRecord {
    pub header: Header,
    pub child: RawKey,
    pub parent: RawKey,
    /// Who called fork: the parent, but for `CLONE_PARENT`.
    pub creator: RawKey,
    /// Inode number of the child's pidfds where the kernel gives one (6.9 and later), else 0.
    pub pidfd_inode: u64,
    pub uid: u32,
    pub euid: u32,
    /// `PROCESS_*`.
    pub flags: u32,
    /// Signal that the probe sent to the creator, whose session is condemned; 0 for none.
    pub signal: u32,
    /// Of the child, as inherited.
    pub member: Member,
}

/// The process is the init of a pid namespace below the first one.
pub const PROCESS_NAMESPACE_INIT: u32 = 1;
/// The probe sent its signal to the child too, not to its creator alone.
pub const PROCESS_CHILD_SIGNALLED: u32 = 2;
/// It was born into another cgroup than its creator's (`CLONE_INTO_CGROUP`).
pub const PROCESS_OTHER_CGROUP: u32 = 4;

/// A living process, as the table program lists them. Not a record: it does not go through the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRow {
    pub process: RawKey,
    pub parent: RawKey,
    pub pidfd_inode: u64,
    /// `PROCESS_*`.
    pub flags: u32,
    pub _pad: u32,
}

/// A process runs another program. Three byte strings follow: file name, argv, executable.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecRecord {
    pub header: Header,
    pub process: RawKey,
    pub parent: RawKey,
    pub pidfd_inode: u64,
    /// Id of the process's cgroup (v2), which is the inode of its directory.
    pub cgroup_id: u64,
    pub uid: u32,
    pub euid: u32,
    pub pgid: u32,
    pub sid: u32,
    /// Controlling terminal as `tty_nr` of /proc/pid/stat has it, 0 for none.
    pub tty: u32,
    /// Thread that called exec, in the init namespace's numbers; another than the pid if it was no leader.
    pub old_tid: u32,
    /// True length of argv in bytes, each argument's NUL included.
    pub argv_full_len: u32,
    /// Bytes of argv that follow.
    pub argv_len: u32,
    /// Bytes of file name that follow, without NUL: as it was given to exec.
    pub filename_len: u16,
    /// Bytes of the executable's path that follow: components from the last to the first, each with a NUL.
    pub exe_len: u16,
    /// 1 if the path of the executable had more components than were copied.
    pub exe_cut: u32,
    pub comm: [u8; 16],
    /// As it is after the exec.
    pub member: Member,
    /// Signal that the probe sent to it, whose session is condemned; 0 for none.
    pub signal: u32,
    /// `ENVIRONMENT_*`.
    pub environment: u32,
}

/// What is in the environment is not known: it was not looked at, not to be read, or too large.
pub const ENVIRONMENT_UNREAD: u32 = 0;
/// All of the environment was gone through, and [`KEEP_MARKER`] is not in it.
pub const ENVIRONMENT_UNMARKED: u32 = 1;
/// [`KEEP_MARKER`] is in it.
pub const ENVIRONMENT_KEEP: u32 = 2;

/// A variable of the environment by which a process says that it is to be kept, with its NUL.
pub const KEEP_MARKER: &[u8; 14] = b"REAPER_KEEP=1\0";

/// A process exited: its last thread has. Written before its children are given to their adopter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitRecord {
    pub header: Header,
    pub process: RawKey,
    pub parent: RawKey,
    /// As `wait(2)` tells it: exit code << 8, or the signal, with 0x80 for a core dump.
    pub status: u32,
    /// Living children seen in the lists of its threads, counted up to a bound.
    pub children: u32,
    /// Most memory it ever had resident, in pages of the machine, as far as the kernel kept count.
    pub peak_rss_pages: u64,
    /// As it was at last: it is not in the map any more.
    pub member: Member,
}

/// A child of an exiting process goes to another parent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReparentRecord {
    pub header: Header,
    pub child: RawKey,
    pub old_parent: RawKey,
    /// Who takes it, as the kernel's rules for it read at the parent's exit.
    pub adopter: RawKey,
    /// Of the child.
    pub member: Member,
    /// Signal that the probe sent to the child; 0 for none.
    pub signal: u32,
    pub _pad: u32,
}

/// A process went to another cgroup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveRecord {
    pub header: Header,
    pub process: RawKey,
    /// Id of the cgroup (v2) that it is in by now.
    pub cgroup_id: u64,
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
