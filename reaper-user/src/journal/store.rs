//! Opens, creates, upgrades or replaces the database.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::schema::{APPLICATION_ID, MIGRATIONS, OLDEST, SCHEMA, migrate};
use super::{JournalError, NewerSchema, files};

/// Extended SQLite result code for a file that is too short (`SQLITE_IOERR_SHORT_READ`).
const SHORT_READ: i32 = 522;
/// Time that another program may hold the database lock, such as a user's SQLite shell.
const BUSY: Duration = Duration::from_millis(500);

/// Open database of the journal.
pub(super) struct Store {
    pub(super) path: PathBuf,
    pub(super) connection: Connection,
    /// Inode number of the database, to notice that the file was removed or replaced.
    inode: u64,
    /// Id of the current boot in the table `boot`.
    pub(super) boot: i64,
    /// Whether an earlier file was unusable and has been renamed.
    pub(super) set_aside: bool,
}

/// Reason why a file cannot be opened.
enum OpenFailure {
    /// Unusable content. The file is renamed and replaced.
    Content(String),
    Error(JournalError),
}

impl From<JournalError> for OpenFailure {
    fn from(error: JournalError) -> OpenFailure {
        OpenFailure::Error(error)
    }
}

impl Store {
    /// Opens the database and upgrades its schema, or creates one. Renames a file that is damaged, is not a journal,
    /// or has an unknown older schema, and logs a warning. `boot_id` is the UUID of the current boot.
    ///
    /// # Errors
    /// The database cannot be opened. With [`JournalError::Newer`] the files are unchanged.
    pub(super) fn open(path: &Path, boot_id: &str) -> Result<Store, JournalError> {
        let directory = files::directory(path.parent().unwrap_or(Path::new("/")))?;
        let path = directory.join(path.file_name().unwrap_or_default());
        match Store::attempt(&path, boot_id) {
            Err(OpenFailure::Content(why)) => set_aside(&path, &why)?,
            Err(OpenFailure::Error(error)) => return Err(error),
            Ok(store) => return Ok(store),
        }
        let store = Store::attempt(&path, boot_id).map_err(|failure| match failure {
            OpenFailure::Error(error) => error,
            OpenFailure::Content(why) => JournalError::File {
                path,
                source: std::io::Error::other(why),
            },
        })?;
        Ok(Store {
            set_aside: true,
            ..store
        })
    }

    /// Opens or creates the database, as [`Store::open`], but renames no file.
    fn attempt(path: &Path, boot_id: &str) -> Result<Store, OpenFailure> {
        NewerSchema::check(path).map_err(JournalError::from)?;
        let reason = files::prepare(path).map_err(|source| file_error(path, source))?;
        if let Some(why) = reason {
            return Err(OpenFailure::Content(why.into()));
        }
        let open = || -> Result<Store, SchemaError> {
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NOFOLLOW;
            let mut connection =
                Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
            connection.busy_timeout(BUSY)?;
            // Before an upgrade: replacing a table needs `foreign_keys = OFF`, which cannot be set in a transaction.
            connection.execute_batch(SETTINGS)?;
            check_and_migrate(&mut connection)?;
            let inode = std::fs::metadata(path).map_or(0, |meta| meta.ino());
            connection.execute(
                "INSERT INTO boot (uuid) VALUES (?1) ON CONFLICT DO NOTHING",
                [boot_id],
            )?;
            let boot =
                connection.query_row("SELECT id FROM boot WHERE uuid = ?1", [boot_id], |row| {
                    row.get(0)
                })?;
            Ok(Store {
                path: path.to_owned(),
                connection,
                inode,
                boot,
                set_aside: false,
            })
        };
        open().map_err(|problem| match problem {
            SchemaError::Foreign(why) => OpenFailure::Content(why),
            SchemaError::Newer(found) => {
                let path = path.to_owned();
                OpenFailure::Error(NewerSchema { path, found }.into())
            }
            SchemaError::Sql(error) if is_corruption(&error) => {
                OpenFailure::Content(format!("damaged ({error})"))
            }
            SchemaError::Sql(source) => OpenFailure::Error(JournalError::Database {
                path: path.to_owned(),
                source,
            }),
        })
    }

    /// Returns whether the path still leads to the open file. Records in a removed file would be lost.
    pub(super) fn is_in_place(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Reads the whole database once.
    ///
    /// # Errors
    /// The database is damaged.
    pub(super) fn check(&self) -> rusqlite::Result<()> {
        let verdict: String = self
            .connection
            .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if verdict == "ok" {
            return Ok(());
        }
        let corrupt = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
        Err(rusqlite::Error::SqliteFailure(corrupt, Some(verdict)))
    }

    /// Starts a transaction, which is rolled back unless it is committed.
    pub(super) fn transaction(&mut self) -> rusqlite::Result<Transaction<'_>> {
        self.connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
    }

