//! Versions of the database schema, and the upgrades between them.

use rusqlite::{Connection, TransactionBehavior};

/// SQLite application id, `Reap` in ASCII.
pub(super) const APPLICATION_ID: i64 = 0x5265_6170;
/// Schema version of the first migration. No release had an older version.
pub(super) const OLDEST: i64 = 3;
/// Migrations: the first creates the schema of version [`OLDEST`], others upgrade by one version. They never change.
pub(super) const MIGRATIONS: [&str; 5] = [
    include_str!("migrations/3.sql"),
    include_str!("migrations/4.sql"),
    include_str!("migrations/5.sql"),
    include_str!("migrations/6.sql"),
    include_str!("migrations/7.sql"),
];
/// Schema version (`user_version`) that this program reads and writes.
pub(super) const SCHEMA: i64 = OLDEST - 1 + MIGRATIONS.len() as i64;

/// Creates or upgrades the schema in one transaction, so that it always matches the stored version.
pub(super) fn migrate(connection: &mut Connection, migrations: &[&str]) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found: i64 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let wanted = (OLDEST..)
        .zip(migrations)
        .filter(|(version, _)| *version > found);
    for (version, migration) in wanted {
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", version)?;
    }
    transaction.commit()
}
