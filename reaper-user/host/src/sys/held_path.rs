//! Paths that are resolved once and cannot be redirected afterwards.
//!
//! A command may replace a directory on the path by a symbolic link, or rename it and put another one in its place.
//! So the nearest existing directory is opened before the command starts. All later operations happen beneath that
//! descriptor, follow no symbolic link and cross no mount point. `openat2(2)` guarantees that. If the kernel or a
//! seccomp filter refuses it, a walk over the path components compares mount ids.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    self as rfs, AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags,
};
use rustix::io::Errno;

/// Flags for opening a directory on the way, without access to its content.
const PLACE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Flags for opening a directory to list its entries.
const LIST: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
/// Maximum number of attempts to find an unused name for a temporary file.
const NAMES_MAX: u32 = 100;

/// A file or directory, relative to an open directory above it.
#[derive(Debug)]
pub struct HeldPath {
    /// Nearest directory above it that existed when the path was resolved.
    directory: OwnedFd,
    /// Path relative to `directory`: one component, or more if directories did not exist yet.
    below: PathBuf,
    /// Whole path, for messages.
    path: PathBuf,
}

/// Reasons why a path cannot be held.
#[derive(Debug, thiserror::Error)]
pub enum HeldPathError {
    /// A component is `..`.
    #[error("the path contains `..`, which can lead elsewhere later; write it without `..`")]
    ParentComponent,
    /// The path is `/` or has no existing directory above it.
    #[error("the path has no file name; write one that ends with a name")]
    NoName,
    /// Another user than root can change this directory.
    #[error(
        "other users than root can change {} and put another file in its place; run this as the owner, or choose a \
         directory that only root can change", .0.display()
    )]
    Writable(PathBuf),
    /// A directory on the path cannot be opened or created.
    #[error("cannot open {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

impl HeldPath {
    /// Resolves a path and opens the nearest existing directory above it. Follows symbolic links up to there, but not
    /// in the last component.
    ///
    /// # Errors
    /// The path has a `..` component or no name, or a directory cannot be opened. As root, also if another user may
    /// write to a directory on the way.
    pub fn resolve(path: &Path) -> Result<HeldPath, HeldPathError> {
        if has_parent_component(path) {
            return Err(HeldPathError::ParentComponent);
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| HeldPathError::Io { path, source }
        };
        // Removes `.` and a slash at the end. With those, a symbolic link would mean its target.
        let path: PathBuf = std::path::absolute(path).map_err(failed(path))?;
        let path: PathBuf = path.components().collect();
        if path.file_name().is_none() {
            return Err(HeldPathError::NoName);
        }
        let above = path.ancestors().skip(1);
        for directory in above {
            let real = match fs::canonicalize(directory) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                real => real.map_err(failed(directory))?,
            };
            let below = path.strip_prefix(directory).unwrap_or(&path).to_owned();
            if rustix::process::geteuid().is_root() {
                // Also checks the symbolic links on the way, not only their targets.
                refuse_writable(directory, &below)?;
                refuse_writable(&real, &below)?;
            }
            let opened = rfs::open(&real, PLACE | OFlags::NOFOLLOW, Mode::empty());
            let opened = opened.map_err(|errno| failed(&real)(errno.into()))?;
            return Ok(HeldPath {
                directory: opened,
                below,
                path,
            });
        }
        Err(HeldPathError::NoName)
    }

    /// Removes the file or directory with all its content. A missing one is no error. A symbolic link is removed
    /// itself, not its target.
    ///
    /// Returns the mount points, which are left, together with the directories above them.
    ///
    /// # Errors
    /// Something cannot be removed, or a directory on the way has become a symbolic link or a mount point.
    pub fn remove(&self) -> io::Result<Vec<PathBuf>> {
        let mut mounts = Vec::new();
        let (directory, name) = match self.open_parent() {
            Err(Errno::NOENT) => return Ok(mounts),
            parent => parent?,
        };
        match remove(directory.as_fd(), name, &self.path, &mut mounts) {
            Err(Errno::NOENT) => Ok(mounts),
            // The directories above a mount point remain too.
            Err(Errno::NOTEMPTY) if !mounts.is_empty() => Ok(mounts),
            removed => Ok(removed.map(|()| mounts)?),
        }
    }

    /// Creates or replaces a file atomically: a reader finds either the old or the new content. The file has the owner
    /// and mode of a new one. A symbolic link is replaced itself, not its target.
    ///
    /// # Errors
    /// It cannot be written, or a directory on the way has become a symbolic link or a mount point.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        let (directory, name) = self.open_parent()?;
        let (mut file, temporary) = create_beside(&directory, name)?;
        let written = file
            .write_all(content)
            .and_then(|()| Ok(rfs::renameat(&directory, &temporary, &directory, name)?));
        if written.is_err() {
            // This process has just created the temporary file.
            let _ = rfs::unlinkat(&directory, &temporary, AtFlags::empty());
        }
        written
    }

    /// Opens the directory that contains the entry, at or below the held one. Also returns the name of the entry.
    fn open_parent(&self) -> rustix::io::Result<(OwnedFd, &OsStr)> {
        let name = self.below.file_name().ok_or(Errno::INVAL)?;
        let parent = self.below.parent().unwrap_or(Path::new(""));
        let directory = match parent.as_os_str().is_empty() {
            true => self
                .directory
                .try_clone()
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::MFILE))?,
            false => open_beneath(self.directory.as_fd(), parent, PLACE)?,
        };
        Ok((directory, name))
    }
}

