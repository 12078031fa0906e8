//! Owning a command: it is run, and when it has come to its end, or has to, nothing that descends from it is left.
//!
//! This process adopts what its descendants leave without a parent, so the kernel itself says when nothing is left: as
//! long as anybody lives who descends from it, it has a child. Nothing is missed, whatever a descendant does with setsid,
//! double fork, environment or user id; only who lets *another* program start something (a container engine, a service manager, a
//! tmux server that is there already) is not followed. Neither a privilege nor a service is needed.
//!
//! ```no_run
//! use std::process::Command;
//! use std::time::Duration;
//!
//! use reaper::run::Run;
//!
//! let mut run = Run::new(Command::new("make"));
//! run.timeout = Some(Duration::from_secs(600));
//! let report = run.attend()?;
//! println!("{}: {} left behind were ended", report.outcome.as_str(), report.ended);
//! # Ok::<(), reaper::run::RunError>(())
//! ```

mod afterwards;
mod attend;
mod end;
mod outcome;
mod probe;
mod report;
mod silence;

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::reap::Times;
use crate::sys;
use crate::sys::child::{self, Held};
pub use outcome::{End, Facts, Outcome, outcome};
pub use report::{Left, Report};

/// A command, and what is to become of it.
pub struct Run {
    /// What is run. Its stdin, stdout and stderr are what this says.
    pub command: Command,
    /// How long who is to end has for that before it is killed, and how long a killed one is waited for.
    pub times: Times,
    /// Sent first to who is to end.
    pub signal: Signal,
    /// The command itself is asked to end first, and what it has started only when it is gone or the grace is over.
    pub leader_first: bool,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// How long it may say nothing on stdout and stderr.
    pub idle: Option<Duration>,
    /// Silence counts only where hardly a processor was used meanwhile.
    pub idle_cpu: bool,
    /// What tells whether it is done.
    pub done_when: Option<DoneWhen>,
    /// For `sh -c`, when nothing is left of the run, with `REAPER_OUTCOME` in its environment; it is owned as the run is.
    pub on_success: Option<String>,
    /// The same where it has failed, died or run out of time.
    pub on_failure: Option<String>,
    /// Removed, with all that is in them, after a success; a link is, and not what it leads to.
    pub clean_on_success: Vec<PathBuf>,
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
            idle_cpu: false,
            done_when: None,
            on_success: None,
            on_failure: None,
            clean_on_success: Vec::new(),
        }
    }

    /// Runs it to its end, and ends whatever is left of it then.
    ///
    /// Signals that reach this process meanwhile go to the command, but for those that the terminal has sent to both.
    /// While what is left is being ended, one that asks for an end cuts the grace short. All children of this process
    /// count as the command's: there must be no other ones, nor other threads that signals could go to.
    ///
    /// # Errors
    /// The command cannot be started; nothing is left of it then. What cannot be ended is no error: it is in the report,
    /// and so is what could not be done afterwards.
    pub fn attend(mut self) -> Result<Report, RunError> {
        sys::pid_namespace_unless_first().map_err(RunError::Proc)?;
        child::adopt_orphans().map_err(RunError::system("orphans cannot be adopted"))?;
        let held = Held::begin().map_err(RunError::system("signals cannot be held"))?;
        let mut report = attend::attend(&mut self, &held)?;
        afterwards::see_to(&self, &held, &mut report);
        Ok(report)
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
}

impl RunError {
    fn system(what: &'static str) -> impl Fn(nix::Error) -> RunError {
        move |errno| RunError::System {
            what,
            source: errno.into(),
        }
    }

    /// As `env(1)` has it: 127 where there is no such program, 126 where it cannot be run, else 125.
    pub fn status(&self) -> u8 {
        match self {
            RunError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            RunError::System { .. } | RunError::Proc(_) => 125,
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
