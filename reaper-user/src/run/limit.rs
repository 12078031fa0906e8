//! How many runs of a group there may be at a time: who comes first goes first.
//!
//! Each has a file in the group's directory, whose name is its number and which it has locked for as long as it lives; the lock
//! is given back however it ends. Whoever has fewer than the limit before it may go. Of those that wait, the first one
//! watches the directory, and each other one waits for the one before it, by a lock that this one has while it waits: nothing
//! is asked for again and again, and however many wait, the kernel has one watch.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::runs::{RecordError, Runs};

/// What the file of one is called that has a place or is to have one, and the other while it waits.
const TICKET: &str = "ticket";
const WAITS: &str = "waits";

/// A group, and how many of it may run at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Letters, digits, `.`, `_` and `-`.
    pub group: String,
    pub runs: usize,
}

/// A place among those that may run, until this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    _ticket: Held,
}

/// A file that is removed when it is let go.
#[derive(Debug)]
struct Held {
    _file: Flock<File>,
    path: PathBuf,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Whoever finds it without a lock removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// What there is to do.
enum Turn {
    Go,
    /// So many are before it; the one to wait for, unless it is the first of those that wait.
    Wait(usize, Option<PathBuf>),
}

impl Runs {
    /// Waits for a place. `waits` is told, once, how many are before it.
    pub(super) fn place(
        &self,
        limit: &Limit,
        waits: impl FnOnce(usize),
    ) -> Result<Place, RecordError> {
        let dir = self.dir().join("limits").join(&limit.group);
        let mut queue = Queue { dir: &dir, limit };
        let place = queue.wait(waits);
        place.map_err(RecordError::file(&dir))
    }
}

struct Queue<'a> {
    dir: &'a Path,
    limit: &'a Limit,
}

impl Queue<'_> {
    fn wait(&mut self, waits: impl FnOnce(usize)) -> io::Result<Place> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(self.dir)?;
        let (number, ticket, waiting) = self.join()?;
        let mut waits = Some(waits);
        // Before the first look: what happens after that is told.
        let mut watch: Option<Inotify> = None;
        loop {
            let (before, predecessor) = match self.turn(number)? {
                Turn::Go => break,
                Turn::Wait(before, predecessor) => (before, predecessor),
            };
            if let Some(waits) = waits.take() {
                waits(before);
            }
            match (predecessor, &watch) {
                (Some(path), _) => await_unlocked(&path)?,
                (None, Some(watch)) => await_events(watch)?,
                (None, None) => match self.watch() {
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
        Ok(Place { _ticket: ticket })
    }

    /// Takes the next number.
    fn join(&self) -> io::Result<(u64, Held, Held)> {
        let _lock = self.lock()?;
        let last = self.numbers(TICKET)?.pop().unwrap_or_default();
        let number = last + 1;
        Ok((
            number,
            self.hold(number, TICKET)?,
            self.hold(number, WAITS)?,
        ))
    }

    fn hold(&self, number: u64, kind: &str) -> io::Result<Held> {
        let path = self.path(number, kind);
        let mut options = File::options();
        // One that is left of somebody who is gone is taken over.
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => Ok(Held { _file: file, path }),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    fn turn(&self, number: u64) -> io::Result<Turn> {
        let _lock = self.lock()?;
        let mut before = 0;
        for other in self
            .numbers(TICKET)?
            .into_iter()
            .filter(|other| *other < number)
        {
            before += usize::from(self.lives(other, TICKET)?);
        }
        if before < self.limit.runs {
            return Ok(Turn::Go);
        }
        let waiting = self.numbers(WAITS)?.into_iter().rev();
        for other in waiting.filter(|other| *other < number) {
            if self.lives(other, WAITS)? {
                return Ok(Turn::Wait(before, Some(self.path(other, WAITS))));
            }
        }
        Ok(Turn::Wait(before, None))
    }

    /// Whether somebody has it; else it is removed.
    fn lives(&self, number: u64, kind: &str) -> io::Result<bool> {
        let path = self.path(number, kind);
        // Not for writing: that this is closed is to wake nobody.
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            file => file?,
        };
        // Shared: two who look are not in each other's way.
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_) => {
                let _ = fs::remove_file(path);
                Ok(false)
            }
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    fn watch(&self) -> nix::Result<Inotify> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(
            self.dir,
            AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_DELETE,
        )?;
        Ok(watch)
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
        let of_kind = entries.filter(|path| path.extension().unwrap_or_default() == kind);
        let number = |path: PathBuf| path.file_stem()?.to_str()?.parse().ok();
        let mut numbers: Vec<u64> = of_kind.filter_map(number).collect();
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

fn await_events(watch: &Inotify) -> io::Result<()> {
    let mut fds = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::NONE) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    while watch.read_events().is_ok_and(|events| !events.is_empty()) {}
    Ok(())
}

#[cfg(test)]
mod tests;
