//! Clocks of the engine.

use std::pin::Pin;
use std::time::Duration;

use crate::sys;

/// Future of [`Clock::sleep_until`].
pub type Sleep = Pin<Box<dyn Future<Output = ()>>>;

/// Source of time. No clock goes backwards, except the wall clock.
pub trait Clock: Send + Sync {
    /// Returns nanoseconds since boot, including time suspended. Events have times of this clock.
    fn boot_time(&self) -> u64;

    /// Returns nanoseconds since boot without time suspended. Delays use this clock.
    fn monotonic(&self) -> u64;

    /// Returns nanoseconds since the epoch.
    fn wall_time(&self) -> u64;

    /// Returns [`monotonic`](Clock::monotonic) plus `delay`, at most `u64::MAX`.
    fn after(&self, delay: Duration) -> u64 {
        self.monotonic().saturating_add(sys::nanoseconds(delay))
    }

    /// Waits until [`monotonic`](Clock::monotonic) reaches `at`, at once if it has. The timer has a resolution of 1 ms,
    /// so the wait can end later.
    fn sleep_until(&self, at: u64) -> Sleep;
}

/// Clocks of the kernel.
pub struct SystemClock;

impl Clock for SystemClock {
    fn boot_time(&self) -> u64 {
        sys::boot_time()
    }

    fn monotonic(&self) -> u64 {
        sys::monotonic()
    }

    fn wall_time(&self) -> u64 {
        sys::wall_time()
    }

    fn sleep_until(&self, at: u64) -> Sleep {
        let left = Duration::from_nanos(at.saturating_sub(self.monotonic()));
        Box::pin(tokio::time::sleep(left))
    }
}
