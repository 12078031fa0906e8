//! When the next pass is due: soon while something happens, rarely while nothing does, and never so often that passes
//! take more than a fifth of a processor. Pure; times are monotonic nanoseconds.

use std::time::Duration;

use reaper_model::event::TICK_NS;

/// So many times as long as a pass took nothing is done after it.
const REST: u64 = 4;

/// How often it looks.
#[derive(Clone, Copy, Debug)]
pub struct ScanOptions {
    /// While something happens.
    pub min_interval: Duration,
    /// While nothing does.
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

pub struct ScanSchedule {
    min: u64,
    max: u64,
    /// Between passes, as of now.
    interval: u64,
    /// How long the last pass took, and when it was over.
    took: u64,
    ended: u64,
    /// A ladder is open.
    pressing: bool,
    due: u64,
}

/// So long a pass waits for what follows from an end that was told: signals come first.
const AFTER_END: u64 = 1_000_000;
/// But no longer than so, however many ends are told.
const LATE: u64 = 5_000_000;

/// What a pass found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassResult {
    /// Nothing, and there is nobody to look after.
    Idle,
    Unchanged,
    /// Something about those who are followed.
    Changed,
}

impl ScanSchedule {
    /// The first pass is due at once.
    pub fn new(min: u64, max: u64) -> ScanSchedule {
        ScanSchedule {
            min,
            max: max.max(min),
            interval: min,
            took: 0,
            ended: 0,
            pressing: false,
            due: 0,
        }
    }

    pub fn due(&self) -> u64 {
        self.due
    }

    /// Whether it is time for a pass; `busy`: there is something to be seen to.
    pub fn is_due(&self, now: u64, busy: bool) -> bool {
        let grace = if busy { LATE } else { 0 };
        self.due.saturating_add(grace) <= now
    }

    /// A pass is over.
    pub fn on_pass_end(&mut self, began: u64, ended: u64, found: PassResult) {
        (self.took, self.ended) = (ended.saturating_sub(began), ended);
        self.interval = match found {
            PassResult::Changed => self.min,
            PassResult::Unchanged => self.interval.saturating_mul(2).min(self.max),
            PassResult::Idle => self.max,
        };
        self.due = self.next();
    }

    /// Something has begun: the next pass comes after the shortest interval.
    pub fn on_activity(&mut self) {
        self.interval = self.min;
        self.due = self.due.min(self.next());
    }

    /// Something has ended, so that others have new parents: the next pass comes as soon as it may.
    pub fn on_exit(&mut self, now: u64) {
        self.interval = self.min;
        let soon = self.soonest().max(now.saturating_add(AFTER_END));
        self.due = self.due.min(soon);
    }

    /// The next pass is due now, whatever it costs.
    pub fn at_once(&mut self) {
        self.due = 0;
    }

    /// Whether passes are to come as fast as they may from now on.
    pub fn set_escalating(&mut self, pressing: bool) {
        self.pressing = pressing;
        if pressing {
            self.on_activity();
        }
    }

    fn next(&self) -> u64 {
        let interval = if self.pressing {
            // Within the tick of its birth nobody is told of.
            TICK_NS
        } else {
            self.interval
        };
        self.soonest().max(self.ended.saturating_add(interval))
    }

    fn soonest(&self) -> u64 {
        self.ended.saturating_add(self.took.saturating_mul(REST))
    }
}
