//! What is too old, or too much, goes.

use std::time::Duration;

use rusqlite::{Connection, Transaction};

use super::keeps::int;
use super::store::Store;
use reaper_host::sys;

/// How often it is looked whether something is too old.
pub(super) const EVERY: Duration = Duration::from_secs(3600);

/// Takes out what happened before `cutoff`: not sessions that may be going on.
pub(super) fn older_than(
    transaction: &Transaction,
    cutoff: i64,
    boot: i64,
) -> rusqlite::Result<bool> {
    let mut gone = 0;
    for table in ["decision", "outcome", "dropped"] {
        gone += transaction.execute(&format!("DELETE FROM {table} WHERE time < ?1"), [cutoff])?;
    }
    gone += transaction.execute(
        "DELETE FROM session WHERE seen < ?1 AND (closed IS NOT NULL OR boot <> ?2)",
        [cutoff, boot],
    )?;
    if gone == 0 {
        return Ok(false);
    }
    // What only that has led to.
    transaction.execute_batch(
        "DELETE FROM process WHERE
             NOT EXISTS (SELECT 1 FROM decision WHERE process = process.id)
             AND NOT EXISTS (SELECT 1 FROM outcome WHERE process = process.id)
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

/// Takes out the oldest until the rest needs at most nine tenths of `max` bytes, if it needs more than
/// that. Whether something was taken out.
pub(super) fn larger_than(
    transaction: &Transaction,
    max: u64,
    boot: i64,
) -> rusqlite::Result<bool> {
    if used(transaction)? <= max {
        return Ok(false);
    }
    // Each round takes out a tenth, so that hardly more goes than has to.
    while used(transaction)? > max / 10 * 9 {
        let cutoff: Option<i64> = transaction.query_row(
            "WITH old (time) AS (
                 SELECT time FROM decision UNION ALL SELECT time FROM outcome
                 UNION ALL SELECT time FROM dropped
                 UNION ALL SELECT seen FROM session WHERE closed IS NOT NULL OR boot <> ?1)
             SELECT max(time) FROM (
                 SELECT time FROM old ORDER BY time LIMIT (SELECT count(*) / 10 + 1 FROM old))",
            [boot],
            |row| row.get(0),
        )?;
        // What is left is going on.
        let Some(cutoff) = cutoff else { break };
        older_than(transaction, cutoff.saturating_add(1), boot)?;
    }
    Ok(true)
}

/// Bytes in use: what is free in the file is not.
fn used(connection: &Connection) -> rusqlite::Result<u64> {
    let number = |name: &str| -> rusqlite::Result<u64> {
        connection.pragma_query_value(None, name, |row| Ok(row.get::<_, i64>(0)?.cast_unsigned()))
    };
    let pages = number("page_count")?.saturating_sub(number("freelist_count")?);
    Ok(pages.saturating_mul(number("page_size")?))
}

/// Before what time something is too old.
pub(super) fn cutoff(max_age: Duration) -> i64 {
    int(sys::wall_time().saturating_sub(sys::nanoseconds(max_age)))
}

/// Gives what is free in the file back to the file system.
pub(super) fn shrink(store: &Store) -> rusqlite::Result<()> {
    let mut statement = store.connection.prepare("PRAGMA incremental_vacuum")?;
    let mut rows = statement.query([])?;
    // Each step frees a page.
    while rows.next()?.is_some() {}
    Ok(())
}
