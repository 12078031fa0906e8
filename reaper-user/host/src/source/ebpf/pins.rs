//! What stays when the service goes: programs, links, maps and ring, pinned in a BPF file system.
//!
//! ```text
//! /sys/fs/bpf/reaper/     the pin directory
//!   host/                 one for each scope; locked by the service whose it is
//!     maps-4/             of an ABI version: EVENTS MEMBERS SESSIONS NAMES NAME_INDEX CONTROL DROPS
//!     probes-1f6b7aa9…/   of an object and its settings: a program and a link for each hook
//! ```
//!
//! Directories are made under another name and then renamed, and renamed again before they are removed, so
//! that they are there whole or not at all. The kernel forgets all of it when it boots.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{MapData, MapInfo};
use aya::programs::ProgramInfo;
use aya::programs::links::{FdLink, PinnedLink};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use reaper_common::ABI_VERSION;

use super::error::PinError;
use super::load::{LoadedObject, MAPS, program_pin};
use crate::source::probes::PinOptions;
use crate::sys::{self, bpffs};

const MAPS_OF: &str = "maps-";
const PROBES_OF: &str = "probes-";
/// Beginning of the names of directories that are not finished, or about to be removed.
const UNFINISHED: &str = "new-";
/// Beginnings of the names of all directories below that of a scope, in any version.
const BEGINNINGS: [&str; 3] = [MAPS_OF, PROBES_OF, UNFINISHED];

/// What was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names of the scopes.
    pub scopes: Vec<String>,
    /// Programs, links and maps.
    pub entries: usize,
}

/// Removes all that is pinned in a pin directory, whatever version pinned it. What is no scope's is left.
///
/// # Errors
/// A running service holds some of it, which is left; or the directory cannot be used.
pub fn remove(dir: &Path) -> Result<Removed, PinError> {
    let mut removed = Removed::default();
    let Some(mut scopes) = entries(dir)? else {
        return Ok(removed);
    };
    if !bpffs::is(dir) {
        return Err(PinError::NotBpffs { path: dir.into() });
    }
    scopes.retain(|path| is_scope(&name_of(path)));
    scopes.iter().try_for_each(|path| check(path))?;
    let scopes: Vec<_> = scopes
        .into_iter()
        .map(|path| Ok((lock(&path)?, path)))
        .collect::<Result<_, PinError>>()?;
    for (_lock, path) in &scopes {
        removed.entries += remove_scope(path)?;
        removed.scopes.push(name_of(path));
    }
    remove_unless_used(dir)?;
    removed.scopes.sort_unstable();
    Ok(removed)
}

/// Whether a directory of this name is that of a scope, in any version.
fn is_scope(name: &str) -> bool {
    name == "host" || name.starts_with("scope-")
}

/// Refuses what no version has made: somebody else's pins, in a directory that was named by mistake.
fn check(scope: &Path) -> Result<(), PinError> {
    let foreign = |path: &Path, what: &str| PinError::UnknownPins {
        path: path.into(),
        what: what.into(),
    };
    if !fs::symlink_metadata(scope).is_ok_and(|meta| meta.is_dir()) {
        return Err(foreign(scope, "no directory"));
    }
    for entry in entries(scope)?.unwrap_or_default() {
        let name = name_of(&entry);
        if !BEGINNINGS.iter().any(|known| name.starts_with(known)) {
            return Err(foreign(&entry, "none of maps-*, probes-* and new-*"));
        }
    }
    Ok(())
}

/// The place of one service's pins, held for as long as this lives.
pub struct PinDir {
    path: PathBuf,
    /// What is pinned is of no use to anybody yet, and goes when this does.
    pub(super) fresh: bool,
    _lock: Flock<File>,
}

impl Drop for PinDir {
    fn drop(&mut self) {
        if self.fresh {
            // Half of it would be in the way; the next start says so if it is.
            let _ = self.remove();
        }
    }
}

