//! Waits with a time limit.

use std::process::Child;
use std::time::{Duration, Instant};

/// Time limit for everything that is not measured.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits until a condition is true; returns false if that takes too long.
pub fn until(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + LIMIT;
    while !condition() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// Waits until a child exits; returns false if that takes too long.
pub fn ended(child: &mut Child) -> bool {
    until(|| !matches!(child.try_wait(), Ok(None)))
}
