//! What is too old, too much or too fast.

use super::*;

/// Records that may wait in these tests.
const ROOM: usize = 3000;

#[test]
fn what_is_too_old_goes_and_what_goes_on_stays() {
    let mut world = World::new();
    let now = sys::boot_time();
    world.options.max_age = Duration::from_nanos(now / 2);
    let mut records = whole(1, 100, 0);
    // Open for longer than anything is kept.
    records.push(opened(1, 200, 0));
    records.extend(whole(now, 300, 0));
    world.tell(&records);
    let pids: Vec<_> = world.all().iter().map(|session| session.pid).collect();
    assert_eq!(pids, [200, 300]);
    assert_eq!(world.number("SELECT count(*) FROM outcome"), 1);
    // The two roots, and the child of the last session.
    assert_eq!(world.number("SELECT count(*) FROM process"), 3);
    let next = Journal::open(world.options.clone(), "another boot".into()).unwrap();
    next.feed().on_records(&whole(now + 1_000_000_000, 400, 0));
    next.close();
    let pids: Vec<_> = world.all().iter().map(|session| session.pid).collect();
    assert_eq!(
        pids,
        [300, 400],
        "what went on before the last boot is over"
    );
}

#[test]
fn what_is_too_much_goes_the_oldest_first_and_the_file_shrinks() {
    let mut world = World::new();
    world.tell(
        &(1..4000)
            .flat_map(|n| whole(n.into(), n * 10, 0))
            .collect::<Vec<_>>(),
    );
    let size = || std::fs::metadata(world.path()).unwrap().len();
    assert!(size() > 1 << 20, "{}", size());
    world.options.max_size = 512 << 10;
    world.tell(&whole(sys::boot_time(), 90_000, 0));
    let size = std::fs::metadata(world.path()).unwrap().len();
    assert!((256 << 10..=512 << 10).contains(&size), "{size}");
    let all = world.all();
    assert_eq!(all.last().unwrap().pid, 90_000);
    let oldest = all[0].pid;
    assert!(oldest > 10, "the first is still there");
    assert!(
        all.windows(2).all(|two| two[0].pid < two[1].pid),
        "the newest stay"
    );
    // With less room than one session takes.
    world.options.max_size = 1;
    world.tell(&whole(sys::boot_time(), 95_000, 0));
    assert!(world.all().is_empty());
}

/// A hold on the database, as a person with a shell may have it.
fn hold(world: &World) -> Connection {
    let other = Connection::open(world.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    other
}

#[test]
fn what_finds_no_room_is_counted_and_told_in_the_stream_and_in_the_journal() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    feed.room = ROOM;
    let decided = |n: u32| decided(1, who(n, 1, 0), "reap");
    let batch: Vec<_> = (2..ROOM as u32).map(decided).collect();
    let count = |told: Option<EventRecord>| match told.map(|record| record.body) {
        Some(EventBody::Dropped {
            by: "journal",
            count,
        }) => count,
        other => panic!("{other:?}"),
    };
    assert!(feed.on_records(&batch).is_none(), "there is room");
    assert!(feed.on_records(&[decided(1)]).is_none(), "still");
    // One more fits.
    let first =
        count(feed.on_records(&[decided(1_000_000), decided(1_000_001), decided(1_000_002)]));
    assert_eq!(first, 2);
    assert!(
        feed.on_records(&[decided(1_000_003)]).is_none(),
        "told already"
    );
    let body = EventBody::MemberMapFull {
        count: 1,
        capacity: 1,
    };
    assert!(
        feed.on_records(&[record(1, body)]).is_none(),
        "does not cross"
    );
    other.execute_batch("ROLLBACK").unwrap();
    let written = || world.number("SELECT count(*) FROM decision");
    eventually("it is written after all", || written() == ROOM as i64);
    let mut told = None;
    eventually("there is room again", || {
        told = feed.on_records(&[decided(1_000_004)]);
        told.is_some()
    });
    assert_eq!(count(told), 1, "the rest");
    journal.close();
    assert_eq!(world.number("SELECT sum(count) FROM dropped"), 3);
}

#[test]
fn what_was_dropped_last_is_told_with_the_summary() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    feed.room = ROOM;
    let batch: Vec<_> = (1..=ROOM as u32 + 1)
        .map(|n| decided(1, who(n, 1, 0), "reap"))
        .collect();
    assert!(feed.on_records(&batch).is_some());
    assert!(feed.on_records(&batch[..5]).is_none());
    let summary = EventBody::Summary {
        count: crate::export::Totals::default(),
        reason: "SIGTERM",
        pin_dir: None,
    };
    let told = feed.on_records(&[record(1, summary)]);
    assert!(matches!(
        told.unwrap().body,
        EventBody::Dropped { count: 5, .. }
    ));
    drop(other);
}

#[test]
fn what_cannot_be_written_at_once_is_written_later() {
    let world = World::new();
    let journal = world.open();
    let other = hold(&world);
    let mut feed = journal.feed();
    for n in 1..=5 {
        feed.on_records(&whole(1, n * 100, 0));
    }
    assert!(journal.keeper().keep(&[]).is_err(), "nor can a keep");
    drop(other);
    eventually("it is written", || world.all().len() == 5);
    journal.close();
}
