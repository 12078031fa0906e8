//! Tests of the schedule of passes.

use crate::source::scan::interval::{PassResult, ScanSchedule};
use reaper_model::event::TICK_NS;

const MS: u64 = 1_000_000;

#[test]
fn interval_grows_while_nothing_changes() {
    let mut schedule = ScanSchedule::new(50 * MS, 2000 * MS);
    assert_eq!(schedule.due(), 0);
    let mut intervals = Vec::new();
    let mut now = 0;
    for found in [
        PassResult::Changed,
        PassResult::Unchanged,
        PassResult::Unchanged,
        PassResult::Changed,
    ] {
        now += 1;
        schedule.on_pass_end(now - 1, now, found);
        intervals.push((schedule.due() - now) / MS);
        now = schedule.due();
    }
    assert_eq!(intervals, [50, 100, 200, 50]);
    for _ in 0..20 {
        schedule.on_pass_end(now, now, PassResult::Unchanged);
    }
    assert_eq!(schedule.due(), now + 2000 * MS);
    schedule.on_activity();
    assert_eq!(schedule.due(), now + 50 * MS);
    schedule.on_pass_end(now, now, PassResult::Idle);
    assert_eq!(schedule.due(), now + 2000 * MS);
    schedule.on_exit(now);
    assert_eq!(schedule.due(), now + MS);
    assert!(!schedule.is_due(schedule.due() - 1, false) && schedule.is_due(schedule.due(), false));
    let due = schedule.due();
    schedule.on_exit(due + MS);
    assert_eq!(schedule.due(), due, "further exits do not delay the pass");
    assert!(!schedule.is_due(due, true) && schedule.is_due(due + 5 * MS, true));
}

#[test]
fn passes_take_at_most_a_fifth_of_a_processor() {
    let mut schedule = ScanSchedule::new(50 * MS, 2000 * MS);
    schedule.on_pass_end(0, 100 * MS, PassResult::Changed);
    assert_eq!(schedule.due(), 500 * MS);
    schedule.on_exit(100 * MS);
    schedule.on_activity();
    schedule.set_escalating(true);
    assert_eq!(schedule.due(), 500 * MS);
    schedule.on_pass_end(1000 * MS, 1001 * MS, PassResult::Idle);
    assert_eq!(schedule.due(), 1001 * MS + TICK_NS, "an escalation is open");
    schedule.set_escalating(false);
    schedule.on_pass_end(1100 * MS, 1101 * MS, PassResult::Idle);
    assert_eq!(schedule.due(), 3101 * MS);
}
