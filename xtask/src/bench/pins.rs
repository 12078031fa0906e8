//! A BPF file system of the bench's own, so that nothing of the host's is touched or found.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::Bench;
use super::undo::Undo;

/// Where daemons may pin; what they leave there goes with this.
pub struct Pins {
    dir: PathBuf,
    _unmounted: Undo,
}

impl Pins {
    /// # Errors
    /// It cannot be mounted.
    pub fn mounted(bench: &Bench) -> Result<Pins> {
        let dir = bench.dir.join("bpf");
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let gone = dir.clone();
        let unmounted = Undo::later(move || {
            // A daemon that is on its way out may still have its place open.
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

    /// For `--pin-dir`.
    pub fn dir(&self) -> PathBuf {
        self.dir.join("reaper")
    }
}
