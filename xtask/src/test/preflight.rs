//! Checks before the build whether the machine has enough disk space and memory.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

use crate::shell::{as_root, in_ci, say, target_dir};

/// Disk space for a build from scratch, and for tests of an existing build, in MiB.
const COLD_MIB: u64 = 3 << 10;
const WARM_MIB: u64 = 512;
/// Space for the files of running tests, in MiB.
const TEMPORARY_MIB: u64 = 256;
/// Free memory that linking needs, in MiB.
const MEMORY_MIB: u64 = 1536;

/// Reports what is missing and how to fix it.
///
/// # Errors
/// Disk space is missing, or in CI a way to become root.
pub fn check() -> Result<()> {
    let target = target_dir();
    let is_built = target.join("debug/deps").is_dir();
    let existing = target.ancestors().find(|path| path.is_dir());
    let build = existing.unwrap_or(Path::new("/")).to_owned();
    let needed = if is_built { WARM_MIB } else { COLD_MIB };
    for (directory, needed, variable) in [
        (build, needed, "CARGO_TARGET_DIR"),
        (std::env::temp_dir(), TEMPORARY_MIB, "TMPDIR"),
    ] {
        let name = directory.display().to_string();
        let stat = statvfs(&directory).with_context(|| name.clone())?;
        let free = (stat.blocks_available() * stat.fragment_size()) >> 20;
        ensure!(
            free >= needed,
            "{name}: {free} MiB of disk space free, {needed} MiB needed: \
             free some, or set {variable} to a directory on another disk"
        );
    }
    if let Some(free) = available_mib().filter(|free| *free < MEMORY_MIB) {
        say(format_args!(
            "{free} MiB of memory available, linking needs {MEMORY_MIB} MiB: if the build is killed, \
             close other programs or set CARGO_BUILD_JOBS=1"
        ));
    }
    match as_root("true") {
        Err(error) if in_ci() => Err(error),
        Err(error) => {
            say(format_args!(
                "skipping tests with real process trees: {error:#}"
            ));
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

/// Returns the memory available without swapping, or `None` if the kernel does not report it.
fn available_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib >> 10)
}
