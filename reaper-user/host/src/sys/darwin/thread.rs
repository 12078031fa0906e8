//! Scheduling priority and resource limits of the service.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Maximum number of open files without raising system limits (`OPEN_MAX` of sys/syslimits.h).
const OPEN_MAX: u64 = 10240;

/// Does nothing: macOS has no setting for it.
pub fn lower_oom_score() {}

/// Raises the priority of this process. Failures are ignored: they make the service slower, not wrong.
pub fn raise_priority() {
    // SAFETY: no memory is involved.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } != 0 {
        tracing::debug!("cannot raise priority: {}", std::io::Error::last_os_error());
    }
}

/// Returns 1: the number of runnable threads is not read on macOS.
pub fn runnable_per_processor() -> u32 {
    1
}

/// Returns 0 for each thread: its sleep is not read on macOS.
pub fn thread_id() -> u32 {
    0
}

/// Returns the same number for each thread, as if it were always asleep.
pub fn sleep_number(_thread_id: u32) -> Option<u64> {
    Some(0)
}

/// Raises the limit on open files to the hard limit, at most to 10,240. Only logs a failure.
pub fn raise_open_files() {
    // The kernel refuses more, even below the hard limit.
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let wanted = hard.min(OPEN_MAX)
        && soft < wanted
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)
    {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}
