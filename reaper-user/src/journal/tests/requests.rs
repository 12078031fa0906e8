//! Requests of users, and ancestors of processes.

use super::history::HistoryAncestor;
use super::*;
use crate::export::{Ancestor, KeepDuration};

/// Returns the record of a request by uid 1000; of `unkeep` for `None`.
fn requested(time: u64, process: ProcessRef, kept: Option<KeepDuration>) -> EventRecord {
    let body = EventBody::Keep {
        process,
        by: 1000,
        kept,
        processes: 1,
    };
    record(time, body)
}

fn kept_until(until: Option<u64>) -> Option<KeepDuration> {
    Some(KeepDuration { until, tree: true })
}

#[test]
fn requests_are_stored_apart_from_decisions() {
    let world = World::new();
    let now = sys::boot_time();
    let member = |pid| process(pid, 100, 1000);
    let records = [
        opened(now, 100, 1000),
        requested(now + 1, member(101), kept_until(Some(now + 1_000_000_001))),
        requested(now + 2, member(101), None),
        requested(now + 3, member(102), kept_until(None)),
        exited(now + 4, member(102), ExitStatus::Exited(3)),
    ];
    world.store(&records);
    // A retry of the same records adds nothing.
    world.store(&records);
    let session = &world.all()[0];
    let [first, second] = &session.processes[..] else {
        panic!("{session:?}")
    };
    let requests = first.requests.iter();
    let requests: Vec<_> = requests.map(|r| (&*r.request, r.by_uid, r.tree)).collect();
    let expected = [("keep", 1000, Some(true)), ("unkeep", 1000, None)];
    assert_eq!(requests, expected);
    let lasts = first.requests[0]
        .until
        .unwrap()
        .duration_since(first.requests[0].time);
    assert_eq!(lasts.as_millis(), 1000);
    assert_eq!(first.requests[1].until, None);
    assert_eq!((first.decisions.len(), first.outcomes.len()), (0, 0));
    assert!(first.exited_at.is_none());
    // The exit of a process that only has a request is stored.
    assert_eq!((second.pid, second.requests[0].until), (102, None));
    assert_eq!(second.own_exit().unwrap().1.code, Some(3));
    let of_pid = world.history(&HistoryQuery {
        pids: vec![101],
        ..HistoryQuery::default()
    });
    assert_eq!(of_pid[0].processes, std::slice::from_ref(first));
    let (_, last) = history::last_with_pid(&world.path(), BOOT, 101, Some(1000))
        .unwrap()
        .unwrap();
    assert_eq!(last.pid, 101);
}

#[test]
fn latest_requests_of_a_process_are_stored() {
    let world = World::new();
    let now = sys::boot_time();
    let member = || process(101, 100, 1000);
    let requests =
        (1..=40).map(|n| requested(now + n, member(), kept_until(Some(now + n + 1_000))));
    let records: Vec<EventRecord> = [opened(now, 100, 1000)]
        .into_iter()
        .chain(requests)
        .collect();
    world.store(&records);
    let stored = &world.all()[0].processes[0].requests;
    assert_eq!(stored.len(), 32);
    let time = |n: usize| stored[n].time;
    assert_eq!(time(31).duration_since(time(0)).as_nanos(), 31);
}

#[test]
fn old_requests_are_deleted_and_recent_ones_keep_their_process() {
    let mut world = World::new();
    let now = sys::boot_time();
    world.options.max_age = Duration::from_nanos(now / 2);
    let member = |pid| process(pid, 100, 0);
    world.store(&[
        opened(now, 100, 0),
        requested(1, member(101), kept_until(None)),
        requested(1, member(102), kept_until(None)),
        requested(now, member(102), None),
    ]);
    let session = &world.all()[0];
    let left = session.processes.iter();
    let left: Vec<_> = left.map(|p| (p.pid, p.requests.len())).collect();
    assert_eq!(left, [(102, 1)]);
    assert_eq!(
        world.number("SELECT count(*) FROM process WHERE pid = 101"),
        0
    );
}

#[test]
fn oversized_journal_loses_oldest_requests() {
    let mut world = World::new();
    let request = |n: u32| requested(n.into(), process(n, 1, 0), kept_until(None));
    world.store(&(2..8000).map(request).collect::<Vec<_>>());
    let size = || std::fs::metadata(world.path()).unwrap().len();
    assert!(size() > 1 << 20, "{}", size());
    world.options.max_size = 512 << 10;
    world.store(&[requested(sys::boot_time(), process(9000, 1, 0), None)]);
    let left = world.number("SELECT count(*) FROM request");
    assert!((100..7000).contains(&left), "{left}");
    assert_eq!(
        world.number("SELECT count(*) FROM request WHERE request = 'unkeep'"),
        1
    );
    assert_eq!(
        world.number("SELECT count(*) FROM process"),
        world.number("SELECT count(DISTINCT process) FROM request")
    );
}

#[test]
fn stored_ancestors_are_replaced_unless_fewer_are_known() {
    let world = World::new();
    let now = sys::boot_time();
    let ancestor = |pid, has_exited| Ancestor {
        key: key(pid),
        image: Arc::new(Image {
            comm: format!("p{pid}").into(),
            ..Image::default()
        }),
        has_exited,
    };
    let decided_with = |verdict, ancestors: &[Ancestor]| {
        let mut record = decided(now, process(103, 100, 0), verdict);
        if let EventBody::Decision { decision, .. } = &mut record.body {
            decision.ancestors = ancestors.into();
        }
        record
    };
    let stored = |records: &[EventRecord]| {
        world.store(records);
        let lineage = world.all().remove(0).processes.remove(0).lineage;
        let ancestor = |a: HistoryAncestor| (a.pid, a.start_ns, a.comm, a.exited);
        lineage.into_iter().map(ancestor).collect::<Vec<_>>()
    };
    let expected = |pid: u32, exited| (pid, key(pid).start, format!("p{pid}"), exited);
    assert_eq!(
        stored(&[opened(now, 100, 0), decided_with("keep", &[])]),
        []
    );
    assert_eq!(
        stored(&[decided_with(
            "wait",
            &[ancestor(102, true), ancestor(100, false)]
        )]),
        [expected(102, true), expected(100, false)]
    );
    // A restarted service knows the parent alone.
    let both = [expected(102, true), expected(100, true)];
    assert_eq!(
        stored(&[
            decided_with("report", &[ancestor(102, true), ancestor(100, true)]),
            decided_with("keep", &[ancestor(102, true)]),
            decided_with("reap", &[]),
        ]),
        both
    );
    let json = serde_json::to_value(&world.all()[0].processes[0]).unwrap();
    let parent = serde_json::json!({
        "process.pid": 102, "process.start_ns": 102_000_000, "process.comm": "p102", "exited": true
    });
    assert_eq!(json["lineage"][0], parent);
    // A damaged lineage is unknown, and replaced.
    let connection = Connection::open(world.path()).unwrap();
    connection
        .execute_batch("UPDATE process SET lineage = '[{'")
        .unwrap();
    drop(connection);
    assert_eq!(stored(&[]), []);
    let parent = stored(&[decided_with("keep", &[ancestor(102, true)])]);
    assert_eq!(parent, [expected(102, true)]);
}
