//! Schemas of other versions of this program.

use std::collections::BTreeMap;

use super::history::HistoryError;
use super::*;
use crate::journal::recorded::recorded_sessions;
use crate::journal::schema::{MIGRATIONS, OLDEST, SCHEMA, migrate};

/// A journal of schema version 3. The code of commit 98e3e72 wrote it through `Journal` in a unit test: three sessions,
/// and four keeps of boot [`BOOT`]. `PRAGMA wal_checkpoint(TRUNCATE)` made it one file.
const V3: &[u8] = include_bytes!("fixtures/v3.sqlite");
/// Its sessions, as `reaper history --json` of that commit writes them.
const V3_HISTORY: &str = include_str!("fixtures/v3.jsonl");
/// Renames since: of reasons (`migrations/4.sql`), and of a key of `reaper history --json`. `memory.pss` was removed.
const RENAMED: [(&str, &str); 6] = [
    ("\"keep_mark\"", "\"keep_marker\""),
    ("my-sh", "my-sh-bbfe"),
    ("\"root_gone\"", "\"root_exited\""),
    ("\"memory.unread\"", "\"memory.unmeasured\""),
    ("\"memory.pss\":2048,", ""),
    ("\"memory.pss\":0,", ""),
];

impl World {
    /// Creates a world whose journal has this content.
    fn with(journal: &[u8]) -> World {
        let world = World::new();
        std::fs::create_dir(&world.options.directory).unwrap();
        std::fs::write(world.path(), journal).unwrap();
        world
    }

    /// Returns the files of the journal with their content.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let files = std::fs::read_dir(&self.options.directory).unwrap();
        let files = files.map(|file| file.unwrap().path());
        files
            .map(|path| (path.clone(), std::fs::read(path).unwrap()))
            .collect()
    }
}

#[test]
fn journal_of_version_3_keeps_history_and_keeps_when_upgraded() {
    let world = World::with(V3);
    let journal = world.open();
    assert!(!journal.was_replaced());
    let keeps = journal.keeps().iter().map(|keep| {
        let ends = keep.until.map(|until| (until.awake, until.wall));
        (keep.key.pid, keep.is_explicit, keep.tree, keep.by_uid, ends)
    });
    let far = u64::MAX >> 2;
    let expected = [
        (102, true, false, 1000, None),
        (103, true, false, 0, Some((far, far))),
        (104, true, true, 1000, None),
        (105, false, true, 1000, None),
    ];
    assert_eq!(keeps.collect::<Vec<_>>(), expected);
    journal.close();
    let history = world.all().into_iter();
    let history = history.map(|session| serde_json::to_string(&session).unwrap() + "\n");
    let mut expected = V3_HISTORY.to_owned();
    for (old, new) in RENAMED {
        assert!(expected.contains(old));
        expected = expected.replace(old, new);
    }
    assert_eq!(history.collect::<String>(), expected);
    assert_eq!(world.number("PRAGMA user_version"), SCHEMA);
    // The reason of a `not_sent` outcome, besides that of a decision.
    let renamed = "SELECT count(*) FROM outcome WHERE reason = 'keep_marker'";
    assert_eq!(world.number(renamed), 1);
    assert!(world.renamed().is_empty());
}

#[test]
fn new_journal_has_the_newest_version() {
    let world = World::new();
    world.open().close();
    assert_eq!(world.number("PRAGMA user_version"), SCHEMA);
}

/// A row for each table, in columns that all versions have.
const ROWS: &str = "
    PRAGMA foreign_keys = OFF;
    INSERT INTO boot (id, uuid) VALUES (1, '5c5ab1f5-0000-4000-8000-000000000001');
    INSERT INTO session (id, boot, pid, start, agent, root, opened, seen, reaped)
        VALUES (1, 1, 100, 7, 'claude', 1, 5, 6, 3);
    INSERT INTO process (id, boot, pid, start, session, uid, comm, exe, args)
        VALUES (1, 1, 100, 7, 1, 1000, 'sh', '/bin/sh', '[\"sh\"]');
    INSERT INTO decision (process, time, verdict, reason, rule) VALUES (1, 8, 'keep', 'rule', 'mine');
    INSERT INTO outcome (process, time, outcome, exit_code) VALUES (1, 9, 'ended', 3);
    INSERT INTO dropped (time, count) VALUES (1, 1);
    INSERT INTO keep (boot, pid, start, asked, tree, by_uid, made, session_pid, session_start)
        VALUES (1, 100, 7, 1, 0, 1000, 4, 100, 7);
";

#[test]
fn journal_of_each_version_keeps_its_rows_when_upgraded() {
    for (version, last) in (OLDEST..).zip(1..=MIGRATIONS.len()) {
        let world = World::with(b"");
        let mut connection = Connection::open(world.path()).unwrap();
        migrate(&mut connection, &MIGRATIONS[..last]).unwrap();
        connection.execute_batch(ROWS).unwrap();
        drop(connection);
        assert_eq!(world.number("PRAGMA user_version"), version);
        let content = std::fs::read(world.path()).unwrap();
        let before = world.all();
        let (_, kept) = recorded_sessions(&world.path(), BOOT).unwrap();
        assert_eq!(kept.len(), 1, "version {version}");
        let unchanged = std::fs::read(world.path()).unwrap() == content;
        assert!(unchanged, "version {version}: a reader changed it");
        let journal = world.open();
        let [keep] = journal.keeps() else {
            panic!("version {version}: {:?}", journal.keeps())
        };
        assert_eq!((keep.key.pid, keep.by_uid, keep.until), (100, 1000, None));
        journal.close();
        assert_eq!(world.number("PRAGMA user_version"), SCHEMA);
        assert_eq!(
            world.all(),
            before,
            "version {version}: read before the upgrade"
        );
        let [session] = &world.all()[..] else {
            panic!("version {version}: {:?}", world.all())
        };
        let process = &session.processes[0];
        assert_eq!((session.reaped, &*process.exe), (3, "/bin/sh"));
        assert_eq!(process.decisions[0].rule.as_deref(), Some("mine"));
        assert_eq!(process.outcomes[0].exit.code, Some(3));
        assert!(world.renamed().is_empty(), "version {version}");
    }
}

