//! Processes whose exit matters.

use crate::sys::pidfd::Pidfd;
use reaper_model::event::ProcessKey;

/// One whose end matters.
pub(super) struct WatchedProcess {
    /// As a whole tick.
    pub(super) start: u64,
    /// `None`: there is no room for it.
    pub(super) pidfd: Option<Pidfd>,
}

impl WatchedProcess {
    /// Whether it is this one, whose start is a whole tick.
    pub(super) fn is(&self, key: ProcessKey) -> bool {
        self.start == key.start
    }

    pub(super) fn is_held(&self) -> bool {
        self.pidfd.is_some()
    }
}
