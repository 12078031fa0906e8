//! Limits the number of concurrent runs of a group.
//!
//! A group of N has N slot files in its directory. Each run locks one (flock(2)) as long as it lives, and the kernel
//! releases the lock however the run ends. Waiting runs queue for the lock of `turn`. Only the run that holds `turn`
//! takes slots: it watches the directory until a slot file is closed. So there is only one watch, however many runs
//! wait. Runs get slots in the order in which the kernel grants them `turn`.
//!
//! A slot file names the run that has or had the slot. If that run was killed, the next holder first ends its
//! processes. A run that is stopped (Ctrl-Z) while it holds `turn` blocks those behind it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::O_CREAT;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::closing::{close_if_dead, warn_not_closed};
use super::runs::{OPEN, RecordError, Runs};

/// File that the next run locks.
const TURN: &str = "turn";
/// Maximum length of the run id that is read from a slot file.
const ID_MAX: u64 = 64;
/// Time until the first retry. A slot that was closed right before the watch began may still have been locked.
const FIRST_RETRY_MS: u8 = 200;

/// Limit on the number of concurrent runs of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencyLimit {
    /// Name of the group, for which [`is_name`] holds.
    pub group: String,
    /// Maximum number of concurrent runs, at least 1. All runs of a group should use the same number: a waiting run blocks those
    /// behind it, whatever their number is.
    pub runs: usize,
}

/// Returns whether a text can name a run or a group: up to 64 letters, digits, `.`, `_` and `-`, with a letter or digit
/// first. Such a name is also valid as a file name.
pub fn is_name(text: &str) -> bool {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts_alphanumeric = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    starts_alphanumeric && text.len() <= 64 && text.chars().all(is_valid)
}

/// A slot of a group, released on drop.
#[derive(Debug)]
pub(super) struct Slot {
    _lock: Flock<File>,
    /// Slot file, open for writing. Its close, at the latest when this process exits, wakes the next run.
    _writer: File,
}

impl Runs {
    /// Waits for a slot for the run with this id. Calls `on_wait` once, unless a slot is free at once. Ends the
    /// processes of a killed run that had the slot before.
    pub(super) fn take_slot(
        &self,
        limit: &ConcurrencyLimit,
        id: &str,
        on_wait: impl FnOnce(),
    ) -> Result<Slot, RecordError> {
        if !is_name(&limit.group) || limit.runs == 0 {
            let ConcurrencyLimit { group, runs } = limit.clone();
            return Err(RecordError::Limit { group, runs });
        }
        let dir = self.dir().join("limits").join(&limit.group);
        let slots = Slots {
            runs: self,
            dir: &dir,
            count: limit.runs,
            id,
        };
        slots.wait(on_wait).map_err(RecordError::file(&dir))
    }
}

/// Slots of a group, as one run takes them.
struct Slots<'a> {
    runs: &'a Runs,
    /// Directory of the group.
    dir: &'a Path,
    /// Number of slots.
    count: usize,
    /// Id of the run that needs a slot.
    id: &'a str,
}

impl Slots<'_> {
    fn wait(&self, on_wait: impl FnOnce()) -> io::Result<Slot> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(self.dir)?;
        let turn = self.dir.join(TURN);
        let mut held = try_lock(&turn)?;
        if held.is_some()
            && let Some(slot) = self.take_free()?
        {
            return Ok(slot);
        }
        on_wait();
        if held.is_none() {
            held = Some(lock(&turn)?);
        }
        let slot = self.await_slot();
        drop(held);
        slot
    }

    /// Waits for a slot. The caller holds `turn`.
    fn await_slot(&self) -> io::Result<Slot> {
        let watch = self.watch();
        let mut timeout = PollTimeout::from(FIRST_RETRY_MS);
        loop {
            if let Some(slot) = self.take_free()? {
                return Ok(slot);
            }
            let Ok(watch) = &watch else {
                // The user has too many watches. Waits for the first slot, though another may become free earlier.
                drop(lock(&self.path(0))?);
                continue;
            };
            let mut fds = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout) {
                Ok(0) => timeout = PollTimeout::NONE,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let events = watch.read_events().unwrap_or_default();
            let names = events.iter().filter_map(|event| event.name.as_ref());
            for slot in names.filter_map(|name| self.slot_of(Path::new(name))) {
                // The kernel reports the close before it releases the lock (`__fput` in fs/file_table.c). No other run
                // takes the slot while this one holds `turn`, so this wait is short.
                drop(lock(&self.path(slot))?);
            }
        }
    }

    fn watch(&self) -> nix::Result<Inotify> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(self.dir, AddWatchFlags::IN_CLOSE_WRITE)?;
        Ok(watch)
    }

    /// Takes the first free slot. Returns `None` if other runs have all.
    fn take_free(&self) -> io::Result<Option<Slot>> {
        for slot in 0..self.count {
            if let Some(lock) = try_lock(&self.path(slot))? {
                return self.take(lock, &self.path(slot)).map(Some);
            }
        }
        Ok(None)
    }

    /// Closes the run that had the slot before, if it was killed, and writes the id of this run to the slot file.
    fn take(&self, lock: Flock<File>, path: &Path) -> io::Result<Slot> {
        let mut last = Vec::new();
        (&*lock).take(ID_MAX).read_to_end(&mut last)?;
        if let Some(record) = self.open_record(&String::from_utf8_lossy(&last))
            // The slot is taken even if that run cannot be closed from here. Otherwise it would stay blocked.
            && let Err(error) = close_if_dead(&record, true)
        {
            warn_not_closed(&record, &error);
        }
        let mut writer = File::options().write(true).truncate(true).open(path)?;
        writer.write_all(self.id.as_bytes())?;
        Ok(Slot {
            _lock: lock,
            _writer: writer,
        })
    }

    /// Returns the path of the record of an open run. Returns `None` if no open run has this id.
    fn open_record(&self, id: &str) -> Option<PathBuf> {
        let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let path = is_id.then(|| self.runs.path(id, OPEN));
        path.filter(|path| fs::symlink_metadata(path).is_ok())
    }

    fn path(&self, slot: usize) -> PathBuf {
        self.dir.join(format!("{slot}.slot"))
    }

    /// Returns the number of a slot file, given by its name. Returns `None` for other files and for higher numbers.
    fn slot_of(&self, name: &Path) -> Option<usize> {
        let slot = name.file_stem()?.to_str()?.parse().ok()?;
        let is_one = name.extension() == Some("slot".as_ref()) && slot < self.count;
        is_one.then_some(slot)
    }
}

/// Opens or creates a file, and locks it. Returns `None` if another process holds the lock.
fn try_lock(path: &Path) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(open(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(Some(file)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Opens or creates a file, and waits until it can lock it.
fn lock(path: &Path) -> io::Result<Flock<File>> {
    let mut file = open(path)?;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusive) {
            Ok(file) => return Ok(file),
            Err((file, Errno::EINTR)) => file,
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// Opens or creates a file. It is opened for reading only, so that its close does not wake a waiting run.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).mode(0o600).custom_flags(O_CREAT);
    options.open(path)
}

#[cfg(test)]
mod tests;
