//! Reads this host from its files.

use std::path::Path;

use super::Host;
use crate::sys::proc::non_initial_pid_namespace;

impl Host {
    /// Reads the facts about this host from /proc, /sys and other files.
    pub fn read() -> Host {
        Host {
            proc_matches_pid_namespace: non_initial_pid_namespace().is_ok(),
            ..Host::read_at(Path::new("/"))
        }
    }
}
