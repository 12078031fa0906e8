//! What needs the C library or the kernel's own interfaces: all `unsafe` outside the probes' source.

pub mod host;
mod memory;
pub mod pidfd;
mod ready;
mod thread;

pub use memory::{Position, bytes_of, keep_little, page_size, trim};
pub use ready::readable;
pub use thread::{prioritise, raise_open_files};

use std::os::linux::fs::MetadataExt;

/// Inode of this process's pid namespace, or 0 if it is the first one (or cannot be told).
pub fn pid_namespace_unless_first() -> u32 {
    match std::fs::metadata("/proc/self/ns/pid").map(|m| m.st_ino()) {
        Ok(host::FIRST_PID_NAMESPACE) | Err(_) => 0,
        Ok(inode) => inode as u32,
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
