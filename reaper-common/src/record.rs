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
pub enum Kind {
    Fork = 1,
    Exec = 2,
    Exit = 3,
    Reparent = 4,
}

impl Kind {
    /// Number of drop counters: one a kind, and at index 0 the sum of all.
    pub const COUNTERS: u32 = 5;
    /// All kinds, in the order of their numbers.
    pub const ALL: [Kind; 4] = [Kind::Fork, Kind::Exec, Kind::Exit, Kind::Reparent];

    /// The field's word for it, as it stands in the event stream.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Fork => "fork",
            Kind::Exec => "exec",
            Kind::Exit => "exit",
            Kind::Reparent => "reparent",
        }
    }
}

/// Identity of a process as the kernel has it: pid and start, never a bare pid. All zero: nobody.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawKey {
    pub pid: u32,
    pub _pad: u32,
    /// `start_boottime` of the thread group's leader, in ns.
    pub start_ns: u64,
}

/// The beginning of every record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Length of the whole record in bytes, what follows the fixed part included.
    pub len: u32,
    /// A [`Kind`].
    pub kind: u16,
    /// [`crate::ABI_VERSION`] of the object that wrote it.
    pub abi: u16,
    /// When it happened, in ns since boot.
    pub time_ns: u64,
    /// How many records of any kind had been dropped when this one was written.
    pub lost: u64,
}

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
    /// [`FORK_NAMESPACE_INIT`] or 0.
    pub flags: u32,
    pub _pad: u32,
}

/// The child is the init of a pid namespace below the service's own.
pub const FORK_NAMESPACE_INIT: u32 = 1;

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
}

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
}

const _: () = {
    assert!(size_of::<RawKey>() == 16);
    assert!(size_of::<Header>() == 24);
    assert!(size_of::<ForkRecord>() == 96 && offset_of!(ForkRecord, uid) == 80);
    assert!(size_of::<ExecRecord>() == 128 && offset_of!(ExecRecord, comm) == 112);
    assert!(size_of::<ExitRecord>() == 72 && offset_of!(ExitRecord, peak_rss_pages) == 64);
    assert!(size_of::<ReparentRecord>() == 72);
    assert!(FILENAME_MAX <= u16::MAX as usize);
    assert!(EXE_MAX + 256 <= u16::MAX as usize);
};
