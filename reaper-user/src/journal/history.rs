//! Reads a journal, also while a service writes to it.

mod records;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags, Row, params};
use serde::de::DeserializeOwned;

pub use records::{
    HistoryAncestor, HistoryDecision, HistoryOutcome, HistoryProcess, HistoryRequest,
    HistorySession,
};

use super::NewerSchema;
use super::schema::{APPLICATION_ID, MIGRATIONS, OLDEST, SCHEMA, migrate};
use crate::export::{ExitInfo, FreedMemory, SessionIdText, SessionRef};
use reaper_host::advice::Advised as _;
use reaper_model::event::ProcessKey;

/// Settings of a connection that only reads.
const SETTINGS: &str = "PRAGMA trusted_schema = OFF; PRAGMA cache_size = -2048;";

/// Filter for sessions.
#[derive(Clone, Debug, Default)]
pub struct HistoryQuery {
    /// Only sessions with records since this time.
    pub since: Option<Timestamp>,
    /// Only sessions of this agent.
    pub agent: Option<String>,
    /// Only sessions whose name begins with this text.
    pub session: Option<String>,
    /// Only sessions whose root this user owns, with the user's processes in them.
    pub uid: Option<u32>,
    /// Only sessions of agents with these pids, and other sessions with the processes with these pids alone. Empty for all.
    pub pids: Vec<u32>,
    /// Only the newest sessions, at most this many.
    pub limit: Option<usize>,
}

/// Reasons why a journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error(
        "there is no journal at {}: start the service, which writes it; `reaper history --file FILE` reads another",
        .0.display()
    )]
    Missing(PathBuf),
    #[error("cannot read the journal {}: permission denied; run as root or as the user of the service", .0.display())]
    Denied(PathBuf),
    #[error("{} is not a journal of reaper, or is damaged; `reaper history --file FILE` reads another", .0.display())]
    NotAJournal(PathBuf),
    #[error(transparent)]
    Newer(#[from] NewerSchema),
    #[error("cannot open the journal {}: {}", path.display(), source.advised())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot read the journal {}: {error}{}", path.display(), super::advice(error))]
    Unreadable {
        path: PathBuf,
        error: rusqlite::Error,
    },
    /// The callback for a session failed.
    #[error(transparent)]
    Callback(#[from] io::Error),
}

/// Passes each session that matches the query to `on_session`, oldest first.
///
/// # Errors
/// The journal does not exist, cannot be read, or is not a journal; or `on_session` fails.
pub fn read(
    path: &Path,
    query: &HistoryQuery,
    on_session: impl FnMut(HistorySession) -> io::Result<()>,
) -> Result<(), HistoryError> {
    let mut result = Ok(());
    with_journal(path, |connection| {
        match sessions(connection, query, on_session) {
            Err(ReadError::Sql(error)) => return Err(error),
            Err(ReadError::Callback(error)) => result = Err(error),
            Ok(()) => {}
        }
        Ok(())
    })?;
    Ok(result?)
}

/// Returns the latest session of the boot `boot_id` with a decision about, a request for or an outcome of the process with
/// this pid, and that process. With `uid`, only a process and a session of this user.
///
/// # Errors
/// Fails as [`read`].
pub fn last_with_pid(
    path: &Path,
    boot_id: &str,
    pid: u32,
    uid: Option<u32>,
) -> Result<Option<(HistorySession, HistoryProcess)>, HistoryError> {
    let query = HistoryQuery {
        pids: vec![pid],
        uid,
        ..HistoryQuery::default()
    };
    let mut last: Option<(HistorySession, HistoryProcess)> = None;
    read(path, &query, |mut session| {
        let processes = std::mem::take(&mut session.processes).into_iter();
        let of_boot =
            |process: &HistoryProcess| process.pid == pid && process.start_in(boot_id).is_some();
        let newest = processes.filter(of_boot).max_by_key(HistoryProcess::first);
        if let Some(process) = newest
            && last
                .as_ref()
                .is_none_or(|(_, last)| last.first() <= process.first())
        {
            last = Some((session, process));
        }
        Ok(())
    })?;
    Ok(last)
}

/// Opens a journal read-only and passes a consistent snapshot of it to `work`. Returns the result of `work`. A journal of
/// an older version is upgraded in a copy in memory, and its file is not changed.
///
/// # Errors
/// The journal does not exist, cannot be read, is no journal, or has a newer schema version; or `work` fails.
pub(super) fn with_journal<T>(
    path: &Path,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> Result<T, HistoryError> {
    // SQLite reports only that it cannot open the file.
    let owned = || path.to_owned();
    match std::fs::File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(HistoryError::Missing(owned()));
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return Err(HistoryError::Denied(owned()));
        }
        Err(source) => {
            let path = owned();
            return Err(HistoryError::Open { path, source });
        }
        Ok(file) if !file.metadata().is_ok_and(|meta| meta.is_file()) => {
            return Err(HistoryError::NotAJournal(owned()));
        }
        Ok(_) => {}
    }
    NewerSchema::check(path)?;
    let unreadable = |error: rusqlite::Error| {
        let code = error.sqlite_error_code();
        if code == Some(rusqlite::ErrorCode::NotADatabase) {
            return HistoryError::NotAJournal(owned());
        }
        let path = owned();
        HistoryError::Unreadable { path, error }
    };
    let mut connection = open(path).map_err(unreadable)?;
    let number = |name: &str| number(&connection, name).map_err(unreadable);
    let (application, found) = (number("application_id")?, number("user_version")?);
    if application != APPLICATION_ID || found < OLDEST {
        return Err(HistoryError::NotAJournal(owned()));
    }
    if found > SCHEMA {
        let path = owned();
        return Err(NewerSchema { path, found }.into());
    }
    if found < SCHEMA {
        connection = upgraded_copy(&connection).map_err(unreadable)?;
    }
    let transaction = connection.transaction().map_err(unreadable)?;
    work(&transaction).map_err(unreadable)
}

