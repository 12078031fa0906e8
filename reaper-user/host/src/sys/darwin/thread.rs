//! What the engine asks of the scheduler and of its limits.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Open files that a process may ask for without more ado (`OPEN_MAX` of sys/syslimits.h).
const OPEN_MAX: u64 = 10240;

/// See [`raise_priority`].
pub fn prioritise() {
    raise_priority();
}

/// Puts this process before ordinary ones. What is not permitted is left out: it makes things slower, not wrong.
pub fn raise_priority() {
    // SAFETY: no memory is involved.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } != 0 {
        tracing::debug!("no raised priority: {}", std::io::Error::last_os_error());
    }
}

/// Returns 1: the number of runnable threads is not read on macOS.
pub fn runnable_per_processor() -> u32 {
    1
}

/// Returns 0, which stands for each thread: what a thread sleeps in is not read on macOS.
pub fn thread_id() -> u32 {
    0
}

/// Returns the same for each thread, as if it slept all the time.
pub fn sleep_number(_thread_id: u32) -> Option<u64> {
    Some(0)
}

/// Raises the limit on open files as far as permitted.
pub fn raise_open_files() {
    // The kernel refuses more, whatever the hard limit says.
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let wanted = hard.min(OPEN_MAX)
        && soft < wanted
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)
    {
        tracing::debug!("limit on open files is left alone: {error}");
    }
}
