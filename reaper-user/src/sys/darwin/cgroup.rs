//! There are no cgroups: nothing is in one, and no directory is one.

use std::io;
use std::path::Path;

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
