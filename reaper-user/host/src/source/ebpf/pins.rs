//! Pins programs, links, maps and the ring buffer in a BPF file system, so that they outlive the service.
//!
//! ```text
//! /sys/fs/bpf/reaper/     pin directory
//!   host/                 one directory for each scope, locked by its service
//!     maps-4/             one for each ABI version: EVENTS MEMBERS SESSIONS NAMES NAME_INDEX CONTROL DROPS …
//!     probes-1f6b7aa9…/   one for each object with its settings: a program and a link for each hook
//! ```
//!
//! Directories are filled under a temporary name and then renamed. Before removal they are renamed again. So each is
//! either complete or absent. A reboot removes all pins.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use aya::maps::{MapData, MapInfo};
use aya::programs::links::{FdLink, PinnedLink};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use reaper_common::ABI_VERSION;

use super::error::PinError;
use super::load::{LoadedObject, MAPS, program_pin};
use crate::source::probes::PinOptions;
use crate::sys::{self, bpf, bpffs};

const MAPS_PREFIX: &str = "maps-";
const PROBES_PREFIX: &str = "probes-";
/// Prefix of directories that are incomplete or about to be removed.
const UNFINISHED_PREFIX: &str = "new-";
/// Prefixes of all entries in the directory of a scope, in any version of this program.
const PREFIXES: [&str; 3] = [MAPS_PREFIX, PROBES_PREFIX, UNFINISHED_PREFIX];

/// Result of removing pins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names of the scopes.
    pub scopes: Vec<String>,
    /// Number of removed programs, links and maps.
    pub entries: usize,
}

/// Removes the pins of all scopes in a pin directory, made by any version. Leaves everything else. Does nothing if the
/// directory does not exist.
///
/// # Errors
/// A running service holds a scope, or an entry is not from this program: then nothing is removed. Also fails if the
/// directory cannot be used or an entry cannot be removed.
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

/// Returns the directory in which probes of an earlier service are still pinned, although they cannot be used. Also
/// looks where init sees the pins.
pub(super) fn find_stale(options: &PinOptions) -> Option<PathBuf> {
    let path = options.dir.join(&options.name);
    let has_probes =
        |dir: &PathBuf| with_prefix(dir, PROBES_PREFIX).is_ok_and(|all| !all.is_empty());
    [bpffs::of_init(&path), path.clone()]
        .iter()
        .any(has_probes)
        .then_some(path)
}

/// Returns whether this is the name of a scope's directory, in any version.
fn is_scope(name: &str) -> bool {
    name == "host" || name.starts_with("scope-")
}

/// Refuses a directory with entries that no version has made. The user may have named a wrong directory.
fn check(scope: &Path) -> Result<(), PinError> {
    let unknown = |path: &Path, what: &str| PinError::UnknownPins {
        path: path.into(),
        what: what.into(),
    };
    if !fs::symlink_metadata(scope).is_ok_and(|meta| meta.is_dir()) {
        return Err(unknown(scope, "not a directory"));
    }
    for entry in entries(scope)?.unwrap_or_default() {
        let name = name_of(&entry);
        if !PREFIXES.iter().any(|known| name.starts_with(known)) {
            return Err(unknown(&entry, "named neither maps-*, probes-* nor new-*"));
        }
    }
    Ok(())
}

/// Directory of one service's pins, locked until this is dropped.
pub struct PinDir {
    path: PathBuf,
    /// Whether the pins hold nothing worth keeping yet, so that dropping this removes them.
    pub(super) is_fresh: bool,
    _lock: Flock<File>,
}

impl Drop for PinDir {
    fn drop(&mut self) {
        if self.is_fresh {
            // If this fails, the next start reports what is in its way.
            let _ = self.remove();
        }
    }
}

impl PinDir {
    /// Creates the directory if it is missing, and locks it. Mounts a BPF file system at the default place if the
    /// directory is below it and none is mounted.
    ///
    /// Removes directories that an earlier service left incomplete.
    ///
    /// # Errors
    /// There is no writable BPF file system, it would disappear with this process, or another service holds the lock.
    pub fn acquire(options: &PinOptions) -> Result<PinDir, PinError> {
        bpffs::mount_default_for(&options.dir);
        let path = options.dir.join(&options.name);
        let parent = bpffs::existing_part(&options.dir);
        if !bpffs::is(parent) {
            return Err(PinError::NotBpffs {
                path: options.dir.clone(),
            });
        }
        if bpffs::is_private(parent) {
            return Err(PinError::PrivateMount {
                path: parent.into(),
            });
        }
        fs::create_dir_all(&path).map_err(|e| io_error(&path, e))?;
        let pin_dir = PinDir {
            _lock: lock(&path)?,
            is_fresh: false,
            path,
        };
        // An earlier service was killed while it created or removed these.
        for unfinished in with_prefix(&pin_dir.path, UNFINISHED_PREFIX)? {
            remove_tree(&unfinished)?;
        }
        Ok(pin_dir)
    }

