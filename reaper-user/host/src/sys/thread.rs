//! Scheduling priority and resource limits of the service.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::process::setpriority_process;
use rustix::thread::{MembarrierCommand, membarrier};

use super::proc_file::{field, value, words};

/// Maximum factor by which the service extends its time limits on a busy machine.
const CROWD_MAX: u32 = 30;
/// Maximum run time of a probe. It takes less than 1 µs, but a hypervisor can preempt its processor.
const PROBE_MAX: Duration = Duration::from_millis(20);

/// Gives the calling thread the lowest real-time priority, or a nice value of -20 if that is not permitted. Failures are
/// ignored: they make the service slower, not wrong.
///
/// Used by the engine's thread and by one that it waits for. A nice value alone does not suffice: the processes that
/// are killed wake up to exit and would preempt the thread. The kernel reserves 5 % for other threads (sched(7)).
/// Threads that the thread starts do not inherit the priority.
pub fn raise_priority() {
    if set_scheduler(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1) {
        return;
    }
    // Threads started by this one do not inherit the nice value set below.
    set_scheduler(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0);
    // On Linux this sets the priority of the calling thread only.
    if let Err(error) = setpriority_process(None, -20) {
        tracing::debug!("cannot raise priority: {error}");
    }
}

/// Sets policy and priority of the calling thread (sched_setscheduler(2)), and returns whether that was permitted. The
/// function of that name in musl only fails, because POSIX defines it for a process.
fn set_scheduler(policy: libc::c_int, priority: libc::c_int) -> bool {
    // SAFETY: the kernel only reads the structure, which consists of the priority.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) == 0 }
}

/// Returns the calling thread's id (gettid(2)).
pub fn thread_id() -> u32 {
    nix::unistd::gettid().as_raw().cast_unsigned()
}

/// Returns a number that differs between sleeps of a thread of this process, or `None` if it is runnable.
///
/// Read from `State` and `voluntary_ctxt_switches` (proc_pid_status(5)). If they cannot be read, as when no more
/// files can be opened, the result is always the same: it counts as one long sleep.
pub fn sleep_number(thread_id: u32) -> Option<u64> {
    let status = std::fs::read(format!("/proc/self/task/{thread_id}/status"));
    status.map_or(Some(0), |status| sleep_in(&status))
}

/// Returns the number for [`sleep_number`] from a `status` file.
fn sleep_in(status: &[u8]) -> Option<u64> {
    if words(field(status, b"State:")?).next()?.starts_with(b"R") {
        return None;
    }
    value(status, b"voluntary_ctxt_switches:")
}

/// Returns the number of runnable threads on the host per processor, at least 1 and at most 30 (proc_loadavg(5)).
/// Returns 1 if it cannot be read.
///
/// Compared with an idle machine, a thread waits that many times longer for a processor, and others for the locks it
/// holds.
pub fn runnable_per_processor() -> u32 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    let runnable = runnable(&text).unwrap_or_default();
    (runnable / u32::try_from(processors).unwrap_or(u32::MAX)).clamp(1, CROWD_MAX)
}

/// Parses `0.20 0.18 0.12 RUNNABLE/ALL LAST_PID`.
fn runnable(loadavg: &str) -> Option<u32> {
    let (runnable, _) = loadavg.split(' ').nth(3)?.split_once('/')?;
    runnable.parse().ok()
}

/// Makes the process one of the last that the OOM killer chooses. Failures are ignored.
pub fn lower_oom_score() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::debug!("cannot lower the OOM score: {error}");
    }
}

/// Waits until every probe that is running now has finished. Takes about 10 ms. Probes on tracepoints run in an RCU
/// read-side section, and `MEMBARRIER_CMD_GLOBAL` waits like `synchronize_rcu` (membarrier(2)).
///
/// Where membarrier(2) does not wait, sleeps for 20 ms instead, which no probe is expected to exceed.
pub fn await_probes() {
    let waited = membarrier(MembarrierCommand::Global);
    if let Err(error) = &waited {
        // The kernel refuses on processors without a timer tick (nohz_full).
        tracing::debug!("cannot wait for running probes: {error}");
    }
    // On a single processor membarrier does not wait.
    if waited.is_err() || std::thread::available_parallelism().is_ok_and(|n| n.get() == 1) {
        std::thread::sleep(PROBE_MAX);
    }
}

/// Guard of [`many_files`]. Dropping the last one restores the limit.
pub struct ManyFiles;

/// Number of guards, and the limit before the first of them.
static MANY_FILES: Mutex<(usize, Option<(u64, u64)>)> = Mutex::new((0, None));

/// Raises the limit on open files until all guards are dropped, so that commands started later get the old limit.
pub fn many_files() -> ManyFiles {
    let mut many = MANY_FILES.lock().unwrap_or_else(PoisonError::into_inner);
    if many.0 == 0 {
        many.1 = getrlimit(Resource::RLIMIT_NOFILE).ok();
        raise_open_files();
    }
    many.0 += 1;
    ManyFiles
}

impl Drop for ManyFiles {
    fn drop(&mut self) {
        let mut many = MANY_FILES.lock().unwrap_or_else(PoisonError::into_inner);
        many.0 -= 1;
        if let Some((soft, hard)) = many.1.filter(|_| many.0 == 0) {
            // Cannot fail: this limit was permitted before.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        }
    }
}

/// Raises the limit on open files to the hard limit. Only logs a failure. The service holds a pidfd for each process
/// that it ends.
pub fn raise_open_files() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runnable_threads_are_read_from_the_load() {
        assert_eq!(runnable("98.20 70.18 0.12 213/1621 4711\n"), Some(213));
        assert_eq!(runnable("0.20 0.18"), None);
        assert_eq!(runnable(""), None);
        assert!(runnable_per_processor() >= 1);
    }

    #[test]
    fn only_a_thread_that_sleeps_has_a_sleep_number() {
        let status = |state: &str| {
            format!("Name:\tx\nState:\t{state}\nvoluntary_ctxt_switches:\t7\nx:\t3\n")
        };
        assert_eq!(sleep_in(status("D (disk sleep)").as_bytes()), Some(7));
        assert_eq!(sleep_in(status("S (sleeping)").as_bytes()), Some(7));
        assert_eq!(sleep_in(status("R (running)").as_bytes()), None);
        assert_eq!(sleep_in(b""), None);
        assert_eq!(sleep_number(thread_id()), None);
    }
}
