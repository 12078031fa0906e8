//! What a journal tells of past sessions, as the API and `reaper history --json` show it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::export::{Ancestor, ExitInfo, FreedMemory, LEFT_RUNNING, keep_rule};
use reaper_model::event::Image;

/// A session with its decisions and outcomes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistorySession {
    /// Id of the session: agent, and pid and start time of the first root.
    #[serde(rename = "session_id")]
    pub name: String,
    /// Name of the rule that recognised the agent.
    pub agent: String,
    /// Pid of the first root.
    #[serde(rename = "process.pid")]
    pub pid: u32,
    /// Pid of the last root. `None` if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_pid: Option<u32>,
    /// Uid of the root. `None` if it is unknown.
    #[serde(rename = "process.user.id", skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Command line of the root, with secrets redacted.
    #[serde(rename = "process.command_args")]
    pub args: Vec<String>,
    /// Id of the session that contains this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_session_id: Option<String>,
    /// Time when the session opened.
    pub opened_at: Timestamp,
    /// Exit time of the root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_exited_at: Option<Timestamp>,
    /// Exit status of the root.
    #[serde(flatten)]
    pub exit: ExitInfo,
    /// Time when the session closed; `None` if no close is recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed_at: Option<Timestamp>,
    /// Number of processes that exited after a signal of the service.
    pub reaped: u32,
    /// Number of members that were kept.
    pub kept: u32,
    /// Number of processes that could not be ended.
    pub failed: u32,
    /// Number of records lost while the session was open. If there are any, members may be unknown.
    pub lost_before: u64,
    /// Memory of the reaped processes.
    #[serde(flatten)]
    pub memory: FreedMemory,
    /// Members with decisions, outcomes or requests.
    pub processes: Vec<HistoryProcess>,
}

/// A member with decisions, outcomes or requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistoryProcess {
    /// Id that is never reused, made of boot, pid and start time.
    pub entity_id: String,
    /// Pid in the PID namespace of the service.
    #[serde(rename = "process.pid")]
    pub pid: u32,
    /// Real user id.
    #[serde(rename = "process.user.id")]
    pub uid: u32,
    /// Kernel's short name, at most 15 bytes.
    #[serde(rename = "process.comm")]
    pub comm: String,
    /// Path of the executable; empty if unknown.
    #[serde(rename = "process.executable.path")]
    pub exe: String,
    /// Command line, with secrets redacted.
    #[serde(rename = "process.command_args")]
    pub args: Vec<String>,
    /// Time of its exit; `None` if it is alive, or its exit is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exited_at: Option<Timestamp>,
    /// Exit status.
    #[serde(flatten)]
    pub exit: ExitInfo,
    /// Birth ancestors up to its agent, nearest first; at most 16. Empty if unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lineage: Vec<HistoryAncestor>,
    /// Decisions about it, the oldest first.
    pub decisions: Vec<HistoryDecision>,
    /// Requests of users to keep it, or to keep it no longer, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<HistoryRequest>,
    /// Results of the signals to it, the oldest first.
    pub outcomes: Vec<HistoryOutcome>,
    /// `[[keep]]` table that keeps each such process. `None` if it was not to be reaped, or if none can be suggested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_rule: Option<String>,
}

impl HistorySession {
    /// Returns whether its first or last root has this pid.
    pub fn is_of_agent(&self, pid: u32) -> bool {
        self.pid == pid || self.root_pid == Some(pid)
    }
}

impl HistoryProcess {
    /// Returns its start time in ns since boot; `None` if it started in another boot than `boot_id`.
    pub fn start_in(&self, boot_id: &str) -> Option<u64> {
        let rest = self.entity_id.strip_prefix(boot_id)?.strip_prefix('-')?;
        rest.split('-').next()?.parse().ok()
    }

    /// Returns when and how it exited, if the service neither signalled it nor was to do so.
    pub fn own_exit(&self) -> Option<(Timestamp, &ExitInfo)> {
        let at = self.exited_at?;
        let was_due = self.is_reaped() && !self.decisions.iter().any(HistoryDecision::would_reap);
        (self.outcomes.is_empty() && !was_due).then_some((at, &self.exit))
    }

