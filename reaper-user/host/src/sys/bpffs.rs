//! The BPF file system: whether there is one, and who holds a lock there.

use std::fs::File;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, statfs};

/// `BPF_FS_MAGIC` of include/uapi/linux/magic.h.
const MAGIC: FsType = FsType(0xcafe_4a11);
/// Where systemd and bpftool mount it.
const DEFAULT: &str = "/sys/fs/bpf";

/// Whether a path is in a BPF file system.
pub fn is(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == MAGIC)
}

/// The longest beginning of a path that exists.
pub fn existing_part(path: &Path) -> &Path {
    let mut parts = path.ancestors();
    parts.find(|part| part.exists()).unwrap_or(path)
}

/// Mounts a BPF file system in its usual place if that is above `path` and nothing is mounted there, as
/// bpftool does. Whether it came to be, [`is`] tells.
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

/// The process that holds a lock (flock(2)) on a file, where /proc tells it.
pub fn lock_holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.st_ino();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // 1: FLOCK  ADVISORY  WRITE 708 00:21:1234 0 EOF
        let mut words = line.split_ascii_whitespace().skip(1);
        if words.next() != Some("FLOCK") {
            return None;
        }
        let (pid, place) = (words.nth(2)?, words.next()?);
        let found = place.rsplit(':').next()?.parse() == Ok(inode);
        pid.parse().ok().filter(|_| found)
    })
}
