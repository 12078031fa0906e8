//! Supervises one command, and ends every process that it leaves behind.
//!
//! The supervisor is a child subreaper: the kernel makes it the parent of its orphaned descendants. It therefore has a
//! child as long as any descendant lives, whatever that does with setsid, double fork, environment or user id. Only
//! processes that *another* program starts on request (a container engine, a service manager, a running tmux server)
//! are not tracked. Neither privileges nor the service are needed.
//!
//! With [`Run::cgroup`] the command gets its own cgroup. Every process in it belongs to the run too.
//!
//! If the supervisor is killed, a running service ends the rest of the tree. A run with a record ([`Runs`]) can also be
//! found, stopped and awaited by other processes. The next [`Runs::close_dead`] ends what a killed supervisor has left.
//!
//! ```
//! use std::{process::Command, time::Duration};
//! use reaper::run::{Run, Runs};
//!
//! # let dir = std::env::temp_dir().join(format!("reaper-doc-{}", std::process::id()));
//! # let own = dir.join("runs");
//! let runs = Runs::open(&own)?; // or Runs::of_user()?, where `reaper ps` looks
//! runs.close_dead()?; // ends what killed supervisors have left
//! let mut run = Run::new(Command::new("sh"));
//! run.command.args(["-c", "setsid sleep 600 & exit 3"]);
//! run.timeout = Some(Duration::from_secs(60));
//! run.session = Some("turn 17".to_owned());
//! run.records = Some(runs);
//! let report = run.supervise()?;
//! println!("{}: {} left behind were ended", report.outcome.as_str(), report.ended);
//! # assert_eq!((report.outcome, report.ended, report.survivors.len()), (reaper::run::RunOutcome::Failed, 1, 0));
//! # assert_eq!(Runs::open(&own)?.find(&report.run_id.unwrap())?.record.header.session.as_deref(), Some("turn 17"));
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cgroup;
mod closing;
mod done_check;
mod end;
mod hooks;
mod limit;
mod outcome;
mod output_monitor;
mod received_signal;
mod record;
mod record_writer;
mod report;
mod runs;
mod stand_in;
mod stop;
mod supervise;

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

pub use nix::sys::signal::Signal;

pub use crate::reap::Times;
pub use cgroup::CgroupError;
use cgroup::RunCgroup;
pub use limit::{ConcurrencyLimit, is_name};
pub use outcome::{CommandExit, RunOutcome, RunState, outcome};
use reaper_host::advice::Advised as _;
use reaper_host::sys;
use reaper_host::sys::cgroup::own;
use reaper_host::sys::child::{self, BlockedSignals};
use reaper_host::sys::held_path::HeldPath;
pub use reaper_host::sys::held_path::HeldPathError;
pub use record::{
    CgroupCreated, Claim, CommandStarted, RecordedProcess, RunHeader, RunRecord, RunResult,
};
pub use record_writer::RecordWriter;
pub use report::{EndedProcess, LISTED_MAX, RunReport, Survivor};
pub use runs::{CLOSED_AGE, CLOSED_MAX, RecordError, RecordedRun, Runs};
pub use stand_in::{Role, Supervisor, role};
pub use stop::StopError;

