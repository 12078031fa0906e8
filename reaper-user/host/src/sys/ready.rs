//! Waiting on file descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Returns a duplicate of a descriptor that can be awaited until it is readable. Must be called in a tokio runtime.
///
/// # Errors
/// As `dup(2)` and `epoll_ctl(2)`.
pub fn readable(fd: impl AsFd) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = fd.as_fd().try_clone_to_owned()?;
    // SAFETY: the `AsyncFd` owns the descriptor, which is neither replaced nor closed before.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits for one of the events on a descriptor, at most for `timeout`. Returns whether one occurred; an error or hangup
/// of the descriptor counts too. Returns false early if a signal handler interrupts the wait.
pub fn wait_for(fd: impl AsFd, events: PollFlags, timeout: Duration) -> bool {
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    matches!(poll(&mut [PollFd::new(fd.as_fd(), events)], timeout), Ok(1))
}
