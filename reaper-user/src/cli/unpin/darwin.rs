//! `reaper unpin` on macOS, where nothing is ever pinned.

use super::{Failure, UnpinArgs};

pub(super) fn run(_: UnpinArgs) -> Result<(), Failure> {
    Err(Failure::Usage(
        "nothing to remove: on macOS nothing outlives the daemon".into(),
    ))
}
