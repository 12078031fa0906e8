//! Waiting, with an end to it.

use std::process::Child;
use std::time::{Duration, Instant};

/// How long anything may take that is not measured.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits until something is so; false if it takes too long.
pub fn until(mut so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + LIMIT;
    while !so() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// Waits until a child has ended; false if it takes too long.
pub fn ended(child: &mut Child) -> bool {
    until(|| !matches!(child.try_wait(), Ok(None)))
}
