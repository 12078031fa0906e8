//! Handles the files of the journal without opening the database.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::JournalError;
use super::schema::APPLICATION_ID;
use reaper_host::sys::remote;

/// First bytes of an SQLite database.
const HEADER: &[u8; 16] = b"SQLite format 3\0";

/// Size in bytes of the database header, at the beginning of the first page.
const PAGE_HEADER: usize = 100;

/// Size in bytes of the header before the page in each frame of a write-ahead log.
const FRAME_HEADER: usize = 24;

/// Suffixes of the files that SQLite keeps beside a database.
const SUFFIXES: [&str; 2] = ["-wal", "-shm"];

/// Creates the directory if it is missing, and checks that it is safe for a database. Returns its canonical path.
///
/// # Errors
/// The directory cannot be created, is on a network file system, or other users can write to it.
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
    if reaper_host::sys::owner::is_writable_by_others(&meta) {
        return Err(JournalError::WritableByOthers { directory });
    }
    Ok(directory)
}

/// Creates an empty file if none exists. Makes it and the files beside it accessible to the owner only. Returns the
/// reason why the file is not a usable database, `None` if it is one or is empty.
pub(super) fn prepare(path: &Path) -> io::Result<Option<&'static str>> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.is_file() => return Ok(Some("not a regular file")),
        Ok(meta) if ![0, nix::unistd::geteuid().as_raw()].contains(&meta.uid()) => {
            return Ok(Some("owned by another user"));
        }
        Ok(meta) if meta.nlink() > 1 => return Ok(Some("more than one hard link")),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // SQLite would apply the leftover log of a removed database to the new one.
            remove_all(path)?;
        }
        Err(error) => return Err(error),
    }
    let mut file = open(path, true)?;
    for name in SUFFIXES {
        // Later ones get the mode of the database.
        match open(&with_suffix(path, name), false) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    let mut header = [0; HEADER.len()];
    let is_foreign =
        file.metadata()?.len() > 0 && (file.read_exact(&mut header).is_err() || header != *HEADER);
    Ok(is_foreign.then_some("not a database"))
}

/// Opens a file, and gives access to its owner only, also if it exists already. Does not follow a symbolic link.
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

/// Returns the schema version of a journal. None if the file is not a journal or cannot be read.
///
/// Reads the files itself, since SQLite would create `-wal` and `-shm`, or checkpoint. The newest version may be in the
/// `-wal` alone, if the service that upgraded the journal was killed. Checksums are not verified, so the result is the
/// highest version of any committed frame. Formats: <https://sqlite.org/fileformat2.html>.
pub(super) fn schema_version(path: &Path) -> Option<i64> {
    // In this order: a checkpoint moves the version from the log into the database.
    let logged = logged_version(&with_suffix(path, "-wal")).ok().flatten();
    let mut page = [0; PAGE_HEADER];
    open_to_read(path)
        .and_then(|file| file.read_exact_at(&mut page, 0))
        .ok()?;
    version_in(&page).max(logged)
}

/// Returns the highest schema version in the committed frames of a write-ahead log. `None` if no committed frame has
/// one.
fn logged_version(path: &Path) -> io::Result<Option<i64>> {
    let log = open_to_read(path)?;
    let mut header = [0; 32];
    log.read_exact_at(&mut header, 0)?;
    let page_size = number(&header, 8);
    let (mut committed, mut written) = (None, None);
    let mut frame = [0; FRAME_HEADER + PAGE_HEADER];
    let mut at = header.len() as u64;
    // Frames with other salts are left over from before the log was restarted.
    while log.read_exact_at(&mut frame, at).is_ok() && frame[8..16] == header[16..24] {
        let (page, size_after_commit) = (number(&frame, 0), number(&frame, 4));
        if page == 1 {
            written = version_in(&frame[FRAME_HEADER..]);
        }
        if size_after_commit != 0 {
            committed = committed.max(written);
        }
        at += FRAME_HEADER as u64 + u64::from(page_size);
    }
    Ok(committed)
}

/// Returns the schema version in the first page of a journal. `None` if the page is not that of a journal.
fn version_in(page: &[u8]) -> Option<i64> {
    let signed = |at| i64::from(number(page, at).cast_signed());
    (page.starts_with(HEADER) && signed(68) == APPLICATION_ID).then(|| signed(60))
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn open_to_read(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path)
}

/// Renames an unusable database and the files beside it, in the same directory. Returns the new path, which no file had
/// before.
pub(super) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
    let name = format!(".aside-{time}");
    let mut aside = with_suffix(path, &name);
    for n in 2.. {
        if std::fs::symlink_metadata(&aside).is_err() {
            break;
        }
        aside = with_suffix(path, &format!("{name}-{n}"));
    }
    std::fs::rename(path, &aside)?;
    for name in SUFFIXES {
        match std::fs::rename(with_suffix(path, name), with_suffix(&aside, name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(aside)
}

/// Removes a database, if it exists, and the files beside it.
pub(super) fn remove_all(path: &Path) -> io::Result<()> {
    remove(path)?;
    SUFFIXES
        .iter()
        .try_for_each(|name| remove(&with_suffix(path, name)))
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns `path` with `suffix` appended to the file name.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
