//! This host, by its files.

use std::path::Path;

use super::Host;
use crate::sys::proc::pid_namespace_unless_first;

impl Host {
    /// Reads this host.
    pub fn read() -> Host {
        Host {
            own_proc: pid_namespace_unless_first().is_ok(),
            ..Host::read_at(Path::new("/"))
        }
    }
}
