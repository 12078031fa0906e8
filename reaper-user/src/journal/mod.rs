//! Journal: sessions, decisions, outcomes, exits, and users' keeps and requests in an SQLite database.
//!
//! The export sink passes records to [`Feed`]. The journal's thread writes them, one transaction per batch. It can fall
//! behind and then drops and counts records, but it never blocks the engine. It sleeps while there is nothing to write.
//!
//! No error of the journal stops the service. Failed writes are retried. A file that is damaged or not a journal is
//! renamed, and a new database created. An older schema is upgraded. A journal with a newer schema is left untouched.
//! The service then only observes, because it does not know the users' keeps.
//!
//! A committed batch survives any end of the service. Records that a restarted service reports again are stored once.

mod files;
pub mod history;
mod keep_writer;
mod keeps;
mod message;
mod prune;
pub mod recorded;
mod rows;
mod schema;
mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use reaper_host::advice::Advised as _;

pub use keep_writer::KeepWriter;
pub use keeps::{JournalKeep, KeepExpiry};
pub use writer::Journal;

/// Default directory of the journal of the host's service.
pub const DIRECTORY: &str = reaper_host::sys::paths::STATE;

/// Settings of a journal.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    pub directory: PathBuf,
    /// Name of the service's scope, if it does not watch the whole host.
    pub scope: Option<String>,
    /// Age beyond which records are deleted.
    pub max_age: Duration,
    /// Bytes of the database beyond which the oldest records are deleted. The log (`-wal`) takes about a megabyte more.
    pub max_size: u64,
}

impl Default for JournalOptions {
    fn default() -> JournalOptions {
        JournalOptions {
            directory: DIRECTORY.into(),
            scope: None,
            max_age: Duration::from_secs(30 * 24 * 3600),
            max_size: 64 << 20,
        }
    }
}

impl JournalOptions {
    pub fn path(&self) -> PathBuf {
        path(&self.directory, self.scope.as_deref())
    }
}

/// Returns the path of the database for a scope, `None` for the whole host.
pub fn path(directory: &Path, scope: Option<&str>) -> PathBuf {
    directory.join(match scope {
        Some(scope) => format!("journal-{scope}.db"),
        None => "journal.db".into(),
    })
}

/// Returns the scope of the database with this path, by its name; `None` for that of the whole host.
pub fn scope_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let scope = name.strip_prefix("journal-")?.strip_suffix(".db")?;
    Some(scope.into())
}

/// Removes a database with the files beside it.
///
/// # Errors
/// A file cannot be removed.
pub fn remove(path: &Path) -> std::io::Result<()> {
    files::remove_all(path)
}

/// Returns the paths of the databases of all scopes in a directory, which may not exist.
///
/// # Errors
/// The directory cannot be listed.
pub fn all(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match directory.read_dir() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if name == b"journal.db" || name.starts_with(b"journal-") && name.ends_with(b".db") {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Reasons why there is no journal, or why something cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error(
        "cannot use {} for the journal: {source}; make it writable for the service, or set `journal_dir` to another directory",
        path.display()
    )]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{} is on a network file system ({kind}), where a database is not safe: \
         set `journal_dir` to a local directory",
        directory.display()
    )]
    Remote {
        directory: PathBuf,
        kind: &'static str,
    },
    #[error(
        "other users can write to {}, where they could forge the journal: remove that permission (chmod go-w, chown), or set \
         `journal_dir` to another directory",
        directory.display()
    )]
    WritableByOthers { directory: PathBuf },
    #[error("cannot use the journal {}: {source}{}", path.display(), advice(source))]
    Database {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(transparent)]
    Newer(#[from] NewerSchema),
    #[error("cannot start the thread that writes the journal: {}", .0.advised())]
    Thread(std::io::Error),
    #[error("writing to the journal {} took longer than {}s: check whether its disk is full or slow", path.display(), limit.as_secs())]
    TimedOut { path: PathBuf, limit: Duration },
    /// The journal was given up, or its thread has ended. The reason is in the log.
    #[error(
        "the journal {} was given up after an earlier error: fix the cause, which the service's log names, then restart the service",
        path.display()
    )]
    GivenUp { path: PathBuf },
}

/// Returns what the user can do about an error of the database. The text is appended to the error. Empty if that is
/// unknown.
fn advice(error: &rusqlite::Error) -> &'static str {
    use rusqlite::ErrorCode::*;
    match error.sqlite_error_code() {
        Some(DiskFull) => "; free space on its disk",
        Some(DatabaseBusy | DatabaseLocked) => {
            "; close the program that locks it, such as an SQLite shell"
        }
        Some(ReadOnly | PermissionDenied | CannotOpen) => {
            "; check the permissions of the file and its directory"
        }
        Some(SystemIoFailure) => "; check its disk",
        Some(DatabaseCorrupt) => "; a service that writes to it moves it away and creates another",
        _ => "",
    }
}

/// Error for a journal that a newer version of this program wrote.
#[derive(Debug, thiserror::Error)]
#[error(
    "journal {} has schema version {found}, and this version of reaper supports at most {}: install the newer \
     version of reaper again, or move the file and its -wal and -shm files away",
    path.display(), schema::SCHEMA
)]
pub struct NewerSchema {
    pub path: PathBuf,
    pub found: i64,
}

impl NewerSchema {
    /// Checks that no newer version of this program wrote the journal at `path`. Changes no file.
    ///
    /// # Errors
    /// The schema version is newer than that of this program.
    pub fn check(path: &Path) -> Result<(), NewerSchema> {
        let newer = |found: &i64| *found > schema::SCHEMA;
        match files::schema_version(path).filter(newer) {
            Some(found) => Err(NewerSchema {
                path: path.to_owned(),
                found,
            }),
            None => Ok(()),
        }
    }
}
