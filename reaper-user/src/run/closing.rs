//! Closes runs whose supervisor was killed, and ends the processes that it has left, as found by the run record.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hashbrown::HashSet;
use nix::fcntl::Flock;
use nix::sys::signal::Signal;

use super::cgroup::{self, RunCgroup};
use super::record::{NEVER_BEGAN, OTHER_BOOT, RunRecord, RunResult, SUPERVISOR_KILLED};
use super::record_writer::{claim, close};
use super::report::ended;
use super::runs::{self, CLOSED, OPEN, RecordError, RecordedRun, Runs, pid_namespace};
use super::{RunOutcome, Survivor};
use crate::reap::{Due, DueProcess, PollingReaper, Times};
use reaper_host::advice::Advised as _;
use reaper_host::kernel::ProcessHandle;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_host::sys::host::boot_id;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::{ProcessKey, TICK_NS};

/// Time limit for the exit of a supervisor after it has released its record. A program that embeds runs may live on.
const EXIT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of runs that are closed at the same time.
const AT_ONCE: usize = 16;

impl Runs {
    /// Closes runs whose supervisor is gone, and ends their processes with the recorded grace and signal. Returns the
    /// runs that it closed, by the time of their start.
    ///
    /// Closes a run of another boot without signals. Skips runs of another pid namespace, where their pids mean other
    /// processes, and runs that this process descends from. Logs a warning for a run that cannot be closed.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn close_dead(&self) -> Result<Vec<RecordedRun>, RecordError> {
        let mut closed = Vec::new();
        let mut locked = Vec::new();
        let open = |path: &PathBuf| path.extension().unwrap_or_default() == OPEN;
        for path in self.files()?.into_iter().filter(open) {
            match runs::lock_record(&path, false) {
                Ok(file) => locked.extend(file.map(|file| (path, file))),
                Err(error) => warn_not_closed(&path, &error),
            }
            if locked.len() == AT_ONCE {
                closed.append(&mut close_all(std::mem::take(&mut locked)));
            }
        }
        closed.append(&mut close_all(locked));
        closed.sort_by_key(|known: &RecordedRun| known.record.header.started);
        Ok(closed)
    }
}

/// Closes runs in parallel, because each may need its full grace. Returns those that it closed.
fn close_all(locked: Vec<(PathBuf, Flock<File>)>) -> Vec<RecordedRun> {
    let _files = sys::many_files();
    let close = |(path, file): &(PathBuf, Flock<File>)| {
        let closed = close_locked(path, file).unwrap_or_else(|error| {
            warn_not_closed(path, &error);
            None
        });
        // Releases this lock before the other runs are closed, for a process that waits for this run.
        let _ = File::unlock(file);
        closed
    };
    thread::scope(|scope| {
        let start = |run| {
            let thread = thread::Builder::new().spawn_scoped(scope, move || close(run));
            thread.map_err(|_| run)
        };
        let started: Vec<_> = locked.iter().map(start).collect();
        // Joined, so that no thread exists any more: this program may fork next.
        let closed = started.into_iter().map(|started| match started {
            Ok(thread) => thread.join().unwrap_or_default(),
            // No thread could be started for it.
            Err(run) => close(run),
        });
        closed.flatten().collect()
    })
}

pub(super) fn warn_not_closed(path: &Path, error: &io::Error) {
    tracing::warn!(
        "cannot clean up the run recorded in {}: {}; if its `reaper run` was killed, its processes may still run; the next \
         `reaper ps` tries again",
        path.display(),
        error.advised()
    );
}

/// Result of an attempt to close a run.
pub(super) enum Closing {
    /// This call has closed the run.
    Done(Box<RecordedRun>),
    /// Another process already closed the run, or its supervisor is still alive.
    NotDue,
    /// This process cannot close the run or use its record, or the run had its result and its file was only renamed.
    Refused,
}

/// Ends the processes of a run and closes it, if its supervisor is gone. With `wait` it waits for that.
pub(super) fn close_if_dead(path: &Path, wait: bool) -> io::Result<Closing> {
    let Some(file) = runs::lock_record(path, wait)? else {
        return Ok(Closing::NotDue);
    };
    let _files = sys::many_files();
    let closed = close_locked(path, &file)?;
    Ok(closed.map_or(Closing::Refused, |known| Closing::Done(Box::new(known))))
}

/// Ends the processes of a run and closes its record, which the caller has locked. Returns `None` if the run is not
/// closed by this call (see [`Closing::Refused`]).
fn close_locked(path: &Path, file: &File) -> io::Result<Option<RecordedRun>> {
    let Some(record) = runs::parse_or_rename(path, &runs::content(file)?) else {
        return Ok(None);
    };
    if record.result.is_some() {
        fs::rename(path, path.with_extension(CLOSED))?;
        return Ok(None);
    }
    let Some(result) = end_processes(file, &record)? else {
        return Ok(None);
    };
    if let Err(error) = close(file, path, result.clone(), true) {
        let id = &record.header.id;
        tracing::warn!(
            "run {id} was cleaned up, but its result cannot be written to its record: {}; `reaper wait` may report another \
             status",
            error.advised_or("check the disk")
        );
    }
    let result = Some(result);
    Ok(Some(RecordedRun {
        record: RunRecord { result, ..record },
        path: path.with_extension(CLOSED),
    }))
}

