//! What the engine asks of the scheduler and of its limits.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::process::setpriority_process;
use rustix::thread::{MembarrierCommand, membarrier};

use super::proc_file::{field, value, words};

/// Bound on how many times longer the service waits on a busy machine.
const CROWD_MAX: u32 = 30;
/// How long a probe, which takes well under a microsecond, may take where its processor is taken away meanwhile.
const PROBE_MAX: Duration = Duration::from_millis(20);

/// Puts the calling thread before ordinary ones and makes the process the last to be killed for want
/// of memory. What is not permitted is left out: it makes things slower, not wrong.
///
/// See [`raise_priority`].
pub fn prioritise() {
    raise_priority();
    low_oom_score();
}

/// Puts the calling thread before ordinary ones: the engine's, and one that it waits for.
///
/// Real-time, at its lowest priority: what is being ended wakes up to die, and would take the processor
/// from a thread that is merely nice. The kernel leaves others 5 % in any case (sched(7)).
pub fn raise_priority() {
    let lowest = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the structure is read, for the calling thread.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const lowest) } == 0 {
        return;
    }
    // SAFETY: as above. Threads that this one starts do not inherit the priority that follows.
    unsafe {
        let ordinary = libc::sched_param { sched_priority: 0 };
        let policy = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;
        libc::sched_setscheduler(0, policy, &raw const ordinary);
    }
    // On Linux this is the priority of the calling thread.
    if let Err(error) = setpriority_process(None, -20) {
        tracing::debug!("no raised priority: {error}");
    }
}

/// Returns the calling thread's id (gettid(2)).
pub fn thread_id() -> u32 {
    nix::unistd::gettid().as_raw().cast_unsigned()
}

/// Returns a number that tells the sleep which a thread of this process is in from its earlier ones. `None` if the thread
/// runs, or waits for a processor (`State` and `voluntary_ctxt_switches`, proc_pid_status(5)). Where that cannot be read, as
/// when no more files can be open, it counts as one long sleep.
pub fn sleep_number(thread_id: u32) -> Option<u64> {
    let status = std::fs::read(format!("/proc/self/task/{thread_id}/status"));
    status.map_or(Some(0), |status| sleep_in(&status))
}

fn sleep_in(status: &[u8]) -> Option<u64> {
    if words(field(status, b"State:")?).next()?.starts_with(b"R") {
        return None;
    }
    value(status, b"voluntary_ctxt_switches:")
}

/// Returns the number of runnable threads on the host for each processor, from 1 to 30 (`/proc/loadavg`,
/// proc_loadavg(5)). That many times longer than on a quiet machine a thread waits for its turn, and others for the locks that
/// it holds.
pub fn runnable_per_processor() -> u32 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    let runnable = runnable(&text).unwrap_or_default();
    (runnable / u32::try_from(processors).unwrap_or(u32::MAX)).clamp(1, CROWD_MAX)
}

/// Reads `0.20 0.18 0.12 RUNNABLE/ALL LAST_PID`.
fn runnable(loadavg: &str) -> Option<u32> {
    let (runnable, _) = loadavg.split(' ').nth(3)?.split_once('/')?;
    runnable.parse().ok()
}

fn low_oom_score() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::debug!("no low OOM score: {error}");
    }
}

/// Waits until every probe that is at work on any processor now is through: probes of tracepoints run in a reader's section of
/// RCU, and this waits as `synchronize_rcu` does (`MEMBARRIER_CMD_GLOBAL`, membarrier(2)). Takes some 10 ms.
pub fn await_probes() {
    let waited = membarrier(MembarrierCommand::Global);
    if let Err(error) = &waited {
        // Refused where processors run without a tick.
        tracing::debug!("no word of probes at work: {error}");
    }
    // On a single processor it waits for nobody.
    if waited.is_err() || std::thread::available_parallelism().is_ok_and(|n| n.get() == 1) {
        std::thread::sleep(PROBE_MAX);
    }
}

/// See [`many_files`].
pub struct ManyFiles;

/// How many of them there are, and what the limit was before the first.
static MANY_FILES: Mutex<(usize, Option<(u64, u64)>)> = Mutex::new((0, None));

/// The same until all of these are dropped: what is started afterwards is to find the limit as it was.
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
            // It was permitted before.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        }
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
