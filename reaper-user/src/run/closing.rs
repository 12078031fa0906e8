//! Closing runs whose owner is gone: what it could not see to any more is ended by what is written down.

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
use super::record::{NEVER_BEGAN, OTHER_BOOT, OWNER_GONE, RunRecord, RunResult};
use super::record_writer::{claim, close};
use super::report::ended;
use super::runs::{self, CLOSED, OPEN, RecordError, RecordedRun, Runs};
use super::{RunOutcome, Survivor};
use crate::reap::{Due, PollingReaper, Times};
use reaper_host::kernel::ProcessHandle;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_host::sys::host::boot_id;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::{ProcessKey, TICK_NS};

/// How long an owner that has let go of its record may take to end. A program that only embeds runs may live on.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);
/// How many runs are closed at a time.
const AT_ONCE: usize = 16;

impl Runs {
    /// Closes all runs whose owner is gone: what is left of them is ended, as their policy says, if it can be told for
    /// certain. Gives those that it has closed.
    ///
    /// Nothing is signalled of another boot. A run of another pid namespace, whose numbers mean others here, and one that this process
    /// descends from, are left to somebody else.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn close_dead(&self) -> Result<Vec<RecordedRun>, RecordError> {
        let mut closed = Vec::new();
        let mut taken = Vec::new();
        let open = |path: &PathBuf| path.extension().unwrap_or_default() == OPEN;
        for path in self.files()?.into_iter().filter(open) {
            match runs::lock_record(&path, false) {
                Ok(file) => taken.extend(file.map(|file| (path, file))),
                Err(error) => cannot_close(&path, &error),
            }
            if taken.len() == AT_ONCE {
                closed.append(&mut close_all(std::mem::take(&mut taken)));
            }
        }
        closed.append(&mut close_all(taken));
        closed.sort_by_key(|known: &RecordedRun| known.record.header.started);
        Ok(closed)
    }
}

/// Closes runs beside each other: each may need all of its grace.
fn close_all(taken: Vec<(PathBuf, Flock<File>)>) -> Vec<RecordedRun> {
    let _files = sys::many_files();
    let close = |(path, file): &(PathBuf, Flock<File>)| {
        let closed = close_taken(path, file).unwrap_or_else(|error| {
            cannot_close(path, &error);
            None
        });
        // Who waits for this one is not to wait for the others too.
        let _ = File::unlock(file);
        closed
    };
    thread::scope(|scope| {
        let begin = |one| {
            let helper = thread::Builder::new().spawn_scoped(scope, move || close(one));
            // Where there are to be no more threads, this one does it.
            helper.map_err(|_| one)
        };
        let begun: Vec<_> = taken.iter().map(begin).collect();
        // Until they are gone, and not only done: this program may fork next.
        let closed = begun.into_iter().map(|begun| match begun {
            Ok(helper) => helper.join().unwrap_or_default(),
            Err(one) => close(one),
        });
        closed.flatten().collect()
    })
}

pub(super) fn cannot_close(path: &Path, error: &io::Error) {
    tracing::warn!("the run of {} cannot be closed: {error}", path.display());
}

/// What has become of an attempt to close a run.
pub(super) enum Closing {
    Done(Box<RecordedRun>),
    /// Somebody else has closed it, or it has an owner who lives.
    NotDue,
    /// That is not to be done from here, or there was nothing to do but to give it its last name.
    Refused,
}

/// Closes a run if its owner is gone; with `wait` once that is so.
pub(super) fn close_if_dead(path: &Path, wait: bool) -> io::Result<Closing> {
    let Some(file) = runs::lock_record(path, wait)? else {
        return Ok(Closing::NotDue);
    };
    let _files = sys::many_files();
    let closed = close_taken(path, &file)?;
    Ok(closed.map_or(Closing::Refused, |known| Closing::Done(Box::new(known))))
}

/// Closes a run whose owner is gone: its record is locked.
fn close_taken(path: &Path, file: &File) -> io::Result<Option<RecordedRun>> {
    let Some(record) = runs::usable(path, &runs::content(file)?) else {
        return Ok(None);
    };
    if record.result.is_some() {
        fs::rename(path, path.with_extension(CLOSED))?;
        return Ok(None);
    }
    let Some(over) = end(file, &record)? else {
        return Ok(None);
    };
    if let Err(error) = close(file, path, over.clone(), true) {
        let id = &record.header.id;
        tracing::warn!("run {id}: what has come of it cannot be written down: {error}");
    }
    let over = Some(over);
    Ok(Some(RecordedRun {
        record: RunRecord {
            result: over,
            ..record
        },
        path: path.with_extension(CLOSED),
    }))
}