/// A command, and how to supervise it.
pub struct Run {
    /// Command to run, with its stdin, stdout and stderr.
    pub command: Command,
    /// Grace between the first signal and SIGKILL, and time limit for an exit after SIGKILL.
    pub times: Times,
    /// First signal that is sent to a process that must end.
    pub signal: Signal,
    /// Whether the command itself is signalled first, and the rest of the tree only when it has exited or the grace has
    /// expired. If the supervisor is killed, the service or [`Runs::close_dead`] signals the whole tree at once.
    pub leader_first: bool,
    /// Time limit for the command, counted from its start. `None` for no limit.
    pub timeout: Option<Duration>,
    /// Time limit without output on the stdout and stderr of this process. `None` for no limit. With a limit, the command
    /// writes to these streams: a stdout or stderr that was set on [`Run::command`] is replaced, except where this process
    /// has a terminal.
    pub idle: Option<Duration>,
    /// Command that checks whether the run is done.
    pub done_when: Option<DoneWhen>,
    /// Script for `sh -c` after a success, run when the tree has been ended. It is supervised like the command, but
    /// without a time limit. `REAPER_OUTCOME` is in its environment.
    pub on_success: Option<String>,
    /// The same after an outcome with [`RunOutcome::is_failure`]. Not run if the command could not start.
    pub on_failure: Option<String>,
    /// Paths that are removed recursively after a success, unless `on_success` fails. Of a symbolic link only the link
    /// is removed. Paths are resolved before the command starts. As root, a path that another user may change is
    /// refused.
    pub clean_on_success: Vec<PathBuf>,
    /// Directory of the run's record. Without a usable one the command runs all the same, unless it has a name or a
    /// limit, or is detached.
    pub records: Option<Runs>,
    /// Name of the run, unique among the open runs.
    pub name: Option<String>,
    /// Session that the run is part of, as the caller names it.
    pub session: Option<String>,
    /// Name of the agent that starts the run, as the caller gives it.
    pub agent: Option<String>,
    /// Limit on the number of concurrent runs of a group. Signals have their normal effect while the run waits: SIGTERM
    /// then ends this process.
    pub limit: Option<ConcurrencyLimit>,
    /// Whether the command starts in its own cgroup (version 2), below the cgroup of this process. That must be
    /// delegated to this user.
    ///
    /// All processes in it are ended with the run, in the end by `cgroup.kill` (Linux 5.14). That includes processes of
    /// other users and, if the supervisor is killed, those without a living ancestor. Processes of
    /// [`Run::done_when`] are outside of it. The start takes about 10 ms more.
    pub cgroup: bool,
    /// Whether the run was started with `--detach`. The run then needs a record, and gets a file for its output
    /// ([`RecordWriter::log`]). The caller must fork and redirect the output.
    pub detached: bool,
    /// Proof that this process had no children before the run. See [`role`]. `None` if the caller ensures it otherwise.
    pub supervisor: Option<Supervisor>,
    /// Callback for the progress of the run.
    pub progress: Option<ProgressListener>,
    /// [`Run::clean_on_success`], resolved before the command starts.
    clean_paths: Vec<HeldPath>,
    /// Record of the run, once it exists.
    recording: Option<RecordWriter>,
    /// Directory of the cgroup below which that of the command is created. `None` without [`Run::cgroup`].
    parent_cgroup: Option<PathBuf>,
}

/// Callback for the progress of a run.
pub type ProgressListener = Box<dyn FnMut(Progress<'_>)>;

/// Progress of a run.
#[derive(Debug)]
pub enum Progress<'a> {
    /// The record has been created.
    Recorded(&'a RecordWriter),
    /// The run waits for a slot of its concurrency limit.
    Waiting,
    /// The command has started with this pid.
    Started(u32),
}

/// A command that checks whether a run is done: it then exits with status 0. A check that runs longer than 30 s is
/// killed, and counts as failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoneWhen {
    /// Script for `sh -c`.
    pub command: String,
    /// Time from the start of the run to the first check, and from the end of a check to the next. When the command has
    /// exited, the last check starts at once.
    pub every: Duration,
}

impl Run {
    /// Creates a run with SIGTERM, the default [`Times`], and without limits, check, hooks, record or cgroup.
    pub fn new(command: Command) -> Run {
        Run {
            command,
            times: Times::default(),
            signal: Signal::SIGTERM,
            leader_first: false,
            timeout: None,
            idle: None,
            done_when: None,
            on_success: None,
            on_failure: None,
            clean_on_success: Vec::new(),
            records: None,
            name: None,
            session: None,
            agent: None,
            limit: None,
            cgroup: false,
            detached: false,
            supervisor: None,
            progress: None,
            clean_paths: Vec::new(),
            recording: None,
            parent_cgroup: None,
        }
    }

