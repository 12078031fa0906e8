//! Limits how long unreadable processes, which are not reported yet, hold back the time of the last complete scan.

use hashbrown::HashMap;

/// Number of successive passes for which a process may hold it back. A process may never become readable.
pub const PASSES_MAX: u32 = 16;

/// Counts for how many passes processes have been unreadable.
#[derive(Default)]
pub struct UnreadTracker {
    /// Number of successive passes that could not read a process, by pid.
    passes: HashMap<u32, u32>,
}

impl UnreadTracker {
    /// Records the pids that a pass could not read. Returns whether one of them is still within the limit.
    pub fn on_pass(&mut self, unread: impl Iterator<Item = u32>) -> bool {
        let before = std::mem::take(&mut self.passes);
        let passes = |pid: &u32| before.get(pid).map_or(1, |passes| passes.saturating_add(1));
        self.passes.extend(unread.map(|pid| (pid, passes(&pid))));
        self.passes.values().any(|passes| *passes <= PASSES_MAX)
    }
}
