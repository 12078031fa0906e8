//! A handle on one process, as a trait.

use std::time::Duration;

use nix::sys::signal::Signal;

use reaper_model::event::Uids;

/// A handle on one process. It never refers to another, also after the pid is reused.
pub trait ProcessHandle: Send {
    /// Returns the number of the open file that it uses; 0 if it uses none.
    fn file(&self) -> u64;

    /// Returns the inode number, which is unique from Linux 6.9 on. Before that all pidfds share one.
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