#[test]
fn damaged_older_journal_is_not_read_and_not_changed() {
    let world = World::with(V3);
    let connection = Connection::open(world.path()).unwrap();
    connection.execute_batch("DROP TABLE outcome").unwrap();
    drop(connection);
    let before = std::fs::read(world.path()).unwrap();
    let read = history::read(&world.path(), &HistoryQuery::default(), |_| Ok(()));
    let error = read.unwrap_err().to_string();
    assert!(
        error.contains("cannot read the journal") && error.contains("no such table"),
        "{error}"
    );
    assert!(std::fs::read(world.path()).unwrap() == before);
}

#[test]
fn journal_of_older_version_is_read_while_its_service_writes() {
    let world = World::with(V3);
    let mut writer = Connection::open(world.path()).unwrap();
    writer.pragma_update(None, "journal_mode", "WAL").unwrap();
    let sessions = world.all().len();
    assert_eq!(sessions, 3);
    let writing = writer.transaction().unwrap();
    writing
        .execute_batch("UPDATE session SET agent = 'other'")
        .unwrap();
    assert_eq!(world.all().len(), sessions);
    assert!(world.all().iter().all(|session| session.agent != "other"));
    writing.commit().unwrap();
    assert!(world.all().iter().all(|session| session.agent == "other"));
    assert_eq!(world.number("PRAGMA user_version"), 3);
}

#[test]
fn upgrade_that_is_interrupted_changes_nothing() {
    let world = World::with(V3);
    let broken = [
        &MIGRATIONS[..],
        &["DELETE FROM keep; SELECT no_such_function();"],
    ]
    .concat();
    let mut connection = Connection::open(world.path()).unwrap();
    migrate(&mut connection, &broken).unwrap_err();
    drop(connection);
    assert_eq!(world.number("PRAGMA user_version"), 3);
    let old = "SELECT count(*) FROM decision WHERE reason = 'keep_mark'";
    assert_eq!(world.number(old), 1);
    let journal = world.open();
    assert_eq!(journal.keeps().len(), 4);
    assert_eq!(world.number("PRAGMA user_version"), SCHEMA);
}

/// Checks that neither the service nor a reader opens a journal of version 9 or changes its files.
fn is_refused(world: &World) {
    let before = world.files();
    let refused = Journal::open(world.options.clone(), BOOT.into()).err();
    let Some(JournalError::Newer(newer)) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((newer.found, &newer.path), (9, &world.path()));
    let message = newer.to_string();
    assert!(
        message.contains("schema version 9") && message.contains("install"),
        "{message}"
    );
    let read = history::read(&world.path(), &HistoryQuery::default(), |_| Ok(()));
    assert!(matches!(read, Err(HistoryError::Newer(_))), "{read:?}");
    assert!(matches!(
        recorded_sessions(&world.path(), BOOT),
        Err(HistoryError::Newer(_))
    ));
    assert_eq!(world.files(), before);
}

#[test]
fn journal_of_newer_version_is_refused_and_left_untouched() {
    let world = World::new();
    world.store(&lifecycle(1, 100, 0));
    let newer = Connection::open(world.path()).unwrap();
    newer.pragma_update(None, "user_version", 9).unwrap();
    assert!(files::with_suffix(&world.path(), "-wal").exists());
    // The service that upgraded it still runs.
    is_refused(&world);
    // It was killed before a checkpoint, so that the version is in the log alone; or the index of the log is missing.
    let killed = World::with(b"");
    for name in ["", "-wal", "-shm"] {
        let file = |world: &World| files::with_suffix(&world.path(), name);
        std::fs::copy(file(&world), file(&killed)).unwrap();
    }
    is_refused(&killed);
    std::fs::remove_file(files::with_suffix(&killed.path(), "-shm")).unwrap();
    is_refused(&killed);
    // It was stopped.
    drop(newer);
    assert_eq!(world.files().len(), 1);
    is_refused(&world);
}

#[test]
fn upgrade_that_was_never_committed_does_not_count_as_newer() {
    let world = World::new();
    let killed = World::with(b"");
    world.open().close();
    let mut newer = Connection::open(world.path()).unwrap();
    newer.execute_batch("PRAGMA cache_size = 1").unwrap();
    let upgrade = newer.transaction().unwrap();
    upgrade.pragma_update(None, "user_version", 9).unwrap();
    // More than fits into the cache, so that pages are written before the commit.
    let sql = "CREATE TABLE large AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100)
        SELECT i, zeroblob(4000) FROM n";
    upgrade.execute_batch(sql).unwrap();
    for name in ["", "-wal"] {
        let file = |world: &World| files::with_suffix(&world.path(), name);
        std::fs::copy(file(&world), file(&killed)).unwrap();
    }
    let log = std::fs::metadata(files::with_suffix(&killed.path(), "-wal")).unwrap();
    assert!(log.len() > 100_000, "{}", log.len());
    killed.store(&lifecycle(1, 100, 0));
    assert_eq!(killed.all().len(), 1);
}