/// Ends the processes of a run, and returns the result for its record. The outcome is that of the first claim.
///
/// A run of another boot, or one whose command never started, gets a result without any signals. Returns `None` for a
/// run of another pid namespace, and for one that includes this process.
fn end_processes(file: &File, record: &RunRecord) -> io::Result<Option<RunResult>> {
    let header = &record.header;
    // The processes are ended even if the claim cannot be written.
    let settle = |outcome| match claim(file, outcome) {
        Ok(claimed) => claimed.outcome().unwrap_or(outcome),
        Err(error) => {
            tracing::debug!("run {}: cannot write a claim: {error}", header.id);
            record.outcome().unwrap_or(outcome)
        }
    };
    let boot = boot_id(Path::new("/"));
    if boot.is_empty() || header.boot_id != boot {
        return Ok(Some(RunResult::unobserved(
            settle(RunOutcome::Death),
            OTHER_BOOT,
        )));
    }
    let directory = header.cgroup.as_deref().map(Path::new);
    let created = directory.zip(record.cgroup);
    let cgroup = created.map(|(directory, created)| RunCgroup::find(directory, created.id));
    let elsewhere = pid_namespace()? != header.pid_namespace;
    let cgroup = match cgroup.transpose() {
        Err(_) if elsewhere => return Ok(None),
        cgroup => cgroup?.flatten(),
    };
    if let (Some(directory), None) = (directory, &cgroup) {
        cgroup::remove_unused(directory);
    }
    // The command may run without its line in the record, if the disk was full.
    let inside = cgroup.as_ref().map(RunCgroup::pids).transpose();
    let inside = inside.map_err(io::Error::other)?.unwrap_or_default();
    if record.commands.is_empty() && inside.is_empty() {
        return Ok(Some(RunResult::unobserved(
            settle(RunOutcome::Cancelled),
            NEVER_BEGAN,
        )));
    }
    if elsewhere {
        return Ok(None);
    }
    let procfs = Procfs::default();
    if let Some(supervisor) = header.supervisor.key() {
        await_exit(supervisor, &procfs);
    }
    let mut tree = RunTree {
        known: record
            .commands
            .iter()
            .filter_map(|command| command.process.key())
            .collect(),
        cgroup,
        procfs: &procfs,
    };
    let own = std::process::id();
    let found = tree.scan().map_err(io::Error::other)?;
    let contains_self = tree
        .cgroup
        .as_ref()
        .map(RunCgroup::contains_self)
        .transpose();
    let contains_self = contains_self.map_err(io::Error::other)?.unwrap_or_default();
    if found.keys().any(|key| key.pid == own) || contains_self {
        return Ok(None);
    }
    let mut result = RunResult::unobserved(settle(RunOutcome::Death), SUPERVISOR_KILLED);
    let inside = tree.pids_in_cgroup().map_err(io::Error::other)?;
    if !found.is_empty() || !inside.is_empty() {
        let exits = Arc::new(ExitPoll::new()?);
        let times = Times {
            grace: Duration::from_millis(header.grace_ms),
            ..Times::default()
        };
        let signal = Signal::try_from(header.signal).unwrap_or(Signal::SIGTERM);
        let cgroup = tree.cgroup.as_ref().map(RunCgroup::cgroup);
        let reaper = PollingReaper::new(exits, times, signal).with_cgroup(cgroup);
        let results = reaper.end(true, |_| tree.scan());
        let results = results.map_err(io::Error::other)?;
        (result.ended, result.killed) = ended(&results);
        result.left = Survivor::all(&results, tree.pids_in_cgroup().unwrap_or_default());
    }
    if let Some(cgroup) = tree.cgroup.filter(|_| result.left.is_empty()) {
        cgroup.remove();
    }
    Ok(Some(result))
}

/// Waits, at most [`EXIT_MAX`], until a supervisor that is exiting has left its process group.
///
/// An exiting process closes its files, which releases the record, before it leaves its group. If its exit orphans the
/// group, the kernel sends SIGHUP to a group with stopped members (`exit_notify` in kernel/exit.c). So no member may be
/// stopped before that.
fn await_exit(supervisor: ProcessKey, procfs: &Procfs) {
    let pidfd = Pidfd::open(supervisor.pid);
    // Compares the start time alone: `Procfs::probe` reports an exiting process as gone.
    let is_supervisor = |ticks: u64| {
        supervisor.has_same_tick(ProcessKey {
            pid: supervisor.pid,
            start: ticks.saturating_mul(TICK_NS),
        })
    };
    if procfs
        .start_ticks(supervisor.pid)
        .is_some_and(is_supervisor)
        && let Ok(pidfd) = pidfd
    {
        pidfd.wait(EXIT_MAX);
    }
}

/// Processes of a run: its commands, their descendants, and the processes in its cgroup.
struct RunTree<'a> {
    /// Commands, and all processes that a scan has found.
    known: HashSet<ProcessKey>,
    cgroup: Option<RunCgroup>,
    procfs: &'a Procfs,
}

impl RunTree<'_> {
    /// Returns the pids in the cgroup, also those that /proc hides from this user.
    fn pids_in_cgroup(&self) -> Result<HashSet<u32>, ProcfsError> {
        let inside = self.cgroup.as_ref().map(RunCgroup::pids).transpose();
        inside.map(Option::unwrap_or_default)
    }

    /// Returns the living processes of the run. They stay known if their ancestors exit later.
    fn scan(&mut self) -> Result<Due, ProcfsError> {
        let found = self
            .procfs
            .subtrees(&self.known, || self.pids_in_cgroup())?;
        self.known.extend(found.iter().map(|process| process.key));
        Ok(found
            .into_iter()
            .map(|process| (process.key, DueProcess::default()))
            .collect())
    }
}
