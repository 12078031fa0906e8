//! Resolves the path of a script in the file system as its process sees it.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// Returns the absolute path of a script, with links resolved below the root directory of a process. `process` is the
/// directory of the process in /proc. A file or directory that no longer exists keeps its name.
///
/// `None` if the file cannot be reached or is not a regular file. Blocks as long as a file system on the way does.
pub(super) fn resolve(process: &Path, given: &[u8]) -> Option<Vec<u8>> {
    let given = Path::new(OsStr::from_bytes(given));
    let root = File::open(process.join("root")).ok()?;
    let path = match given.is_absolute() {
        true => given.to_path_buf(),
        // Both links are paths in the service's view. After chroot(2), `cwd` starts with `root`.
        false => {
            let cwd = process.join("cwd");
            let directory = std::fs::read_link(&cwd).ok()?.into_os_string().into_vec();
            // The kernel marks a directory that was removed.
            let is_removed = std::fs::metadata(cwd).ok()?.nlink() == 0;
            let named = directory.strip_suffix(b" (deleted)").filter(|_| is_removed);
            let directory = Path::new(OsStr::from_bytes(named.unwrap_or(&directory)));
            let root = std::fs::read_link(process.join("root")).ok()?;
            let below = directory.strip_prefix(root).ok()?;
            Path::new("/").join(below).join(given)
        }
    };
    let (found, metadata) = match open_below(&root, &path, OFlag::empty()) {
        Ok(file) => resolved(&file)?,
        Err(Errno::ENOENT) => return removed(&root, &path),
        Err(_) => return None,
    };
    (metadata.is_file() && metadata.nlink() > 0).then_some(found.into_os_string().into_vec())
}

/// Opens a path below a process's root directory, without access to the contents.
fn open_below(root: &File, path: &Path, flags: OFlag) -> nix::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC | flags)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(root, path, how).map(File::from)
}

/// Returns the path of an open file, and its metadata.
fn resolved(file: &File) -> Option<(PathBuf, Metadata)> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some((std::fs::read_link(link).ok()?, file.metadata().ok()?))
}

/// Returns the path that a removed file had: the nearest directory that still exists, with links resolved, and the rest
/// of the path as it is. `None` if a link or `..` makes the rest ambiguous.
fn removed(root: &File, path: &Path) -> Option<Vec<u8>> {
    let above = path.ancestors().skip(1);
    for (directory, missing) in above.zip(path.ancestors()) {
        match open_below(root, directory, OFlag::O_DIRECTORY) {
            Err(Errno::ENOENT) => continue,
            Err(_) => return None,
            Ok(file) => {
                let is_gone =
                    open_below(root, missing, OFlag::O_NOFOLLOW).err() == Some(Errno::ENOENT);
                let rest = path.strip_prefix(directory).ok().filter(|_| is_gone)?;
                let is_plain = rest
                    .components()
                    .all(|part| matches!(part, Component::Normal(_)));
                let (found, metadata) = resolved(&file).filter(|_| is_plain)?;
                let is_there = metadata.nlink() > 0;
                let path: PathBuf = found.components().chain(rest.components()).collect();
                return is_there.then(|| path.into_os_string().into_vec());
            }
        }
    }
    None
}
