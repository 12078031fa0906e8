//! How many runs of a group there may be at a time: who comes first goes first.
//!
//! Each has a file in the group's directory, whose name is its number, in which its id is, and which it has locked for as long as
//! it lives; the lock is given back however it ends. Whoever has fewer than the limit before it may go. Of those that wait, the
//! first one watches the directory, and each other one waits for the one before it, by a lock that this one has while it
//! waits: nothing is asked for again and again, and however many wait, the kernel has one watch.
//!
//! The place of one whose owner was killed is free once what that has left is ended: whoever is next sees to it. One that is
//! stopped (Ctrl-Z) keeps its turn, and those behind it wait for it to go on: it was there before them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hashbrown::HashSet;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::closing::{cannot_close, close_if_dead};
use super::runs::{OPEN, RecordError, Runs};

/// What the file of one is called that has a place or is to have one, and the other while it waits.
const TICKET: &str = "ticket";
const WAITS: &str = "waits";
/// More than any id has.
const ID_MAX: u64 = 64;
const LOOK_AGAIN_MS: u8 = 200;

/// A group, and how many of it may run at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencyLimit {
    /// Letters, digits, `.`, `_` and `-`.
    pub group: String,
    pub runs: usize,
}

/// A place among those that may run, until this is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    _ticket: Ticket,
}

/// A file that is removed when it is let go.
#[derive(Debug)]
struct Ticket {
    file: Flock<File>,
    path: PathBuf,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Whoever finds it without a lock removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// What there is to do.
enum Turn {
    Go,
    /// So many are before it.
    Wait(usize, For),
}

/// What whoever has no place waits for.
enum For {
    /// The one before it, which waits too.
    Predecessor(PathBuf),
    /// That what is left of these is ended: their tickets and records. Their owners are gone.
    Dead(Vec<(PathBuf, PathBuf)>),
    /// That somebody lets go.
    Places,
}

impl Runs {
    /// Waits for a place for the run of this id. `waits` is told, once, how many are before it.
    pub(super) fn place(
        &self,
        limit: &ConcurrencyLimit,
        id: &str,
        waits: impl FnOnce(usize),
    ) -> Result<Slot, RecordError> {
        let dir = self.dir().join("limits").join(&limit.group);
        let queue = Queue {
            runs: self,
            dir: &dir,
            limit,
        };
        let place = queue.wait(id, waits);
        place.map_err(RecordError::file(&dir))
    }
}

struct Queue<'a> {
    runs: &'a Runs,
    dir: &'a Path,
    limit: &'a ConcurrencyLimit,
}

