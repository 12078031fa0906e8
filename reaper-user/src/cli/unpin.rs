//! `reaper unpin`: removes pinned probes and maps.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::anyhow;
use serde::Serialize;

use super::user::load_readable;
use super::{Failure, UnpinArgs, absolute};
use crate::export::{print, printable, to_json};
use reaper_host::source::ebpf::PinError;
use reaper_host::source::ebpf::pins::{self, Removed};

/// Result as JSON.
#[derive(Serialize)]
struct UnpinReport<'a> {
    pin_dir: &'a Path,
    scopes: &'a [String],
    entries: usize,
}

pub(super) fn run(args: UnpinArgs) -> Result<(), Failure> {
    let directory = match &args.pin_dir {
        Some(directory) => absolute("--pin-dir", directory)?,
        None => load_readable(args.config.as_deref())?.pin_dir,
    };
    let removed = pins::remove(&directory)?;
    let written = if args.json {
        let report = UnpinReport {
            pin_dir: &directory,
            scopes: &removed.scopes,
            entries: removed.entries,
        };
        print(to_json(&report))
    } else {
        let sentence = sentence(&directory, &removed);
        print(printable(&sentence, usize::MAX) + "\n")
    };
    written.map_err(Failure::stdout)
}

/// Removes everything that is pinned in a directory, and returns the number of pins.
///
/// # Errors
/// As [`pins::remove`].
pub(super) fn remove(directory: &Path) -> Result<usize, Failure> {
    Ok(pins::remove(directory)?.entries)
}

impl From<PinError> for Failure {
    fn from(error: PinError) -> Failure {
        match error {
            PinError::Locked { .. } => Failure::Locked(error.to_string()),
            PinError::NotBpffs { .. } | PinError::PrivateMount { .. } => {
                Failure::Usage(error.to_string())
            }
            PinError::Io { ref source, .. } if source.kind() == ErrorKind::PermissionDenied => {
                Failure::Other(anyhow!("{error}; run as root"))
            }
            PinError::UnknownPins { .. } | PinError::Io { .. } => Failure::Other(error.into()),
        }
    }
}

fn sentence(directory: &Path, removed: &Removed) -> String {
    let directory = directory.display();
    if removed.scopes.is_empty() && removed.entries == 0 {
        return format!("Nothing is pinned in {directory}.");
    }
    let (entries, scopes) = (removed.entries, removed.scopes.join(", "));
    format!("Removed {entries} pins of {scopes} from {directory}.")
}
