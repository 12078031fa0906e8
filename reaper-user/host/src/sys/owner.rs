//! Who besides root and this program's own user may change a file, or what lies in a directory.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Users other than the owner of a file there may not remove or rename it.
const STICKY: u32 = 0o1000;

/// Whether others may write to it.
pub fn is_writable_by_others(meta: &Metadata) -> bool {
    is_others(meta) || meta.mode() & 0o022 != 0
}

/// Whether others may put something else in the place of what lies in this directory and is not theirs.
pub fn allows_replacement(directory: &Metadata) -> bool {
    is_others(directory) || directory.mode() & 0o022 != 0 && directory.mode() & STICKY == 0
}

fn is_others(meta: &Metadata) -> bool {
    ![0, nix::unistd::geteuid().as_raw()].contains(&meta.uid())
}