    /// Runs the command until it ends or must end, then ends the rest of its tree.
    ///
    /// Before that it waits for a slot, if there is a [`Run::limit`]. After that it runs the hooks and closes the
    /// record.
    ///
    /// Signals to this process are forwarded to the command, except those that the terminal has sent to both. A signal
    /// that another process sends to their common process group reaches the command twice, because nothing shows
    /// whether the command has received it. While the tree is being ended, a termination signal ends the grace at once.
    ///
    /// All children of this process count as the command's. So there must be no others ([`role`]), and no other threads
    /// that could receive the signals.
    ///
    /// # Errors
    /// The run cannot be prepared, or the command cannot start; then no process of it is left. Processes that could not
    /// be ended and failed hooks are part of the report instead.
    pub fn supervise(mut self) -> Result<RunReport, RunError> {
        sys::non_initial_pid_namespace().map_err(RunError::Proc)?;
        for path in &self.clean_on_success {
            let held = HeldPath::resolve(path).map_err(|source| RunError::Path {
                path: path.clone(),
                source,
            })?;
            self.clean_paths.push(held);
        }
        if self.cgroup {
            self.parent_cgroup = Some(own().ok_or(CgroupError::NotVisible)?);
        }
        self.create_record()?;
        let mut signals = None;
        let done = self.supervise_recorded(&mut signals);
        if let Some(recording) = self.recording.take() {
            let result = match &done {
                Ok(report) => RunResult::of(report),
                Err(error) => RunResult {
                    status: error.status(),
                    ..RunResult::unobserved(recording.claim(error.outcome()), &error.to_string())
                },
            };
            if let Err(error) = recording.close(result) {
                // Another process closes it later with the claimed outcome.
                tracing::debug!("cannot record the result of the run: {error}");
            }
        }
        // Only after the record is closed: until then `reaper stop` may send a SIGTERM, which must not end this process.
        drop(signals);
        done
    }

    /// Waits for a slot, supervises the command and runs the hooks. Does not close the record. Stores the blocked
    /// signals in `signals`, so that they stay blocked after the return.
    fn supervise_recorded(
        &mut self,
        signals: &mut Option<BlockedSignals>,
    ) -> Result<RunReport, RunError> {
        // Before the wait for a slot, so that a failure is reported at once.
        let cgroup = self.create_cgroup()?;
        let _slot = self.acquire_slot()?;
        child::adopt_orphans().map_err(RunError::system(
            "cannot become the parent of orphaned processes, so the command was not started",
        ))?;
        if let Some(recording) = &self.recording {
            let recorded = recording.record_start(&mut self.command);
            recorded.map_err(|source| RunError::System {
                what: "cannot open the record of the run again, so the command was not started",
                source,
            })?;
        }
        let signals = signals.insert(BlockedSignals::begin().map_err(RunError::system(
            "cannot block signals, so the command was not started",
        ))?);
        if self
            .recording
            .as_ref()
            .is_some_and(RecordWriter::is_stop_requested)
        {
            return Err(RunError::Stopped(Signal::SIGTERM));
        }
        let mut report = supervise::supervise_command(self, signals, cgroup)?;
        hooks::run_hooks(self, signals, &mut report);
        Ok(report)
    }

    /// Creates the record, if there is a directory for it.
    ///
    /// # Errors
    /// It does not exist or cannot be created, and the run needs it for its name, its limit or because it is detached.
    fn create_record(&mut self) -> Result<(), RunError> {
        let needed = self.name.is_some() || self.limit.is_some() || self.detached;
        let created = match &self.records {
            Some(runs) => runs.create_record(self),
            None if needed => Err(RecordError::NoDirectory),
            None => return Ok(()),
        };
        match created {
            Ok(recording) => {
                let recording = self.recording.insert(recording);
                if let Some(listener) = &mut self.progress {
                    listener(Progress::Recorded(recording));
                }
            }
            Err(error) if needed => return Err(RunError::Record(error)),
            Err(error) => tracing::debug!("{error}"),
        }
        Ok(())
    }

    /// Creates and records the cgroup for a command. Returns `None` without [`Run::cgroup`].
    fn create_cgroup(&self) -> Result<Option<RunCgroup>, RunError> {
        let Some(parent) = &self.parent_cgroup else {
            return Ok(None);
        };
        let recording = self.recording.as_ref();
        let id = recording.map_or_else(record_writer::random_id, |own| own.id().to_owned());
        let cgroup = RunCgroup::create(&cgroup::directory(parent, &id))?;
        if let Some(Err(error)) = recording.map(|own| own.record_cgroup(cgroup.id())) {
            tracing::debug!("cannot record the cgroup of the command: {error}");
        }
        Ok(Some(cgroup))
    }

