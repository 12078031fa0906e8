//! Operations of other processes on a run: `reaper stop`, `wait` and `logs`.

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
use reaper_host::advice::Advised as _;
use reaper_host::kernel::ProcessTable;
use reaper_host::source::procfs::{Liveness, Procfs};
use reaper_host::sys::pidfd::Pidfd;

/// Time for a run with a claimed outcome to close by itself, before a stop ends its grace.
const CLOSE_MAX: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Reasons why a run cannot be stopped or awaited.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// The record cannot be read or found.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A system call failed.
    #[error("run {id}: cannot {action}: {}", source.advised())]
    Io {
        /// Id of the run.
        id: String,
        /// Verb phrase that completes the message.
        action: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The supervisor must not or cannot be signalled.
    #[error("run {id}: its supervisor, the `reaper run`{}, {reason}", with_pid(*pid))]
    Supervisor {
        /// Id of the run.
        id: String,
        /// Pid of the supervisor, as the record gives it. `None` if it is in another PID namespace.
        pid: Option<u32>,
        /// Predicate that completes the message, such as `is in another pid namespace`.
        reason: &'static str,
    },
}

fn with_pid(pid: Option<u32>) -> String {
    pid.map_or(String::new(), |pid| format!(" with pid {pid}"))
}

fn failed(known: &RecordedRun, action: &'static str) -> impl Fn(io::Error) -> StopError {
    move |source| StopError::Io {
        id: known.id().to_owned(),
        action,
        source,
    }
}

fn refused(known: &RecordedRun, reason: &'static str) -> StopError {
    let header = &known.record.header;
    let own = runs::pid_namespace().is_ok_and(|own| own == header.pid_namespace);
    StopError::Supervisor {
        id: known.id().to_owned(),
        pid: header.supervisor.pid.filter(|_| own),
        reason,
    }
}

