//! The versions of the database schema, and upgrades between them.

use rusqlite::{Connection, TransactionBehavior};

/// `Reap` in ASCII, at its place in the file.
pub(super) const APPLICATION_ID: i64 = 0x5265_6170;
/// Schema version of the first migration. No release had an older one.
pub(super) const OLDEST: i64 = 3;
/// Creates the schema of version [`OLDEST`], then upgrades by one version each. Released ones never change.
pub(super) const MIGRATIONS: [&str; 2] = [
    include_str!("migrations/3.sql"),
    include_str!("migrations/4.sql"),
];
/// Schema version (`user_version`) that this program reads and writes.
pub(super) const SCHEMA: i64 = OLDEST - 1 + MIGRATIONS.len() as i64;

/// Upgrades the schema to the version that the last of `migrations` makes, or creates it. Does all of it in one
/// transaction, so that a database always has the version that it names.
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
