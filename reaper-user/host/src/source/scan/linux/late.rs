//! Who is there and could not be read, so that it is not told of yet: how long that is waited for.

use hashbrown::HashMap;

/// So many passes in a row; one that can never be read must not hold up for ever what waits for all to have been told
/// of.
pub const PASSES_MAX: u32 = 16;

/// See the module.
#[derive(Default)]
pub struct UnreadTracker {
    /// By pid: in how many passes in a row.
    passes: HashMap<u32, u32>,
}

impl UnreadTracker {
    /// A pass has left these unread. Gives whether somebody of them is still waited for.
    pub fn passed(&mut self, unread: impl Iterator<Item = u32>) -> bool {
        let before = std::mem::take(&mut self.passes);
        let passes = |pid: &u32| before.get(pid).map_or(1, |passes| passes.saturating_add(1));
        self.passes.extend(unread.map(|pid| (pid, passes(&pid))));
        self.passes.values().any(|passes| *passes <= PASSES_MAX)
    }
}
