//! Cgroups of version 2: what the kernel calls a cgroup's id is the inode of its directory.

use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::sync::LazyLock;

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// Whether this is the directory of a cgroup of version 2.
pub fn is_cgroup(directory: &Path) -> bool {
    let on_v2 = statfs(directory).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
    on_v2 && directory.is_dir()
}

/// Whether a process's cgroup of version 2 tells its unit of systemd: not where systemd keeps units in a hierarchy of
/// version 1 alone, and all processes are in the first cgroup of version 2. Told by where this program is.
pub fn tell_units() -> bool {
    static TELL: LazyLock<bool> = LazyLock::new(|| {
        let own = std::fs::read("/proc/self/cgroup");
        own.is_ok_and(|own| agree(&own))
    });
    *TELL
}

/// Whether by a `cgroup` file of /proc both hierarchies have the same path.
pub fn agree(file: &[u8]) -> bool {
    let path = |start: &[u8]| {
        let mut lines = file.split(|b| *b == b'\n');
        lines.find_map(|line| line.splitn(2, |b| *b == b':').nth(1)?.strip_prefix(start))
    };
    match (path(b":"), path(b"name=systemd:")) {
        (Some(v2), Some(systemd)) => v2 == systemd,
        (v2, _) => v2.is_some(),
    }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::agree;
    use crate::damage::{hostile, real};

    proptest! {
        #[test]
        fn any_file_says_something(bytes in hostile(real("cgroup"))) {
            let twice = [&*bytes, b"\n", &bytes].concat();
            prop_assert_eq!(agree(&twice), agree(&bytes), "what comes first counts");
        }
    }

    #[test]
    fn units_are_told_where_systemd_has_them() {
        for (file, tell) in [
            ("0::/system.slice/a.service\n", true),
            ("0::/\n", true),
            // Both, as systemd has it in its hybrid mode, and where there is no systemd.
            ("5:pids:/x\n1:name=systemd:/a.slice\n0::/a.slice\n", true),
            ("1:name=systemd:/\n0::/\n", true),
            // The old way, with version 2 mounted by somebody else, and without.
            ("1:name=systemd:/user.slice\n0::/\n", false),
            ("1:name=systemd:/user.slice\n", false),
            ("5:pids:/\n", false),
            ("", false),
        ] {
            assert_eq!(agree(file.as_bytes()), tell, "{file:?}");
        }
    }
}
