//! Pidfds: the only names by which a process is signalled.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::poll::PollFlags;
use nix::sys::signal::Signal;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::sys::errno;
use crate::sys::proc_file::uids;
use crate::sys::process_handle::ProcessHandle;
use crate::sys::wait_for;
use reaper_model::event::{ExitStatus, Uids};

/// A handle on one process, for ever the same one.
#[derive(Debug)]
pub struct Pidfd(OwnedFd);

/// There are no pidfds to be had, and so nothing can be signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("processes can be neither held nor signalled by pidfds: {0}; {advice}", advice = PidfdUnavailable::ADVICE)]
pub struct PidfdUnavailable(pub nix::Error);

impl PidfdUnavailable {
    /// What to do about it.
    pub const ADVICE: &str = "run it on Linux 5.3 or later, under no seccomp filter that denies pidfd_open and \
        pidfd_send_signal, as those of older container runtimes do";
}

/// Whether there are, tried on this process; it is sent nothing.
///
/// # Errors
/// What the kernel says, or a seccomp filter. That there is no room for one more is none.
pub fn probe() -> Result<(), PidfdUnavailable> {
    match Pidfd::open(std::process::id()).and_then(|own| own.send_number(0)) {
        Ok(()) | Err(nix::Error::EMFILE | nix::Error::ENFILE | nix::Error::ENOMEM) => Ok(()),
        Err(errno) => Err(PidfdUnavailable(errno)),
    }
}

impl Pidfd {
    /// Opens a handle on whoever has the pid now (`pidfd_open(2)`).
    ///
    /// # Errors
    /// `ESRCH` if nobody has, `EMFILE` and the like.
    pub fn open(pid: u32) -> nix::Result<Pidfd> {
        // SAFETY: no memory is passed.
        let fd = nix::Error::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        // SAFETY: a new descriptor that belongs to nobody else.
        Ok(Pidfd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Sends the signal of a number, be it one that has no name. Nothing but `crate::reap` may call this.
    ///
    /// # Errors
    /// As [`ProcessHandle::send_signal`]; `EINVAL` if there is no such signal.
    pub fn send_number(&self, number: i32) -> nix::Result<()> {
        // SAFETY: a null `info` is allowed and means what kill(2) does.
        unsafe { self.send(number, std::ptr::null()) }
    }

    /// Sends a signal with a number that goes with it, as sigqueue(3). Nothing but `crate::reap` may call this.
    ///
    /// # Errors
    /// As [`ProcessHandle::send_signal`].
    pub fn send_signal_with(&self, signal: Signal, value: i32) -> nix::Result<()> {
        let info = SignalInfo {
            signo: signal as i32,
            errno: 0,
            code: libc::SI_QUEUE,
            pad: 0,
            pid: std::process::id(),
            uid: nix::unistd::getuid().as_raw(),
            value: [value, 0],
            rest: [0; 12],
        };
        // SAFETY: it is as long as the kernel's, and lives until the call is over.
        unsafe { self.send(signal as i32, (&raw const info).cast()) }
    }

    /// # Safety
    /// `info` is null or a whole one.
    unsafe fn send(&self, number: i32, info: *const libc::siginfo_t) -> nix::Result<()> {
        // SAFETY: as the caller has it.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                number,
                info,
                0,
            )
        };
        nix::Error::result(sent).map(drop)
    }

    /// Duplicates an open file of the process (`pidfd_getfd(2)`, Linux 5.6).
    ///
    /// # Errors
    /// `EBADF` if it has no such file, `EPERM` if this program may not trace it.
    pub fn file_of(&self, number: i32) -> nix::Result<OwnedFd> {
        pidfd_getfd(&self.0, number, PidfdGetfdFlags::empty()).map_err(errno)
    }

    /// The inode number where it is unique, told by the file system that has had pidfds since then.
    pub fn unique_inode(&self) -> Option<u64> {
        let of = nix::sys::statfs::fstatfs(&self.0).ok()?;
        (of.filesystem_type().0 == PIDFS).then(|| self.inode())?
    }

    /// How the process ended, once it has been waited for and where the kernel still knows (6.15).
    pub fn exit_status(&self) -> Option<ExitStatus> {
        let info = self.info(INFO_EXIT)?;
        Some(ExitStatus::from_wait_status(info.exit_code.cast_unsigned()))
    }

    fn uids_from_info(&self) -> Option<Uids> {
        let info = self.info(INFO_CREDS)?;
        Some(Uids {
            real: info.ruid,
            effective: info.euid,
        })
    }

    /// What the kernel tells of the process, if that is in it which is asked for.
    fn info(&self, mask: u64) -> Option<Info> {
        let mut info = Info {
            mask,
            ..Info::default()
        };
        // SAFETY: the request's size names this structure's, and the kernel writes no more than that.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
        (answer == 0 && info.mask & mask != 0).then_some(info)
    }
}

impl ProcessHandle for Pidfd {
    fn file(&self) -> u64 {
        self.0.as_raw_fd().unsigned_abs().into()
    }

    fn inode(&self) -> Option<u64> {
        nix::sys::stat::fstat(&self.0).ok().map(|stat| stat.st_ino)
    }

    /// Reads them by the pidfd (`PIDFD_GET_INFO`, 6.13). Before that reads /proc by the pid, which still belongs to the
    /// process if it has not exited afterwards.
    fn uids(&self, pid: u32) -> Option<Uids> {
        self.uids_from_info().or_else(|| {
            let uids = uids(&std::fs::read(format!("/proc/{pid}/status")).ok()?)?;
            (!self.has_exited()).then_some(uids)
        })
    }

    fn wait(&self, timeout: Duration) -> bool {
        wait_for(&self.0, PollFlags::POLLIN, timeout)
    }

    fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        self.send_number(signal as i32)
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `struct pidfd_info` of include/uapi/linux/pidfd.h in its first version.
#[repr(C)]
#[derive(Default)]
struct Info {
    mask: u64,
    cgroupid: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    ruid: u32,
    rgid: u32,
    euid: u32,
    egid: u32,
    suid: u32,
    sgid: u32,
    fsuid: u32,
    fsgid: u32,
    exit_code: i32,
}

/// `siginfo_t` of a signal with a value, on machines of 64 bits (include/uapi/asm-generic/siginfo.h).
#[repr(C, align(8))]
struct SignalInfo {
    signo: i32,
    errno: i32,
    code: i32,
    pad: i32,
    pid: u32,
    uid: u32,
    /// A union with a pointer.
    value: [i32; 2],
    rest: [u64; 12],
}
const _: () = assert!(size_of::<SignalInfo>() == size_of::<libc::siginfo_t>());

const INFO_CREDS: u64 = 1 << 1;
const INFO_EXIT: u64 = 1 << 3;
/// `PID_FS_MAGIC` of include/uapi/linux/magic.h.
const PIDFS: nix::libc::__fsword_t = 0x5049_4446;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: libc::c_ulong =
    3 << 30 | (size_of::<Info>() as libc::c_ulong) << 16 | 0xFF << 8 | 11;
const _: () = assert!(size_of::<Info>() == 64);
