//! Mount points, as this process sees them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Directory of the file system that is mounted.
    pub root: PathBuf,
    /// Directory where it is mounted.
    pub point: PathBuf,
    /// Type of the file system, such as `bpf`.
    pub kind: String,
    /// Whether it is mounted read-write.
    pub writable: bool,
}

/// All mounts, in the order of mountinfo: a mount comes after those that it covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// Parses `/proc/self/mountinfo`. Lines with another format are skipped.
    pub fn parse(mountinfo: &[u8]) -> Mounts {
        Mounts(mountinfo.split(|&b| b == b'\n').filter_map(mount).collect())
    }

    /// Returns only the mounts of this file system type.
    pub fn of_kind(mut self, kind: &str) -> Mounts {
        self.0.retain(|mount| mount.kind == kind);
        self
    }

    /// Converts a path inside of a file system of this type to one that this process can open, by the last mount that
    /// shows it. `None` if no mount does.
    fn find(&self, kind: &str, path: &Path) -> Option<PathBuf> {
        let shown = |mount: &Mount| {
            let below = path.strip_prefix(&mount.root).ok()?;
            // Joining an empty path would append a slash.
            Some(mount.point.components().chain(below.components()).collect())
        };
        let of_kind = self.0.iter().rev().filter(|mount| mount.kind == kind);
        of_kind.filter_map(shown).next()
    }

    /// Returns the directory of a cgroup of version 2, given its path in a `cgroup` file of /proc. `None` if no mount
    /// shows it, as for a cgroup outside of this process's cgroup namespace (`/..`).
    pub fn cgroup(&self, path: &[u8]) -> Option<PathBuf> {
        let inside = !path.starts_with(b"/..");
        let path = inside.then(|| Path::new(OsStr::from_bytes(path)));
        self.find("cgroup2", path?)
    }

    /// Returns the mount that contains a path, which need not exist.
    pub fn of(&self, path: &Path) -> Option<&Mount> {
        let over = |mount: &&Mount| path.starts_with(&mount.point);
        // Of the mounts with the longest mount point, the last one covers the others.
        let depth = |mount: &&Mount| mount.point.components().count();
        self.0.iter().filter(over).max_by_key(depth)
    }
}

/// Parses `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue` (proc_pid_mountinfo(5)).
fn mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&b| b == b' ');
    let (root, point) = (unescaped(fields.nth(3)?), unescaped(fields.next()?));
    let options = fields.next()?;
    let mut fields = fields.skip_while(|field| field != b"-").skip(1);
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let super_options = fields.nth(1)?;
    let writable = |options: &[u8]| options.split(|&b| b == b',').any(|option| option == b"rw");
    Some(Mount {
        root,
        point,
        kind,
        writable: writable(options) && writable(super_options),
    })
}

/// Decodes a path in which blanks and backslashes are written as octal escapes.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::new();
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\').then(|| tail.get(..3)).flatten();
        let octal = octal.and_then(|digits| str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &tail[3..];
            }
            None => {
                path.push(byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::arbitrary_bytes;

    proptest! {
        #[test]
        fn any_mountinfo_can_be_parsed(bytes in arbitrary_bytes(MOUNTINFO)) {
            let Mounts(all) = Mounts::parse(&bytes);
            prop_assert!(all.len() <= bytes.split(|&byte| byte == b'\n').count());
            let of_root = Mounts(all).of(Path::new("/")).cloned();
            prop_assert!(of_root.is_none_or(|mount| Path::new("/").starts_with(mount.point)));
        }
    }

    proptest! {
        #[test]
        fn blanks_in_mount_points_are_decoded(path in prop::collection::vec(any::<u8>(), 0..40), other in arbitrary_bytes(b"/a\\040b")) {
            let escape = |byte: &u8| match byte {
                b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
                other => vec![*other],
            };
            let escaped: Vec<u8> = path.iter().flat_map(escape).collect();
            prop_assert_eq!(unescaped(&escaped).into_os_string().into_vec(), path);
            prop_assert!(unescaped(&other).as_os_str().len() <= other.len());
        }
    }

    const MOUNTINFO: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /sys ro,nosuid - sysfs sysfs rw
24 23 0:22 / /sys/fs/bpf rw,nosuid shared:2 master:3 - bpf bpf rw,mode=700
25 22 0:23 / /a\\040b\\134 rw - bpf none ro
26 22 0:24 / /over rw - tmpfs tmpfs rw
27 26 0:25 / /over rw - bpf bpf rw
28 23 0:26 / /cg rw - cgroup2 none rw
29 23 0:26 /user.slice/1 /sys/fs/cgroup rw - cgroup2 none rw
nonsense
";

    #[test]
    fn path_is_on_the_mount_that_covers_it() {
        let mounts = Mounts::parse(MOUNTINFO.as_bytes());
        for (path, point, kind, writable) in [
            ("/sys/fs/bpf/reaper", "/sys/fs/bpf", "bpf", true),
            ("/sys/fs/bpf", "/sys/fs/bpf", "bpf", true),
            ("/sys/fs/bpfx", "/sys", "sysfs", false),
            ("/a b\\/x", "/a b\\", "bpf", false),
            ("/over/x", "/over", "bpf", true),
            ("/var", "/", "ext4", true),
        ] {
            let mount = mounts.of(Path::new(path)).expect(path);
            assert_eq!(
                (mount.point.as_path(), mount.kind.as_str(), mount.writable),
                (Path::new(point), kind, writable),
                "{path}"
            );
        }
        assert_eq!(Mounts::default().of(Path::new("/")), None);
    }

    #[test]
    fn cgroup_path_is_found_through_a_mount() {
        let mounts = Mounts::parse(MOUNTINFO.as_bytes());
        for (path, at) in [
            ("/user.slice/1/a", Some("/sys/fs/cgroup/a")),
            ("/user.slice/1", Some("/sys/fs/cgroup")),
            ("/user.slice/10", Some("/cg/user.slice/10")),
            ("/", Some("/cg")),
            ("/../b", None),
        ] {
            let found = mounts.cgroup(path.as_bytes());
            assert_eq!(found.as_deref().map(Path::as_os_str), at.map(OsStr::new));
        }
        assert_eq!(mounts.find("cgroup", Path::new("/")), None);
    }
}
