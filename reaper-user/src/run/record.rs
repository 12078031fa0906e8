//! Format of a run record: a file of JSON lines that is only appended to. Pure: the caller passes in the bytes.
//!
//! Each line is an object with one field, which names a [`Line`]. The first line is `run`; `over` follows when no
//! process of the run is left. The first `claim` and the first `over` count, so that all readers agree. Incomplete or
//! invalid lines are ignored: their write has failed.

use std::ffi::OsStr;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{CommandExit, RunOutcome, RunReport, STOPPED, Survivor};
use reaper_model::event::ProcessKey;

/// Version of the format. It increases with each change that older versions would misread.
pub(super) const SCHEMA: u32 = 1;
/// Maximum length of a recorded command line in bytes.
const COMMAND_MAX: usize = 1024;

/// A line of a record.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Run(Box<RunHeader>),
    Cgroup(CgroupCreated),
    /// Written by each command as it starts.
    Command(CommandStarted),
    /// Written by any process that wants the run to end.
    Claim(Claim),
    Over(Box<RunResult>),
}

/// Identity of a process, with its start time from /proc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Pid in the PID namespace of the run; `None` in a record that is shown in another one
    /// ([`RunRecord::shown_in`]).
    pub pid: Option<u32>,
    /// Start time in nanoseconds since boot, rounded down to a clock tick.
    pub start_ns: u64,
}

impl RecordedProcess {
    /// Returns the key of the process. `None` without a valid pid: 0 is not that of a process.
    pub(super) fn key(self) -> Option<ProcessKey> {
        Some(ProcessKey {
            pid: self.pid.filter(|pid| *pid != 0)?,
            start: self.start_ns,
        })
    }
}

/// First line of a record, written before the command starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunHeader {
    /// Version of the format.
    pub schema: u32,
    /// Random id of the run.
    pub id: String,
    /// Name that the user chose, unique among the open runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Session that the run is part of, as the caller names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Name of the agent that starts the run, as the caller gives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Id of the boot, from /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// Inode of the PID namespace; 0 for the initial one.
    pub pid_namespace: u32,
    /// Supervisor of the run.
    #[serde(rename = "wrapper")]
    pub supervisor: RecordedProcess,
    /// Effective uid of the supervisor.
    pub uid: u32,
    /// Program and arguments, possibly truncated.
    pub command: Vec<String>,
    /// Whether `command` is truncated.
    #[serde(default)]
    pub truncated: bool,
    /// Working directory of the command.
    pub cwd: String,
    /// Time when the record was created, before the command started.
    pub started: Timestamp,
    /// Time limit for the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Time limit without output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Time between the first signal and SIGKILL.
    pub grace_ms: u64,
    /// Number of the first signal that is sent to end a process.
    pub signal: i32,
    /// Whether the command is signalled before the rest of its tree.
    #[serde(default)]
    pub leader_first: bool,
    /// Group of the concurrency limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Directory of the run's own cgroup. The command and each hook get a new one with this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Whether the run is detached: its output then goes to `ID.log`.
    #[serde(default)]
    pub detached: bool,
}

/// A cgroup that was created for a command, in the directory [`RunHeader::cgroup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupCreated {
    /// Id of the cgroup, unique until the next boot.
    pub id: u64,
}

/// A command or hook that has been started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandStarted {
    /// First process of the command or hook.
    #[serde(flatten)]
    pub process: RecordedProcess,
    /// Time of the line (`CLOCK_MONOTONIC`, ns).
    pub at: u64,
}

/// Decision on the outcome of a run, written by a process that then ends the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Outcome that the run will have.
    pub outcome: RunOutcome,
    /// Pid of the claiming process; `None` in a record that is shown in another PID namespace.
    pub by: Option<u32>,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// Outcome of the run.
    pub outcome: RunOutcome,
    /// Exit status of `reaper run`.
    pub status: u8,
    /// Exit status of the command, if it exited by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
    /// Number of the signal that killed the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_signal: Option<i32>,
    /// Time when no process of the run was left, or when the run was closed.
    pub ended_at: Timestamp,
    /// Time from the start until no process was left; `None` if no supervisor has observed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// Number of processes that were ended. It leaves out the command itself, unless the supervisor was killed.
    pub ended: usize,
    /// Number of these that were ended by SIGKILL.
    pub killed: usize,
    /// Processes that could not be ended.
    pub left: Vec<Survivor>,
    /// Remarks and errors for the user.
    pub notes: Vec<String>,
}

// Notes for runs without a supervisor that reports their result.
pub(super) const SUPERVISOR_KILLED: &str = "its `reaper run` was killed";
pub(super) const NEVER_BEGAN: &str = "its `reaper run` was killed before the command started";
pub(super) const OTHER_BOOT: &str = "the machine was rebooted since";
pub(super) const UNWRITTEN: &str = "its result could not be written to the record";

