use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// Id of the run that takes a slot.
const OWN: &str = "self22";

fn limit(runs: usize) -> ConcurrencyLimit {
    ConcurrencyLimit {
        group: "x".to_owned(),
        runs,
    }
}

fn must_not_wait() {
    panic!("no slot is must_not_wait")
}

#[test]
fn waiting_runs_all_get_the_slot() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let first = runs.take_slot(&limit(1), OWN, must_not_wait).unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..5 {
            let (sender, waits) = channel();
            let (order, runs) = (&order, &runs);
            scope.spawn(move || {
                let slot = runs.take_slot(&limit(1), OWN, || sender.send(()).unwrap());
                order.lock().unwrap().push(n);
                drop(slot.unwrap());
            });
            waits.recv().unwrap();
        }
        drop(first);
    });
    let mut order = order.into_inner().unwrap();
    order.sort_unstable();
    assert_eq!(order, [0, 1, 2, 3, 4]);
}

#[test]
fn concurrent_runs_do_not_exceed_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                let slot = runs.take_slot(&limit(3), OWN, || ()).unwrap();
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::yield_now();
                now.fetch_sub(1, Ordering::SeqCst);
                drop(slot);
            });
        }
    });
    let most = most.load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at once");
}

#[test]
fn waiting_run_gets_the_first_released_slot() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    for released in [0, 1, 2] {
        let mut held: Vec<_> = (0..3)
            .map(|_| runs.take_slot(&limit(3), OWN, must_not_wait).unwrap())
            .collect();
        thread::scope(|scope| {
            let (sender, waits) = channel();
            let runs = &runs;
            let on_wait = move || sender.send(()).unwrap();
            let waiting = scope.spawn(move || runs.take_slot(&limit(3), OWN, on_wait));
            waits.recv().unwrap();
            drop(held.remove(released));
            waiting.join().unwrap().unwrap();
        });
    }
}

#[test]
fn slot_of_a_killed_run_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let group = dir.path().join("limits/x");
    fs::create_dir_all(&group).unwrap();
    for (name, content) in [("0.slot", "gone22-and-more"), ("9.slot", ""), ("junk", "")] {
        fs::write(group.join(name), content).unwrap();
    }
    let slot = runs.take_slot(&limit(1), OWN, must_not_wait).unwrap();
    assert_eq!(fs::read_to_string(group.join("0.slot")).unwrap(), OWN);
    drop(slot);
}

#[test]
fn group_that_is_no_name_is_refused_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(&dir.path().join("runs")).unwrap();
    let long = "x".repeat(65);
    for (group, count) in [
        ("../x", 1),
        ("/tmp/x", 1),
        ("..", 1),
        ("", 1),
        (".x", 1),
        ("a/b", 1),
        (&long, 1),
        ("x", 0),
    ] {
        let group = group.to_owned();
        let limit = ConcurrencyLimit { group, runs: count };
        let refused = runs.take_slot(&limit, OWN, must_not_wait).unwrap_err();
        assert!(matches!(refused, RecordError::Limit { .. }), "{refused}");
    }
    assert!(!runs.dir().join("limits").exists());
}
