//! A BPF file system of the bench's own, so that nothing of the host's is touched or found.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::Bench;
use super::raw::bpf::Positions;
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

    /// Where the ring stands that one daemon has left here.
    ///
    /// # Errors
    /// There is none.
    pub fn ring(&self) -> Result<Positions> {
        let below = |dir: PathBuf| -> Result<Vec<PathBuf>> {
            let entries = fs::read_dir(&dir).with_context(|| format!("no pins: {}", dir.display()));
            entries?.map(|entry| Ok(entry?.path())).collect()
        };
        let scopes = below(self.dir())?;
        let versions = scopes.into_iter().map(below).collect::<Result<Vec<_>>>()?;
        let mut rings = versions.iter().flatten().map(|path| path.join("EVENTS"));
        let ring = rings
            .find(|path| path.exists())
            .context("no ring is pinned")?;
        Positions::of_pinned(&ring).context("cannot look at the ring")
    }
}
