//! Handles on processes, to signal them and to wait for their exits.

use std::os::fd::AsFd;

use crate::sys::exit_poll::ExitPoll;
use crate::sys::pidfd::Pidfd;
use crate::sys::process_handle::ProcessHandle;

/// Opener of process handles. Its file descriptor is readable once a watched process has exited.
pub trait Signals: AsFd {
    /// Opens a handle on the process that currently has the pid.
    ///
    /// # Errors
    /// `ESRCH` if there is no such process, `EMFILE` or `ENFILE` if no more files can be opened.
    fn open(&self, pid: u32) -> nix::Result<Box<dyn WatchedHandle>>;

    /// Returns the tokens of some watched processes that have exited; empty if none exist. Does not wait. Linux
    /// returns a token again and again until its handle is dropped, macOS once.
    fn exited(&self) -> Vec<u64>;
}

/// A process handle that can report the exit of its process.
pub trait WatchedHandle: Send {
    /// Returns the handle, for signalling.
    fn handle(&self) -> &dyn ProcessHandle;

    /// Watches for the exit, after which [`Signals::exited`] returns `token`. Can be called again with the same token.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    fn watch_exit(&self, token: u64) -> nix::Result<()>;
}

impl Signals for ExitPoll {
    fn open(&self, pid: u32) -> nix::Result<Box<dyn WatchedHandle>> {
        Ok(Box::new(WatchedPidfd {
            pidfd: Pidfd::open(pid)?,
            poll: self.clone(),
        }))
    }

    fn exited(&self) -> Vec<u64> {
        self.ready()
    }
}

struct WatchedPidfd {
    pidfd: Pidfd,
    poll: ExitPoll,
}

impl WatchedHandle for WatchedPidfd {
    fn handle(&self) -> &dyn ProcessHandle {
        &self.pidfd
    }

    fn watch_exit(&self, token: u64) -> nix::Result<()> {
        self.poll.add(&self.pidfd, token)
    }
}
