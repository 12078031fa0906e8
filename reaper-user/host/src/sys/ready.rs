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

/// Returns a future that resolves when nothing can read any more what is written to a descriptor: the reading end of the
/// pipe, or the other end of the socket, is closed. It never resolves for a file. Must be called in a tokio runtime.
///
/// # Errors
/// As `dup(2)` and `epoll_ctl(2)`.
pub fn unread(fd: impl AsFd) -> io::Result<impl Future<Output = ()>> {
    let fd = fd.as_fd().try_clone_to_owned()?;
    // An error and a hangup are always reported. epoll only needs some interest, and a pipe is always writable.
    let interest = Interest::READABLE | Interest::ERROR;
    // SAFETY: the `AsyncFd` owns the descriptor, which is neither replaced nor closed before.
    let registered = unsafe { AsyncFd::register_with_interest(fd, interest) };
    let ready = match registered.map_err(io::Error::from) {
        Ok(ready) => Some(ready),
        // A file or a device, which has no other end.
        Err(error) if error.raw_os_error() == Some(nix::libc::EPERM) => None,
        Err(error) => return Err(error),
    };
    Ok(async move {
        let Some(ready) = ready else {
            return std::future::pending().await;
        };
        while !wait_for(ready.get_ref(), PollFlags::empty(), Duration::ZERO) {
            match ready.ready(interest).await {
                Ok(mut guard) => guard.clear_ready(),
                Err(_) => return std::future::pending().await,
            }
        }
    })
}

/// Waits for one of the events on a descriptor, at most for `timeout`. Returns whether one occurred; an error or hangup
/// of the descriptor counts too. Returns false early if a signal handler interrupts the wait.
pub fn wait_for(fd: impl AsFd, events: PollFlags, timeout: Duration) -> bool {
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    matches!(poll(&mut [PollFd::new(fd.as_fd(), events)], timeout), Ok(1))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns whether `unread` resolves within the time limit.
    fn resolves(fd: impl AsFd, limit: Duration, close: impl FnOnce()) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let unread = unread(fd).unwrap();
            close();
            tokio::time::timeout(limit, unread).await.is_ok()
        })
    }

    #[test]
    fn closed_reader_is_noticed_without_a_write() {
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(10));
        let (reader, writer) = io::pipe().unwrap();
        assert!(!resolves(&writer, short, || ()));
        assert!(resolves(&writer, long, || drop(reader)));
        let (near, far) = UnixStream::pair().unwrap();
        assert!(!resolves(&near, short, || ()));
        assert!(resolves(&near, long, || drop(far)));
        let file = File::options().write(true).open("/dev/null").unwrap();
        assert!(!resolves(&file, short, || ()));
    }
}
