//! Reads this host through sysctl(3).

use std::path::Path;

use super::{Capabilities, Host};
use crate::sys::darwin::text;

impl Host {
    /// Reads the facts about this host. Those that only Linux has are unknown.
    pub fn read() -> Host {
        let euid = nix::unistd::geteuid();
        // macOS has no capabilities: root may do everything, other users nothing.
        Host {
            release: text(c"kern.osrelease"),
            boot_id: text(c"kern.bootsessionuuid"),
            euid: Some(euid.as_raw()),
            capabilities: Capabilities(if euid.is_root() { u64::MAX } else { 0 }),
            // All other facts come from files that only Linux has.
            ..Host::read_at(Path::new("/nonexistent"))
        }
    }
}
