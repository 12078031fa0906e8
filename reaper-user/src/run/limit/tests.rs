use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// The run that asks for a slot.
const OWN: &str = "self22";

fn limit(runs: usize) -> ConcurrencyLimit {
    ConcurrencyLimit {
        group: "x".to_owned(),
        runs,
    }
}

fn free() {
    panic!("a slot is free")
}

#[test]
fn all_that_wait_for_a_slot_get_it_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let first = runs.take_slot(&limit(1), OWN, free).unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..5 {
            let (tell, told) = channel();
            let (order, runs) = (&order, &runs);
            scope.spawn(move || {
                let slot = runs.take_slot(&limit(1), OWN, || tell.send(()).unwrap());
                order.lock().unwrap().push(n);
                drop(slot.unwrap());
            });
            told.recv().unwrap();
        }
        drop(first);
    });
    let mut order = order.into_inner().unwrap();
    order.sort_unstable();
    assert_eq!(order, [0, 1, 2, 3, 4]);
}

#[test]
fn there_are_never_more_than_the_limit() {
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

/// Whichever slot is released first wakes the run that waits.
#[test]
fn run_that_waits_gets_the_first_slot_that_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    for released in [0, 1, 2] {
        let mut held: Vec<_> = (0..3)
            .map(|_| runs.take_slot(&limit(3), OWN, free).unwrap())
            .collect();
        thread::scope(|scope| {
            let (tell, told) = channel();
            let runs = &runs;
            let waits = move || tell.send(()).unwrap();
            let waiting = scope.spawn(move || runs.take_slot(&limit(3), OWN, waits));
            told.recv().unwrap();
            drop(held.remove(released));
            waiting.join().unwrap().unwrap();
        });
    }
}

#[test]
fn slot_of_a_run_that_was_killed_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let group = dir.path().join("limits/x");
    fs::create_dir_all(&group).unwrap();
    for (name, content) in [("0.slot", "gone22-and-more"), ("9.slot", ""), ("junk", "")] {
        fs::write(group.join(name), content).unwrap();
    }
    let slot = runs.take_slot(&limit(1), OWN, free).unwrap();
    assert_eq!(fs::read_to_string(group.join("0.slot")).unwrap(), OWN);
    drop(slot);
}
