//! Limits of age, size and rate.

use super::*;

/// Limit of waiting records in these tests.
const ROOM: usize = 3000;

#[test]
fn old_records_are_deleted_except_open_sessions() {
    let mut world = World::new();
    let now = sys::boot_time();
    world.options.max_age = Duration::from_nanos(now / 2);
    let mut records = lifecycle(1, 100, 0);
    // Open for longer than the maximum age.
    records.push(opened(1, 200, 0));
    records.extend(lifecycle(now, 300, 0));
    world.store(&records);
    let pids: Vec<_> = world.all().iter().map(|session| session.pid).collect();
    assert_eq!(pids, [200, 300]);
    assert_eq!(world.number("SELECT count(*) FROM outcome"), 1);
    // Two roots, and the child of the last session.
    assert_eq!(world.number("SELECT count(*) FROM process"), 3);
    let next = Journal::open(world.options.clone(), "another boot".into()).unwrap();
    next.feed()
        .on_records(&lifecycle(now + 1_000_000_000, 400, 0));
    next.close();
    let pids: Vec<_> = world.all().iter().map(|session| session.pid).collect();
    assert_eq!(
        pids,
        [300, 400],
        "open sessions of an earlier boot are deleted"
    );
}

#[test]
fn oversized_journal_loses_oldest_records_and_shrinks() {
    let mut world = World::new();
    world.store(
        &(1..4000)
            .flat_map(|n| lifecycle(n.into(), n * 10, 0))
            .collect::<Vec<_>>(),
    );
    let size = || std::fs::metadata(world.path()).unwrap().len();
    assert!(size() > 1 << 20, "{}", size());
    world.options.max_size = 512 << 10;
    world.store(&lifecycle(sys::boot_time(), 90_000, 0));
    let size = std::fs::metadata(world.path()).unwrap().len();
    assert!((256 << 10..=512 << 10).contains(&size), "{size}");
    let all = world.all();
    assert_eq!(all.last().unwrap().pid, 90_000);
    let oldest = all[0].pid;
    assert!(oldest > 10, "the oldest session was not deleted");
    assert!(
        all.windows(2).all(|two| two[0].pid < two[1].pid),
        "the order has changed"
    );
    // Less space than one session takes.
    world.options.max_size = 1;
    world.store(&lifecycle(sys::boot_time(), 95_000, 0));
    assert!(world.all().is_empty());
}

/// Locks the database, as a user's SQLite shell could.
fn hold(world: &World) -> Connection {
    let other = Connection::open(world.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    other
}

#[test]
fn dropped_records_are_counted_in_stream_and_journal() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    feed.room = ROOM;
    let decided = |n: u32| decided(1, process(n, 1, 0), "reap");
    let batch: Vec<_> = (2..ROOM as u32).map(decided).collect();
    let count = |record: Option<EventRecord>| match record.map(|record| record.body) {
        Some(EventBody::Dropped {
            by: "journal",
            count,
        }) => count,
        other => panic!("{other:?}"),
    };
    assert!(feed.on_records(&batch).is_none(), "there is room");
    assert!(feed.on_records(&[decided(1)]).is_none(), "room left");
    // There is room for one of these.
    let first =
        count(feed.on_records(&[decided(1_000_000), decided(1_000_001), decided(1_000_002)]));
    assert_eq!(first, 2);
    assert!(
        feed.on_records(&[decided(1_000_003)]).is_none(),
        "reported already"
    );
    let body = EventBody::MemberMapFull {
        count: 1,
        capacity: 1,
    };
    assert!(
        feed.on_records(&[record(1, body)]).is_none(),
        "not a record for the journal"
    );
    other.execute_batch("ROLLBACK").unwrap();
    let written = || world.number("SELECT count(*) FROM decision");
    eventually("the records are written", || written() == ROOM as i64);
    let mut dropped = None;
    eventually("there is room again", || {
        dropped = feed.on_records(&[decided(1_000_004)]);
        dropped.is_some()
    });
    assert_eq!(count(dropped), 1, "the later drop");
    journal.close();
    assert_eq!(world.number("SELECT sum(count) FROM dropped"), 3);
}

#[test]
fn last_drops_are_reported_with_the_summary() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    feed.room = ROOM;
    let batch: Vec<_> = (1..=ROOM as u32 + 1)
        .map(|n| decided(1, process(n, 1, 0), "reap"))
        .collect();
    assert!(feed.on_records(&batch).is_some());
    assert!(feed.on_records(&batch[..5]).is_none());
    let summary = EventBody::Summary {
        count: crate::export::Totals::default(),
        reason: "SIGTERM",
        pin_dir: None,
        first_waiting: Vec::new(),
    };
    let dropped = feed.on_records(&[record(1, summary)]);
    assert!(matches!(
        dropped.unwrap().body,
        EventBody::Dropped { count: 5, .. }
    ));
    drop(other);
}

#[test]
fn records_of_a_locked_journal_are_written_later() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    for n in 1..=5 {
        feed.on_records(&lifecycle(1, n * 100, 0));
    }
    assert!(journal.keep_writer().keep(&[]).is_err(), "locked");
    drop(other);
    eventually("the sessions are written", || world.all().len() == 5);
    journal.close();
}