impl RunResult {
    /// Creates the result of a run that has ended now.
    pub(super) fn of(report: &RunReport) -> RunResult {
        let (exit_code, exit_signal) = match report.end {
            Some(CommandExit::Exited(status)) => (Some(status), None),
            Some(CommandExit::Killed(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        RunResult {
            outcome: report.outcome,
            status: report.status(),
            exit_code,
            exit_signal,
            ended_at: Timestamp::now(),
            duration_ms: Some(millis(report.duration)),
            ended: report.ended,
            killed: report.killed,
            left: report.survivors.clone(),
            notes: report.errors.clone(),
        }
    }

    /// Creates the result of a run whose end no supervisor has observed, with a remark. Derives the status from the
    /// outcome, and contains no processes.
    pub(super) fn unobserved(outcome: RunOutcome, note: &str) -> RunResult {
        RunResult {
            outcome,
            status: match outcome {
                RunOutcome::Success => 0,
                RunOutcome::Timeout | RunOutcome::Idle => 124,
                RunOutcome::Cancelled => STOPPED,
                RunOutcome::Failed | RunOutcome::Death => 1,
            },
            exit_code: None,
            exit_signal: None,
            ended_at: Timestamp::now(),
            duration_ms: None,
            ended: 0,
            killed: 0,
            left: Vec::new(),
            notes: vec![note.to_owned()],
        }
    }
}

/// Contents of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRecord {
    /// First line of the record.
    pub header: RunHeader,
    /// Last cgroup that was created for the run.
    pub cgroup: Option<CgroupCreated>,
    /// The command, then the hooks.
    pub commands: Vec<CommandStarted>,
    /// First claim of the outcome; `None` until the run must end.
    pub claim: Option<Claim>,
    /// First result; `None` while the run is open.
    pub result: Option<RunResult>,
}

/// Reasons why a file cannot be used as a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordParseError {
    #[error("the file is damaged")]
    Damaged,
    #[error("a later version of reaper wrote it (record version {0}, this program reads {SCHEMA})")]
    Later(u32),
}

impl RunRecord {
    /// Parses the contents of a file.
    ///
    /// # Errors
    /// The first line is not a [`RunHeader`] of this version.
    pub(super) fn parse(bytes: &[u8]) -> Result<RunRecord, RecordParseError> {
        let whole = bytes.split_inclusive(|byte| *byte == b'\n');
        let mut lines = whole.filter(|line| line.len() > 1 && line.ends_with(b"\n"));
        let first = lines.next().ok_or(RecordParseError::Damaged)?;
        let header = match serde_json::from_slice(first) {
            Ok(Line::Run(header)) if header.schema == SCHEMA => *header,
            _ => return Err(later_version(first).unwrap_or(RecordParseError::Damaged)),
        };
        let mut record = RunRecord {
            header,
            cgroup: None,
            commands: Vec::new(),
            claim: None,
            result: None,
        };
        for line in lines {
            match serde_json::from_slice(line) {
                Ok(Line::Cgroup(created)) => record.cgroup = Some(created),
                Ok(Line::Command(started)) => record.commands.push(started),
                Ok(Line::Claim(claim)) => record.claim = record.claim.or(Some(claim)),
                Ok(Line::Over(result)) => record.result = record.result.or(Some(*result)),
                Ok(Line::Run(_)) | Err(_) => {}
            }
        }
        Ok(record)
    }

    /// Returns the record as a process in a PID namespace may show it. Pids of another namespace are removed, because
    /// they mean other processes. `namespace` is the inode of that process's own; 0 for the initial one, `None` if
    /// unknown.
    pub fn shown_in(mut self, namespace: Option<u32>) -> RunRecord {
        if namespace != Some(self.header.pid_namespace) {
            let commands = self
                .commands
                .iter_mut()
                .map(|command| &mut command.process.pid);
            let claim = self.claim.iter_mut().map(|claim| &mut claim.by);
            let left = self.result.iter_mut().flat_map(|result| &mut result.left);
            let left = left.map(|survivor| &mut survivor.pid);
            let pids = commands.chain(claim).chain(left);
            pids.chain([&mut self.header.supervisor.pid])
                .for_each(|pid| *pid = None);
        }
        self
    }

    /// Returns the outcome of the result or, without one, of the claim. Returns `None` if the record has neither.
    pub fn outcome(&self) -> Option<RunOutcome> {
        let outcome = self.result.as_ref().map(|result| result.outcome);
        outcome.or(self.claim.map(|claim| claim.outcome))
    }
}

/// Returns the error for a first line that names a later version of the format.
fn later_version(first: &[u8]) -> Option<RecordParseError> {
    let line: serde_json::Value = serde_json::from_slice(first).ok()?;
    let schema = u32::try_from(line.get("run")?.get("schema")?.as_u64()?).ok()?;
    (schema > SCHEMA).then_some(RecordParseError::Later(schema))
}

/// Returns a command line of at most [`COMMAND_MAX`] bytes, and whether it is truncated.
pub(super) fn truncate_command<'a>(words: impl Iterator<Item = &'a OsStr>) -> (Vec<String>, bool) {
    let (mut kept, mut room) = (Vec::new(), COMMAND_MAX);
    for word in words {
        if room == 0 {
            return (kept, true);
        }
        let word = word.to_string_lossy();
        let end = word.floor_char_boundary(room.min(word.len()));
        kept.push(word[..end].to_owned());
        if end < word.len() {
            return (kept, true);
        }
        room = room.saturating_sub(end + 1);
    }
    (kept, false)
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(super) mod tests;
