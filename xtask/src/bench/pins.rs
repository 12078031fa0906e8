//! Mounts a BPF file system for the benchmark, separate from that of the host.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::Bench;
use super::undo::Undo;

/// Mounted BPF file system. On drop it is unmounted, with all that is pinned there.
pub struct Pins {
    dir: PathBuf,
    _unmounted: Undo,
}

impl Pins {
    /// Mounts the file system.
    ///
    /// # Errors
    /// The file system cannot be mounted.
    pub fn mounted(bench: &Bench) -> Result<Pins> {
        let dir = bench.dir.join("bpf");
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let gone = dir.clone();
        let unmounted = Undo::later(move || {
            // A daemon that is exiting may still have the directory open.
            let _ = umount2(&gone, MntFlags::MNT_DETACH);
            let _ = fs::remove_dir(&gone);
        });
        let none = None::<&Path>;
        mount(none, &dir, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
            .with_context(|| format!("cannot mount a BPF file system at {}", dir.display()))?;
        Ok(Pins {
            dir,
            _unmounted: unmounted,
        })
    }

    /// Returns the directory for `--pin-dir`.
    pub fn dir(&self) -> PathBuf {
        self.dir.join("reaper")
    }
}