    /// Returns whether its last decision was to reap it.
    pub fn is_reaped(&self) -> bool {
        let last = self.decisions.last();
        last.is_some_and(|last| last.decision == "reap")
    }

    /// Returns whether it was last decided to keep it, or requested since the last decision, and no end is recorded.
    pub fn is_kept(&self) -> bool {
        let decision = self.decisions.last();
        let keeps = |last: &HistoryDecision| {
            matches!(&*last.decision, "keep" | "report") && last.reason != LEFT_RUNNING
        };
        let decided = decision.is_some_and(keeps);
        // A request for a limited time is over once the process is to be reaped.
        let is_last = |time| decision.is_none_or(|last| last.time <= time);
        let requested = self.requests.last();
        let requested = requested.is_some_and(|last| last.request == "keep" && is_last(last.time));
        (decided || requested) && self.outcomes.is_empty() && self.exited_at.is_none()
    }

    /// Returns the time of the first decision, request or outcome.
    pub(super) fn first(&self) -> Option<Timestamp> {
        let decided = self.decisions.first().map(|decision| decision.time);
        let requested = self.requests.first().map(|request| request.time);
        let ended = self.outcomes.first().map(|outcome| outcome.time);
        [decided, requested, ended].into_iter().flatten().min()
    }

    /// Sets [`HistoryProcess::keep_rule`].
    pub(super) fn suggest_rule(&mut self) {
        if self.is_reaped() {
            let argv = self
                .args
                .iter()
                .flat_map(|arg| [arg.as_bytes(), &[0]].concat());
            self.keep_rule = keep_rule(&Image {
                comm: self.comm.clone().into_bytes(),
                exe: self.exe.clone().into_bytes(),
                argv: argv.collect(),
                ..Image::default()
            });
        }
    }
}

/// Birth ancestor of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistoryAncestor {
    /// Pid in the PID namespace of the service.
    #[serde(rename = "process.pid")]
    pub pid: u32,
    /// Start time in ns since boot.
    #[serde(rename = "process.start_ns")]
    pub start_ns: u64,
    /// Kernel's short name; empty if unknown.
    #[serde(rename = "process.comm")]
    pub comm: String,
    /// Whether it had exited when the member was decided about.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exited: bool,
}

impl From<&Ancestor> for HistoryAncestor {
    fn from(ancestor: &Ancestor) -> HistoryAncestor {
        HistoryAncestor {
            pid: ancestor.key.pid,
            start_ns: ancestor.key.start,
            comm: String::from_utf8_lossy(&ancestor.image.comm).into_owned(),
            exited: ancestor.has_exited,
        }
    }
}

/// Request of a user to keep a member, or to keep it no longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistoryRequest {
    /// Time of the request.
    pub time: Timestamp,
    /// `keep` or `unkeep`.
    pub request: String,
    /// Uid of the user.
    pub by_uid: u32,
    /// Whether descendants are kept too. `None` for `unkeep`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<bool>,
    /// Expected end of the keep; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// Decision about a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistoryDecision {
    /// Time of the decision.
    pub time: Timestamp,
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: String,
    /// Reason, such as `root_exited`.
    pub reason: String,
    /// Name of the deciding rule, if a rule decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Mode of the service: with `observe`, nothing was signalled. `None` if an older version made the decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

impl HistoryDecision {
    /// Returns whether the process would have been reaped, but the service only observed.
    pub fn would_reap(&self) -> bool {
        self.decision == "reap" && self.mode.as_deref() == Some("observe")
    }
}

/// Result of the signals to a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistoryOutcome {
    /// Time of the exit or of the failure.
    pub time: Timestamp,
    /// Outcome, such as `ended` or `failed`.
    pub outcome: String,
    /// Reason why it was not ended or not signalled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Strongest signal that the process was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Exit status of the process.
    #[serde(flatten)]
    pub exit: ExitInfo,
    /// Nanoseconds from the first signal to the exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// Resident bytes right after the first signal.
    #[serde(rename = "memory.rss", skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// Bytes in swap right after the first signal.
    #[serde(rename = "memory.swap", skip_serializing_if = "Option::is_none")]
    pub swap: Option<u64>,
}
