//! Limits how many runs of a group there are at a time.
//!
//! A group of N has N slot files in its directory. A run holds the lock of one (flock(2)) for as long as it lives, and the
//! kernel releases the lock however the run ends. Runs that wait queue for the lock of `turn`. Only the run that holds
//! `turn` takes slots. It watches the directory and sleeps until a slot file is closed. So however many runs wait, the kernel has
//! one watch. The order in which they get a slot is that in which the kernel hands out `turn`.
//!
//! A slot file names the run that has or had the slot. If that run was killed, the next holder first ends what is left of it.
//! A run that is stopped (Ctrl-Z) while it has `turn` holds up those behind it.

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

use super::closing::{cannot_close, close_if_dead};
use super::runs::{OPEN, RecordError, Runs};

/// Lock of the run that is next.
const TURN: &str = "turn";
/// Upper bound of the length of a run's id.
const ID_MAX: u64 = 64;
/// Time after which the first wait looks again: a slot that was closed right before the watch began may have been still locked.
const LOOK_AGAIN_MS: u8 = 200;

/// A group, and how many of it may run at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencyLimit {
    /// Letters, digits, `.`, `_` and `-`.
    pub group: String,
    /// The same for all runs of a group: a run that waits holds up those behind it, whatever their number is.
    pub runs: usize,
}

/// A slot of the group, held until this is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    _lock: Flock<File>,
    /// Its close, which comes with this process's exit at the latest, wakes the run that is next.
    _writer: File,
}

impl Runs {
    /// Waits for a slot for the run of this id. Calls `waits` once if none is free.
    pub(super) fn take_slot(
        &self,
        limit: &ConcurrencyLimit,
        id: &str,
        waits: impl FnOnce(),
    ) -> Result<Slot, RecordError> {
        let dir = self.dir().join("limits").join(&limit.group);
        let slots = Slots {
            runs: self,
            dir: &dir,
            count: limit.runs,
            id,
        };
        slots.wait(waits).map_err(RecordError::file(&dir))
    }
}

struct Slots<'a> {
    runs: &'a Runs,
    dir: &'a Path,
    count: usize,
    /// The run that is to have one.
    id: &'a str,
}

impl Slots<'_> {
    fn wait(&self, waits: impl FnOnce()) -> io::Result<Slot> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(self.dir)?;
        let turn = self.dir.join(TURN);
        let mut held = try_lock(&turn)?;
        if held.is_some()
            && let Some(slot) = self.take_free()?
        {
            return Ok(slot);
        }
        waits();
        if held.is_none() {
            held = Some(lock(&turn)?);
        }
        let slot = self.await_slot();
        drop(held);
        slot
    }

    /// Waits for a slot. This process holds `turn`.
    fn await_slot(&self) -> io::Result<Slot> {
        let watch = self.watch();
        let mut timeout = PollTimeout::from(LOOK_AGAIN_MS);
        loop {
            if let Some(slot) = self.take_free()? {
                return Ok(slot);
            }
            let Ok(watch) = &watch else {
                // The user has too many watches. The first slot is waited for, though another may be free before.
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
                // The kernel reports the close before it releases the lock (`__fput` in fs/file_table.c). While this process
                // holds `turn` no other takes the slot, so this wait is short.
                drop(lock(&self.path(slot))?);
            }
        }
    }

    fn watch(&self) -> nix::Result<Inotify> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(self.dir, AddWatchFlags::IN_CLOSE_WRITE)?;
        Ok(watch)
    }

    fn take_free(&self) -> io::Result<Option<Slot>> {
        for slot in 0..self.count {
            if let Some(lock) = try_lock(&self.path(slot))? {
                return self.take(lock, &self.path(slot)).map(Some);
            }
        }
        Ok(None)
    }

    /// Ends what is left of the run that had the slot, and enters this one.
    fn take(&self, lock: Flock<File>, path: &Path) -> io::Result<Slot> {
        let mut last = Vec::new();
        (&*lock).take(ID_MAX).read_to_end(&mut last)?;
        if let Some(record) = self.open_record(&String::from_utf8_lossy(&last))
            // Where it cannot be closed from here the slot is free all the same: nothing could ever wait for it.
            && let Err(error) = close_if_dead(&record, true)
        {
            cannot_close(&record, &error);
        }
        let mut writer = File::options().write(true).truncate(true).open(path)?;
        writer.write_all(self.id.as_bytes())?;
        Ok(Slot {
            _lock: lock,
            _writer: writer,
        })
    }

    /// Returns the record of a run that is not closed.
    fn open_record(&self, id: &str) -> Option<PathBuf> {
        let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let path = is_id.then(|| self.runs.path(id, OPEN));
        path.filter(|path| fs::symlink_metadata(path).is_ok())
    }

    fn path(&self, slot: usize) -> PathBuf {
        self.dir.join(format!("{slot}.slot"))
    }

    fn slot_of(&self, name: &Path) -> Option<usize> {
        let slot = name.file_stem()?.to_str()?.parse().ok()?;
        let is_one = name.extension() == Some("slot".as_ref()) && slot < self.count;
        is_one.then_some(slot)
    }
}

fn try_lock(path: &Path) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(open(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(Some(file)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

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

/// Opens a file for reading, so that its close wakes nothing. Creates it if it is not there.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).mode(0o600).custom_flags(O_CREAT);
    options.open(path)
}

#[cfg(test)]
mod tests;
