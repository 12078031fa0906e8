//! The clocks.

use std::pin::Pin;
use std::time::Duration;

use crate::sys;

/// See [`Clock::sleep_until`].
pub type Sleep = Pin<Box<dyn Future<Output = ()>>>;

/// Reads the time. The values of each clock never decrease, except those of the wall clock.
pub trait Clock: Send + Sync {
    /// Returns the time in nanoseconds since boot, including time suspended: the clock of events.
    fn boot_time(&self) -> u64;

    /// Returns the time in nanoseconds since boot without time suspended: the clock of delays.
    fn monotonic(&self) -> u64;

    /// Returns the time of day in nanoseconds since the epoch.
    fn wall_time(&self) -> u64;

    /// Returns the time after `delay` on the clock of delays; the greatest value if that is too far away.
    fn after(&self, delay: Duration) -> u64 {
        self.monotonic().saturating_add(sys::nanoseconds(delay))
    }

    /// Waits until the clock of delays reaches `at`. May end up to a millisecond later.
    fn sleep_until(&self, at: u64) -> Sleep;
}

/// The clocks of the kernel.
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
