//! Processes, and decisions about them.

use serde::{Deserialize, Serialize};

/// Decision about a process, in the terms of the event stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DecisionInfo {
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: String,
    /// Reason, such as `root_exited`, as in the event stream.
    pub reason: String,
    /// Mode of the service: with `observe`, nothing is signalled.
    #[serde(default)]
    pub mode: String,
    /// Name of the deciding rule, if a rule decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Time until the decision is evaluated again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
    /// The same for people, such as `kept: a rule keeps it (gradle)`. All commands use these words.
    #[serde(default)]
    pub text: String,
}

/// Snapshot of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProcessInfo {
    /// Pid in the PID namespace of the service.
    pub pid: u32,
    /// Start time. With the pid, it identifies the process.
    pub start_ns: u64,
    /// Pid of the current parent; absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_pid: Option<u32>,
    /// Command line without secrets, possibly truncated. Without a command line: the kernel's name in brackets.
    pub command: String,
    /// Effective user id.
    pub uid: u32,
    /// Time since the process started.
    pub age_s: u64,
    /// Resident memory; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// Innermost session of which it is a member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// Name of the agent whose session that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Whether it is the root of that session.
    pub session_root: bool,
    /// Whether it is an orphan whose agent is alive.
    pub detached: bool,
    /// Whether it is a member whose agent has exited.
    pub due: bool,
    /// Whether it has exited but its parent has not waited for it. A zombie holds no memory.
    pub zombie: bool,
    /// Rule that makes the process a boundary: its descendants are not members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundary: Option<String>,
    /// Evidence that made a late-discovered process a member: `process_group`, `kernel_session`, `cgroup`, `marker` or
    /// `cwd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// Environment variable that is the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_variable: Option<String>,
    /// Directory of the agent, if the evidence is `cwd`: the process works in it or below it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_directory: Option<String>,
    /// Decision about a member, or about a leftover that a scan has found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<DecisionInfo>,
}

/// Process of which only the name is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NamedProcess {
    /// Pid in the PID namespace of the service.
    pub pid: u32,
    /// Kernel's short name (`comm`); empty if unknown.
    pub name: String,
}
