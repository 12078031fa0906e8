//! Schedules polls of the ring buffer for records that do not wake the engine.

use reaper_host::kernel::Clock;

/// Longest time that a record waits if it does not wake the engine, in nanoseconds.
const POLL_INTERVAL_NS: u64 = 50_000_000;

/// Timer for the next poll. It runs while records arrive, and stops after two polls in a row that found none.
pub(super) struct IdleTimer {
    /// Time of the next poll, in ns of CLOCK_MONOTONIC. `None` while the probes wake the engine.
    pub(super) until: Option<u64>,
    /// Whether the last poll found no records.
    is_idle: bool,
}

impl IdleTimer {
    pub(super) fn new(now: u64) -> IdleTimer {
        IdleTimer {
            until: Some(now + POLL_INTERVAL_NS),
            is_idle: false,
        }
    }

    /// Restarts polling after records were read outside of a poll: more may arrive without waking the engine. Does
    /// nothing if `records` is 0. `now` is in ns of CLOCK_MONOTONIC.
    pub(super) fn on_records(&mut self, records: u64, now: u64) {
        if records > 0 {
            self.is_idle = false;
            self.until.get_or_insert(now + POLL_INTERVAL_NS);
        }
    }

    pub(super) fn has_expired(&self, now: u64) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// Schedules the next poll after one that read `records`. After two polls in a row without records, schedules none.
    pub(super) fn on_poll(&mut self, records: u64, now: u64) {
        self.until = (records > 0 || !self.is_idle).then_some(now + POLL_INTERVAL_NS);
        if records > 0 {
            self.is_idle = false;
        } else if self.until.is_some() {
            self.is_idle = true;
        }
    }

    /// Returns whether the engine must announce to the probes that it goes idle. One more poll follows, because a probe
    /// may have written a record before it saw the announcement.
    pub(super) fn goes_idle(&self) -> bool {
        self.is_idle && self.until.is_some()
    }
}

/// Sleeps until `deadline` on CLOCK_MONOTONIC, forever without one.
pub(super) async fn sleep_until(clock: &dyn Clock, deadline: Option<u64>) {
    match deadline {
        Some(deadline) => clock.sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
