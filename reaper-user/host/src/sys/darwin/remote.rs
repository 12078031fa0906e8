//! File systems of other machines.

use std::path::Path;

use nix::mount::MntFlags;
use nix::sys::statfs::statfs;

/// What a file system of another machine is called in the error, if the directory is in one.
///
/// # Errors
/// As statfs(2).
pub fn kind(directory: &Path) -> nix::Result<Option<&'static str>> {
    let local = statfs(directory)?.flags().contains(MntFlags::MNT_LOCAL);
    Ok((!local).then_some("network"))
}
