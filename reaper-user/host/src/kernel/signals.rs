//! Handles on processes: signalling them, and waiting for their exits.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::sys::exit_poll::ExitPoll;
use crate::sys::pidfd::Pidfd;
use reaper_model::event::Uids;

/// Opens handles on processes. Its file descriptor is readable when a watched process has exited.
pub trait Signals: AsFd {
    /// Opens a handle on the process that has the pid now.
    ///
    /// # Errors
    /// `ESRCH` if there is none, `EMFILE` or `ENFILE` if no more files can be opened.
    fn open(&self, pid: u32) -> nix::Result<Box<dyn WatchedHandle>>;

    /// Returns the tokens of some watched processes that have exited; none if there are no more. A token is returned until
    /// the handle is dropped.
    fn exited(&self) -> Vec<u64>;
}

/// A handle on one process. It never refers to another, also after the pid is reused.
pub trait ProcessHandle: Send {
    /// Returns the number of the open file that it uses.
    fn file(&self) -> u64;

    /// Returns the inode number, which is unique from Linux 6.9 on.
    fn inode(&self) -> Option<u64>;

    /// Returns the uids that the process has now. `pid` is its pid. `None` if it has exited or they cannot be read.
    fn uids(&self, pid: u32) -> Option<Uids>;

    /// Waits until the process has exited, at most for `timeout`. Returns whether it has.
    fn wait(&self, timeout: Duration) -> bool;

    /// Whether the process has exited with all of its threads.
    fn has_exited(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Sends a signal. Only `reap` may call this.
    ///
    /// # Errors
    /// `ESRCH` if the process is gone, `EPERM` if it may not be signalled.
    fn send_signal(&self, signal: Signal) -> nix::Result<()>;
}

/// A handle whose exit can be watched.
pub trait WatchedHandle: ProcessHandle {
    /// Watches for the exit: [`Signals::exited`] then returns `token`. May be called again.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    fn watch_exit(&self, token: u64) -> nix::Result<()>;
}

/// Pidfds, and what waits for all of them.
pub struct Pidfds(ExitPoll);

impl Pidfds {
    /// # Errors
    /// As `epoll_create1(2)`.
    pub fn new() -> nix::Result<Pidfds> {
        ExitPoll::new().map(Pidfds)
    }
}

impl AsFd for Pidfds {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Signals for Pidfds {
    fn open(&self, pid: u32) -> nix::Result<Box<dyn WatchedHandle>> {
        Ok(Box::new(WatchedPidfd {
            pidfd: Pidfd::open(pid)?,
            poll: self.0.clone(),
        }))
    }

    fn exited(&self) -> Vec<u64> {
        self.0.ready()
    }
}

struct WatchedPidfd {
    pidfd: Pidfd,
    poll: ExitPoll,
}

impl WatchedHandle for WatchedPidfd {
    fn watch_exit(&self, token: u64) -> nix::Result<()> {
        self.poll.add(&self.pidfd, token)
    }
}

impl ProcessHandle for WatchedPidfd {
    fn file(&self) -> u64 {
        self.pidfd.file()
    }

    fn inode(&self) -> Option<u64> {
        self.pidfd.inode()
    }

    fn uids(&self, pid: u32) -> Option<Uids> {
        self.pidfd.uids(pid)
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.pidfd.wait(timeout)
    }

    fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        self.pidfd.send_signal(signal)
    }
}

impl ProcessHandle for Pidfd {
    fn file(&self) -> u64 {
        Pidfd::file(self)
    }

    fn inode(&self) -> Option<u64> {
        Pidfd::inode(self)
    }

    fn uids(&self, pid: u32) -> Option<Uids> {
        Pidfd::uids(self, pid)
    }

    fn wait(&self, timeout: Duration) -> bool {
        Pidfd::wait(self, timeout)
    }

    fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        Pidfd::send_signal(self, signal)
    }
}
