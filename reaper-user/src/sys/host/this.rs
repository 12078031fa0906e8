//! This host, by its files.

use std::path::Path;

use super::Host;

pub(super) fn host() -> Host {
    Host::read_at(Path::new("/"))
}
