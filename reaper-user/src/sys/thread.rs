//! What the engine asks of the scheduler and of its limits.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Puts the calling thread before ordinary ones and makes the process the last to be killed for want
/// of memory. What is not permitted is left out: it makes things slower, not wrong.
pub fn prioritise() {
    // SAFETY: no memory is involved; on Linux the priority is the calling thread's.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } != 0 {
        tracing::debug!("no raised priority: {}", std::io::Error::last_os_error());
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::debug!("no low OOM score: {error}");
    }
}

/// Raises the limit on open files as far as permitted: each process that is being ended holds one.
pub fn raise_open_files() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::debug!("limit on open files is left alone: {error}");
    }
}
