//! The files of the journal, before there is a database in them.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::JournalError;
use crate::sys::remote;

/// What a database begins with.
const HEADER: &[u8; 16] = b"SQLite format 3\0";

/// What the files beside a database are called after its name.
const BESIDE: [&str; 2] = ["-wal", "-shm"];

/// Makes the directory if it is not there, and checks that a database may lie in it. Gives its path
/// without links.
pub(super) fn directory(directory: &Path) -> Result<PathBuf, JournalError> {
    let file = |source| JournalError::File {
        path: directory.to_owned(),
        source,
    };
    let mut builder = DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(file)?;
    let directory = std::fs::canonicalize(directory).map_err(file)?;
    let remote = remote::kind(&directory).map_err(|errno| file(errno.into()))?;
    if let Some(kind) = remote {
        return Err(JournalError::Remote { directory, kind });
    }
    let meta = std::fs::metadata(&directory).map_err(file)?;
    if crate::sys::owner::is_exposed(&meta) {
        return Err(JournalError::Exposed { directory });
    }
    Ok(directory)
}

/// Makes an empty file unless there is one, and sees to it that only its owner may read it and those
/// beside it. Gives what makes it no database, if something does.
pub(super) fn prepare(path: &Path) -> io::Result<Option<&'static str>> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.is_file() => return Ok(Some("it is no ordinary file")),
        Ok(meta) if ![0, nix::unistd::geteuid().as_raw()].contains(&meta.uid()) => {
            return Ok(Some("it is another user's"));
        }
        Ok(meta) if meta.nlink() > 1 => return Ok(Some("it has another name besides this one")),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // What is left of one that was removed would be taken for its own.
            for name in BESIDE {
                remove(&beside(path, name))?;
            }
        }
        Err(error) => return Err(error),
    }
    let mut file = open(path, true)?;
    for name in BESIDE {
        // Those that are made from now on get the mode of the database.
        match open(&beside(path, name), false) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    let mut header = [0; HEADER.len()];
    let foreign =
        file.metadata()?.len() > 0 && (file.read_exact(&mut header).is_err() || header != *HEADER);
    Ok(foreign.then_some("it is no database"))
}

/// Opens a file for its owner alone.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Renames a database that cannot be used, and what is beside it. Gives its new name.
pub(super) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
    let name = format!(".aside-{time}");
    let mut aside = beside(path, &name);
    for n in 2.. {
        if std::fs::symlink_metadata(&aside).is_err() {
            break;
        }
        aside = beside(path, &format!("{name}-{n}"));
    }
    std::fs::rename(path, &aside)?;
    for name in BESIDE {
        match std::fs::rename(beside(path, name), beside(&aside, name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(aside)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `path` with something after its name.
pub(super) fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}
