//! What is told of a run when it is over.

use std::time::Duration;

use hashbrown::HashSet;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::{CommandExit, RunOutcome};
use crate::reap::{ReapFailure, ReapOutcome as Reaped, ReapResult};
use reaper_host::source::procfs::Procfs;

/// See the module.
#[derive(Debug, Serialize)]
pub struct RunReport {
    pub schema: u32,
    /// As which it is recorded, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Of the command, as this process has started it.
    pub pid: u32,
    pub outcome: RunOutcome,
    /// How the command itself has ended; `None` where it could not be ended.
    #[serde(flatten)]
    pub end: Option<CommandExit>,
    /// From its start until nothing was left of it.
    #[serde(rename = "duration_ms", serialize_with = "as_millis")]
    pub duration: Duration,
    /// How many others were ended, and how many of these by SIGKILL.
    pub ended: usize,
    pub killed: usize,
    /// Memory that they had, in bytes.
    #[serde(rename = "memory.rss")]
    pub memory_rss: u64,
    /// Who could not be ended.
    pub survivors: Vec<Survivor>,
    /// What could not be done when it was over.
    pub errors: Vec<String>,
}

impl RunReport {
    /// What a shell is told: 0 for a success, the command's own status if it failed, died or was stopped (128 and the number of a
    /// signal, 1 where it left with 0 and was not done), 124 where time ran out, 125 where something could not be done
    /// afterwards.
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
}

/// A process that could not be ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    pub pid: u32,
    pub command: String,
    /// What stands in the way.
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

impl Survivor {
    /// Returns the processes of a tree that could not be ended, and those `living` that were not found: /proc does not show
    /// them, or they are new.
    pub(super) fn all(endings: &[ReapResult], mut living: HashSet<u32>) -> Vec<Survivor> {
        // Most leave nothing, and it takes a while to begin with /proc.
        if endings.is_empty() && living.is_empty() {
            return Vec::new();
        }
        let procfs = Procfs::default();
        let survivors = endings.iter().filter_map(|one| Survivor::of(one, &procfs));
        let mut survivors: Vec<Survivor> = survivors.collect();
        for survivor in &survivors {
            living.remove(&survivor.pid);
        }
        let mut unseen: Vec<u32> = living.into_iter().collect();
        unseen.sort_unstable();
        survivors.extend(unseen.into_iter().map(|pid| {
            let comm = procfs.comm(pid);
            let why = match comm {
                Some(_) => "it came while the others were being ended",
                None => "another user's, and /proc does not show it",
            };
            Survivor {
                pid,
                command: comm.unwrap_or_default(),
                reason: why.to_owned(),
            }
        }));
        survivors
    }

    /// Returns one of those that were to be ended, if it lives on.
    fn of(ending: &ReapResult, procfs: &Procfs) -> Option<Survivor> {
        let why = match ending.outcome {
            Reaped::Failed(ReapFailure::Eperm) => "it may not be signalled by this user".to_owned(),
            Reaped::Failed(ReapFailure::KillTimeout(state)) => {
                format!("it does not die of SIGKILL (state {state})")
            }
            Reaped::Failed(ReapFailure::Errno(errno)) => nix::Error::from_raw(errno).to_string(),
            Reaped::Failed(ReapFailure::Stopped) | Reaped::NotSent(_) | Reaped::Exited(_) => {
                return None;
            }
        };
        Some(Survivor {
            pid: ending.key.pid,
            command: procfs.comm(ending.key.pid).unwrap_or_default(),
            reason: why,
        })
    }
}

/// Returns how many processes were ended, and how many of these by SIGKILL.
pub(super) fn ended<'a>(endings: impl IntoIterator<Item = &'a ReapResult>) -> (usize, usize) {
    let has_ended = |one: &&ReapResult| matches!(one.outcome, Reaped::Exited(_));
    let ended = endings.into_iter().filter(has_ended);
    ended.fold((0, 0), |(count, killed), one| {
        let is_killed = one.signal == Some(Signal::SIGKILL);
        (count + 1, killed + usize::from(is_killed))
    })
}

/// Children of this process, be it that /proc does not show them.
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