/// Returns whether a path has a `..` component.
pub fn has_parent_component(path: &Path) -> bool {
    path.components().any(|part| part == Component::ParentDir)
}

/// Fails if another user than root can change a directory on a path, and so decide what the path means. Checks
/// `directory`, those above it, and those on the path `below` it.
///
/// A directory of root with the sticky bit is allowed if the entry in it belongs to root or does not exist yet.
fn refuse_writable(directory: &Path, below: &Path) -> Result<(), HeldPathError> {
    let whole = directory.join(below);
    let mut entry: &Path = &whole;
    for directory in whole.ancestors().skip(1) {
        let io = |source| HeldPathError::Io {
            path: directory.to_owned(),
            source,
        };
        let meta = match fs::symlink_metadata(directory) {
            // A process of root will create it later. The directory above is checked next.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                entry = directory;
                continue;
            }
            meta => meta.map_err(io)?,
        };
        // The mode of a symbolic link has no meaning.
        let mode = if meta.is_symlink() { 0 } else { meta.mode() };
        let others_may_write = meta.uid() != 0 || mode & 0o022 != 0;
        let is_roots = match fs::symlink_metadata(entry) {
            Ok(entry) => entry.uid() == 0,
            Err(error) => error.kind() == ErrorKind::NotFound,
        };
        let is_kept = meta.uid() == 0 && mode & 0o1000 != 0 && is_roots;
        if others_may_write && !is_kept {
            return Err(HeldPathError::Writable(directory.to_owned()));
        }
        entry = directory;
    }
    Ok(())
}

/// Opens a relative path below a directory.
///
/// # Errors
/// `ELOOP` or `ENOTDIR` if a component is a symbolic link, `EXDEV` if one is a mount point.
fn open_beneath(
    directory: rustix::fd::BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match rfs::openat2(directory, path, flags, Mode::empty(), resolve) {
        Err(Errno::NOSYS | Errno::PERM) => walk_beneath(directory, path, flags),
        opened => opened,
    }
}

/// Does the same as [`open_beneath`] without openat2(2): opens each component and compares its mount id.
fn walk_beneath(
    directory: rustix::fd::BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let mount = mount_id(directory)?;
    let parts: Vec<_> = path.components().collect();
    let mut at: Option<OwnedFd> = None;
    for (n, part) in parts.iter().enumerate() {
        let Component::Normal(name) = part else {
            return Err(Errno::XDEV);
        };
        let flags = match n + 1 == parts.len() {
            true => flags,
            false => PLACE,
        };
        let parent = at.as_ref().map_or(directory, |fd| fd.as_fd());
        let opened = rfs::openat(parent, *name, flags | OFlags::NOFOLLOW, Mode::empty())?;
        if mount_id(opened.as_fd())? != mount {
            return Err(Errno::XDEV);
        }
        at = Some(opened);
    }
    at.ok_or(Errno::INVAL)
}

