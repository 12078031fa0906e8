//! There are no cgroups: nothing is in one, and no directory is one.

use std::io;
use std::path::Path;

use hashbrown::HashSet;

/// A handle on one, which there is not.
#[derive(Debug)]
pub enum Cgroup {}

impl Cgroup {
    /// Who is in it.
    ///
    /// # Errors
    /// None: there is none.
    pub fn pids(&self) -> io::Result<HashSet<u32>> {
        match *self {}
    }

    /// Whether a process is in it.
    ///
    /// # Errors
    /// None: there is none.
    pub fn contains(&self, _pid: u32) -> io::Result<bool> {
        match *self {}
    }

    /// Ends all that is in it. Nothing but `crate::reap` may call this.
    ///
    /// # Errors
    /// None: there is none.
    pub fn kill(&self) -> io::Result<()> {
        match *self {}
    }
}

/// Whether this is the directory of one.
pub fn is_cgroup(_: &Path) -> bool {
    false
}

/// The ids of a cgroup and of those below it.
///
/// # Errors
/// Always.
pub fn ids_below(_: &Path) -> io::Result<Vec<u64>> {
    Err(io::ErrorKind::Unsupported.into())
}