    /// Returns the directory of the pins.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn maps(&self) -> PathBuf {
        self.path.join(format!("{MAPS_PREFIX}{ABI_VERSION}"))
    }

    /// Returns the directory of the maps that an earlier service of this ABI version left, and the size of their ring
    /// in bytes. Returns `None` if none exist.
    ///
    /// If some maps are missing, the others are useless. Then logs a warning and returns `None`.
    ///
    /// # Errors
    /// The directory has an entry that is not one of the maps, or is of another kind.
    pub fn find_maps(&self) -> Result<Option<(PathBuf, u32)>, PinError> {
        let maps = self.maps();
        let Some(pinned) = entries(&maps)? else {
            return Ok(None);
        };
        let mut ring = 0;
        for path in &pinned {
            let unknown = |what: &str| PinError::UnknownPins {
                path: path.clone(),
                what: what.into(),
            };
            let name = name_of(path);
            let Some((_, kind, key, value)) = MAPS.into_iter().find(|map| map.0 == name) else {
                return Err(unknown("not one of the expected maps"));
            };
            let map =
                MapData::from_pin(path).map_err(|_| unknown("it cannot be opened as a map"))?;
            let info = map
                .info()
                .map_err(|_| unknown("a map whose type cannot be read"))?;
            let sizes = (info.key_size(), info.value_size());
            if info.map_type().ok() != Some(kind) || sizes != (key, value) {
                return Err(unknown("a map of another kind"));
            }
            if name == "EVENTS" {
                ring = info.max_entries();
            }
        }
        if let Some(missing) = MAPS.iter().find(|map| !pinned.contains(&maps.join(map.0))) {
            tracing::warn!(
                "the pinned map {} is missing in {}: creating new maps, without the sessions and events in the old ones",
                missing.0,
                maps.display()
            );
            return Ok(None);
        }
        Ok(Some((maps, ring)))
    }

    /// Pins the maps of a loaded object, replacing any remains of others, and returns their directory.
    ///
    /// # Errors
    /// The file system is full or not writable.
    pub(super) fn pin_maps(&self, loaded: &LoadedObject<'_>) -> Result<PathBuf, PinError> {
        let maps = self.maps();
        self.create_atomically(&maps, |unfinished| {
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

    /// Returns whether the probes with this `PreparedObject::identity` are all pinned and attached, and use the pinned
    /// maps. Logs a warning if some are missing.
    pub(super) fn has_probes(&self, loaded: &LoadedObject<'_>, identity: &str) -> bool {
        let probes = self.probes(identity);
        let used = loaded.hooks().map(|hook| maps_of(&probes, hook));
        let Some(used) = used.collect::<Option<Vec<_>>>() else {
            if probes.is_dir() {
                tracing::warn!(
                    "some of the pinned probes in {} are missing: attaching all again; events since the last service stopped \
                     may be lost",
                    probes.display()
                );
            }
            return false;
        };
        let ring = MapInfo::from_pin(self.maps().join("EVENTS"));
        ring.is_ok_and(|ring| used.iter().all(|maps| maps.contains(&ring.id())))
    }

    /// Returns file descriptors of the pinned probes. Leaves out those that cannot be opened.
    pub(super) fn probe_fds(&self, loaded: &LoadedObject<'_>, identity: &str) -> Vec<OwnedFd> {
        let probes = self.probes(identity);
        let fd = |hook: &str| bpf::open_pin(&probes.join(program_pin(hook))).ok();
        loaded.hooks().filter_map(fd).collect()
    }

    /// Opens the pinned links, so that the probes stay attached even if the pins are removed. Leaves out those that
    /// cannot be opened.
    pub(super) fn links(&self, loaded: &LoadedObject<'_>, identity: &str) -> Vec<FdLink> {
        let probes = self.probes(identity);
        let link = |hook: &str| PinnedLink::from_pin(probes.join(hook)).ok();
        loaded.hooks().filter_map(link).map(FdLink::from).collect()
    }

    fn probes(&self, identity: &str) -> PathBuf {
        self.path.join(format!("{PROBES_PREFIX}{identity}"))
    }

    /// Pins attached probes, replacing any remains of the same ones. Call [`PinDir::remove_others`] only afterwards, so that
    /// some probes are attached at all times.
    ///
    /// # Errors
    /// As [`PinDir::pin_maps`]. The links are dropped then.
    pub(super) fn pin_probes(
        &self,
        identity: &str,
        loaded: &mut LoadedObject<'_>,
        links: Vec<(&'static str, FdLink)>,
    ) -> Result<(), PinError> {
        let probes = self.probes(identity);
        self.create_atomically(&probes, |unfinished| {
            let programs = loaded.pin_programs(unfinished);
            programs.map_err(|e| pin_error(unfinished, &e))?;
            for (hook, link) in links {
                let path = unfinished.join(hook);
                link.pin(&path).map_err(|e| pin_error(&path, &e))?;
            }
            Ok(())
        })
    }

    /// Removes the probes of other objects or settings, and the maps of other ABI versions. Returns the number of such
    /// versions.
    ///
    /// # Errors
    /// An entry cannot be removed.
    pub fn remove_others(&self, identity: &str) -> Result<usize, PinError> {
        let (own, maps) = (self.probes(identity), self.maps());
        let others = with_prefix(&self.path, PROBES_PREFIX)?;
        for probes in others.iter().filter(|path| **path != own) {
            remove_atomically(probes)?;
        }
        let others = with_prefix(&self.path, MAPS_PREFIX)?;
        let others = others.iter().filter(|path| **path != maps);
        others.map(|maps| remove_atomically(maps).map(|_| 1)).sum()
    }

    /// Removes all pins of the scope. Only probes held by this process stay attached.
    ///
    /// # Errors
    /// An entry cannot be removed.
    pub fn remove(&self) -> Result<(), PinError> {
        remove_scope(&self.path)?;
        // This fails if other scopes remain in the pin directory.
        if let Some(dir) = self.path.parent() {
            let _ = fs::remove_dir(dir);
        }
        Ok(())
    }

    /// Creates a directory with the entries that `fill` adds, atomically, in place of an existing one. `fill` gets the
    /// path of the unfinished directory.
    fn create_atomically(
        &self,
        path: &Path,
        fill: impl FnOnce(&Path) -> Result<(), PinError>,
    ) -> Result<(), PinError> {
        let unfinished = self
            .path
            .join(format!("{UNFINISHED_PREFIX}{}", name_of(path)));
        let result = fs::create_dir(&unfinished).map_err(|e| io_error(&unfinished, e));
        let result = result.and_then(|()| fill(&unfinished));
        let result = result.and_then(|()| {
            let before = rename_for_removal(path)?;
            fs::rename(&unfinished, path).map_err(|e| io_error(path, e))?;
            remove_tree(&before).map(drop)
        });
        if result.is_err() {
            // If this fails, the next start removes it.
            let _ = remove_tree(&unfinished);
        }
        result
    }
}

/// Returns the entries of a directory; `None` if it does not exist.
fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, PinError> {
    let read = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|e| io_error(dir, e))?,
    };
    let paths: Result<_, _> = read.map(|entry| entry.map(|entry| entry.path())).collect();
    paths.map(Some).map_err(|e| io_error(dir, e))
}

/// Returns the entries of a scope's directory whose names have a prefix.
fn with_prefix(scope: &Path, prefix: &str) -> Result<Vec<PathBuf>, PinError> {
    let mut with_prefix = entries(scope)?.unwrap_or_default();
    with_prefix.retain(|path| name_of(path).starts_with(prefix));
    Ok(with_prefix)
}

/// Returns the ids of the maps that the pinned probe of a hook uses; `None` if no probe is attached.
fn maps_of(probes: &Path, hook: &str) -> Option<Vec<u32>> {
    let link = PinnedLink::from_pin(probes.join(hook)).ok()?;
    let program = bpf::open_pin(&probes.join(program_pin(hook))).ok()?;
    let program = bpf::program_info(program).ok()?;
    // An object that is not a link has no program id.
    let attached = FdLink::from(link).info().ok()?.program_id() == program.id;
    attached.then_some(program.map_ids)
}

/// Removes the pins of a scope, and returns the number of files. Removes the directory too, unless it has other
/// entries.
fn remove_scope(path: &Path) -> Result<usize, PinError> {
    // Probes first: if the rest fails, remaining maps can be resumed, but probes without maps are useless.
    for of in [PROBES_PREFIX, MAPS_PREFIX] {
        for entry in with_prefix(path, of)? {
            rename_for_removal(&entry)?;
        }
    }
    let mut files = 0;
    for entry in with_prefix(path, UNFINISHED_PREFIX)? {
        files += remove_tree(&entry)?;
    }
    remove_unless_used(path)?;
    Ok(files)
}

/// Removes a directory atomically, and returns the number of files.
fn remove_atomically(path: &Path) -> Result<usize, PinError> {
    remove_tree(&rename_for_removal(path)?)
}

/// Renames a directory, if it exists, to a name that [`PinDir::acquire`] removes, and returns this name.
fn rename_for_removal(path: &Path) -> Result<PathBuf, PinError> {
    let renamed = path.with_file_name(format!("{UNFINISHED_PREFIX}no-{}", name_of(path)));
    remove_tree(&renamed)?;
    match fs::rename(path, &renamed) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error(path, e)),
        _ => Ok(renamed),
    }
}

/// Removes a directory unless it has entries or is a mount point.
fn remove_unless_used(path: &Path) -> Result<(), PinError> {
    use io::ErrorKind::{DirectoryNotEmpty, ResourceBusy};
    match fs::remove_dir(path) {
        Err(e) if !matches!(e.kind(), DirectoryNotEmpty | ResourceBusy) => Err(io_error(path, e)),
        _ => Ok(()),
    }
}

/// Removes a file or a directory with all its contents, if it exists, and returns the number of files. Does not follow
/// symbolic links.
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

/// Locks a directory without waiting. [`PinError::Locked`] if another process holds the lock.
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

/// Returns the process that holds a lock on a file, if /proc shows it.
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