/// Opens a pidfd of the supervisor of a run, and returns its pid too. Returns `None` if it has exited; [`Runs::wait`]
/// then closes the run.
fn open_supervisor(known: &RecordedRun) -> Result<Option<(u32, Pidfd)>, StopError> {
    let failed = failed(known, "find its `reaper run`, which was not signalled");
    let header = &known.record.header;
    if runs::pid_namespace().map_err(&failed)? != header.pid_namespace {
        return Err(refused(
            known,
            "is in another pid namespace; stop the run from there, for example with nsenter or docker exec",
        ));
    }
    // Before the claim.
    let Some(supervisor) = header.supervisor.key() else {
        return Err(refused(
            known,
            "has no valid pid: the record of the run is damaged; find its processes with `ps`, and kill them",
        ));
    };
    if supervisor.pid == 1 {
        return Err(refused(
            known,
            "is the first process of its pid namespace, which is never signalled; stop its container instead",
        ));
    }
    // Before the check of the start time, so that the pidfd is known to be that of the supervisor.
    let pidfd = Pidfd::open(supervisor.pid);
    match Procfs::default().probe(supervisor) {
        Ok(Liveness::Alive { .. }) => {}
        Ok(Liveness::Gone) => return Ok(None),
        Err(error) => return Err(failed(io::Error::other(error))),
    }
    match pidfd {
        Err(Errno::ESRCH) => Ok(None),
        Ok(pidfd) => Ok(Some((supervisor.pid, pidfd))),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// Returns whether the run still has its supervisor.
///
/// A program that embeds runs may live on after it has closed a record. So this is checked right before each signal.
fn is_supervised(known: &RecordedRun, file: &File) -> Result<bool, StopError> {
    let supervised = match known.has_supervisor() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        supervised => supervised.map_err(failed(
            known,
            "check whether its `reaper run` is alive, which was not signalled",
        ))?,
    };
    Ok(supervised && runs::is_at(file, &known.path))
}

impl Runs {
    /// Tells the supervisor of a run to end it. Does not wait for the end.
    ///
    /// The outcome is then `cancelled`, unless another was claimed before. In that case the run gets 1 s to close by
    /// itself before the signal. A second stop ends the grace at once. Does nothing if the supervisor has exited.
    ///
    /// # Errors
    /// The record cannot be opened, or the supervisor cannot be signalled.
    pub fn stop(&self, known: &RecordedRun) -> Result<(), StopError> {
        let file = match runs::open(&known.path) {
            // The run is closed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file.map_err(failed(known, "open its record, so it was not stopped"))?,
        };
        let Some((pid, supervisor)) = open_supervisor(known)? else {
            return Ok(());
        };
        if !is_supervised(known, &file)? {
            return Ok(());
        }
        let is_closed =
            |record: &RunRecord| record.result.is_some() || !runs::is_at(&file, &known.path);
        let claimed = claim(&file, RunOutcome::Cancelled);
        if claimed.as_ref().is_ok_and(is_closed) {
            return Ok(());
        }
        let has_other_outcome =
            |record: &RunRecord| record.outcome() != Some(RunOutcome::Cancelled);
        // With another outcome claimed, the run is ending already. The signal is needed only if its processes or a hook
        // take long.
        if claimed.as_ref().is_ok_and(has_other_outcome) && self.closes_soon(known)? {
            return Ok(());
        }
        if !is_supervised(known, &file)? {
            return Ok(());
        }
        let sent = match claimed {
            Ok(_) => terminate_own(&supervisor, pid, Signal::SIGTERM),
            Err(error) => {
                let id = known.id();
                tracing::warn!(
                    "run {id} is stopped by a signal alone, as its record cannot be written: {}; it may report \
                     another outcome",
                    error.advised_or("check the disk")
                );
                stop_supervisor(&supervisor, pid)
            }
        };
        match sent {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(Errno::EPERM) => Err(refused(
                known,
                "may not be signalled by this user; send it SIGTERM as root to stop the run",
            )),
            Err(errno) => Err(failed(known, "signal its `reaper run`")(errno.into())),
        }
    }

    /// Waits up to [`CLOSE_MAX`] for a result, and returns whether there is one.
    fn closes_soon(&self, known: &RecordedRun) -> Result<bool, StopError> {
        let until = Instant::now() + CLOSE_MAX;
        while self.reload(known)?.record.result.is_none() {
            if Instant::now() >= until {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Waits until a run is closed, and returns it with its result. Closes a run whose supervisor is gone.
    ///
    /// # Errors
    /// The record no longer exists, or this process cannot close the run.
    pub fn wait(&self, known: &RecordedRun) -> Result<RecordedRun, StopError> {
        let failed = failed(known, "end what is left of it");
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
                    "has exited, but the rest of the run cannot be ended from here: the run is in another pid namespace, or \
                     includes this process; repeat this where the run was started",
                ));
            }
        }
    }

    /// Copies the output of a detached run to `to`. With `follow` it also copies later output, and returns when the
    /// supervisor has exited.
    ///
    /// # Errors
    /// The run was not detached, its output cannot be read, or `to` cannot be written.
    pub fn logs(&self, known: &RecordedRun, to: &mut dyn Write, follow: bool) -> io::Result<()> {
        if !known.record.header.detached {
            return Err(io::Error::other(
                "it was not detached, so its output went to the terminal or file of its caller; start it with --detach",
            ));
        }
        let log = known.log();
        let mut from = File::open(&log)?;
        if !follow {
            return io::copy(&mut from, to).and_then(|_| to.flush());
        }
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(&log, AddWatchFlags::IN_MODIFY)?;
        // The supervisor closes the record when it exits, for whatever reason.
        let closed = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVE_SELF;
        match watch.add_watch(&known.path, closed) {
            Ok(_) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        loop {
            let closed = !known.has_supervisor()?;
            io::copy(&mut from, to)?;
            to.flush()?;
            if closed {
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
