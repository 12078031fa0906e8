//! Deletes old records, and the oldest ones of a database that is too large.

use std::time::Duration;

use rusqlite::{Connection, Transaction};

use super::keeps::int;
use super::store::Store;
use reaper_host::sys;

/// Interval of the deletion of old records.
pub(super) const INTERVAL: Duration = Duration::from_secs(3600);

/// Deletes decisions, outcomes, requests and drop counts before `cutoff` (ns since the epoch), and sessions that were last seen
/// before. Sessions that may be open stay, as do keeps. Also deletes processes and boots that nothing refers to any
/// more.
///
/// `boot` is the row of the current boot. Returns whether any was deleted.
pub(super) fn older_than(
    transaction: &Transaction,
    cutoff: i64,
    boot: i64,
) -> rusqlite::Result<bool> {
    let mut rows = 0;
    for table in ["decision", "outcome", "request", "dropped"] {
        rows += transaction.execute(&format!("DELETE FROM {table} WHERE time < ?1"), [cutoff])?;
    }
    rows += transaction.execute(
        "DELETE FROM session WHERE seen < ?1 AND (closed IS NOT NULL OR boot <> ?2)",
        [cutoff, boot],
    )?;
    if rows == 0 {
        return Ok(false);
    }
    // Rows that nothing refers to any more.
    transaction.execute_batch(
        "DELETE FROM process WHERE
             NOT EXISTS (SELECT 1 FROM decision WHERE process = process.id)
             AND NOT EXISTS (SELECT 1 FROM outcome WHERE process = process.id)
             AND NOT EXISTS (SELECT 1 FROM request WHERE process = process.id)
             AND NOT EXISTS (SELECT 1 FROM session WHERE root = process.id);
         UPDATE process SET session = NULL WHERE session IS NOT NULL
             AND NOT EXISTS (SELECT 1 FROM session WHERE id = process.session);
         UPDATE session SET outer = NULL WHERE outer IS NOT NULL
             AND NOT EXISTS (SELECT 1 FROM session AS o WHERE o.id = session.outer);",
    )?;
    transaction.execute(
        "DELETE FROM boot WHERE id <> ?1
             AND NOT EXISTS (SELECT 1 FROM process WHERE boot = boot.id)
             AND NOT EXISTS (SELECT 1 FROM session WHERE boot = boot.id)
             AND NOT EXISTS (SELECT 1 FROM keep WHERE boot = boot.id)",
        [boot],
    )?;
    Ok(true)
}

/// Deletes the oldest records of a database above `max` bytes, down to 90 % of that. Stops earlier if only open
/// sessions are left. Returns whether the database was too large.
pub(super) fn larger_than(
    transaction: &Transaction,
    max: u64,
    boot: i64,
) -> rusqlite::Result<bool> {
    if used(transaction)? <= max {
        return Ok(false);
    }
    // Each round deletes a tenth of the records, so that not many more than necessary are deleted.
    while used(transaction)? > max / 10 * 9 {
        let cutoff: Option<i64> = transaction.query_row(
            "WITH old (time) AS (
                 SELECT time FROM decision UNION ALL SELECT time FROM outcome
                 UNION ALL SELECT time FROM request UNION ALL SELECT time FROM dropped
                 UNION ALL SELECT seen FROM session WHERE closed IS NOT NULL OR boot <> ?1)
             SELECT max(time) FROM (
                 SELECT time FROM old ORDER BY time LIMIT (SELECT count(*) / 10 + 1 FROM old))",
            [boot],
            |row| row.get(0),
        )?;
        // Only open sessions are left.
        let Some(cutoff) = cutoff else { break };
        older_than(transaction, cutoff.saturating_add(1), boot)?;
    }
    Ok(true)
}

/// Returns the number of bytes in use, without free pages.
fn used(connection: &Connection) -> rusqlite::Result<u64> {
    let number = |name: &str| -> rusqlite::Result<u64> {
        connection.pragma_query_value(None, name, |row| Ok(row.get::<_, i64>(0)?.cast_unsigned()))
    };
    let pages = number("page_count")?.saturating_sub(number("freelist_count")?);
    Ok(pages.saturating_mul(number("page_size")?))
}

/// Returns the time before which records are too old, in ns since the epoch.
pub(super) fn cutoff(max_age: Duration) -> i64 {
    int(sys::wall_time().saturating_sub(sys::nanoseconds(max_age)))
}

/// Returns free pages to the file system.
pub(super) fn shrink(store: &Store) -> rusqlite::Result<()> {
    let mut statement = store.connection.prepare("PRAGMA incremental_vacuum")?;
    let mut rows = statement.query([])?;
    // Each step frees one page.
    while rows.next()?.is_some() {}
    Ok(())
}