    /// Renames a damaged database, and creates a new one without its records and keeps. `why` is for the log.
    pub(super) fn replace(self, why: &str, boot_id: &str) -> Result<Store, JournalError> {
        let Store {
            path, connection, ..
        } = self;
        // Before the rename, so that nothing is written to the files later.
        drop(connection);
        set_aside(&path, why)?;
        let store = Store::open(&path, boot_id)?;
        Ok(Store {
            set_aside: true,
            ..store
        })
    }
}

/// Settings for little memory use, and for a log that shrinks after a large batch.
const SETTINGS: &str = "\
    PRAGMA synchronous = NORMAL;
    PRAGMA foreign_keys = OFF;
    PRAGMA cache_size = -512;
    PRAGMA wal_autocheckpoint = 256;
    PRAGMA journal_size_limit = 1048576;
    PRAGMA trusted_schema = OFF;
    PRAGMA secure_delete = OFF;
";

enum SchemaError {
    Foreign(String),
    Newer(i64),
    Sql(rusqlite::Error),
}

impl From<rusqlite::Error> for SchemaError {
    fn from(error: rusqlite::Error) -> SchemaError {
        SchemaError::Sql(error)
    }
}

/// Checks that a database is empty or a journal of a known schema version, and upgrades it to the newest version.
fn check_and_migrate(connection: &mut Connection) -> Result<(), SchemaError> {
    let number = |name: &str| -> rusqlite::Result<i64> {
        connection.pragma_query_value(None, name, |row| row.get(0))
    };
    let (application, schema) = (number("application_id")?, number("user_version")?);
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    match (application, schema) {
        // Includes a database whose creation was interrupted. The pragma must precede the first table.
        (0, 0) if tables == 0 => connection.execute_batch("PRAGMA auto_vacuum = INCREMENTAL")?,
        (APPLICATION_ID, OLDEST..=SCHEMA) => {
            let tables = ["boot", "process", "session", "decision", "outcome", "keep"];
            let newer = (schema >= 7).then_some("request");
            for table in tables.into_iter().chain(newer) {
                if !connection.table_exists(None, table)? {
                    let why = format!("damaged (no table `{table}`)");
                    return Err(SchemaError::Foreign(why));
                }
            }
        }
        (APPLICATION_ID, newer) if newer > SCHEMA => return Err(SchemaError::Newer(newer)),
        (APPLICATION_ID, other) => {
            return Err(SchemaError::Foreign(format!(
                "schema version {other} cannot be upgraded by this version of reaper"
            )));
        }
        _ => {
            return Err(SchemaError::Foreign("database of another program".into()));
        }
    }
    connection.execute_batch("PRAGMA journal_mode = WAL")?;
    Ok(migrate(connection, &MIGRATIONS)?)
}

/// Renames the database, and logs a warning with the reason `why`.
fn set_aside(path: &Path, why: &str) -> Result<(), JournalError> {
    let aside = files::set_aside(path).map_err(|source| JournalError::File {
        path: path.to_owned(),
        source,
    })?;
    tracing::warn!(
        "cannot use the journal {}: {why}; moved it to {}, and continuing with a new one, without the history; if the service is just starting, what users kept is lost too: keep it again with `reaper keep`",
        path.display(),
        aside.display()
    );
    Ok(())
}

fn file_error(path: &Path, source: std::io::Error) -> OpenFailure {
    OpenFailure::Error(JournalError::File {
        path: path.to_owned(),
        source,
    })
}

/// Returns whether an error means that the file is damaged.
pub(super) fn is_corruption(error: &rusqlite::Error) -> bool {
    let is_short = |error: &rusqlite::ffi::Error| error.extended_code == SHORT_READ;
    match error {
        rusqlite::Error::SqliteFailure(error, _) => {
            matches!(
                error.code,
                ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase
            ) || is_short(error)
        }
        _ => false,
    }
}

/// Returns whether an error may be temporary, such as a full disk or a lock.
pub(super) fn is_transient(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::OutOfMemory
                | ErrorCode::ReadOnly
                | ErrorCode::SystemIoFailure
                | ErrorCode::DiskFull
                | ErrorCode::CannotOpen
                | ErrorCode::PermissionDenied
        )
    )
}
