//! What needs the C library or the kernel's own interfaces: all `unsafe` outside the probes' source.

pub mod cgroup;
pub mod host;
mod memory;
pub mod pidfd;
mod ready;
mod thread;

pub use memory::{Position, bytes_of, keep_little, page_size, trim};
pub use ready::readable;
pub use thread::{prioritise, raise_open_files};

use std::io;
use std::os::linux::fs::MetadataExt;

/// Inode of this process's pid namespace, or 0 if it is the first one, or the only one there can be.
///
/// # Errors
/// /proc is not there, or shows the processes of another namespace: its pids would be others'.
pub fn pid_namespace_unless_first() -> io::Result<u32> {
    let own = std::fs::read_link("/proc/self")?;
    if own.to_str().and_then(|own| own.parse().ok()) != Some(std::process::id()) {
        return Err(io::Error::other(
            "it shows the processes of another pid namespace",
        ));
    }
    match std::fs::metadata("/proc/self/ns/pid") {
        Ok(of) if of.st_ino() == host::FIRST_PID_NAMESPACE => Ok(0),
        Ok(of) => Ok(of.st_ino() as u32),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Nanoseconds since boot, suspend included: the clock of the probes' time stamps.
pub fn boot_time() -> u64 {
    clock(nix::time::ClockId::CLOCK_BOOTTIME)
}

/// Nanoseconds on a clock that stands still while the machine is suspended: for delays.
pub fn monotonic() -> u64 {
    clock(nix::time::ClockId::CLOCK_MONOTONIC)
}

/// Nanoseconds since the epoch.
pub fn wall_time() -> u64 {
    clock(nix::time::ClockId::CLOCK_REALTIME)
}

fn clock(id: nix::time::ClockId) -> u64 {
    // These clocks exist on every kernel this runs on.
    id.now().map_or(0, |t| {
        t.tv_sec().cast_unsigned() * 1_000_000_000 + t.tv_nsec().cast_unsigned()
    })
}
