//! `reaper unpin`, where there is no BPF to have anything pinned.

use super::{Failure, UnpinArgs};

pub(super) fn run(_: UnpinArgs) -> Result<(), Failure> {
    Err(Failure::Usage(
        "there is nothing to detach: on macOS nothing of it outlives the daemon".into(),
    ))
}
