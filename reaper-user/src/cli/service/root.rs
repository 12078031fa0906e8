//! Paths below another root directory, such as that of an image.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;

/// Number of symbolic links on one path, as in path_resolution(7).
const LINKS_MAX: u32 = 40;

/// Resolves the directories of `path` as a process does whose root directory is `root`, and returns where the file is on
/// this host. Absolute links and `..` do not leave `root`. The last component is not followed, and nothing needs to exist.
///
/// The result has no links, except perhaps the last component. It is valid while no other process changes the directories.
///
/// # Errors
/// There are too many symbolic links, or one cannot be read.
pub(super) fn resolve(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let mut below = PathBuf::new();
    // In reverse order.
    let mut left: Vec<OsString> = Vec::new();
    let push = |left: &mut Vec<OsString>, path: &Path| {
        let parts = path.components().rev().filter_map(|part| match part {
            Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
            _ => None,
        });
        left.extend(parts);
    };
    push(&mut left, path);
    let mut links = 0;
    while let Some(part) = left.pop() {
        if part == ".." {
            below.pop();
            continue;
        }
        let at = below.join(&part);
        let is_last = left.is_empty();
        if is_last || !root.join(&at).is_symlink() {
            below = at;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::ELOOP.into());
        }
        let target = root.join(&at).read_link()?;
        if target.is_absolute() {
            below = PathBuf::new();
        }
        push(&mut left, &target);
    }
    Ok(root.join(below))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_an_image_stay_below_its_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("usr/etc/systemd")).unwrap();
        for (target, link) in [
            ("/usr/etc", "etc"),
            ("../../../../../usr", "usr/up"),
            ("etc/systemd", "relative"),
            ("/loop", "loop"),
            ("/missing/directory", "dangling"),
            ("/usr/file", "usr/last"),
        ] {
            symlink(target, root.join(link)).unwrap();
        }
        for (path, expected) in [
            ("/etc/systemd/unit", "usr/etc/systemd/unit"),
            ("etc/../unit", "usr/unit"),
            ("/usr/up/up/etc/new/unit", "usr/etc/new/unit"),
            ("/relative/unit", "usr/etc/systemd/unit"),
            ("/../../unit", "unit"),
            ("/dangling/unit", "missing/directory/unit"),
            ("/usr/last", "usr/last"),
        ] {
            assert_eq!(
                resolve(root, Path::new(path)).unwrap(),
                root.join(expected),
                "{path}"
            );
        }
        let error = resolve(root, Path::new("/loop/unit")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ELOOP as i32));
    }
}
