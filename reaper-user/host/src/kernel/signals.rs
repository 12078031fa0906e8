//! Handles on processes: signalling them, and waiting for their exits.

use std::os::fd::AsFd;

use crate::sys::exit_poll::ExitPoll;
use crate::sys::pidfd::Pidfd;
use crate::sys::process_handle::ProcessHandle;

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

/// A handle whose exit can be watched.
pub trait WatchedHandle: Send {
    /// Returns the handle itself.
    fn handle(&self) -> &dyn ProcessHandle;

    /// Watches for the exit: [`Signals::exited`] then returns `token`. May be called again.
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