impl PinDir {
    /// Makes the place if it is not there, and takes it.
    ///
    /// # Errors
    /// There is no BPF file system that can be written, or another service has it.
    pub fn take(options: &PinOptions) -> Result<PinDir, PinError> {
        bpffs::mount_default_for(&options.dir);
        let path = options.dir.join(&options.name);
        let parent = bpffs::existing_part(&options.dir);
        if !bpffs::is(parent) {
            return Err(PinError::NotBpffs {
                path: options.dir.clone(),
            });
        }
        fs::create_dir_all(&path).map_err(|e| io_error(&path, e))?;
        let place = PinDir {
            _lock: lock(&path)?,
            fresh: false,
            path,
        };
        // Whoever was making these, or removing them, did not get to the end.
        for unfinished in named(&place.path, UNFINISHED)? {
            remove_tree(&unfinished)?;
        }
        Ok(place)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn maps(&self) -> PathBuf {
        self.path.join(format!("{MAPS_OF}{ABI_VERSION}"))
    }

    /// The directory of the maps, if a service before this one left them, and the size of the ring there.
    ///
    /// Where some of them are missing, the others are of no use: it says so, and there are none.
    ///
    /// # Errors
    /// There is something else in their place.
    pub fn found_maps(&self) -> Result<Option<(PathBuf, u32)>, PinError> {
        let maps = self.maps();
        let Some(pinned) = entries(&maps)? else {
            return Ok(None);
        };
        let mut ring = 0;
        for path in &pinned {
            let foreign = |what: &str| PinError::UnknownPins {
                path: path.clone(),
                what: what.into(),
            };
            let name = name_of(path);
            let Some((_, kind, key, value)) = MAPS.into_iter().find(|map| map.0 == name) else {
                return Err(foreign("none of the maps that belong there"));
            };
            let map = MapData::from_pin(path).map_err(|_| foreign("no map"))?;
            let info = map
                .info()
                .map_err(|_| foreign("a map that cannot be read"))?;
            let sizes = (info.key_size(), info.value_size());
            if info.map_type().ok() != Some(kind) || sizes != (key, value) {
                return Err(foreign("a map of another kind"));
            }
            if name == "EVENTS" {
                ring = info.max_entries();
            }
        }
        if let Some(missing) = MAPS.iter().find(|map| !pinned.contains(&maps.join(map.0))) {
            tracing::warn!(
                "{} is without the map {}, so it is begun anew: what happened before now is not known",
                maps.display(),
                missing.0
            );
            return Ok(None);
        }
        Ok(Some((maps, ring)))
    }

    /// Pins the maps of an object that was loaded, in place of what is left of others; where they are from
    /// now on.
    ///
    /// # Errors
    /// The file system is full, or cannot be written.
    pub(super) fn pin_maps(&self, loaded: &LoadedObject<'_>) -> Result<PathBuf, PinError> {
        let maps = self.maps();
        self.whole(&maps, |unfinished| {
            for (name, ..) in MAPS {
                let path = unfinished.join(name);
                let map = loaded.ebpf.map(name);
                let pin = map.map(|map| map.pin(&path)).transpose();
                pin.map_err(|e| pin_error(&path, &e))?;
            }
            Ok(())
        })?;
        Ok(maps)
    }

    /// Whether exactly these probes are at work already, each of them, and with the maps that are pinned.
    pub(super) fn has_probes(&self, loaded: &LoadedObject<'_>, identity: &str) -> bool {
        let probes = self.probes(identity);
        let used = loaded.hooks().map(|hook| maps_of(&probes, hook));
        let Some(used) = used.collect::<Option<Vec<_>>>() else {
            if probes.is_dir() {
                tracing::warn!(
                    "{} is without some of its probes, so they are attached anew: what happened before now may not be known",
                    probes.display()
                );
            }
            return false;
        };
        let ring = MapInfo::from_pin(self.maps().join("EVENTS"));
        ring.is_ok_and(|ring| used.iter().all(|maps| maps.contains(&ring.id())))
    }

    /// File descriptors of the probes that are pinned.
    pub(super) fn probe_fds(&self, loaded: &LoadedObject<'_>, identity: &str) -> Vec<OwnedFd> {
        let probes = self.probes(identity);
        let fd = |hook: &str| {
            let program = ProgramInfo::from_pin(probes.join(program_pin(hook))).ok()?;
            program.fd().ok()?.as_fd().try_clone_to_owned().ok()
        };
        loaded.hooks().filter_map(fd).collect()
    }

    /// The attachments that are pinned, to be held besides.
    pub(super) fn links(&self, loaded: &LoadedObject<'_>, identity: &str) -> Vec<FdLink> {
        let probes = self.probes(identity);
        let link = |hook: &str| PinnedLink::from_pin(probes.join(hook)).ok();
        loaded.hooks().filter_map(link).map(FdLink::from).collect()
    }

    fn probes(&self, identity: &str) -> PathBuf {
        self.path.join(format!("{PROBES_OF}{identity}"))
    }

    /// Pins probes that have been attached, in place of what is left of others. Only then may those go that
    /// were there before, so that there is no moment at which none is at work.
    ///
    /// # Errors
    /// As [`PinDir::pin_maps`]; then the links are gone.
    pub(super) fn pin_probes(
        &self,
        identity: &str,
        loaded: &mut LoadedObject<'_>,
        links: Vec<(&'static str, FdLink)>,
    ) -> Result<(), PinError> {
        let probes = self.probes(identity);
        self.whole(&probes, |unfinished| {
            let programs = loaded.pin_programs(unfinished);
            programs.map_err(|e| pin_error(unfinished, &e))?;
            for (hook, link) in links {
                let path = unfinished.join(hook);
                link.pin(&path).map_err(|e| pin_error(&path, &e))?;
            }
            Ok(())
        })
    }

    /// Removes the probes of other objects, and the maps of other ABI versions; says how many of the
    /// latter there were.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn remove_others(&self, identity: &str) -> Result<usize, PinError> {
        let (own, maps) = (self.probes(identity), self.maps());
        let others = named(&self.path, PROBES_OF)?;
        for probes in others.iter().filter(|path| **path != own) {
            remove_whole(probes)?;
        }
        let others = named(&self.path, MAPS_OF)?;
        let others = others.iter().filter(|path| **path != maps);
        others.map(|maps| remove_whole(maps).map(|_| 1)).sum()
    }

    /// Removes all of it: nothing is at work any more, but for what this process holds.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn remove(&self) -> Result<(), PinError> {
        remove_scope(&self.path)?;
        // Others may be in the pin directory still.
        if let Some(dir) = self.path.parent() {
            let _ = fs::remove_dir(dir);
        }
        Ok(())
    }

