//! Checks whether other users than root and the effective user can change a file or replace the entries of a
//! directory.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Mode bit: only the owner of an entry may remove or rename it.
const STICKY: u32 = 0o1000;

/// Returns whether other users can write to the file: one of them owns it, or its group or all users may write.
pub fn is_writable_by_others(meta: &Metadata) -> bool {
    has_other_owner(meta) || meta.mode() & 0o022 != 0
}

/// Returns whether other users can replace entries of the directory that are not theirs.
///
/// They can if one of them owns it. They also can if its group or all users may write, and it has no sticky bit.
pub fn allows_replacement(directory: &Metadata) -> bool {
    has_other_owner(directory) || directory.mode() & 0o022 != 0 && directory.mode() & STICKY == 0
}

/// Returns whether the owner is neither root nor the effective user.
fn has_other_owner(meta: &Metadata) -> bool {
    ![0, nix::unistd::geteuid().as_raw()].contains(&meta.uid())
}
