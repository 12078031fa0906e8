//! How often it looks.

use crate::source::scan::interval::{PassResult, ScanSchedule};
use reaper_model::event::TICK_NS;

const MS: u64 = 1_000_000;

#[test]
fn fast_while_something_happens_and_slower_and_slower_while_nothing_does() {
    let mut pace = ScanSchedule::new(50 * MS, 2000 * MS);
    assert_eq!(pace.due(), 0);
    let mut intervals = Vec::new();
    let mut now = 0;
    for found in [
        PassResult::Changed,
        PassResult::Unchanged,
        PassResult::Unchanged,
        PassResult::Changed,
    ] {
        now += 1;
        pace.on_pass_end(now - 1, now, found);
        intervals.push((pace.due() - now) / MS);
        now = pace.due();
    }
    assert_eq!(intervals, [50, 100, 200, 50]);
    for _ in 0..20 {
        pace.on_pass_end(now, now, PassResult::Unchanged);
    }
    assert_eq!(pace.due(), now + 2000 * MS);
    pace.on_activity();
    assert_eq!(pace.due(), now + 50 * MS);
    pace.on_pass_end(now, now, PassResult::Idle);
    assert_eq!(pace.due(), now + 2000 * MS);
    pace.on_exit(now);
    assert_eq!(pace.due(), now + MS);
    assert!(!pace.is_due(pace.due() - 1, false) && pace.is_due(pace.due(), false));
    let due = pace.due();
    pace.on_exit(due + MS);
    assert_eq!(pace.due(), due, "one end after the other puts nothing off");
    assert!(!pace.is_due(due, true) && pace.is_due(due + 5 * MS, true));
}

#[test]
fn never_more_than_a_fifth_of_a_processor() {
    let mut pace = ScanSchedule::new(50 * MS, 2000 * MS);
    pace.on_pass_end(0, 100 * MS, PassResult::Changed);
    assert_eq!(pace.due(), 500 * MS);
    pace.on_exit(100 * MS);
    pace.on_activity();
    pace.set_escalating(true);
    assert_eq!(pace.due(), 500 * MS);
    pace.on_pass_end(1000 * MS, 1001 * MS, PassResult::Idle);
    assert_eq!(pace.due(), 1001 * MS + TICK_NS, "a ladder is open");
    pace.set_escalating(false);
    pace.on_pass_end(1100 * MS, 1101 * MS, PassResult::Idle);
    assert_eq!(pace.due(), 3101 * MS);
}
