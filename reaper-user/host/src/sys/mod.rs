//! Wrappers of system calls and C library functions. All `unsafe` code outside of `source/ebpf` is here.

#[cfg(test)]
pub mod allocations;
#[cfg(target_os = "linux")]
pub(crate) mod bpf;
#[cfg(target_os = "linux")]
pub mod bpffs;
#[cfg_attr(target_os = "macos", path = "darwin/cgroup.rs")]
pub mod cgroup;
#[cfg(target_os = "linux")]
pub mod child;
#[cfg(target_os = "macos")]
pub mod darwin;
#[cfg_attr(target_os = "macos", path = "darwin/exit_poll.rs")]
pub mod exit_poll;
#[cfg(target_os = "linux")]
pub mod held_path;
pub mod host;
#[cfg(any(target_os = "macos", test))]
#[path = "darwin/kinfo.rs"]
pub mod kinfo;
#[cfg_attr(target_os = "macos", path = "darwin/memory.rs")]
mod memory;
#[cfg(target_os = "linux")]
pub(crate) mod netlink;
pub mod notify;
pub mod owner;
#[cfg_attr(target_os = "macos", path = "darwin/paths.rs")]
pub mod paths;
#[cfg_attr(target_os = "macos", path = "darwin/pidfd.rs")]
pub mod pidfd;
pub mod privileges;
#[cfg_attr(target_os = "macos", path = "darwin/proc.rs")]
mod proc;
pub mod proc_file;
pub mod process_handle;
mod ready;
#[cfg_attr(target_os = "macos", path = "darwin/remote.rs")]
pub mod remote;
#[cfg_attr(target_os = "macos", path = "darwin/thread.rs")]
mod thread;
pub mod xdg;

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::time::ClockId;

#[cfg(target_os = "linux")]
pub(crate) use memory::{Counters, RingMemory, RingRecord, bytes_of, page_size};
pub use memory::{fix_mmap_threshold, is_swap_used, trim};
pub use proc::{is_visible, lock_holder, non_initial_pid_namespace, thread_group};
pub use ready::{readable, unread, wait_for};
#[cfg(target_os = "linux")]
pub use thread::{await_probes, many_files};
pub use thread::{
    lower_oom_score, raise_open_files, raise_priority, runnable_per_processor, sleep_number,
    thread_id,
};

/// Clock since boot, including time suspended.
#[cfg(target_os = "linux")]
const BOOT: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(target_os = "macos")]
const BOOT: ClockId = ClockId::from_raw(libc::CLOCK_MONOTONIC_RAW);
/// Clock since boot, without time suspended.
#[cfg(target_os = "linux")]
const MONOTONIC: ClockId = ClockId::CLOCK_MONOTONIC;
#[cfg(target_os = "macos")]
const MONOTONIC: ClockId = ClockId::from_raw(libc::CLOCK_UPTIME_RAW);

/// Returns nanoseconds since boot, including time suspended. The probes use the same clock.
pub fn boot_time() -> u64 {
    now(BOOT)
}

/// Returns nanoseconds since boot, without time suspended. Delays use this clock.
pub fn monotonic() -> u64 {
    now(MONOTONIC)
}

/// Returns [`monotonic`] plus `time`, at most `u64::MAX`.
pub fn after(time: Duration) -> u64 {
    monotonic().saturating_add(nanoseconds(time))
}

/// Returns a duration in nanoseconds, at most `u64::MAX`.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns how long the machine has been suspended since boot, in ns.
pub fn suspended() -> u64 {
    let measure = || {
        let before = monotonic();
        let boot = boot_time();
        (
            monotonic().saturating_sub(before),
            boot.saturating_sub(before),
        )
    };
    // This thread can be preempted between two readings, so the measurement with the closest readings is used.
    let [first, second, third] = std::array::from_fn(|_| measure());
    first.min(second).min(third).1
}

/// Returns nanoseconds since the epoch.
pub fn wall_time() -> u64 {
    now(ClockId::CLOCK_REALTIME)
}

/// Returns the CPU time of the calling thread, in ns.
#[cfg(target_os = "linux")]
pub fn thread_time() -> u64 {
    now(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// Checks that this process can open `count` more files.
///
/// # Errors
/// `EMFILE` if its own limit does not allow that, `ENFILE` if that of the system does not.
pub fn check_free_files(count: usize) -> io::Result<()> {
    let stderr = io::stderr();
    let copies = (0..count).map(|_| stderr.as_fd().try_clone_to_owned());
    copies.collect::<io::Result<Vec<_>>>().map(drop)
}

/// Converts an error of `rustix` into one of `nix`.
#[cfg(target_os = "linux")]
fn errno(error: rustix::io::Errno) -> nix::Error {
    nix::Error::from_raw(error.raw_os_error())
}

/// Returns the time of a clock in ns.
fn now(id: ClockId) -> u64 {
    // Cannot fail: every supported kernel has these clocks.
    id.now().map_or(0, |t| {
        t.tv_sec().cast_unsigned() * 1_000_000_000 + t.tv_nsec().cast_unsigned()
    })
}