/// Ends what there is of a run; `None` if that is not to be done from here.
fn end(file: &File, record: &RunRecord) -> io::Result<Option<RunResult>> {
    let start = &record.header;
    // What is left of it is to be ended in any case.
    let settle = |outcome| match claim(file, outcome) {
        Ok(claimed) => claimed.outcome().unwrap_or(outcome),
        Err(error) => {
            tracing::debug!("run {}: cannot be claimed: {error}", start.id);
            record.outcome().unwrap_or(outcome)
        }
    };
    let boot = boot_id(Path::new("/"));
    if boot.is_empty() || start.boot_id != boot {
        return Ok(Some(RunResult::unobserved(
            settle(RunOutcome::Death),
            OTHER_BOOT,
        )));
    }
    let directory = start.cgroup.as_deref().map(Path::new);
    let made = directory.zip(record.cgroup);
    let leaf = made.map(|(directory, made)| RunCgroup::find(directory, made.id));
    let elsewhere = sys::non_initial_pid_namespace()? != start.pid_namespace;
    let leaf = match leaf.transpose() {
        // It is for others to see to.
        Err(_) if elsewhere => return Ok(None),
        leaf => leaf?.flatten(),
    };
    if let (Some(directory), None) = (directory, &leaf) {
        cgroup::remove_unused(directory);
    }
    // The line that names the command may have found no room.
    let begun = leaf.as_ref().map(RunCgroup::pids).transpose();
    let begun = begun.map_err(io::Error::other)?.unwrap_or_default();
    if record.commands.is_empty() && begun.is_empty() {
        return Ok(Some(RunResult::unobserved(
            settle(RunOutcome::Cancelled),
            NEVER_BEGAN,
        )));
    }
    if elsewhere {
        return Ok(None);
    }
    let procfs = Procfs::default();
    await_exit(start.wrapper.key(), &procfs);
    let mut family = Family {
        known: record
            .commands
            .iter()
            .map(|one| one.process.key())
            .collect(),
        leaf,
        procfs: &procfs,
    };
    let own = std::process::id();
    let found = family.look().map_err(io::Error::other)?;
    let holds = family
        .leaf
        .as_ref()
        .map(RunCgroup::contains_self)
        .transpose();
    let holds = holds.map_err(io::Error::other)?.unwrap_or_default();
    if found.keys().any(|key| key.pid == own) || holds {
        return Ok(None);
    }
    let mut over = RunResult::unobserved(settle(RunOutcome::Death), OWNER_GONE);
    let inside = family.inside().map_err(io::Error::other)?;
    if !found.is_empty() || !inside.is_empty() {
        let exits = Arc::new(ExitPoll::new()?);
        let times = Times {
            grace: Duration::from_millis(start.grace_ms),
            ..Times::default()
        };
        let signal = Signal::try_from(start.signal).unwrap_or(Signal::SIGTERM);
        let cgroup = family.leaf.as_ref().map(RunCgroup::cgroup);
        let endings = PollingReaper::new(exits, times, signal).within(cgroup);
        let endings = endings.end(true, |_| family.look());
        let endings = endings.map_err(io::Error::other)?;
        (over.ended, over.killed) = ended(&endings);
        over.left = Survivor::all(&endings, family.inside().unwrap_or_default());
    }
    if let Some(leaf) = family.leaf.filter(|_| over.left.is_empty()) {
        leaf.remove();
    }
    Ok(Some(over))
}

/// Waits until an owner that lets go of its record because it ends has ended: its files are closed before it leaves its
/// process group. If that is orphaned by it, whoever stands still in there by then is sent SIGHUP (`exit_notify` in
/// kernel/exit.c).
fn await_exit(owner: ProcessKey, procfs: &Procfs) {
    let pidfd = Pidfd::open(owner.pid);
    // One that is about to end counts as gone wherever else it is asked.
    let is_it = |ticks: u64| {
        owner.has_same_tick(ProcessKey {
            pid: owner.pid,
            start: ticks.saturating_mul(TICK_NS),
        })
    };
    if procfs.start_ticks(owner.pid).is_some_and(is_it)
        && let Ok(pidfd) = pidfd
    {
        pidfd.wait(LEAVES_WITHIN);
    }
}

/// Those that a run has started, and all that were found to descend from them, or to be in its cgroup.
struct Family<'a> {
    known: HashSet<ProcessKey>,
    leaf: Option<RunCgroup>,
    procfs: &'a Procfs,
}

impl Family<'_> {
    /// Who is in its cgroup, be it that the process table does not show them to this user.
    fn inside(&self) -> Result<HashSet<u32>, ProcfsError> {
        let inside = self.leaf.as_ref().map(RunCgroup::pids).transpose();
        inside.map(Option::unwrap_or_default)
    }

    /// Who of it lives. Who has lost all makers since the last look is remembered.
    fn look(&mut self) -> Result<Due, ProcfsError> {
        let found = self.procfs.subtrees(&self.known, || self.inside())?;
        self.known.extend(found.iter().map(|one| one.key));
        Ok(found.into_iter().map(|one| (one.key, None)).collect())
    }
}
