//! What was decided, and what came of it, kept for later: sessions, decisions and outcomes in an SQLite
//! database, and the keeps that users have asked for.
//!
//! The export sink hands over what crosses ([`Feed`]); a thread of the journal's own gathers it and
//! writes it, one transaction a batch. It may fall behind and then loses records, which it counts, but
//! it holds nobody up; while nothing happens it sleeps for good. Nothing about it ends the service: what
//! cannot be written is tried again, what is damaged or somebody else's is set aside. An older schema is upgraded; a
//! journal with a newer schema is left untouched, and then the service only observes, since it does not know what
//! users asked to keep.
//!
//! A committed batch outlives this program however it ends. What is told twice, as by the service that
//! takes up after one that was killed, is kept once.

mod files;
pub mod history;
mod keeper;
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

pub use keeper::KeepWriter;
pub use keeps::{JournalKeep, KeepExpiry};
pub use writer::{Feed, Journal};

/// Where the journal of the host's service is, unless the config says otherwise.
pub const DIRECTORY: &str = reaper_host::sys::paths::STATE;

/// What a journal is opened with.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    pub directory: PathBuf,
    /// Name of the service's scope, if it does not watch the whole host.
    pub scope: Option<String>,
    /// What is older goes.
    pub max_age: Duration,
    /// Bytes of the database beyond which the oldest goes. Beside it there is a log of what was written
    /// last (`-wal`), of about a megabyte.
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
    /// The database.
    pub fn path(&self) -> PathBuf {
        path(&self.directory, self.scope.as_deref())
    }
}

/// The database of the service of this scope; `None` is the whole host.
pub fn path(directory: &Path, scope: Option<&str>) -> PathBuf {
    directory.join(match scope {
        Some(scope) => format!("journal-{scope}.db"),
        None => "journal.db".into(),
    })
}

/// The databases in a directory, of all scopes.
///
/// # Errors
/// It is there and cannot be listed.
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

/// Why there is no journal, or something is not in it.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("{}: {source}", path.display())]
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
        "other users may write to {}: take that right away (chmod o-w, chown), or set `journal_dir` to \
         another directory",
        directory.display()
    )]
    WritableByOthers { directory: PathBuf },
    #[error("{}: {source}", path.display())]
    Database {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(transparent)]
    Newer(#[from] NewerSchema),
    #[error("cannot start the journal's thread: {0}")]
    Thread(std::io::Error),
    #[error("{} does not answer in time", path.display())]
    TimedOut { path: PathBuf },
}

/// A newer version of this program wrote the journal.
#[derive(Debug, thiserror::Error)]
#[error(
    "journal {} has schema version {found}, and this version of reaper knows none above {}: install the newer \
     version of reaper again, or move the file and its -wal and -shm files away",
    path.display(), schema::SCHEMA
)]
pub struct NewerSchema {
    pub path: PathBuf,
    pub found: i64,
}

impl NewerSchema {
    /// Checks that no newer version of this program wrote the journal at `path`. Changes neither it nor the files beside
    /// it.
    ///
    /// # Errors
    /// A newer version did.
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
