//! Queries about processes that /proc answers on Linux.

use std::fs::Metadata;
use std::io;

/// Returns 0: macOS has no pid namespaces.
///
/// # Errors
/// None.
pub fn non_initial_pid_namespace() -> io::Result<u32> {
    Ok(0)
}

/// Returns `pid`: threads have no pids on macOS.
pub fn thread_group(pid: u32) -> Option<u32> {
    Some(pid)
}

/// Returns true: every process is visible on macOS.
pub fn is_visible(_: u32) -> bool {
    true
}

/// Would return the pid that holds a lock on a file, which macOS does not report.
///
/// # Errors
/// Always.
pub fn lock_holder(_: &Metadata) -> io::Result<Option<u32>> {
    Err(io::Error::other(
        "the holder of a lock is visible only to users with access to the lock file; run this as the user of the service",
    ))
}
