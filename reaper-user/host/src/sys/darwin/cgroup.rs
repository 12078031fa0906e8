//! Cgroups do not exist on macOS.

use std::io;
use std::path::Path;

use hashbrown::HashSet;

/// A handle on a cgroup. Has no values.
#[derive(Debug)]
pub enum Cgroup {}

impl Cgroup {
    /// Returns the pids of the processes in the cgroup.
    ///
    /// # Errors
    /// None: there is no such cgroup.
    pub fn pids(&self) -> io::Result<HashSet<u32>> {
        match *self {}
    }

    /// Returns whether a process is in the cgroup.
    ///
    /// # Errors
    /// None: there is no such cgroup.
    pub fn contains(&self, _pid: u32) -> io::Result<bool> {
        match *self {}
    }

    /// Sends SIGKILL to all processes in the cgroup. Only `crate::reap` may call this.
    ///
    /// # Errors
    /// None: there is no such cgroup.
    pub fn kill(&self) -> io::Result<()> {
        match *self {}
    }
}

/// Returns false: macOS has no cgroups.
pub fn is_cgroup(_: &Path) -> bool {
    false
}

/// Returns the ids of a cgroup and of those below it.
///
/// # Errors
/// Always.
pub fn ids_below(_: &Path) -> io::Result<Vec<u64>> {
    Err(io::ErrorKind::Unsupported.into())
}
