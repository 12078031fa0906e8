//! `reaper unpin` on macOS, where nothing is ever pinned.

use std::path::Path;

use super::{Failure, UnpinArgs};

pub(super) fn run(_: UnpinArgs) -> Result<(), Failure> {
    Err(Failure::Usage(
        "nothing to remove: on macOS nothing outlives the daemon".into(),
    ))
}

/// Returns 0: nothing is ever pinned.
///
/// # Errors
/// Never.
pub(super) fn remove(_: &Path) -> Result<usize, Failure> {
    Ok(0)
}