/// Returns the mount id and the device number (major, minor) of a file.
fn mount_id(file: rustix::fd::BorrowedFd<'_>) -> rustix::io::Result<(u64, u32, u32)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
    let stat = rfs::statx(file, "", flags, StatxFlags::MNT_ID)?;
    Ok((stat.stx_mnt_id, stat.stx_dev_major, stat.stx_dev_minor))
}

/// Removes a directory entry with all its content, except mount points and the directories above them.
///
/// Adds the paths of the mount points to `mounts`. `path` is the full path of the entry.
///
/// # Errors
/// `ENOTEMPTY` if mount points remain, or the error of the first entry that cannot be removed.
fn remove(
    directory: rustix::fd::BorrowedFd<'_>,
    name: &OsStr,
    path: &Path,
    mounts: &mut Vec<PathBuf>,
) -> rustix::io::Result<()> {
    let stat = rfs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return match rfs::unlinkat(directory, name, AtFlags::empty()) {
            // A file can be a mount point too.
            Err(Errno::BUSY) => {
                mounts.push(path.to_owned());
                Err(Errno::NOTEMPTY)
            }
            removed => removed,
        };
    }
    let opened = match open_beneath(directory, Path::new(name), LIST | OFlags::NOFOLLOW) {
        Err(Errno::XDEV) => {
            mounts.push(path.to_owned());
            return Err(Errno::NOTEMPTY);
        }
        opened => opened?,
    };
    let mut left = false;
    for entry in Dir::read_from(&opened)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        match remove(opened.as_fd(), name, &path.join(name), mounts) {
            // Another process has removed it first.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY) if !mounts.is_empty() => left = true,
            removed => removed?,
        }
    }
    match left {
        true => Err(Errno::NOTEMPTY),
        false => rfs::unlinkat(directory, name, AtFlags::REMOVEDIR),
    }
}

/// Creates a file in the directory of `name`, under an unused name, which is returned too. Tries at most 100 names.
fn create_beside(directory: &OwnedFd, name: &OsStr) -> io::Result<(File, OsString)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for number in 0..NAMES_MAX {
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}-{number}", std::process::id()));
        match rfs::openat(directory, &temporary, flags, Mode::from_raw_mode(0o666)) {
            Err(Errno::EXIST) => {}
            opened => return Ok((File::from(opened?), temporary)),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Returns the target of a symbolic link, whether it exists or not; for any other path the path itself. Follows one
/// link only.
pub fn without_dangling_link(path: &Path) -> PathBuf {
    let parent = path.parent().unwrap_or(Path::new(""));
    fs::read_link(path).map_or_else(|_| path.to_owned(), |target| parent.join(target))
}

/// A file that is written in place: a device, a pipe, or the target of a symbolic link.
#[derive(Debug)]
pub struct HeldFile(OwnedFd);

impl HeldFile {
    /// Opens a path without access to its content. Returns `None` for a regular file, a missing file, or a symbolic
    /// link without a target.
    ///
    /// # Errors
    /// As [`HeldPath::resolve`].
    pub fn open(path: &Path) -> Result<Option<HeldFile>, HeldPathError> {
        if fs::symlink_metadata(path).map_or(true, |meta| meta.is_file()) {
            return Ok(None);
        }
        // Refuses a symbolic link that another user may replace.
        HeldPath::resolve(path)?;
        match rfs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(opened) => Ok(Some(HeldFile(opened))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(HeldPathError::Io {
                path: path.to_owned(),
                source: errno.into(),
            }),
        }
    }

    /// Opens the file for writing and writes `content`. Truncates a regular file first.
    ///
    /// # Errors
    /// As `open(2)` and `write(2)`.
    pub fn write(&self, content: &[u8]) -> io::Result<()> {
        fs::write(format!("/proc/self/fd/{}", self.0.as_raw_fd()), content)
    }
}

#[cfg(test)]
mod tests;
