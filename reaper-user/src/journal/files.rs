//! The files of the journal, before there is a database in them.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::JournalError;
use super::schema::APPLICATION_ID;
use reaper_host::sys::remote;

/// What a database begins with.
const HEADER: &[u8; 16] = b"SQLite format 3\0";

/// Bytes of the database header at the beginning of its first page.
const PAGE_HEADER: usize = 100;

/// Bytes before the page in each frame of a write-ahead log.
const FRAME_HEADER: usize = 24;

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
    if reaper_host::sys::owner::is_writable_by_others(&meta) {
        return Err(JournalError::WritableByOthers { directory });
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

/// Returns the schema version of a journal; None if the file is no journal or cannot be read.
///
/// Reads the files itself, since SQLite would create `-wal` and `-shm`, or checkpoint. The newest version may be in the
/// `-wal` alone, if the service that upgraded the journal was killed. Checksums are not verified, so the result is the
/// highest version of any committed frame. Formats: <https://sqlite.org/fileformat2.html>.
pub(super) fn schema_version(path: &Path) -> Option<i64> {
    // In this order: a checkpoint moves the version from the log into the database.
    let logged = logged_version(&beside(path, "-wal")).ok().flatten();
    let mut page = [0; PAGE_HEADER];
    open_to_read(path)
        .and_then(|file| file.read_exact_at(&mut page, 0))
        .ok()?;
    version_in(&page).max(logged)
}

/// Returns the highest schema version in the committed frames of a write-ahead log.
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

/// Returns the schema version in the first page of a journal.
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
