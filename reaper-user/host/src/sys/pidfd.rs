//! Pidfds. The service signals a process only through its pidfd.

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

/// A handle on one process. It never refers to another process.
#[derive(Debug)]
pub struct Pidfd(OwnedFd);

/// Pidfds are unavailable, so that no process can be signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot open or signal processes by pidfds: {0}; {advice}", advice = PidfdUnavailable::ADVICE)]
pub struct PidfdUnavailable(pub nix::Error);

impl PidfdUnavailable {
    /// Advice for the user.
    pub const ADVICE: &str = "run reaper on Linux 5.3 or later, without a seccomp filter that denies pidfd_open or \
        pidfd_send_signal (older container runtimes have one)";
}

/// Checks that pidfds can be opened and signalled, with signal 0 to this process.
///
/// # Errors
/// The error of the kernel or of a seccomp filter. A lack of file descriptors or memory is no error.
pub fn probe() -> Result<(), PidfdUnavailable> {
    match Pidfd::open(std::process::id()).and_then(|own| own.send_number(0)) {
        Ok(()) | Err(nix::Error::EMFILE | nix::Error::ENFILE | nix::Error::ENOMEM) => Ok(()),
        Err(errno) => Err(PidfdUnavailable(errno)),
    }
}

impl Pidfd {
    /// Opens a handle on the process that currently has the pid (`pidfd_open(2)`).
    ///
    /// # Errors
    /// `ESRCH` if there is no such process, `EMFILE` and others.
    pub fn open(pid: u32) -> nix::Result<Pidfd> {
        // SAFETY: no memory is passed.
        let fd = nix::Error::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        // SAFETY: a new descriptor that nothing else owns.
        Ok(Pidfd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Sends a signal by number, including those without a name. Only `crate::reap` may call this.
    ///
    /// # Errors
    /// As [`ProcessHandle::send_signal`]; `EINVAL` if there is no such signal.
    pub fn send_number(&self, number: i32) -> nix::Result<()> {
        // SAFETY: `info` may be null; the signal then looks like one of kill(2).
        unsafe { self.send(number, std::ptr::null()) }
    }

    /// Sends a signal with a value, as sigqueue(3) does. Only `crate::reap` may call this.
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
        // SAFETY: `info` has the size of the kernel's structure and outlives the call.
        unsafe { self.send(signal as i32, (&raw const info).cast()) }
    }

    /// Sends a signal by number. `info` is what the receiver gets to know about it; if null, the same as with kill(2).
    ///
    /// # Safety
    /// `info` is null or points to a complete `siginfo_t`.
    unsafe fn send(&self, number: i32, info: *const libc::siginfo_t) -> nix::Result<()> {
        // SAFETY: guaranteed by the caller.
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

    /// Duplicates the file with descriptor `number` in the process (`pidfd_getfd(2)`, Linux 5.6).
    ///
    /// # Errors
    /// `EBADF` if it has no such file, `EPERM` if this process may not trace it.
    pub fn file_of(&self, number: i32) -> nix::Result<OwnedFd> {
        pidfd_getfd(&self.0, number, PidfdGetfdFlags::empty()).map_err(errno)
    }

    /// Returns the inode number of the pidfd if it is unique, as in pidfs; `None` before Linux 6.9.
    pub fn unique_inode(&self) -> Option<u64> {
        let of = nix::sys::statfs::fstatfs(&self.0).ok()?;
        (of.filesystem_type().0 as u32 == PIDFS).then(|| self.inode())?
    }

    /// Returns the exit status, once the process has been waited for, if the kernel still has it. `None` otherwise, and
    /// before Linux 6.15.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        let info = self.info(INFO_EXIT)?;
        Some(ExitStatus::from_wait_status(info.exit_code.cast_unsigned()))
    }

    /// Returns the uids by `PIDFD_GET_INFO`; `None` before Linux 6.13.
    fn uids_from_info(&self) -> Option<Uids> {
        let info = self.info(INFO_CREDS)?;
        Some(Uids {
            real: info.ruid,
            effective: info.euid,
        })
    }

    /// Returns what `PIDFD_GET_INFO` reports, if that includes the fields `mask` (`INFO_*`). `None` before Linux 6.13.
    fn info(&self, mask: u64) -> Option<Info> {
        let mut info = Info {
            mask,
            ..Info::default()
        };
        // The type of requests depends on the C library.
        let request = PIDFD_GET_INFO as libc::Ioctl;
        // SAFETY: the request number contains the size of `Info`, and the kernel writes no more than that.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), request, &raw mut info) };
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

    /// Reads them through the pidfd (`PIDFD_GET_INFO`, Linux 6.13). Older kernels: reads /proc by pid. If the process
    /// has not exited afterwards, the pid was still its own.
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

/// First version of `struct pidfd_info` of include/uapi/linux/pidfd.h.
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

/// `siginfo_t` of a signal with a value, on 64-bit machines (include/uapi/asm-generic/siginfo.h).
#[repr(C, align(8))]
struct SignalInfo {
    signo: i32,
    errno: i32,
    code: i32,
    pad: i32,
    pid: u32,
    uid: u32,
    /// Union of an integer and a pointer.
    value: [i32; 2],
    rest: [u64; 12],
}
const _: () = assert!(size_of::<SignalInfo>() == size_of::<libc::siginfo_t>());

/// `PIDFD_INFO_CREDS` and `PIDFD_INFO_EXIT` of include/uapi/linux/pidfd.h.
const INFO_CREDS: u64 = 1 << 1;
const INFO_EXIT: u64 = 1 << 3;
/// `PID_FS_MAGIC` of include/uapi/linux/magic.h.
const PIDFS: u32 = 0x5049_4446;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: u32 = 3 << 30 | (size_of::<Info>() as u32) << 16 | 0xFF << 8 | 11;
const _: () = assert!(size_of::<Info>() == 64);
