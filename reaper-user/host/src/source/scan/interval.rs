//! Schedules the passes of the scan.
//!
//! The interval is short while watched processes change and grows while they do not. Passes take at most a fifth of a
//! processor, except those that are ordered at once. Pure: times are nanoseconds of CLOCK_MONOTONIC.

use std::time::Duration;

use reaper_model::event::TICK_NS;

/// Pause after a pass, as a multiple of the time that the pass took.
const IDLE_FACTOR: u64 = 4;

/// Bounds on the interval between passes.
#[derive(Clone, Copy, Debug)]
pub struct ScanOptions {
    /// Interval while watched processes change.
    pub min_interval: Duration,
    /// Interval after a long time without changes.
    pub max_interval: Duration,
}

impl Default for ScanOptions {
    fn default() -> ScanOptions {
        ScanOptions {
            min_interval: Duration::from_millis(50),
            max_interval: Duration::from_secs(2),
        }
    }
}

/// Schedule of the passes.
pub struct ScanSchedule {
    min: u64,
    max: u64,
    /// Current interval between passes.
    interval: u64,
    /// Duration of the last pass, in ns.
    duration: u64,
    /// End of the last pass.
    ended: u64,
    /// Whether an escalation is open.
    escalating: bool,
    /// Time of the next pass; 0 if it is due whatever it costs.
    due: u64,
}

/// Delay of a pass after a reported exit, in ns: signals that follow from the exit come first.
const EXIT_DELAY_NS: u64 = 1_000_000;
/// Longest delay of a due pass by further exits, in ns.
const EXIT_DELAY_MAX_NS: u64 = 5_000_000;

/// Result of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassResult {
    /// No process is watched.
    Idle,
    /// Nothing has changed that concerns watched processes.
    Unchanged,
    /// Something has changed that concerns watched processes.
    Changed,
}

impl ScanSchedule {
    /// Creates a schedule whose first pass is due at once. `min` and `max` bound the interval, in ns.
    pub fn new(min: u64, max: u64) -> ScanSchedule {
        ScanSchedule {
            min,
            max: max.max(min),
            interval: min,
            duration: 0,
            ended: 0,
            escalating: false,
            due: 0,
        }
    }

    /// Returns the time of the next pass (CLOCK_MONOTONIC, ns).
    pub fn due(&self) -> u64 {
        self.due
    }

    /// Returns whether a pass is due. `has_exits` says that exits were just reported, which delay a due pass by up to
    /// `EXIT_DELAY_MAX_NS`.
    pub fn is_due(&self, now: u64, has_exits: bool) -> bool {
        let grace = if has_exits { EXIT_DELAY_MAX_NS } else { 0 };
        self.due.saturating_add(grace) <= now
    }

    /// Schedules the next pass after one that ran from `began` to `ended`. The interval is the shortest after a change
    /// and the longest if no process is watched. Otherwise it doubles, up to the longest.
    pub fn on_pass_end(&mut self, began: u64, ended: u64, found: PassResult) {
        (self.duration, self.ended) = (ended.saturating_sub(began), ended);
        self.interval = match found {
            PassResult::Changed => self.min,
            PassResult::Unchanged => self.interval.saturating_mul(2).min(self.max),
            PassResult::Idle => self.max,
        };
        self.due = self.next();
    }

    /// Makes the interval the shortest one, and moves the next pass forward accordingly. A pass that is due earlier
    /// stays so.
    pub fn on_activity(&mut self) {
        self.interval = self.min;
        self.due = self.due.min(self.next());
    }

    /// Moves the next pass forward after an exit, which gives other processes new parents. It comes as soon as the cost
    /// allows, but not within `EXIT_DELAY_NS` from `now`.
    pub fn on_exit(&mut self, now: u64) {
        self.interval = self.min;
        let soon = self.soonest().max(now.saturating_add(EXIT_DELAY_NS));
        self.due = self.due.min(soon);
    }

    /// Makes the next pass due now, whatever it costs.
    pub fn set_due_now(&mut self) {
        self.due = 0;
    }

    /// Sets whether an escalation is open. Meanwhile the interval is one tick, or longer if the cost requires it.
    pub fn set_escalating(&mut self, escalating: bool) {
        self.escalating = escalating;
        if escalating {
            self.on_activity();
        }
    }

    /// Returns the time of the next pass by the interval and the cost.
    fn next(&self) -> u64 {
        let interval = if self.escalating {
            // A new process is reported only after the tick of its start, so shorter intervals bring nothing.
            TICK_NS
        } else {
            self.interval
        };
        self.soonest().max(self.ended.saturating_add(interval))
    }

    /// Returns the earliest time that keeps the cost of passes within its bound.
    fn soonest(&self) -> u64 {
        self.ended
            .saturating_add(self.duration.saturating_mul(IDLE_FACTOR))
    }
}