impl Queue<'_> {
    fn wait(&self, id: &str, waits: impl FnOnce(usize)) -> io::Result<Slot> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(self.dir)?;
        let (number, ticket, waiting) = self.join(id)?;
        let mut waits = Some(waits);
        let mut buried = HashSet::new();
        // Before the first look: what happens after that is told.
        let mut watch: Option<Inotify> = None;
        // It may have begun between the word that a file is closed and the lock's return: looked for again once.
        let mut patience = PollTimeout::from(LOOK_AGAIN_MS);
        loop {
            let (before, what) = match self.turn(number, &buried)? {
                Turn::Go => break,
                Turn::Wait(before, what) => (before, what),
            };
            if let Some(waits) = waits.take() {
                waits(before);
            }
            match (what, &watch) {
                (For::Predecessor(path), _) => await_unlocked(&path)?,
                (For::Dead(all), _) => {
                    for (ticket, run) in all {
                        bury(&ticket, &run);
                        buried.insert(ticket);
                    }
                }
                (For::Places, Some(watch)) => {
                    let once = std::mem::replace(&mut patience, PollTimeout::NONE);
                    self.await_events(watch, once, number)?;
                }
                (For::Places, None) => match self.watch() {
                    Ok(begun) => watch = Some(begun),
                    // There are too many: the oldest is waited for, even if another ends before it.
                    Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC) => {
                        self.await_oldest(number)?
                    }
                    Err(errno) => return Err(errno.into()),
                },
            }
        }
        drop(waiting);
        Ok(Slot { _ticket: ticket })
    }

    /// Takes the next number.
    fn join(&self, id: &str) -> io::Result<(u64, Ticket, Ticket)> {
        let _lock = self.lock()?;
        let last = self.numbers(TICKET)?.pop().unwrap_or_default();
        let number = last + 1;
        let ticket = self.hold(number, TICKET)?;
        (&*ticket.file).write_all(id.as_bytes())?;
        Ok((number, ticket, self.hold(number, WAITS)?))
    }

    fn hold(&self, number: u64, kind: &str) -> io::Result<Ticket> {
        let path = self.path(number, kind);
        let mut options = File::options();
        // One that is left of somebody who is gone is taken over.
        let file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => Ok(Ticket { file, path }),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    /// Of those that were `buried` nothing more can be done, be it that their files are still there.
    fn turn(&self, number: u64, buried: &HashSet<PathBuf>) -> io::Result<Turn> {
        let _lock = self.lock()?;
        let (mut before, mut dead) = (0, Vec::new());
        let tickets = self.numbers(TICKET)?.into_iter();
        for other in tickets.filter(|other| *other < number) {
            let path = self.path(other, TICKET);
            match (self.id_unless_lives(&path)?, path) {
                (None, _) => before += 1,
                (Some(id), path) => match self.open_record(&id) {
                    Some(record) if !buried.contains(&path) => {
                        before += 1;
                        dead.push((path, record));
                    }
                    _ => drop(fs::remove_file(path)),
                },
            }
        }
        if before < self.limit.runs {
            return Ok(Turn::Go);
        }
        let waiting = self.numbers(WAITS)?.into_iter().rev();
        for other in waiting.filter(|other| *other < number) {
            let path = self.path(other, WAITS);
            match self.id_unless_lives(&path)? {
                None => return Ok(Turn::Wait(before, For::Predecessor(path))),
                Some(_) => drop(fs::remove_file(path)),
            }
        }
        let what = match dead.is_empty() {
            true => For::Places,
            false => For::Dead(dead),
        };
        Ok(Turn::Wait(before, what))
    }

    /// What is in a file that nobody has locked; `None` where somebody has.
    fn id_unless_lives(&self, path: &Path) -> io::Result<Option<String>> {
        // Not for writing: that this is closed is to wake nobody.
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(String::new())),
            file => file?,
        };
        // Shared: two who look are not in each other's way.
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(file) => {
                let mut id = Vec::new();
                (&*file).take(ID_MAX).read_to_end(&mut id)?;
                Ok(Some(String::from_utf8_lossy(&id).into_owned()))
            }
            Err((_, Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    /// The record of a run that is not closed, if it is one.
    fn open_record(&self, id: &str) -> Option<PathBuf> {
        let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let path = is_id.then(|| self.runs.path(id, OPEN));
        path.filter(|path| fs::symlink_metadata(path).is_ok())
    }

    fn watch(&self) -> nix::Result<Inotify> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(
            self.dir,
            AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_DELETE,
        )?;
        Ok(watch)
    }

    /// Waits until somebody who came before this number may have let go.
    fn await_events(&self, watch: &Inotify, timeout: PollTimeout, number: u64) -> io::Result<()> {
        let mut fds = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        while let Ok(events) = watch.read_events()
            && !events.is_empty()
        {
            let names = events.iter().filter_map(|event| event.name.as_ref());
            let numbers = names.filter_map(|name| number_of(Path::new(name), TICKET));
            for other in numbers.filter(|other| *other < number) {
                // That a file is closed the kernel tells before it gives back the lock (`__fput` in fs/file_table.c).
                await_unlocked(&self.path(other, TICKET))?;
            }
        }
        Ok(())
    }

    fn await_oldest(&self, number: u64) -> io::Result<()> {
        let all = self.numbers(TICKET)?;
        match all.into_iter().find(|other| *other < number) {
            Some(oldest) => await_unlocked(&self.path(oldest, TICKET)),
            None => Ok(()),
        }
    }

    /// In order.
    fn numbers(&self, kind: &str) -> io::Result<Vec<u64>> {
        let entries = fs::read_dir(self.dir)?.flatten().map(|entry| entry.path());
        let mut numbers: Vec<u64> = entries.filter_map(|path| number_of(&path, kind)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn path(&self, number: u64, kind: &str) -> PathBuf {
        self.dir.join(format!("{number}.{kind}"))
    }

    fn lock(&self) -> io::Result<Flock<File>> {
        let locked = Flock::lock(File::open(self.dir)?, FlockArg::LockExclusive);
        locked.map_err(|(_, errno)| errno.into())
    }
}

fn await_unlocked(path: &Path) -> io::Result<()> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    // Shared: who is told of it is not in the way of others.
    match Flock::lock(file, FlockArg::LockShared) {
        Ok(_) | Err((_, Errno::EINTR)) => Ok(()),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// The number in the name of a file of this kind.
fn number_of(path: &Path, kind: &str) -> Option<u64> {
    let its = path.extension().and_then(OsStr::to_str) == Some(kind);
    path.file_stem().filter(|_| its)?.to_str()?.parse().ok()
}

/// Has a run that is dead be closed, what is left of it ended by that. Where that cannot be done from here its place is free all the
/// same: nobody could ever wait for it.
fn bury(ticket: &Path, run: &Path) {
    if let Err(error) = close_if_dead(run, true) {
        cannot_close(run, &error);
    }
    // Its number is given to nobody else as long as somebody waits behind it.
    let _ = fs::remove_file(ticket);
}

#[cfg(test)]
mod tests;
