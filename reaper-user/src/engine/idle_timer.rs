//! The poll of records that do not wake the engine.

use reaper_host::kernel::Clock;

/// Longest time that such records wait, in nanoseconds.
const POLL_INTERVAL_NS: u64 = 50_000_000;

/// Says when to poll the ring. It polls while records come, and goes idle when a poll has found none.
pub(super) struct IdleTimer {
    /// Time of the next poll, in nanoseconds of the monotonic clock; `None` while idle.
    pub(super) until: Option<u64>,
    /// The probes have been told that this thread sleeps until it is woken.
    asleep: bool,
}

impl IdleTimer {
    pub(super) fn new(now: u64) -> IdleTimer {
        IdleTimer {
            until: Some(now + POLL_INTERVAL_NS),
            asleep: false,
        }
    }

    /// Polls again if records were read outside of a poll: more may come that do not wake the engine.
    pub(super) fn on_records(&mut self, records: u64, now: u64) {
        if records > 0 {
            self.asleep = false;
            self.until.get_or_insert(now + POLL_INTERVAL_NS);
        }
    }

    pub(super) fn has_expired(&self, now: u64) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// A poll has found this number of records.
    pub(super) fn on_poll(&mut self, records: u64, now: u64) {
        self.until = (records > 0 || !self.asleep).then_some(now + POLL_INTERVAL_NS);
        if records > 0 {
            self.asleep = false;
        } else if self.until.is_some() {
            self.asleep = true;
        }
    }

    /// Whether the probes are to be told that this thread goes idle. One more poll follows: a probe may have written a
    /// record on what it was told before.
    pub(super) fn goes_idle(&self) -> bool {
        self.asleep && self.until.is_some()
    }
}

/// Waits until `deadline` on the monotonic clock; for ever if there is none.
pub(super) async fn at(clock: &dyn Clock, deadline: Option<u64>) {
    match deadline {
        Some(deadline) => clock.sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
