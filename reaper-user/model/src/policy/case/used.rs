//! Rules whose delay starts again while the member is in use.

use super::Case;
use crate::idle::TreeUse;
use crate::ruleset::Rule;

impl Case<'_> {
    /// Returns the end of a delay that starts again with each use of the process or a descendant. It starts again with an
    /// agent that follows in the same directory, too. Otherwise it ends at `expires_at`. Both times are in ns of
    /// `CLOCK_MONOTONIC`.
    ///
    /// Returns `None` if activity must be read first: once at the beginning, to compare with, and at the end of the
    /// delay.
    pub(super) fn use_end(&self, rule: &Rule, expires_at: u64) -> Option<u64> {
        let now = self.model.monotonic_now();
        // The exit is only assumed, so there is no use after it.
        let Some((ended, _)) = self.model.sessions.due(self.session.id) else {
            return Some(expires_at);
        };
        // An agent that continues the work may use it.
        let expires_at = match self.model.sessions.followed_at(ended) {
            0 => expires_at,
            at => expires_at.max(
                self.model
                    .clock
                    .to_monotonic(at)
                    .saturating_add(rule.delay_ns),
            ),
        };
        match self.model.tree_use(self.node, self.session) {
            TreeUse::Unread => None,
            TreeUse::Unreadable => Some(now.saturating_add(rule.delay_ns)),
            TreeUse::Last { used_at, read_at } => {
                let end = expires_at.max(used_at.saturating_add(rule.delay_ns));
                let is_current = now < end || read_at >= end;
                is_current.then_some(end)
            }
        }
    }
}
