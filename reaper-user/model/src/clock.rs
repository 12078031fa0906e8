//! Time that stops while the machine sleeps: what the delays of rules run on.
//!
//! Events come with the time since boot. To know how much of that was slept through, the model remembers when
//! it was told of which sleep.

use std::collections::VecDeque;

use super::Model;

/// Sleeps that are remembered; what happened before the first of them counts as if there had been none since.
const SLEEPS_MAX: usize = 256;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelTime {
    /// Nanoseconds since boot.
    now: u64,
    /// From when on, in nanoseconds since boot, how many nanoseconds had been slept; oldest first.
    slept: VecDeque<(u64, u64)>,
}

impl ModelTime {
    /// The monotonic time of a time since boot. If too much, then because it cannot be told whether a sleep
    /// came before or after: who waits for it waits longer.
    pub(super) fn to_monotonic(&self, boot: u64) -> u64 {
        let known = self.slept.iter().rev().find(|(from, _)| *from <= boot);
        let slept = known.or(self.slept.front()).map_or(0, |(_, slept)| *slept);
        boot.saturating_sub(slept)
    }

    /// Nanoseconds since boot.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// The monotonic time now.
    pub(super) fn monotonic_now(&self) -> u64 {
        self.to_monotonic(self.now)
    }

    fn set_suspended(&mut self, slept: u64) {
        let before = self.slept.back().map(|(_, slept)| *slept);
        if before.is_some_and(|before| before >= slept) {
            return;
        }
        // Whatever has happened later than this has happened after the sleep, however late that was noticed.
        let from = before.map_or(0, |before| self.now.saturating_sub(slept - before));
        if self.slept.len() == SLEEPS_MAX {
            self.slept.pop_front();
        }
        self.slept.push_back((from, slept));
    }
}

impl Model {
    /// Says what time it is, in nanoseconds since boot: what delays, ages and the keeps of users are judged by
    /// until it is said again. An earlier time than before is not taken.
    pub fn set_now(&mut self, boot: u64) {
        self.clock.now = self.clock.now.max(boot);
    }

    /// Says for how many nanoseconds the machine has slept since it was started: boot time less monotonic
    /// time. To be called before [`Model::set_now`] is told of a time after a sleep, or right after.
    pub fn set_suspended(&mut self, slept: u64) {
        self.clock.set_suspended(slept);
    }

    /// Monotonic time, in nanoseconds, as far as the model has been told.
    pub fn monotonic_now(&self) -> u64 {
        self.clock.monotonic_now()
    }
}

#[cfg(test)]
mod tests {
    use super::ModelTime;

    #[test]
    fn what_was_slept_through_does_not_count() {
        let mut clock = ModelTime::default();
        assert_eq!(clock.to_monotonic(70), 70);
        clock.now = 100;
        clock.set_suspended(40);
        assert_eq!(
            (
                clock.to_monotonic(100),
                clock.to_monotonic(50),
                clock.to_monotonic(10)
            ),
            (60, 10, 0)
        );
        // Slept from 150 to 1150, noticed at 1200: what came in between may have been at 151 or at 1199.
        clock.now = 1200;
        clock.set_suspended(1040);
        assert_eq!(
            (
                clock.to_monotonic(150),
                clock.to_monotonic(1151),
                clock.monotonic_now()
            ),
            (110, 111, 160)
        );
        // A sleep that is told of twice is one.
        clock.set_suspended(1040);
        assert_eq!(clock.slept.len(), 2);
    }
}
