//! How often it looks.

use crate::source::scan::interval::{Found, ScanPace};
use reaper_model::event::TICK_NS;

const MS: u64 = 1_000_000;

#[test]
fn fast_while_something_happens_and_slower_and_slower_while_nothing_does() {
    let mut pace = ScanPace::new(50 * MS, 2000 * MS);
    assert_eq!(pace.due(), 0);
    let mut intervals = Vec::new();
    let mut now = 0;
    for found in [Found::News, Found::Nothing, Found::Nothing, Found::News] {
        now += 1;
        pace.passed(now - 1, now, found);
        intervals.push((pace.due() - now) / MS);
        now = pace.due();
    }
    assert_eq!(intervals, [50, 100, 200, 50]);
    for _ in 0..20 {
        pace.passed(now, now, Found::Nothing);
    }
    assert_eq!(pace.due(), now + 2000 * MS);
    pace.stir();
    assert_eq!(pace.due(), now + 50 * MS);
    pace.passed(now, now, Found::Peace);
    assert_eq!(pace.due(), now + 2000 * MS);
    pace.hurry(now);
    assert_eq!(pace.due(), now + MS);
    assert!(!pace.is_due(pace.due() - 1, false) && pace.is_due(pace.due(), false));
    let due = pace.due();
    pace.hurry(due + MS);
    assert_eq!(pace.due(), due, "one end after the other puts nothing off");
    assert!(!pace.is_due(due, true) && pace.is_due(due + 5 * MS, true));
}

#[test]
fn never_more_than_a_fifth_of_a_processor() {
    let mut pace = ScanPace::new(50 * MS, 2000 * MS);
    pace.passed(0, 100 * MS, Found::News);
    assert_eq!(pace.due(), 500 * MS);
    pace.hurry(100 * MS);
    pace.stir();
    pace.press(true);
    assert_eq!(pace.due(), 500 * MS);
    pace.passed(1000 * MS, 1001 * MS, Found::Peace);
    assert_eq!(pace.due(), 1001 * MS + TICK_NS, "a ladder is open");
    pace.press(false);
    pace.passed(1100 * MS, 1101 * MS, Found::Peace);
    assert_eq!(pace.due(), 3101 * MS);
}
