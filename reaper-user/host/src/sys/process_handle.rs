//! Trait of a handle on one process.

use std::time::Duration;

use nix::sys::signal::Signal;

use reaper_model::event::Uids;

/// A handle on one process. It never refers to another process, even after the pid is reused.
pub trait ProcessHandle: Send {
    /// Returns the number of the file descriptor; 0 without one.
    fn file(&self) -> u64;

    /// Returns the inode number of the pidfd. It is unique since Linux 6.9; before that all pidfds share one. On macOS,
    /// the number of the process, which is not reused.
    fn inode(&self) -> Option<u64>;

    /// Returns the current uids of the process, which has this pid. `None` if it has exited or they cannot be read.
    fn uids(&self, pid: u32) -> Option<Uids>;

    /// Waits for the exit of the process, at most for `timeout`. Returns whether it has exited.
    fn wait(&self, timeout: Duration) -> bool;

    /// Returns whether the process has exited with all of its threads. A zombie has exited.
    fn has_exited(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Sends a signal. Only `reap` may call this.
    ///
    /// # Errors
    /// `ESRCH` if the process is gone, `EPERM` if it may not be signalled.
    fn send_signal(&self, signal: Signal) -> nix::Result<()>;
}
