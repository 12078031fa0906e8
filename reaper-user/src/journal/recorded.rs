//! Reads recorded members and keeps for a scan for leftovers, as a restarted service does not know the old ancestors.

use std::path::Path;

use rusqlite::{Connection, params};

use super::history::{HistoryError, with_journal};
use super::keeps::int;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::leftover::RecordedSession;

/// Returns the sessions of the boot `boot_id`, which must be the current one, and the processes that users keep.
///
/// Each session has the members that were to be reaped or whose agent was alive, and whose exit is not confirmed. Left
/// out are sessions without a known root, and those in which a user keeps a process with its descendants: which
/// processes these are is unknown. If any records were dropped, no session is returned, since a change of its root may
/// be missing.
///
/// # Errors
/// Fails as [`history::read`](super::history::read).
pub fn recorded_sessions(
    path: &Path,
    boot_id: &str,
) -> Result<(Vec<RecordedSession>, Vec<ProcessKey>), HistoryError> {
    with_journal(path, |connection| {
        let kept = keeps(connection, boot_id)?;
        let dropped: bool =
            connection.query_row("SELECT EXISTS (SELECT 1 FROM dropped)", [], |row| {
                row.get(0)
            })?;
        if dropped {
            return Ok((Vec::new(), kept));
        }
        Ok((sessions(connection, boot_id)?, kept))
    })
}

/// Returns the processes that users keep in the boot `boot_id`, without expired keeps. It must be the current boot.
///
/// # Errors
/// Fails as [`history::read`](super::history::read).
pub fn kept(path: &Path, boot_id: &str) -> Result<Vec<ProcessKey>, HistoryError> {
    with_journal(path, |connection| keeps(connection, boot_id))
}

/// Returns the sessions as [`recorded_sessions`], but does not check for dropped records.
fn sessions(connection: &Connection, boot_id: &str) -> rusqlite::Result<Vec<RecordedSession>> {
    let mut statement = connection.prepare(
        "SELECT s.agent, root.pid, root.start, p.pid, p.start, s.uid
         FROM session s JOIN boot ON boot.id = s.boot JOIN process root ON root.id = s.root
             LEFT JOIN process p ON p.session = s.id AND p.id <> root.id
                 AND (SELECT verdict = 'reap' OR reason IN ('detached', 'root_alive')
                      FROM decision WHERE process = p.id ORDER BY id DESC LIMIT 1)
                 AND NOT EXISTS (SELECT 1 FROM outcome WHERE process = p.id AND outcome = 'ended')
         WHERE boot.uuid = ?1 AND s.uid IS NOT NULL
             AND NOT EXISTS (SELECT 1 FROM keep
                 WHERE boot = s.boot AND tree AND (session_pid, session_start) = (s.pid, s.start)
                     AND (until_awake IS NULL OR until_awake > ?2))
         ORDER BY s.id",
    )?;
    let key = |row: &rusqlite::Row<'_>, at: usize| -> rusqlite::Result<Option<ProcessKey>> {
        let (pid, start): (Option<u32>, Option<i64>) = (row.get(at)?, row.get(at + 1)?);
        Ok(pid.zip(start).map(|(pid, start)| ProcessKey {
            pid,
            start: start.cast_unsigned(),
        }))
    };
    let mut rows = statement.query(params![boot_id, int(sys::monotonic())])?;
    let mut recorded: Vec<RecordedSession> = Vec::new();
    while let Some(row) = rows.next()? {
        let (agent, member) = (row.get::<_, String>(0)?, key(row, 3)?);
        let Some(root) = key(row, 1)? else {
            continue;
        };
        match recorded.last_mut().filter(|last| last.root == root) {
            Some(last) => last.members.extend(member),
            None => recorded.push(RecordedSession {
                agent: agent.into(),
                root,
                uid: row.get(5)?,
                members: member.into_iter().collect(),
            }),
        }
    }
    Ok(recorded)
}

/// Returns the processes with a keep of this boot that has not expired.
fn keeps(connection: &Connection, boot_id: &str) -> rusqlite::Result<Vec<ProcessKey>> {
    let mut statement = connection.prepare(
        "SELECT DISTINCT pid, start FROM keep JOIN boot ON boot.id = keep.boot
         WHERE boot.uuid = ?1 AND (until_awake IS NULL OR until_awake > ?2)",
    )?;
    let rows = statement.query_map(params![boot_id, int(sys::monotonic())], |row| {
        Ok(ProcessKey {
            pid: row.get(0)?,
            start: row.get::<_, i64>(1)?.cast_unsigned(),
        })
    })?;
    rows.collect()
}
