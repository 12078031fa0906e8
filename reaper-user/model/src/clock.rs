//! Conversion of times since boot to `CLOCK_MONOTONIC`, which stops during suspend and measures the delays of rules.
//!
//! Events carry the time since boot. The model remembers when the machine was suspended, and for how long.

use std::collections::VecDeque;

use super::Model;

/// Maximum number of suspends that are remembered. Times before the oldest convert as if it had already happened.
const SUSPENDS_MAX: usize = 256;

/// Current time and past suspends.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelTime {
    /// Nanoseconds since boot.
    now: u64,
    /// Total suspended time in ns, by the time (ns since boot) from which it applies; oldest first.
    suspends: VecDeque<(u64, u64)>,
}

impl ModelTime {
    /// Converts a time since boot to `CLOCK_MONOTONIC`, both in ns. After a suspend that was noticed late, the result
    /// can be too late, which lengthens delays.
    pub(super) fn to_monotonic(&self, boot: u64) -> u64 {
        let known = self.suspends.iter().rev().find(|(from, _)| *from <= boot);
        let suspended = known
            .or(self.suspends.front())
            .map_or(0, |(_, suspended)| *suspended);
        boot.saturating_sub(suspended)
    }

    /// Returns the current time, in ns since boot.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// Returns the current time, in ns of `CLOCK_MONOTONIC`.
    pub(super) fn monotonic_now(&self) -> u64 {
        self.to_monotonic(self.now)
    }

    /// Sets the current time and the total suspended time, both in ns. An earlier time is ignored, and so is a total
    /// that has not grown. The current time is set first: the suspend ended just before it.
    fn set(&mut self, boot: u64, suspended: u64) {
        self.now = self.now.max(boot);
        let before = self.suspends.back().map(|(_, suspended)| *suspended);
        if before.is_some_and(|before| before >= suspended) {
            return;
        }
        // The added time counts as suspended just before `now`.
        let from = before.map_or(0, |before| self.now.saturating_sub(suspended - before));
        if self.suspends.len() == SUSPENDS_MAX {
            self.suspends.pop_front();
        }
        self.suspends.push_back((from, suspended));
    }
}

impl Model {
    /// Sets the current time (ns since boot) and for how long the machine has been suspended since boot (ns), which is
    /// the difference to `CLOCK_MONOTONIC`. Delays, ages and users' keeps are measured with both.
    ///
    /// Ignores a time before the current one. Until this is called after a suspend, events since then convert to a too
    /// late time, which lengthens delays.
    pub fn set_time(&mut self, boot: u64, suspended: u64) {
        self.clock.set(boot, suspended);
    }

    /// Returns the current time of the model, in ns of `CLOCK_MONOTONIC`.
    pub fn monotonic_now(&self) -> u64 {
        self.clock.monotonic_now()
    }
}

#[cfg(test)]
mod tests {
    use super::ModelTime;

    #[test]
    fn monotonic_time_excludes_suspends() {
        let mut clock = ModelTime::default();
        assert_eq!(clock.to_monotonic(70), 70);
        clock.set(100, 40);
        assert_eq!(
            (
                clock.to_monotonic(100),
                clock.to_monotonic(50),
                clock.to_monotonic(10)
            ),
            (60, 10, 0)
        );
        // Suspended from 150 to 1150, noticed at 1200. An event in between is from 150 or earlier, or from 1150 or
        // later.
        clock.set(1200, 1040);
        assert_eq!(
            (
                clock.to_monotonic(150),
                clock.to_monotonic(1151),
                clock.monotonic_now()
            ),
            (110, 111, 160)
        );
        // A repeated total is one suspend.
        clock.set(1200, 1040);
        assert_eq!(clock.suspends.len(), 2);
    }
}
