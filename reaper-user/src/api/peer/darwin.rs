//! Reads a target from the process table of macOS.

use std::io;

use super::SignalTarget;
use reaper_host::source::darwin::table;
use reaper_model::event::{ProcessKey, TICK_NS};

impl SignalTarget {
    /// Reads the process from the kernel. Returns `None` for an unused pid.
    ///
    /// # Errors
    /// The kernel refuses the read.
    pub fn read(pid: u32) -> io::Result<Option<SignalTarget>> {
        let process = table::one(pid).map_err(io::Error::other)?;
        Ok(process.map(|process| {
            let key = table::key(&process);
            SignalTarget {
                // Truncated to a clock tick, as on Linux.
                key: ProcessKey {
                    start: key.start - key.start % TICK_NS,
                    ..key
                },
                real: process.uids.real,
                saved: process.saved_uid,
                comm: String::from_utf8_lossy(&process.comm).into_owned(),
            }
        }))
    }
}

/// Returns true, because macOS has no pid namespaces.
pub(super) fn shares_pid_namespace(_pid: Option<i32>) -> Option<bool> {
    Some(true)
}
