//! Owning a command: it is run, and when it has come to its end, or has to, nothing that descends from it is left.
//!
//! This process adopts what its descendants leave without a parent, so the kernel itself says when nothing is left: as
//! long as anybody lives who descends from it, it has a child. Nothing is missed, whatever a descendant does with setsid,
//! double fork, environment or user id; only who lets *another* program start something (a container engine, a service manager, a
//! tmux server that is there already) is not followed. Neither a privilege nor a service is needed.
//!
//! The command can have a cgroup for itself ([`Run::cgroup`]): then what is in there is the run's too, and can be ended by whoever
//! may write to it.
//!
//! A service that watches it ends what is left if this process is killed.
//!
//! A run can be written down ([`Runs`]): then it is found, stopped and waited for by others, and if this process is killed, the next
//! one ends what is left.
//!
//! ```
//! use std::{process::Command, time::Duration};
//! use reaper::run::{Run, Runs};
//!
//! # let dir = std::env::temp_dir().join(format!("reaper-doc-{}", std::process::id()));
//! # let own = dir.join("runs");
//! let runs = Runs::open(&own)?; // or Runs::of_user()?, where `reaper ps` looks
//! runs.close_dead()?; // what others have left who were killed
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
mod end;
mod hooks;
mod limit;
mod outcome;
mod output_monitor;
mod probe;
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

use nix::sys::signal::Signal;

use crate::reap::Times;
pub use cgroup::CgroupError;
use cgroup::RunCgroup;
pub use limit::ConcurrencyLimit;
pub use outcome::{CommandExit, RunOutcome, RunState, outcome};
use reaper_host::sys;
use reaper_host::sys::cgroup::own;
use reaper_host::sys::child::{self, BlockedSignals};
use reaper_host::sys::held_path::HeldPath;
pub use reaper_host::sys::held_path::HeldPathError;
pub use record::{
    CgroupCreated, Claim, CommandStarted, RecordedProcess, RunHeader, RunRecord, RunResult,
};
pub use record_writer::RecordWriter;
pub use report::{RunReport, Survivor};
pub use runs::{CLOSED_AGE, CLOSED_MAX, RecordError, RecordedRun, Runs};
pub use stand_in::{Role, Supervisor, role};
pub use stop::StopError;

/// A command, and what is to become of it.
pub struct Run {
    /// What is run. Its stdin, stdout and stderr are what this says.
    pub command: Command,
    /// How long who is to end has for that before it is killed, and how long a killed one is waited for.
    pub times: Times,
    /// Sent first to who is to end.
    pub signal: Signal,
    /// The command itself is asked to end first, and what it has started only when it is gone or the grace is over. Where this
    /// process is killed, whatever ends the tree instead asks all of it at once.
    pub leader_first: bool,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// How long it may say nothing on stdout and stderr.
    pub idle: Option<Duration>,
    /// What tells whether it is done.
    pub done_when: Option<DoneWhen>,
    /// For `sh -c`, when nothing is left of the run, with `REAPER_OUTCOME` in its environment; it is owned as the run is.
    pub on_success: Option<String>,
    /// The same where it has failed, died or run out of time.
    pub on_failure: Option<String>,
    /// Removed, with all that is in them, after a success. A symbolic link is removed, and not what it leads to. Each is
    /// resolved before the command starts; as root, a path is refused on which another user may write.
    pub clean_on_success: Vec<PathBuf>,
    /// Where it is written down, so that it can be found and stopped, and what is left of it is ended even where this process
    /// is killed. Where that cannot be done it is run all the same, unless it has a name, a limit, or is detached.
    pub records: Option<Runs>,
    /// What it is found by, of which there is one at a time.
    pub name: Option<String>,
    /// Of whom it is part, in the words of the caller.
    pub session: Option<String>,
    pub agent: Option<String>,
    /// How many of its kind there may be at a time. While it waits for its turn signals do to this process what they always do:
    /// who stops it then ends this process.
    pub limit: Option<ConcurrencyLimit>,
    /// The command is born in a cgroup of version 2 that it has for itself, below the one that this process is in, where that
    /// is delegated to this user. Whoever is in there at the end is ended with it, at last by `cgroup.kill` (Linux 5.14): also
    /// those who run under another user id, and, where this process is killed, those who have lost all lineage. What
    /// [`Run::done_when`] asks is not in it. Starting takes some 10 ms more.
    pub cgroup: bool,
    /// Whoever has started this process has let go of it.
    pub detached: bool,
    /// Permission to supervise it: this process has no children from before. See [`role`].
    pub supervisor: Option<Supervisor>,
    /// Told how far it is.
    pub progress: Option<ProgressListener>,
    /// [`Run::clean_on_success`], resolved before the command starts.
    clean_paths: Vec<HeldPath>,
    /// As what it is written down by now.
    recording: Option<RecordWriter>,
    /// Directory of the cgroup that the command's is made in.
    parent_cgroup: Option<PathBuf>,
}

/// Who is told how far a run is.
pub type ProgressListener = Box<dyn FnMut(Progress<'_>)>;

/// How far a run is.
#[derive(Debug)]
pub enum Progress<'a> {
    /// It is written down.
    Recorded(&'a RecordWriter),
    /// It has to wait until fewer run.
    Waiting,
    /// The command has been started, with this pid.
    Started(u32),
}

/// A command that leaves with status 0 once a run is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoneWhen {
    /// For `sh -c`.
    pub command: String,
    /// From the end of one to the start of the next.
    pub every: Duration,
}