    /// Makes a directory that is there with all that `fill` puts into it, or not at all. What was there
    /// before is removed.
    fn whole(
        &self,
        path: &Path,
        fill: impl FnOnce(&Path) -> Result<(), PinError>,
    ) -> Result<(), PinError> {
        let unfinished = self.path.join(format!("{UNFINISHED}{}", name_of(path)));
        let made = fs::create_dir(&unfinished).map_err(|e| io_error(&unfinished, e));
        let made = made.and_then(|()| fill(&unfinished));
        let made = made.and_then(|()| {
            let before = set_aside(path)?;
            fs::rename(&unfinished, path).map_err(|e| io_error(path, e))?;
            remove_tree(&before).map(drop)
        });
        if made.is_err() {
            // It is in the way of the next attempt only, which removes it too.
            let _ = remove_tree(&unfinished);
        }
        made
    }
}

/// What is in a directory; `None` if there is none.
fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, PinError> {
    let read = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|e| io_error(dir, e))?,
    };
    let paths: Result<_, _> = read.map(|entry| entry.map(|entry| entry.path())).collect();
    paths.map(Some).map_err(|e| io_error(dir, e))
}

/// What is in a scope's directory and has a name that begins so.
fn named(scope: &Path, beginning: &str) -> Result<Vec<PathBuf>, PinError> {
    let mut named = entries(scope)?.unwrap_or_default();
    named.retain(|path| name_of(path).starts_with(beginning));
    Ok(named)
}

