//! Finds or mounts the BPF file system.

use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, statfs};

/// `BPF_FS_MAGIC` of include/uapi/linux/magic.h.
const MAGIC: FsType = FsType(0xcafe_4a11);
/// Directory where systemd and bpftool mount it.
const DEFAULT: &str = "/sys/fs/bpf";

/// Returns whether a path is in a BPF file system; false if it does not exist.
pub fn is(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == MAGIC)
}

/// Returns the longest leading part of a path that exists: the path itself or a directory above it.
pub fn existing_part(path: &Path) -> &Path {
    let mut parts = path.ancestors();
    parts.find(|part| part.exists()).unwrap_or(path)
}

/// Mounts a BPF file system at its default place, as bpftool does. Does nothing unless `path` is below that place and
/// no BPF file system is mounted there. Call [`is`] to see whether it succeeded.
pub fn mount_default_for(path: &Path) {
    let default = Path::new(DEFAULT);
    if path.starts_with(default) && default.is_dir() && !is(default) {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let mounted = mount(Some("bpf"), default, Some("bpf"), flags, Some("mode=0700"));
        if let Err(error) = mounted {
            tracing::debug!("cannot mount a BPF file system at {DEFAULT}: {error}");
        }
    }
}