fn open(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(Duration::from_secs(2))?;
    connection.execute_batch(SETTINGS)?;
    Ok(connection)
}

/// Copies a journal into memory, and upgrades the copy.
fn upgraded_copy(journal: &Connection) -> rusqlite::Result<Connection> {
    let mut copy = Connection::open_in_memory()?;
    copy.execute_batch(SETTINGS)?;
    // All pages in one step, which waits for a lock no longer than any other access.
    match Backup::new(journal, &mut copy)?.step(-1)? {
        StepResult::Done => {}
        _ => {
            let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
            return Err(rusqlite::Error::SqliteFailure(busy, None));
        }
    }
    migrate(&mut copy, &MIGRATIONS)?;
    Ok(copy)
}

fn number(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

enum ReadError {
    Sql(rusqlite::Error),
    Callback(io::Error),
}

impl From<rusqlite::Error> for ReadError {
    fn from(error: rusqlite::Error) -> ReadError {
        ReadError::Sql(error)
    }
}

/// Passes the sessions that match the query to `on_session`, oldest first.
fn sessions(
    connection: &Connection,
    query: &HistoryQuery,
    mut on_session: impl FnMut(HistorySession) -> io::Result<()>,
) -> Result<(), ReadError> {
    let mut statement = connection.prepare(
        "SELECT s.id, s.agent, s.pid, s.start, s.uid, root.args, o.agent, o.pid, o.start, s.opened, s.gone,
             s.exit_code, s.exit_signal, s.closed, s.reaped, s.kept, s.failed, s.lost_before, s.rss, s.swap,
             s.unread, root.pid
         FROM session s LEFT JOIN process root ON root.id = s.root LEFT JOIN session o ON o.id = s.outer
         WHERE s.seen >= ?1 AND (?2 IS NULL OR s.agent = ?2) AND (?3 IS NULL OR s.uid = ?3)
             AND (?4 IS NULL OR s.pid IN (SELECT value FROM json_each(?4))
                 OR root.pid IN (SELECT value FROM json_each(?4))
                 OR EXISTS (SELECT 1 FROM process p
                     WHERE p.session = s.id AND p.pid IN (SELECT value FROM json_each(?4))
                         AND (?3 IS NULL OR p.uid = ?3)
                         AND (EXISTS (SELECT 1 FROM decision WHERE process = p.id)
                             OR EXISTS (SELECT 1 FROM outcome WHERE process = p.id)
                             OR EXISTS (SELECT 1 FROM request WHERE process = p.id))))
         ORDER BY s.opened, s.id",
    )?;
    let since = query.since.map_or(i64::MIN, nanoseconds);
    let pids = list(&query.pids);
    let mut rows = statement.query(params![since, query.agent, query.uid, pids])?;
    let mut found = VecDeque::new();
    while let Some(row) = rows.next()? {
        let (id, session) = (row.get::<_, i64>(0)?, session(row)?);
        let wanted = |name: &String| session.name.starts_with(name);
        if !query.session.as_ref().is_none_or(wanted) {
            continue;
        }
        found.push_back((id, session));
        if query.limit.is_some_and(|limit| found.len() > limit) {
            found.pop_front();
        }
    }
    for (id, mut session) in found {
        // The pid of an agent selects the whole session.
        let wanted = match query.pids.iter().any(|pid| session.is_of_agent(*pid)) {
            true => &[],
            false => &*query.pids,
        };
        session.processes = processes(connection, id, query.uid, wanted)?;
        on_session(session).map_err(ReadError::Callback)?;
    }
    Ok(())
}

/// Returns pids as an array in JSON, `None` for no pids.
fn list(pids: &[u32]) -> Option<String> {
    (!pids.is_empty()).then(|| format!("{pids:?}"))
}

/// Returns the session in a row, without its processes.
fn session(row: &Row<'_>) -> rusqlite::Result<HistorySession> {
    let name = |at: usize| -> rusqlite::Result<Option<String>> {
        let Some(agent) = row.get::<_, Option<String>>(at)? else {
            return Ok(None);
        };
        let first_root = ProcessKey {
            pid: row.get(at + 1)?,
            start: unsigned(row, at + 2)?,
        };
        let agent = agent.into();
        Ok(Some(
            SessionIdText(&SessionRef { agent, first_root }).to_string(),
        ))
    };
    Ok(HistorySession {
        name: name(1)?.unwrap_or_default(),
        agent: row.get(1)?,
        pid: row.get(2)?,
        root_pid: row.get(21)?,
        uid: row.get(4)?,
        args: array(row.get(5)?),
        // From the same three columns of the outer session.
        outer_session_id: name(6)?,
        opened_at: time(row.get(9)?),
        root_exited_at: row.get::<_, Option<i64>>(10)?.map(time),
        exit: ExitInfo {
            code: row.get(11)?,
            signal: row.get(12)?,
            core_dumped: None,
        },
        closed_at: row.get::<_, Option<i64>>(13)?.map(time),
        reaped: row.get(14)?,
        kept: row.get(15)?,
        failed: row.get(16)?,
        lost_before: unsigned(row, 17)?,
        memory: FreedMemory {
            rss: unsigned(row, 18)?,
            swap: unsigned(row, 19)?,
            unmeasured: unsigned(row, 20)?,
        },
        processes: Vec::new(),
    })
}

/// Returns the members of a session with decisions, outcomes or requests, ordered by the time of the first one. With `uid`, only
/// those of this user; with `pids`, only those with one of these pids.
fn processes(
    connection: &Connection,
    session: i64,
    uid: Option<u32>,
    pids: &[u32],
) -> rusqlite::Result<Vec<HistoryProcess>> {
    let mut statement = connection.prepare_cached(
        "SELECT p.id, boot.uuid, p.pid, p.start, p.uid, p.comm, p.exe, p.args, p.exited, p.exit_code, p.exit_signal,
             p.lineage
         FROM process p JOIN boot ON boot.id = p.boot
         WHERE p.session = ?1 AND (?2 IS NULL OR p.uid = ?2)
             AND (?3 IS NULL OR p.pid IN (SELECT value FROM json_each(?3)))",
    )?;
    let mut rows = statement.query(params![session, uid, list(pids)])?;
    let mut processes = Vec::new();
    while let Some(row) = rows.next()? {
        let id: i64 = row.get(0)?;
        let (boot, pid, start): (String, u32, u64) = (row.get(1)?, row.get(2)?, unsigned(row, 3)?);
        let mut process = HistoryProcess {
            entity_id: format!("{boot}-{start}-{pid}"),
            pid,
            uid: row.get(4)?,
            comm: row.get(5)?,
            exe: row.get(6)?,
            args: array(row.get(7)?),
            exited_at: row.get::<_, Option<i64>>(8)?.map(time),
            exit: ExitInfo {
                code: row.get(9)?,
                signal: row.get(10)?,
                core_dumped: None,
            },
            lineage: array(row.get(11)?),
            decisions: decisions(connection, id)?,
            requests: requests(connection, id)?,
            outcomes: outcomes(connection, id)?,
            keep_rule: None,
        };
        process.suggest_rule();
        if process.first().is_some() {
            processes.push(process);
        }
    }
    processes.sort_by_key(HistoryProcess::first);
    Ok(processes)
}

fn decisions(connection: &Connection, process: i64) -> rusqlite::Result<Vec<HistoryDecision>> {
    let mut statement = connection.prepare_cached(
        "SELECT time, verdict, reason, rule, mode FROM decision WHERE process = ?1 ORDER BY id",
    )?;
    let rows = statement.query_map([process], |row| {
        Ok(HistoryDecision {
            time: time(row.get(0)?),
            decision: row.get(1)?,
            reason: row.get(2)?,
            rule: row.get(3)?,
            mode: row.get(4)?,
        })
    })?;
    rows.collect()
}

fn outcomes(connection: &Connection, process: i64) -> rusqlite::Result<Vec<HistoryOutcome>> {
    let mut statement = connection.prepare_cached(
        "SELECT time, outcome, reason, signal, exit_code, exit_signal, duration, rss, swap
         FROM outcome WHERE process = ?1 ORDER BY id",
    )?;
    let rows = statement.query_map([process], |row| {
        let number = |at| {
            row.get::<_, Option<i64>>(at)
                .map(|n| n.map(i64::cast_unsigned))
        };
        Ok(HistoryOutcome {
            time: time(row.get(0)?),
            outcome: row.get(1)?,
            reason: row.get(2)?,
            signal: row.get(3)?,
            exit: ExitInfo {
                code: row.get(4)?,
                signal: row.get(5)?,
                core_dumped: None,
            },
            duration_ns: number(6)?,
            rss: number(7)?,
            swap: number(8)?,
        })
    })?;
    rows.collect()
}

fn requests(connection: &Connection, process: i64) -> rusqlite::Result<Vec<HistoryRequest>> {
    let mut statement = connection.prepare_cached(
        "SELECT time, request, by_uid, tree, until FROM request WHERE process = ?1 ORDER BY id",
    )?;
    let rows = statement.query_map([process], |row| {
        Ok(HistoryRequest {
            time: time(row.get(0)?),
            request: row.get(1)?,
            by_uid: row.get(2)?,
            tree: row.get(3)?,
            until: row.get::<_, Option<i64>>(4)?.map(time),
        })
    })?;
    rows.collect()
}

/// Returns an integer of a row as `u64`. The bits stay the same.
fn unsigned(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(at).map(i64::cast_unsigned)
}

/// Parses a JSON array. Returns nothing if there is no array.
fn array<T: DeserializeOwned>(json: Option<String>) -> Vec<T> {
    let parsed = json.map(|json| serde_json::from_str(&json).unwrap_or_default());
    parsed.unwrap_or_default()
}

/// Converts nanoseconds since the epoch to a time.
fn time(nanoseconds: i64) -> Timestamp {
    Timestamp::from_nanosecond(nanoseconds.into()).unwrap_or_default()
}

fn nanoseconds(time: Timestamp) -> i64 {
    i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX)
}
