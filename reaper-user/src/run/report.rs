//! Report of a run that has ended.

use std::time::Duration;

use hashbrown::HashSet;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::{CommandExit, RunOutcome};
use crate::reap::{ReapFailure, ReapOutcome as Reaped, ReapResult};
use reaper_host::source::procfs::Procfs;

/// Report of a run, as `--json` and `--report` write it.
#[derive(Debug, Serialize)]
pub struct RunReport {
    /// Version of the format: 1.
    pub schema: u32,
    /// Id of the record, if the run has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Name that the user chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Session that the run is part of, as the caller names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Name of the agent that starts the run, as the caller gives it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Pid of the command.
    pub pid: u32,
    /// Outcome of the run.
    pub outcome: RunOutcome,
    /// Exit of the command itself; `None` if it could not be ended.
    #[serde(flatten)]
    pub end: Option<CommandExit>,
    /// Time from the start until no process of the run was left.
    #[serde(rename = "duration_ms", serialize_with = "as_millis")]
    pub duration: Duration,
    /// `--timeout` or `--idle`, if it ended the run.
    #[serde(
        rename = "limit_ms",
        serialize_with = "as_optional_millis",
        skip_serializing_if = "Option::is_none"
    )]
    pub limit: Option<Duration>,
    /// Number of processes besides the command that were ended.
    pub ended: usize,
    /// Number of these that were ended by SIGKILL.
    pub killed: usize,
    /// Processes that were ended, at most [`LISTED_MAX`]. Includes the command if it had to be ended.
    pub processes: Vec<EndedProcess>,
    /// Sum of the resident memory of these processes right after their first signal, in bytes. Leaves out those that
    /// could not be measured.
    #[serde(rename = "memory.rss")]
    pub memory_rss: u64,
    /// Processes that could not be ended.
    pub survivors: Vec<Survivor>,
    /// Failures of hooks and of the removal of paths.
    pub errors: Vec<String>,
}

impl RunReport {
    /// Returns the exit status of `reaper run`: 0 for a success, 124 for an expired limit, 125 if there are `errors`.
    /// Otherwise that of the command, as a shell reports it, and at least 1 for a failure.
    pub fn status(&self) -> u8 {
        let own = self.end.map_or(1, CommandExit::status);
        match self.outcome {
            _ if !self.errors.is_empty() => 125,
            RunOutcome::Success => 0,
            RunOutcome::Timeout | RunOutcome::Idle => 124,
            RunOutcome::Cancelled => own,
            RunOutcome::Failed | RunOutcome::Death => own.max(1),
        }
    }

    /// Returns the number of processes that were ended, including the command if it had to be ended.
    pub fn reaped(&self) -> usize {
        let is_command = |process: &EndedProcess| process.pid == self.pid;
        self.ended + usize::from(self.processes.iter().any(is_command))
    }
}

/// Maximum number of processes that a report lists.
pub const LISTED_MAX: usize = 1000;

/// A process that was ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndedProcess {
    /// Pid in the PID namespace of the run.
    pub pid: u32,
    /// Kernel's short name (`comm`) before the first signal; empty if unknown.
    pub command: String,
    /// Name of the strongest signal that it was sent.
    pub signal: &'static str,
}

/// A process that could not be ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// Pid in the PID namespace of the run; `None` in a record that is shown in another one.
    pub pid: Option<u32>,
    /// Kernel's short name (`comm`); empty if unknown.
    pub command: String,
    /// Reason why it could not be ended.
    pub reason: String,
}

impl Serialize for CommandExit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut end = serializer.serialize_struct("End", 1)?;
        match self {
            CommandExit::Exited(status) => end.serialize_field("exit_code", status)?,
            CommandExit::Killed(signal) => end.serialize_field("exit_signal", signal)?,
        }
        end.end()
    }
}

fn as_millis<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn as_optional_millis<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    as_millis(&time.unwrap_or_default(), serializer)
}

impl Survivor {
    /// Returns the processes of a tree that could not be ended.
    ///
    /// These are the failed `results`, and the other `living` pids: /proc hides them, or they are new.
    pub(super) fn all(results: &[ReapResult], mut living: HashSet<u32>) -> Vec<Survivor> {
        // The common case. `Procfs::default` takes a while.
        if results.is_empty() && living.is_empty() {
            return Vec::new();
        }
        let procfs = Procfs::default();
        let survivors = results
            .iter()
            .filter_map(|result| Survivor::of(result, &procfs));
        let mut survivors: Vec<Survivor> = survivors.collect();
        for survivor in &survivors {
            survivor.pid.map(|pid| living.remove(&pid));
        }
        let mut unseen: Vec<u32> = living.into_iter().collect();
        unseen.sort_unstable();
        survivors.extend(unseen.into_iter().map(|pid| {
            let comm = procfs.comm(pid);
            let reason = match comm {
                Some(_) => "it was started while the others were being ended; kill it",
                None => "it belongs to another user, and /proc does not show it; end it as root",
            };
            Survivor {
                pid: Some(pid),
                command: comm.unwrap_or_default(),
                reason: reason.to_owned(),
            }
        }));
        survivors
    }

    /// Returns the process of a result that says why it could not be ended.
    ///
    /// Returns `None` if it exited, was not signalled, or the reaper was stopped first. `procfs` supplies its name.
    fn of(result: &ReapResult, procfs: &Procfs) -> Option<Survivor> {
        let reason = match result.outcome {
            Reaped::Failed(ReapFailure::Stopped) | Reaped::NotSent(_) | Reaped::Exited(_) => {
                return None;
            }
            Reaped::Failed(failure) => failure.to_string(),
        };
        Some(Survivor {
            pid: Some(result.key.pid),
            command: procfs.comm(result.key.pid).unwrap_or_default(),
            reason,
        })
    }
}

/// Returns the number of ended processes, and of those ended by SIGKILL.
pub(super) fn ended<'a>(results: impl IntoIterator<Item = &'a ReapResult>) -> (usize, usize) {
    let has_ended = |result: &&ReapResult| matches!(result.outcome, Reaped::Exited(_));
    let ended = results.into_iter().filter(has_ended);
    ended.fold((0, 0), |(count, killed), result| {
        let is_killed = result.signal == Some(Signal::SIGKILL);
        (count + 1, killed + usize::from(is_killed))
    })
}

/// Returns the children of this process, also those that /proc hides (`hidepid`).
pub(super) fn children() -> HashSet<u32> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let lists = tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids = lists.flat_map(|list| {
        let pids = list.split_whitespace().map(str::parse::<u32>);
        pids.flatten().collect::<Vec<_>>()
    });
    pids.collect()
}
