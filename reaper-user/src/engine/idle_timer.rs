//! How long the engine sleeps where nothing wakes it.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// How long records that wake nobody may wait.
const DRAIN_EVERY: Duration = Duration::from_millis(50);

/// When the ring is looked into without having been woken for it.
pub(super) struct IdleTimer {
    /// When to look next, if nothing wakes it before.
    pub(super) until: Option<Instant>,
    /// The probes have been told that this thread sleeps until it is woken.
    asleep: bool,
}

impl Default for IdleTimer {
    fn default() -> IdleTimer {
        IdleTimer {
            until: Some(Instant::now() + DRAIN_EVERY),
            asleep: false,
        }
    }
}

impl IdleTimer {
    /// Records have been read out of turn: more may come that wake nobody.
    pub(super) fn on_records(&mut self, records: u64) {
        if records > 0 {
            self.asleep = false;
            self.until
                .get_or_insert_with(|| Instant::now() + DRAIN_EVERY);
        }
    }

    pub(super) fn has_expired(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// It was time to look, and so many records were there.
    pub(super) fn on_poll(&mut self, records: u64) {
        self.until = (records > 0 || !self.asleep).then(|| Instant::now() + DRAIN_EVERY);
        if records > 0 {
            self.asleep = false;
        } else if self.until.is_some() {
            self.asleep = true;
        }
    }

    /// Whether it is time to tell the probes so. One more look follows: a probe may have committed a
    /// record on what had been said before.
    pub(super) fn goes_idle(&self) -> bool {
        self.asleep && self.until.is_some()
    }
}

/// Waits until then, or for ever.
pub(super) async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
