//! Finds or mounts the BPF file system.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, statfs};

/// `BPF_FS_MAGIC` of include/uapi/linux/magic.h.
const MAGIC: FsType = FsType(0xcafe_4a11);
/// Root directory of init.
const INIT_ROOT: &str = "/proc/1/root";
/// Directory where systemd and bpftool mount it.
const DEFAULT: &str = "/sys/fs/bpf";

/// Returns whether a path is in a BPF file system; false if it does not exist.
pub fn is(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == MAGIC)
}

/// Returns the place where init sees a path: another one in a private mount namespace, as of a confined service.
pub fn of_init(path: &Path) -> PathBuf {
    Path::new(INIT_ROOT).join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns whether only the mount namespace of this process has the file system of a path: it disappears with the last
/// process of the namespace. Returns false if this user cannot determine it.
pub fn is_private(path: &Path) -> bool {
    differs(path, &of_init(path))
}

/// Returns whether a path is on another file system than `outside`, the same path in another mount namespace.
fn differs(path: &Path, outside: &Path) -> bool {
    match (fs::metadata(path), fs::metadata(outside)) {
        (Ok(own), Ok(outside)) => own.dev() != outside.dev(),
        (Ok(_), Err(error)) => error.kind() == ErrorKind::NotFound,
        (Err(_), _) => false,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_file_system_is_another_one_or_absent_outside() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("inside");
        fs::create_dir(&inside).unwrap();
        let absent = dir.path().join("absent");
        for (path, outside, expected) in [
            (inside.as_path(), dir.path(), false),
            (inside.as_path(), Path::new("/proc"), true),
            (inside.as_path(), absent.as_path(), true),
            (absent.as_path(), dir.path(), false),
        ] {
            assert_eq!(differs(path, outside), expected, "{}", outside.display());
        }
        assert_eq!(
            of_init(Path::new("/sys/fs/bpf")),
            Path::new("/proc/1/root/sys/fs/bpf")
        );
    }
}
