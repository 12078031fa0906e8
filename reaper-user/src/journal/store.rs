//! The database: opened, created, upgraded, or set aside.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::schema::{APPLICATION_ID, MIGRATIONS, OLDEST, SCHEMA, migrate};
use super::{JournalError, NewerSchema, files};

/// Extended code of a file that ends before its time.
const SHORT_READ: i32 = 522;
/// How long another program may hold it, such as a person with a shell on it.
const BUSY: Duration = Duration::from_millis(500);

/// An open database of this program's.
pub(super) struct Store {
    pub(super) path: PathBuf,
    pub(super) connection: Connection,
    /// Of the file.
    inode: u64,
    /// Of the row of this boot.
    pub(super) boot: i64,
    /// What was there before could not be used.
    pub(super) set_aside: bool,
}

/// Why a file cannot be used.
enum OpenFailure {
    /// Whatever is in it is to be set aside.
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
    /// or has an unknown older schema, and logs a warning.
    ///
    /// # Errors
    /// Among others [`JournalError::Newer`]: then the files are as they were.
    pub(super) fn open(path: &Path, boot_id: &str) -> Result<Store, JournalError> {
        let directory = files::directory(path.parent().unwrap_or(Path::new("/")))?;
        let path = directory.join(path.file_name().unwrap_or_default());
        match Store::attempt(&path, boot_id) {
            Err(OpenFailure::Content(why)) => set_aside(&path, &why)?,
            Err(OpenFailure::Error(error)) => return Err(error),
            Ok(store) => return Ok(store),
        }
        let store = Store::attempt(&path, boot_id).map_err(|unfit| match unfit {
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

    fn attempt(path: &Path, boot_id: &str) -> Result<Store, OpenFailure> {
        NewerSchema::check(path).map_err(JournalError::from)?;
        let foreign = files::prepare(path).map_err(|source| file_error(path, source))?;
        if let Some(why) = foreign {
            return Err(OpenFailure::Content(why.into()));
        }
        let open = || -> Result<Store, SchemaError> {
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NOFOLLOW;
            let mut connection =
                Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
            connection.busy_timeout(BUSY)?;
            // Before an upgrade: one that replaces a table needs `foreign_keys = OFF`, which no transaction can set.
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
                OpenFailure::Content(format!("it is damaged ({error})"))
            }
            SchemaError::Sql(source) => OpenFailure::Error(JournalError::Database {
                path: path.to_owned(),
                source,
            }),
        })
    }

    /// Whether the file is still where it was: writing to one that was removed would tell nobody.
    pub(super) fn is_in_place(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode)
    }

    /// Reads all of it once.
    ///
    /// # Errors
    /// It is damaged somewhere.
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

    /// Begins a change, which is undone unless it is committed.
    pub(super) fn transaction(&mut self) -> rusqlite::Result<Transaction<'_>> {
        self.connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
    }

    /// Sets it aside, since it turned out to be damaged, and begins a new one.
    pub(super) fn replace(self, why: &str, boot_id: &str) -> Result<Store, JournalError> {
        let Store {
            path, connection, ..
        } = self;
        // Before its files are renamed: nothing is to be written to them any more.
        drop(connection);
        set_aside(&path, why)?;
        let store = Store::open(&path, boot_id)?;
        Ok(Store {
            set_aside: true,
            ..store
        })
    }
}

/// Little memory, and a log that does not stay as long as the largest batch made it.
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
        // Also one whose creation was interrupted. The pragma has to come before the first table.
        (0, 0) if tables == 0 => connection.execute_batch("PRAGMA auto_vacuum = INCREMENTAL")?,
        (APPLICATION_ID, OLDEST..=SCHEMA) => {
            for table in ["boot", "process", "session", "decision", "outcome", "keep"] {
                if !connection.table_exists(None, table)? {
                    let why = format!("it is damaged (it has no table `{table}`)");
                    return Err(SchemaError::Foreign(why));
                }
            }
        }
        (APPLICATION_ID, newer) if newer > SCHEMA => return Err(SchemaError::Newer(newer)),
        (APPLICATION_ID, other) => {
            return Err(SchemaError::Foreign(format!(
                "this version of reaper cannot upgrade its schema version {other}"
            )));
        }
        _ => {
            return Err(SchemaError::Foreign(
                "it is a database of another program".into(),
            ));
        }
    }
    connection.execute_batch("PRAGMA journal_mode = WAL")?;
    Ok(migrate(connection, &MIGRATIONS)?)
}

fn set_aside(path: &Path, why: &str) -> Result<(), JournalError> {
    let aside = files::set_aside(path).map_err(|source| JournalError::File {
        path: path.to_owned(),
        source,
    })?;
    tracing::warn!(
        "the journal {} cannot be used: {why}; it is set aside as {}, and a new one begun",
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

/// Whether an error means that the file is not what it was.
pub(super) fn is_corruption(error: &rusqlite::Error) -> bool {
    let short = |error: &rusqlite::ffi::Error| error.extended_code == SHORT_READ;
    match error {
        rusqlite::Error::SqliteFailure(error, _) => {
            matches!(
                error.code,
                ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase
            ) || short(error)
        }
        _ => false,
    }
}

/// Whether an error may be over later: a full disk, a lock.
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
