//! Reads a config file. As root, refuses one that other users can change or replace, because it decides which processes
//! are killed.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::ConfigError;
use reaper_host::sys::owner;
use reaper_host::sys::paths;

/// How well a file must be protected from other users.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    /// The file is read whatever its permissions.
    Any,
    /// Only its owner may write to it or replace it. Its directory may have the sticky bit, as /tmp has.
    Kept,
    /// The same, and no other user may write to its directory.
    Private,
}

impl Trust {
    /// Returns the rule for a file that this process reads.
    fn of(path: &Path) -> Trust {
        match nix::unistd::geteuid().is_root() {
            _ if path == Path::new(paths::CONFIG) => Trust::Private,
            true => Trust::Kept,
            false => Trust::Any,
        }
    }

    fn refuses_directory(self, directory: &Metadata) -> bool {
        match self {
            Trust::Any => false,
            Trust::Kept => owner::allows_replacement(directory),
            Trust::Private => owner::is_writable_by_others(directory),
        }
    }
}

/// Reads a regular file.
///
/// # Errors
/// The file cannot be read, or other users may change it.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ConfigError> {
    read_as(path, Trust::of(path))
}

/// Reads a regular file; `None` if it does not exist.
///
/// # Errors
/// As [`read`]. Also if the file does not exist, but other users could create it.
pub(super) fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>, ConfigError> {
    let trust = Trust::of(path);
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            check_directory(path, path, trust).map(|()| None)
        }
        _ => read_as(path, trust).map(Some),
    }
}

pub(super) fn read_as(path: &Path, trust: Trust) -> Result<Vec<u8>, ConfigError> {
    let unreadable = |e| ConfigError::unreadable(path, &e);
    // `O_NONBLOCK`: the open of a pipe would wait for a writer.
    let mut file = File::options()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(unreadable(ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        let error = std::io::Error::other("it is not a regular file");
        return Err(unreadable(error));
    }
    if trust != Trust::Any && owner::is_writable_by_others(&metadata) {
        let (uid, mode) = (metadata.uid(), metadata.mode());
        return Err(ConfigError::not_trusted(path, uid, mode));
    }
    check_directory(path, path, trust)?;
    // A symbolic link is as safe as the directory of its target.
    let target = path.canonicalize().map_err(unreadable)?;
    check_directory(path, &target, trust)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// Checks that other users cannot put another file in the place of `entry`, which is the config file `path` or its
/// target. A missing directory passes.
pub(super) fn check_directory(path: &Path, entry: &Path, trust: Trust) -> Result<(), ConfigError> {
    let directory = match entry.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    match directory.metadata() {
        Ok(metadata) if trust.refuses_directory(&metadata) => {
            let (uid, mode) = (metadata.uid(), metadata.mode());
            Err(ConfigError::replaceable(path, directory, uid, mode))
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(ConfigError::unreadable(path, &error))
        }
        _ => Ok(()),
    }
}
