use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// The run that asks for a place.
const OWN: &str = "self22";

fn limit(runs: usize) -> ConcurrencyLimit {
    ConcurrencyLimit {
        group: "x".to_owned(),
        runs,
    }
}

#[test]
fn who_comes_first_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let first = runs
        .place(&limit(1), OWN, |_| panic!("there is a place"))
        .unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..5 {
            let (tell, told) = channel();
            let (order, runs) = (&order, &runs);
            scope.spawn(move || {
                let place = runs.place(&limit(1), OWN, |before| tell.send(before).unwrap());
                order.lock().unwrap().push(n);
                drop(place.unwrap());
            });
            // It has its number, and waits.
            assert_eq!(told.recv().unwrap(), n + 1);
        }
        drop(first);
    });
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn there_are_never_more_than_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                let place = runs.place(&limit(3), OWN, |_| ()).unwrap();
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::yield_now();
                now.fetch_sub(1, Ordering::SeqCst);
                drop(place);
            });
        }
    });
    let most = most.load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at once");
    let left: Vec<_> = fs::read_dir(dir.path().join("limits/x")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Killed, nobody has removed their files.
#[test]
fn the_places_of_those_who_are_gone_are_free() {
    let dir = tempfile::tempdir().unwrap();
    let runs = Runs::open(dir.path()).unwrap();
    let group = dir.path().join("limits/x");
    fs::create_dir_all(&group).unwrap();
    for name in ["1.ticket", "2.ticket", "2.waits", "7.ticket", "junk"] {
        fs::write(group.join(name), "").unwrap();
    }
    let place = runs.place(&limit(1), OWN, |_| panic!("there is a place"));
    assert!(group.join("8.ticket").exists());
    drop(place);
}
