//! What others do to a run: stop it, wait for it, read what it says.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::Signal;

use super::RunOutcome;
use super::closing::{Closing, close_if_dead};
use super::record::RunRecord;
use super::record_writer::claim;
use super::runs::{self, RecordError, RecordedRun, Runs};
use crate::reap::{stop_supervisor, terminate_own};
use reaper_host::kernel::ProcessTable;
use reaper_host::source::procfs::{Liveness, Procfs};
use reaper_host::sys::{self, pidfd::Pidfd};

/// How long a run whose outcome is decided has to be over by itself, and how often that is asked.
const SOON: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Why a run cannot be stopped, or waited for.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("run {id}: {source}")]
    Io { id: String, source: io::Error },
    #[error("run {id} cannot be stopped: its owner, pid {pid}, {why}")]
    Supervisor {
        id: String,
        pid: u32,
        why: &'static str,
    },
}

fn failed(known: &RecordedRun) -> impl Fn(io::Error) -> StopError {
    |source| StopError::Io {
        id: known.id().to_owned(),
        source,
    }
}

fn refused(known: &RecordedRun, why: &'static str) -> StopError {
    StopError::Supervisor {
        id: known.id().to_owned(),
        pid: known.record.header.wrapper.pid,
        why,
    }
}

/// A handle on the owner of a run, if that is to be had and may be signalled; `None` where it is gone, which whoever waits for the
/// run finds.
fn owner(known: &RecordedRun) -> Result<Option<Pidfd>, StopError> {
    let failed = failed(known);
    let start = &known.record.header;
    if sys::non_initial_pid_namespace().map_err(&failed)? != start.pid_namespace {
        return Err(refused(
            known,
            "is in another pid namespace: stop it from there, as with nsenter or docker exec",
        ));
    }
    // Before anything is claimed: the record itself may be wrong.
    if start.wrapper.pid <= 1 {
        return Err(refused(
            known,
            "is never signalled: end the container that it is the first process of",
        ));
    }
    // Opened before it is known to be the owner's.
    let pidfd = Pidfd::open(start.wrapper.pid);
    match Procfs::default().probe(start.wrapper.key()) {
        Ok(Liveness::Alive { .. }) => {}
        Ok(Liveness::Gone) => return Ok(None),
        Err(error) => return Err(failed(io::Error::other(error))),
    }
    match pidfd {
        Err(Errno::ESRCH) => Ok(None),
        pidfd => pidfd.map(Some).map_err(|errno| failed(errno.into())),
    }
}

/// Returns whether the run still has its owner. One that embeds runs may live on after it has closed its record, so this is
/// asked right before each signal.
fn is_owned(known: &RecordedRun, file: &File) -> Result<bool, StopError> {
    let owned = match known.has_supervisor() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        owned => owned.map_err(failed(known))?,
    };
    Ok(owned && runs::is_at(file, &known.path))
}

impl Runs {
    /// Has the owner of a run end it, which is then recorded as cancelled, unless it has come to another end by then. Does
    /// not wait for that. A second stop cuts the grace short.
    ///
    /// # Errors
    /// The owner cannot be asked; one that is gone is no error.
    pub fn stop(&self, known: &RecordedRun) -> Result<(), StopError> {
        let failed = failed(known);
        let file = match runs::open(&known.path) {
            // It is closed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file.map_err(&failed)?,
        };
        let Some(owner) = owner(known)? else {
            return Ok(());
        };
        if !is_owned(known, &file)? {
            return Ok(());
        }
        let is_over =
            |record: &RunRecord| record.result.is_some() || !runs::is_at(&file, &known.path);
        let claimed = claim(&file, RunOutcome::Cancelled);
        if claimed.as_ref().is_ok_and(is_over) {
            return Ok(());
        }
        let decided = |record: &RunRecord| record.outcome() != Some(RunOutcome::Cancelled);
        // If its outcome was decided before, it is about to be over, unless its end or a command that follows takes its time:
        // that is cut short.
        if claimed.as_ref().is_ok_and(decided) && self.is_over_soon(known)? {
            return Ok(());
        }
        if !is_owned(known, &file)? {
            return Ok(());
        }
        let pid = known.record.header.wrapper.pid;
        let sent = match claimed {
            Ok(_) => terminate_own(&owner, pid, Signal::SIGTERM),
            Err(error) => {
                let id = known.id();
                tracing::warn!("run {id}: that it is stopped cannot be written down: {error}");
                stop_supervisor(&owner, pid)
            }
        };
        match sent {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(Errno::EPERM) => Err(refused(known, "may not be signalled by this user")),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Whether a run comes to its end by itself.
    fn is_over_soon(&self, known: &RecordedRun) -> Result<bool, StopError> {
        let until = Instant::now() + SOON;
        while self.reload(known)?.record.result.is_none() {
            if Instant::now() >= until {
                return Ok(false);
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(true)
    }

    /// Waits until a run is over, and gives what has come of it. One whose owner is gone is closed.
    ///
    /// # Errors
    /// It cannot be read any more, or not be closed from here.
    pub fn wait(&self, known: &RecordedRun) -> Result<RecordedRun, StopError> {
        let failed = failed(known);
        loop {
            let now = self.reload(known)?;
            if now.record.result.is_some() {
                return Ok(now);
            }
            match close_if_dead(&now.path, true).map_err(&failed)? {
                Closing::Done(closed) => return Ok(*closed),
                Closing::NotDue => continue,
                Closing::Refused => {}
            }
            let now = self.reload(known)?;
            if now.record.result.is_none() {
                return Err(refused(
                    &now,
                    "is gone, and the run cannot be closed from here: it is of another pid namespace, or this is part of it",
                ));
            }
        }
    }

    /// Passes on what a detached run has written, and with `follow` all that it writes until it is over.
    ///
    /// # Errors
    /// It was not detached, or cannot be read, or nobody reads what is passed on.
    pub fn logs(&self, known: &RecordedRun, to: &mut dyn Write, follow: bool) -> io::Result<()> {
        if !known.record.header.detached {
            return Err(io::Error::other(
                "it was not detached: its output went to where it was started",
            ));
        }
        let log = known.log();
        let mut from = File::open(&log)?;
        if !follow {
            return io::copy(&mut from, to).and_then(|_| to.flush());
        }
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(&log, AddWatchFlags::IN_MODIFY)?;
        // Its owner lets go of it at its end, whatever that is.
        let ends = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVE_SELF;
        match watch.add_watch(&known.path, ends) {
            Ok(_) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        loop {
            let over = !known.has_supervisor()?;
            io::copy(&mut from, to)?;
            to.flush()?;
            if over {
                return Ok(());
            }
            let mut fds = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            while watch.read_events().is_ok_and(|events| !events.is_empty()) {}
        }
    }
}
