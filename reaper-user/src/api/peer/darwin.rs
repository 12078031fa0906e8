//! A target as the process table shows it.

use std::io;

use super::SignalTarget;
use reaper_host::source::darwin::table;
use reaper_model::event::{ProcessKey, TICK_NS};

impl SignalTarget {
    /// Asks the kernel; `None` if there is no such process.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn read(pid: u32) -> io::Result<Option<SignalTarget>> {
        let process = table::one(pid).map_err(io::Error::other)?;
        Ok(process.map(|process| {
            let key = table::key(&process);
            SignalTarget {
                // As /proc would have it.
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
