//! Stores users' keeps, so that they survive a crash of the service.

use rusqlite::{Transaction, params};

use super::store::Store;
use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// Keep of one process. It is valid for the current boot only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalKeep {
    pub key: ProcessKey,
    /// First root of the session that the process is a member of.
    pub session: ProcessKey,
    /// Whether the user named this process. Otherwise it is kept as a descendant.
    pub is_explicit: bool,
    /// Whether all descendants are kept as well.
    pub tree: bool,
    /// Uid of the requesting user.
    pub by_uid: u32,
    /// Time of the request, in ns since the epoch.
    pub made_at: u64,
    /// Expiry. `None` if the keep lasts as long as the process.
    pub until: Option<KeepExpiry>,
}

/// Expiry of a keep on two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepExpiry {
    /// Nanoseconds of CLOCK_MONOTONIC, which stands still during suspend. This time is authoritative.
    pub awake: u64,
    /// Expected nanoseconds since the epoch, calculated at the request. Shown to people.
    pub wall: u64,
}

/// Change of keeps.
pub(super) enum KeepUpdate {
    Keep(Vec<JournalKeep>),
    Unkeep { by: u32, made: u64 },
}

impl Store {
    /// Returns the keeps of this boot that have not expired. Deletes all others.
    pub(super) fn keeps(&mut self) -> rusqlite::Result<Vec<JournalKeep>> {
        let (boot, now) = (self.boot, int(sys::monotonic()));
        self.connection.execute(
            "DELETE FROM keep WHERE boot <> ?1 OR until_awake <= ?2",
            [boot, now],
        )?;
        let mut statement = self.connection.prepare(
            "SELECT pid, start, tree, by_uid, made, until_awake, until, session_pid, session_start, asked
             FROM keep ORDER BY made, pid",
        )?;
        let rows = statement.query_map([], |row| {
            let number = |n: usize| row.get::<_, i64>(n).map(i64::cast_unsigned);
            let awake: Option<i64> = row.get(5)?;
            let wall: Option<i64> = row.get(6)?;
            Ok(JournalKeep {
                key: ProcessKey {
                    pid: row.get(0)?,
                    start: number(1)?,
                },
                session: ProcessKey {
                    pid: row.get(7)?,
                    start: number(8)?,
                },
                is_explicit: row.get(9)?,
                tree: row.get(2)?,
                by_uid: row.get(3)?,
                made_at: number(4)?,
                until: awake.map(|awake| KeepExpiry {
                    awake: awake.cast_unsigned(),
                    wall: wall.unwrap_or(0).cast_unsigned(),
                }),
            })
        })?;
        rows.collect()
    }

    /// Applies a change of keeps, all or none.
    pub(super) fn change(&mut self, change: &KeepUpdate) -> rusqlite::Result<()> {
        let boot = self.boot;
        let transaction = self.transaction()?;
        match change {
            KeepUpdate::Keep(keeps) => put(&transaction, boot, keeps)?,
            KeepUpdate::Unkeep { by, made } => drop(transaction.execute(
                "DELETE FROM keep WHERE (boot, by_uid, made) = (?1, ?2, ?3)",
                params![boot, by, int(*made)],
            )?),
        }
        transaction.commit()
    }
}

/// Stores keeps. First deletes earlier requests for the processes that the user named, with all of their keeps.
fn put(transaction: &Transaction, boot: i64, keeps: &[JournalKeep]) -> rusqlite::Result<()> {
    for keep in keeps.iter().filter(|keep| keep.is_explicit) {
        transaction.execute(
            "DELETE FROM keep WHERE boot = ?1 AND (by_uid, made) IN
                 (SELECT by_uid, made FROM keep WHERE (boot, pid, start) = (?1, ?2, ?3) AND asked)",
            params![boot, keep.key.pid, int(keep.key.start)],
        )?;
    }
    for keep in keeps {
        transaction.execute(
            "INSERT OR REPLACE INTO keep (boot, pid, start, tree, by_uid, made, until_awake, until,
                 session_pid, session_start, asked)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
            params![
                boot,
                keep.key.pid,
                int(keep.key.start),
                keep.tree,
                keep.by_uid,
                int(keep.made_at),
                keep.until.map(|until| int(until.awake)),
                keep.until.map(|until| int(until.wall)),
                keep.session.pid,
                int(keep.session.start),
                keep.is_explicit
            ],
        )?;
    }
    Ok(())
}

/// Converts a number for the database. Numbers that are too large become `i64::MAX`.
pub(super) fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
