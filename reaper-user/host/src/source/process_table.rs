//! The process table, as a trait.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::snapshot::{Liveness, ProcessMemory, ProcfsError, Snapshot};
use crate::sys::{self, cgroup};
use reaper_model::event::ProcessKey;

/// Reads processes at the moment of the call. What it says of a pid may be about a process that has taken the pid since.
pub trait ProcessTable: Send + Sync {
    /// Returns the pid of this program.
    fn own_pid(&self) -> u32 {
        std::process::id()
    }

    /// Returns the pids of all processes.
    ///
    /// # Errors
    /// They cannot be listed.
    fn pids(&self) -> Result<Vec<u32>, ProcfsError>;

    /// Whether this very process lives, and which parent it has. Must not block for long.
    ///
    /// # Errors
    /// It is there and cannot be read.
    fn probe(&self, key: ProcessKey) -> Result<Liveness, ProcfsError>;

    /// Reads processes. Those that cannot be read are counted.
    ///
    /// # Errors
    /// No thread can be started to read them.
    fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError>;

    /// Reads processes, each within `patience`.
    ///
    /// # Errors
    /// As [`ProcessTable::snapshot_of`].
    fn snapshot_within(&self, patience: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError>;

    /// Returns the state letter of the leader that `ps` shows (`D` is uninterruptible); `None` if the process is gone.
    fn state(&self, pid: u32) -> Option<char>;

    /// Returns the resident memory in bytes, 0 if it has none; `None` if the process is gone.
    fn rss_bytes(&self, pid: u32) -> Option<u64>;

    /// Returns the memory of a process; `None` if it is gone or has exited. Swapped memory is only read if `swaps` is
    /// true, which takes longer. Waits for no lock that the process may hold for long.
    fn memory(&self, pid: u32, swaps: bool) -> Option<ProcessMemory>;

    /// Whether anything is swapped out.
    fn is_swap_used(&self) -> bool {
        sys::is_swap_used()
    }

    /// Returns the ids of a cgroup and of those below it.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn cgroups_below(&self, directory: &Path) -> io::Result<Vec<u64>> {
        cgroup::ids_below(directory)
    }
}
