//! The interface through which the engine reads the process table.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::snapshot::{Liveness, ProcessMemory, ProcfsError, Snapshot};
use crate::sys::{self, cgroup};
use reaper_model::event::ProcessKey;

/// Reads processes at the time of the call. A pid may have been reused since the caller last saw it.
pub trait ProcessTable: Send + Sync {
    /// Returns the pid of this program.
    fn own_pid(&self) -> u32 {
        std::process::id()
    }

    /// Returns the pids of all processes that this user can see, zombies and kernel threads included.
    ///
    /// # Errors
    /// The processes cannot be listed.
    fn pids(&self) -> Result<Vec<u32>, ProcfsError>;

    /// Returns whether the process with this key is alive, and its parent. Must not block for long.
    ///
    /// Compares start times by the tick. A zombie is [`Liveness::Gone`], and so is a process whose pid belongs to
    /// another one.
    ///
    /// # Errors
    /// The process exists but cannot be read.
    fn probe(&self, key: ProcessKey) -> Result<Liveness, ProcfsError>;

    /// Reads the processes with these pids in full. Those that cannot be read, or not in time, are only counted.
    ///
    /// # Errors
    /// No thread can be started to read them.
    fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError>;

    /// As [`ProcessTable::snapshot_of`], with `timeout` as the limit on the wait for the next result. On a busy machine
    /// the limit is longer. macOS needs no limit.
    ///
    /// # Errors
    /// As [`ProcessTable::snapshot_of`].
    fn snapshot_within(&self, timeout: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError>;

    /// Returns the state letter of the process's leader as in `ps` (`D` is uninterruptible); `None` if it is gone.
    fn state(&self, pid: u32) -> Option<char>;

    /// Returns the resident memory in bytes, 0 if it has none; `None` if the process is gone.
    fn rss_bytes(&self, pid: u32) -> Option<u64>;

    /// Returns the memory of a process; `None` if it has exited or has no memory, as a kernel thread. Waits for no lock
    /// that the process may hold for long.
    ///
    /// Swapped memory is only read if `swaps` is true, which takes longer. Otherwise it is 0.
    fn memory(&self, pid: u32, swaps: bool) -> Option<ProcessMemory>;

    /// Returns whether any swap space of the host is in use.
    fn is_swap_used(&self) -> bool {
        sys::is_swap_used()
    }

    /// Returns the ids of a cgroup and of its descendants. Descendants that cannot be read are left out.
    ///
    /// `directory` is the cgroup's directory in the cgroup file system.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn cgroups_below(&self, directory: &Path) -> io::Result<Vec<u64>> {
        cgroup::ids_below(directory)
    }
}
