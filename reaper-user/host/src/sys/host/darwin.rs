//! This host, by what sysctl(3) tells of it.

use std::path::Path;

use super::{Capabilities, Host};
use crate::sys::darwin::text;

impl Host {
    /// Reads this host.
    pub fn read() -> Host {
        let euid = nix::unistd::geteuid();
        // Nothing is told apart: root may do all of it, and others nothing.
        Host {
            release: text(c"kern.osrelease"),
            boot_id: text(c"kern.bootsessionuuid"),
            euid: Some(euid.as_raw()),
            capabilities: Capabilities(if euid.is_root() { u64::MAX } else { 0 }),
            // No file of Linux's tells anything here.
            ..Host::read_at(Path::new("/nonexistent"))
        }
    }
}
