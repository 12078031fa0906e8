//! Pidfds: the only names by which a process is signalled.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::model::event::Uids;

/// A handle on one process, for ever the same one.
#[derive(Debug)]
pub struct Pidfd(OwnedFd);

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

    /// Sends a signal (`pidfd_send_signal(2)`). Nothing but `crate::reap` may call this.
    ///
    /// # Errors
    /// `ESRCH` if it is gone, `EPERM` if it may not be signalled.
    pub fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        let info: *const libc::siginfo_t = std::ptr::null();
        // SAFETY: a null `info` is allowed and means what kill(2) does.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                signal as i32,
                info,
                0,
            )
        };
        nix::Error::result(sent).map(drop)
    }

    /// Inode number; a name of the process that is never used again, from 6.9 on. Before that all
    /// pidfds share one.
    pub fn inode(&self) -> Option<u64> {
        nix::sys::stat::fstat(&self.0).ok().map(|stat| stat.st_ino)
    }

    /// Whether the process has exited, its last thread included.
    pub fn has_exited(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits for the exit at most so long; whether it came.
    pub fn wait(&self, timeout: Duration) -> bool {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, timeout), Ok(1))
    }

    /// The process's user ids now, by its pidfd (`PIDFD_GET_INFO`, 6.13), before that from /proc by its
    /// pid, which is still its own if it lives on afterwards. `None` if neither tells.
    pub fn uids(&self, pid: u32) -> Option<Uids> {
        self.told_uids().or_else(|| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
            let mut ids = line.split_whitespace().map(str::parse);
            let (real, effective) = (ids.next()?.ok()?, ids.next()?.ok()?);
            (!self.has_exited()).then_some(Uids { real, effective })
        })
    }

    fn told_uids(&self) -> Option<Uids> {
        let mut info = Info {
            mask: INFO_CREDS,
            ..Info::default()
        };
        // SAFETY: the request's size names this structure's, and the kernel writes no more than that.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
        (answer == 0 && info.mask & INFO_CREDS != 0).then_some(Uids {
            real: info.ruid,
            effective: info.euid,
        })
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

const INFO_CREDS: u64 = 1 << 1;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: libc::c_ulong =
    3 << 30 | (size_of::<Info>() as libc::c_ulong) << 16 | 0xFF << 8 | 11;
const _: () = assert!(size_of::<Info>() == 64);
