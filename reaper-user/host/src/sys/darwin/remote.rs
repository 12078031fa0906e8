//! Recognises network file systems.

use std::path::Path;

use nix::mount::MntFlags;
use nix::sys::statfs::statfs;

/// Returns `network` if a directory is on a file system of another machine.
///
/// # Errors
/// As statfs(2).
pub fn kind(directory: &Path) -> nix::Result<Option<&'static str>> {
    let local = statfs(directory)?.flags().contains(MntFlags::MNT_LOCAL);
    Ok((!local).then_some("network"))
}
