//! Cgroups of version 2: what the kernel calls a cgroup's id is the inode of its directory.

use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// Whether this is the directory of a cgroup of version 2.
pub fn is_cgroup(directory: &Path) -> bool {
    let on_v2 = statfs(directory).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
    on_v2 && directory.is_dir()
}

/// The ids of a cgroup and of those below it.
///
/// # Errors
/// The directory cannot be read; one below it that has just gone is no error.
pub fn ids_below(directory: &Path) -> io::Result<Vec<u64>> {
    let mut ids = vec![std::fs::metadata(directory)?.st_ino()];
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            ids.extend(ids_below(&entry.path()).unwrap_or_default());
        }
    }
    Ok(ids)
}
