//! Waiting for many pidfds at once.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::ProcessKey;

/// A set of pidfds, readable when one of them is. Closing a pidfd takes it out.
#[derive(Clone)]
pub struct ExitPoll(Arc<Epoll>);

impl ExitPoll {
    pub(super) fn new() -> nix::Result<ExitPoll> {
        Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map(|epoll| ExitPoll(Arc::new(epoll)))
    }

    /// Waits for one more. It may be in the set already.
    pub(super) fn add(&self, pidfd: &Pidfd, key: ProcessKey, token: u64) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, token);
        match self.0.add(pidfd.as_fd(), event) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(error) => {
                tracing::error!("pid {}: its end cannot be waited for: {error}", key.pid)
            }
        }
    }

    /// The tokens of those that have exited.
    pub(super) fn ready(&self) -> Vec<u64> {
        let mut events = [EpollEvent::empty(); 256];
        let mut tokens = Vec::new();
        // Bounded, since what is ready stays so until its pidfd is closed.
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
