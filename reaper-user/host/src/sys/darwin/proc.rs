//! Questions about processes that Linux answers by files in /proc.

use std::fs::Metadata;
use std::io;

/// There are no pid namespaces: always the only one there can be.
///
/// # Errors
/// None.
pub fn non_initial_pid_namespace() -> io::Result<u32> {
    Ok(0)
}

/// The process that a task belongs to: tasks of others have no pids here.
pub fn thread_group(pid: u32) -> Option<u32> {
    Some(pid)
}

/// Whether the process table shows a process that there is: always.
pub fn is_visible(_: u32) -> bool {
    true
}

/// Pid of whoever has a lock on a file that may not be read.
///
/// # Errors
/// Always: nobody tells.
pub fn lock_holder(_: &Metadata) -> io::Result<Option<u32>> {
    Err(io::Error::other(
        "only who may read a lock can tell who holds it: ask as the user that the service runs as",
    ))
}