    /// Waits for a slot of the concurrency limit. Returns `None` if the run has none.
    fn acquire_slot(&mut self) -> Result<Option<limit::Slot>, RunError> {
        let (Some(limit), Some(runs), Some(recording)) =
            (self.limit.clone(), self.records.clone(), &self.recording)
        else {
            return Ok(None);
        };
        let id = recording.id().to_owned();
        let slot = runs.take_slot(&limit, &id, || self.report_progress(Progress::Waiting));
        slot.map(Some).map_err(RunError::Record)
    }

    fn report_progress(&mut self, progress: Progress<'_>) {
        if let Some(listener) = &mut self.progress {
            listener(progress);
        }
    }
}

/// Errors of a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The command cannot be executed.
    #[error("cannot start {}: {}", program.display(), source.advised_or(start_advice(source)))]
    Start {
        /// Program as the caller gave it.
        program: PathBuf,
        /// Error of the start.
        source: io::Error,
    },
    /// /proc is not usable, so descendants could not be found.
    #[error(
        "the command was not started, because what it leaves behind could not be found: cannot use /proc: {}",
        .0.advised_or("mount the /proc of this pid namespace (mount -t proc proc /proc)")
    )]
    Proc(#[source] io::Error),
    /// A system call failed.
    #[error("{what}: {}", source.advised_or(REPORT))]
    System {
        /// Operation that cannot be done and the effect, such as `cannot block signals, so the command was not started`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// A path in [`Run::clean_on_success`] cannot be resolved or may be changed by another user.
    #[error("--clean-on-success cannot use {}, so the command was not started: {source}", path.display())]
    Path {
        /// Path as the caller gave it.
        path: PathBuf,
        /// Reason why it is refused.
        source: HeldPathError,
    },
    /// The run has a name or a limit or is detached, and cannot be recorded.
    #[error("the command was not started: {0}")]
    Record(#[source] RecordError),
    /// The command cannot have its own cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Stopped before the command started: by this signal, or by a recorded stop request (as SIGTERM).
    #[error(
        "the run was stopped before its command started, by {0} or `reaper stop`; nothing was started"
    )]
    Stopped(Signal),
}

/// Exit status if a stopped run's command has none: that of a process killed by SIGTERM.
const STOPPED: u8 = 128 + 15;

impl RunError {
    fn system(what: &'static str) -> impl Fn(nix::Error) -> RunError {
        move |errno| RunError::System {
            what,
            source: errno.into(),
        }
    }

    fn outcome(&self) -> RunOutcome {
        match self {
            RunError::Stopped(_) => RunOutcome::Cancelled,
            _ => RunOutcome::Failed,
        }
    }

    /// Returns the exit status, as `env(1)` defines it: 127 if the program does not exist, 126 if it cannot be
    /// executed, 125 for other errors. A stopped run has 128 plus the signal.
    pub fn status(&self) -> u8 {
        match self {
            RunError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            RunError::Stopped(signal) => 128 + *signal as u8,
            RunError::System { .. } | RunError::Proc(_) | RunError::Path { .. } => 125,
            RunError::Record(_) | RunError::Cgroup(_) => 125,
        }
    }
}

/// Advice for an unexpected error of a system call.
const REPORT: &str = "try again, and report a bug if it persists";

/// Returns what the user can do about a program that cannot be started.
fn start_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "check its spelling and PATH, and that the interpreter in its first line exists"
        }
        io::ErrorKind::PermissionDenied => {
            "make it executable (chmod +x), and check that its file system is not mounted noexec"
        }
        io::ErrorKind::ArgumentListTooLong => "shorten its arguments or its environment",
        io::ErrorKind::ExecutableFileBusy => "wait until no process writes to it",
        _ => "check that it is a program for this machine, or a script that begins with `#!`",
    }
}
