//! What is written down of a run: a file of lines that is only ever appended to. Pure: bytes come in.
//!
//! Each line is a JSON object with one field, which says what it tells of: `run`, once, at the beginning; `cgroup`, when one
//! has been made for a command; `command`, by each command as it starts; `claim`, by whoever would have the run end; `over`, once nothing is left of it. Of the
//! last two the first one counts, so that all who read agree. A line without an end, or one that makes no sense, is one that
//! could not be written, and counts for nothing.

use std::ffi::OsStr;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{CommandExit, RunOutcome, RunReport, STOPPED, Survivor};
use reaper_model::event::ProcessKey;

/// Raised with every change that older versions would misread.
pub(super) const SCHEMA: u32 = 1;
/// Bytes of a command line that are kept.
const COMMAND_MAX: usize = 1024;

/// One line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Run(Box<RunHeader>),
    Cgroup(CgroupCreated),
    Command(CommandStarted),
    Claim(Claim),
    Over(Box<RunResult>),
}

/// A process, by what /proc tells of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    pub pid: u32,
    /// In ns since boot, known to the tick.
    pub start_ns: u64,
}

impl RecordedProcess {
    pub(super) fn key(self) -> ProcessKey {
        ProcessKey {
            pid: self.pid,
            start: self.start_ns,
        }
    }
}

/// What is known before the command starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunHeader {
    pub schema: u32,
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    pub boot_id: String,
    /// Inode of the namespace that pids are numbers in; 0 for the host's own.
    pub pid_namespace: u32,
    /// Who owns the command.
    pub wrapper: RecordedProcess,
    pub uid: u32,
    /// The beginning of the program and its arguments.
    pub command: Vec<String>,
    /// Whether that is not all of it.
    #[serde(default)]
    pub truncated: bool,
    pub cwd: String,
    pub started: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    pub grace_ms: u64,
    /// Number of the one that is sent first.
    pub signal: i32,
    #[serde(default)]
    pub leader_first: bool,
    /// The group of which it is to have a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Directory of the cgroup that its commands have for themselves, one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Whether its output goes to a file beside this one.
    #[serde(default)]
    pub detached: bool,
}

/// A cgroup that has been made for a command, where [`RunHeader::cgroup`] says; `id` is its own until the machine is started anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupCreated {
    pub id: u64,
}

/// A command that has been started. `at` is on the monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandStarted {
    #[serde(flatten)]
    pub process: RecordedProcess,
    pub at: u64,
}

/// How a run is to be recorded, as somebody has decided who then ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub outcome: RunOutcome,
    /// Pid of who claims.
    pub by: u32,
}

/// What has come of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    pub outcome: RunOutcome,
    /// What its caller was told.
    pub status: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_signal: Option<i32>,
    pub ended_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// How many others were ended, and how many of these by SIGKILL.
    pub ended: usize,
    pub killed: usize,
    pub left: Vec<Survivor>,
    /// What else there is to say.
    pub notes: Vec<String>,
}

/// What is said of a run that nobody saw the end of.
pub(super) const OWNER_GONE: &str = "its `reaper run` was killed";
pub(super) const NEVER_BEGAN: &str = "its `reaper run` was gone before the command was started";
pub(super) const OTHER_BOOT: &str = "the machine has been started anew since";
pub(super) const UNWRITTEN: &str = "what has come of it could not be written down";

impl RunResult {
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

    /// Of one that nobody saw the end of.
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

/// All that a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRecord {
    pub header: RunHeader,
    /// The last cgroup that was made for it.
    pub cgroup: Option<CgroupCreated>,
    /// The command first, then those that followed on it.
    pub commands: Vec<CommandStarted>,
    pub claim: Option<Claim>,
    pub result: Option<RunResult>,
}

/// Why a file is no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordParseError {
    #[error("it is damaged")]
    Damaged,
    #[error(
        "it is of a later version of reaper (its records are of version {0}, this one knows {SCHEMA})"
    )]
    Later(u32),
}

impl RunRecord {
    /// Reads what a file has by now.
    ///
    /// # Errors
    /// It does not begin with a run.
    pub(super) fn parse(bytes: &[u8]) -> Result<RunRecord, RecordParseError> {
        let whole = bytes.split_inclusive(|byte| *byte == b'\n');
        let mut lines = whole.filter(|line| line.len() > 1 && line.ends_with(b"\n"));
        let first = lines.next().ok_or(RecordParseError::Damaged)?;
        let start = match serde_json::from_slice(first) {
            Ok(Line::Run(start)) if start.schema == SCHEMA => *start,
            _ => return Err(later(first).unwrap_or(RecordParseError::Damaged)),
        };
        let mut record = RunRecord {
            header: start,
            cgroup: None,
            commands: Vec::new(),
            claim: None,
            result: None,
        };
        for line in lines {
            match serde_json::from_slice(line) {
                Ok(Line::Cgroup(made)) => record.cgroup = Some(made),
                Ok(Line::Command(begun)) => record.commands.push(begun),
                Ok(Line::Claim(claim)) => record.claim = record.claim.or(Some(claim)),
                Ok(Line::Over(over)) => record.result = record.result.or(Some(*over)),
                Ok(Line::Run(_)) | Err(_) => {}
            }
        }
        Ok(record)
    }

    /// How it was decided to be recorded, if that was.
    pub fn outcome(&self) -> Option<RunOutcome> {
        let over = self.result.as_ref().map(|over| over.outcome);
        over.or(self.claim.map(|claim| claim.outcome))
    }
}

/// Whether it says of itself that it is of another version, and which.
fn later(first: &[u8]) -> Option<RecordParseError> {
    let line: serde_json::Value = serde_json::from_slice(first).ok()?;
    let schema = u32::try_from(line.get("run")?.get("schema")?.as_u64()?).ok()?;
    (schema > SCHEMA).then_some(RecordParseError::Later(schema))
}

/// The beginning of a command line, and whether that is not all.
pub(super) fn preview<'a>(words: impl Iterator<Item = &'a OsStr>) -> (Vec<String>, bool) {
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
