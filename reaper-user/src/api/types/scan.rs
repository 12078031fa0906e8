//! Report of a scan.

use serde::{Deserialize, Serialize};

/// Result of a scan.
///
/// The service reports members and untracked leftovers. `reaper scan` without a service reports leftovers only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ScanReport {
    /// `service` or `command`.
    pub scanned_by: String,
    /// Whether the service only observes and signals nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observes: bool,
    /// Processes to reap, or reaped.
    pub reapable: Vec<Finding>,
    /// Processes left alone. Members with a living agent are listed only if they are detached.
    pub kept: Vec<Finding>,
    /// Number of processes that could not be read. They count as alive and are not listed.
    pub unreadable: u64,
    /// Number of leftovers with a confirmed exit. Absent if no reaping was requested, or if it is not finished: then
    /// the event stream reports the outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// Memory freed by these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
}

impl ScanReport {
    /// Returns the leftover or member with this pid.
    pub fn finding(&self, pid: u32) -> Option<&Finding> {
        let mut all = self.reapable.iter().chain(&self.kept);
        all.find(|found| found.pid == pid)
    }
}

/// Process found by a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Finding {
    /// Pid of the process.
    pub pid: u32,
    /// Start time. With the pid, it identifies the process.
    pub start_ns: u64,
    /// Pid of the current parent, 0 for none; absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_pid: Option<u32>,
    /// Topmost process of the subtree. For a member: the first root of its session.
    pub subtree_root_pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Command line, as in [`ProcessInfo`](super::process::ProcessInfo).
    pub command: String,
    /// Name of the agent's rule.
    pub agent: String,
    /// Session of a member; absent for a leftover.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: String,
    /// Reason of the decision, such as `root_exited` or `not_orphan`.
    pub reason: String,
    /// Name of the rule or unit that decided, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Evidence that it is a leftover: `dead_agent`, `tool_shell`, `recorded_session` or `marker`. For a member as in
    /// [`ProcessInfo`](super::process::ProcessInfo).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// Environment variable that is the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_variable: Option<String>,
    /// Directory, as in [`ProcessInfo`](super::process::ProcessInfo).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_directory: Option<String>,
    /// Pid of the agent that the evidence names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_pid: Option<u32>,
    /// Decision and its reason as in [`DecisionInfo::text`](super::process::DecisionInfo::text); of a leftover with the evidence.
    pub why: String,
    /// Time since the process started.
    pub age_s: u64,
    /// Resident memory; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// Outcome of reaping a leftover: `ended`, `failed` or `not_sent`. The event stream reports those of members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Strongest signal that it was sent, by any sender.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Nanoseconds from the first signal to the exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
}
