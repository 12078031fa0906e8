//! Waiting on file descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A duplicate of a descriptor, to be waited on until it is readable. Call it within a tokio runtime.
///
/// # Errors
/// As `dup(2)` and `epoll_ctl(2)`.
pub fn readable(fd: impl AsFd) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = fd.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is owned by what is made here and is neither replaced nor closed before.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// Waits until a descriptor has one of these events, at most for `timeout`. Returns whether it has.
pub fn wait_for(fd: impl AsFd, events: PollFlags, timeout: Duration) -> bool {
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    matches!(poll(&mut [PollFd::new(fd.as_fd(), events)], timeout), Ok(1))
}
