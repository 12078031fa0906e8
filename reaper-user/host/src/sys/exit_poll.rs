//! Waits for the exits of many processes.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::sys::pidfd::Pidfd;

/// A set of pidfds. It is readable while it contains a process that has exited. Closing a pidfd removes it.
#[derive(Clone)]
pub struct ExitPoll(Arc<Epoll>);

impl ExitPoll {
    /// Returns an empty set.
    ///
    /// # Errors
    /// As `epoll_create1(2)`.
    pub fn new() -> nix::Result<ExitPoll> {
        Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map(|epoll| ExitPoll(Arc::new(epoll)))
    }

    /// Adds a pidfd. Does nothing if it is in the set already, even with another token.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub fn add(&self, pidfd: &Pidfd, token: u64) -> nix::Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, token);
        match self.0.add(pidfd.as_fd(), event) {
            Err(nix::Error::EEXIST) => Ok(()),
            added => added,
        }
    }

    /// Returns the tokens of at most 256 processes that have exited, without waiting. Each call can return the same
    /// ones.
    pub fn ready(&self) -> Vec<u64> {
        let mut events = [EpollEvent::empty(); 256];
        let mut tokens = Vec::new();
        // One call only: a pidfd stays ready until it is closed.
        if let Ok(n) = self.0.wait(&mut events, EpollTimeout::ZERO) {
            tokens.extend(events.iter().take(n).map(EpollEvent::data));
        }
        tokens
    }
}

impl AsFd for ExitPoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}