/// The ids of the maps that the probe uses that is pinned for a hook; `None` if none is attached.
fn maps_of(probes: &Path, hook: &str) -> Option<Vec<u32>> {
    let link = PinnedLink::from_pin(probes.join(hook)).ok()?;
    let program = ProgramInfo::from_pin(probes.join(program_pin(hook))).ok()?;
    // What is no link has no such program.
    let attached = FdLink::from(link).info().ok()?.program_id() == program.id();
    program.map_ids().ok()?.filter(|_| attached)
}

/// Removes what is pinned for a scope; gives the number of files.
fn remove_scope(path: &Path) -> Result<usize, PinError> {
    // Maps that are left are gone on from; probes without them would be at work for nobody.
    for of in [PROBES_OF, MAPS_OF] {
        for entry in named(path, of)? {
            set_aside(&entry)?;
        }
    }
    let mut files = 0;
    for entry in named(path, UNFINISHED)? {
        files += remove_tree(&entry)?;
    }
    remove_unless_used(path)?;
    Ok(files)
}

/// Removes a directory that is there whole or not at all; gives the number of files.
fn remove_whole(path: &Path) -> Result<usize, PinError> {
    remove_tree(&set_aside(path)?)
}

/// Renames a directory, if it is there, to what [`PinDir::take`] removes; gives that name.
fn set_aside(path: &Path) -> Result<PathBuf, PinError> {
    let aside = path.with_file_name(format!("{UNFINISHED}no-{}", name_of(path)));
    remove_tree(&aside)?;
    match fs::rename(path, &aside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error(path, e)),
        _ => Ok(aside),
    }
}

/// Removes a directory that is empty, and no mount point.
fn remove_unless_used(path: &Path) -> Result<(), PinError> {
    use io::ErrorKind::{DirectoryNotEmpty, ResourceBusy};
    match fs::remove_dir(path) {
        Err(e) if !matches!(e.kind(), DirectoryNotEmpty | ResourceBusy) => Err(io_error(path, e)),
        _ => Ok(()),
    }
}

/// Removes what is there, if anything is, with all that is in it; gives the number of files. Links are
/// followed nowhere.
fn remove_tree(path: &Path) -> Result<usize, PinError> {
    let is_dir = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        meta => meta.map_err(|e| io_error(path, e))?.is_dir(),
    };
    if !is_dir {
        fs::remove_file(path).map_err(|e| io_error(path, e))?;
        return Ok(1);
    }
    let mut files = 0;
    for entry in entries(path)?.unwrap_or_default() {
        files += remove_tree(&entry)?;
    }
    fs::remove_dir(path).map_err(|e| io_error(path, e))?;
    Ok(files)
}

fn lock(path: &Path) -> Result<Flock<File>, PinError> {
    let file = File::open(path).map_err(|e| io_error(path, e))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(file, errno)| match errno {
        Errno::EWOULDBLOCK => PinError::Locked {
            name: path.display().to_string(),
            pid: lock_holder(&file),
        },
        errno => io_error(path, errno.into()),
    })
}

/// Returns the process that holds a lock on a file, where /proc tells.
fn lock_holder(file: &File) -> Option<u32> {
    sys::lock_holder(&file.metadata().ok()?).ok()?
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn io_error(path: &Path, source: io::Error) -> PinError {
    PinError::Io {
        path: path.into(),
        source,
    }
}

fn pin_error(path: &Path, error: &aya::pin::PinError) -> PinError {
    let source = match error {
        aya::pin::PinError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    };
    let source = source.map_or_else(
        || io::Error::other(error.to_string()),
        io::Error::from_raw_os_error,
    );
    io_error(path, source)
}
