//! File descriptors that the engine waits on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

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
