//! Sessions and their process trees.

use serde::{Deserialize, Serialize};

use super::process::ProcessInfo;

/// Snapshot of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SessionInfo {
    /// Id of the session: agent, and pid and start time of the first root.
    pub id: String,
    /// Name of the rule that recognised the agent.
    pub agent: String,
    /// `agent`, or `server` for an agent's server.
    pub kind: String,
    /// Pid of the current root, also after its exit.
    pub root_pid: u32,
    /// Time since it opened.
    pub age_s: u64,
    /// Number of living members, without those of nested sessions.
    pub members: u64,
    /// Number of members that are kept although the root has exited.
    pub kept: u64,
    /// Session that contains this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_session_id: Option<String>,
    /// Exit status of the root, if it has exited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_exit: Option<String>,
    /// Time since the root exited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_root_exit_s: Option<u64>,
    /// Rules for all programs that make members wait after an exit of the agent; empty after its exit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<WaitInfo>,
}

/// Rule with a delay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct WaitInfo {
    /// Name of the rule.
    pub rule: String,
    /// Delay, or the age up to which the rule waits.
    pub wait_s: u64,
    /// Whether members wait after an exit with status 0.
    pub after_status_0: bool,
    /// Whether members wait after a failure, a signal, or both.
    pub after_others: bool,
}

/// Answer to `GET /v1/tree`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TreeResponse {
    /// Outermost sessions, and with `all=true` the processes without a session.
    pub groups: Vec<TreeGroup>,
}

/// Session with the sessions nested in it, or all processes without a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TreeGroup {
    /// Absent for processes without a session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// Processes in depth-first order: each parent before its children. Includes zombies below their parents.
    pub processes: Vec<TreeRow>,
}

/// Process in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TreeRow {
    /// Number of listed ancestors.
    pub depth: usize,
    /// Process at this place in the tree.
    #[serde(flatten)]
    pub process: ProcessInfo,
}