impl Run {
    /// Without any limit.
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

    /// Runs it to its end, and ends whatever is left of it then.
    ///
    /// Signals that reach this process meanwhile go to the command, but for those that the terminal has sent to both. One that
    /// somebody else sends to the process group that both are of reaches the command twice: whether it has had it nobody can tell.
    /// While what is left is being ended, one that asks for an end cuts the grace short. All children of this process
    /// count as the command's: there must be no other ones ([`role`]), nor other threads that signals could go to.
    ///
    /// # Errors
    /// The command cannot be started; nothing is left of it then. What cannot be ended is no error: it is in the report,
    /// and so is what could not be done afterwards.
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
            self.parent_cgroup = Some(own().ok_or(CgroupError::NotShown)?);
        }
        self.write_down()?;
        let mut held = None;
        let done = self.attend_recorded(&mut held);
        if let Some(recording) = self.recording.take() {
            let over = match &done {
                Ok(report) => RunResult::of(report),
                Err(error) => RunResult {
                    status: error.status(),
                    ..RunResult::unobserved(recording.claim(error.outcome()), &error.to_string())
                },
            };
            if let Err(error) = recording.close(over) {
                // Whoever comes next closes it, by what was claimed.
                tracing::debug!("what has come of the run cannot be recorded: {error}");
            }
        }
        // Not before: whoever asks for a stop until then must not end this process in its place.
        drop(held);
        done
    }

    /// Leaves in `held` what has signals wait.
    fn attend_recorded(
        &mut self,
        held: &mut Option<BlockedSignals>,
    ) -> Result<RunReport, RunError> {
        // Before it is waited for: that it cannot be made is told at once.
        let leaf = self.make_leaf()?;
        let _slot = self.acquire_slot()?;
        child::adopt_orphans().map_err(RunError::system("orphans cannot be adopted"))?;
        if let Some(recording) = &self.recording {
            let noted = recording.note(&mut self.command);
            noted.map_err(|source| RunError::System {
                what: "the command cannot be recorded",
                source,
            })?;
        }
        let held = held
            .insert(BlockedSignals::begin().map_err(RunError::system("signals cannot be held"))?);
        if self
            .recording
            .as_ref()
            .is_some_and(RecordWriter::is_stop_requested)
        {
            return Err(RunError::Stopped(Signal::SIGTERM));
        }
        let mut report = supervise::attend(self, held, leaf)?;
        hooks::run_hooks(self, held, &mut report);
        Ok(report)
    }

    fn write_down(&mut self) -> Result<(), RunError> {
        let needed = self.name.is_some() || self.limit.is_some() || self.detached;
        let begun = match &self.records {
            Some(runs) => runs.begin(self),
            None if needed => Err(RecordError::NoPlace),
            None => return Ok(()),
        };
        match begun {
            Ok(recording) => {
                let recording = self.recording.insert(recording);
                if let Some(tell) = &mut self.progress {
                    tell(Progress::Recorded(recording));
                }
            }
            Err(error) if needed => return Err(RunError::Record(error)),
            Err(error) => tracing::debug!("{error}"),
        }
        Ok(())
    }

    /// A cgroup for a command to begin in, where that is wanted; that it is there is written down.
    fn make_leaf(&self) -> Result<Option<RunCgroup>, RunError> {
        let Some(above) = &self.parent_cgroup else {
            return Ok(None);
        };
        let recording = self.recording.as_ref();
        let id = recording.map_or_else(record_writer::random_id, |own| own.id().to_owned());
        let leaf = RunCgroup::make(&cgroup::directory(above, &id))?;
        if let Some(Err(error)) = recording.map(|own| own.note_cgroup(leaf.id())) {
            tracing::debug!("the cgroup of the command cannot be recorded: {error}");
        }
        Ok(Some(leaf))
    }

    fn acquire_slot(&mut self) -> Result<Option<limit::Slot>, RunError> {
        let (Some(limit), Some(runs), Some(recording)) =
            (self.limit.clone(), self.records.clone(), &self.recording)
        else {
            return Ok(None);
        };
        let id = recording.id().to_owned();
        let slot = runs.take_slot(&limit, &id, || self.tell(Progress::Waiting));
        slot.map(Some).map_err(RunError::Record)
    }

    fn tell(&mut self, progress: Progress<'_>) {
        if let Some(tell) = &mut self.progress {
            tell(progress);
        }
    }
}

/// Why a command could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{}: {source}{}", program.display(), hint(source))]
    Start { program: PathBuf, source: io::Error },
    #[error(
        "what is left behind could not be found: /proc cannot be used: {0}; mount this pid namespace's own"
    )]
    Proc(#[source] io::Error),
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
    #[error("cannot clean {} on success: {source}", path.display())]
    Path {
        path: PathBuf,
        source: HeldPathError,
    },
    #[error(transparent)]
    Record(RecordError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// By this signal, or as if it had been.
    #[error("it was stopped before its command was started")]
    Stopped(Signal),
}

/// Status of a run that has been stopped, and whose command has none: as if SIGTERM had ended it.
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

    /// As `env(1)` has it: 127 where there is no such program, 126 where it cannot be run, else 125.
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

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": is it in PATH, and its interpreter there?",
        io::ErrorKind::PermissionDenied => ": is it executable?",
        _ => "",
    }
}
