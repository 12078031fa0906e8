//! `reaper unpin`, where there is no BPF to have anything pinned.

use super::{Failure, UnpinArgs};
use crate::source::ebpf::pins::PinError;

pub(super) fn run(_: UnpinArgs) -> Result<(), Failure> {
    Err(Failure::Usage(
        "there is nothing to detach: on macOS nothing of it outlives the daemon".into(),
    ))
}

impl From<PinError> for Failure {
    fn from(error: PinError) -> Failure {
        match error {
            PinError::Held { by } => match by {},
        }
    }
}
