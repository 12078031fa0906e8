//! Rules for agents, and their test on a process.

use serde::{Deserialize, Serialize};

use super::tree::SessionInfo;

/// Answer to `GET /v1/agents`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AgentsResponse {
    /// Rules in force for agents and their servers.
    pub agents: Vec<AgentInfo>,
}

/// Rule that recognises an agent or an agent's server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AgentInfo {
    /// Name of the rule.
    pub name: String,
    /// `agent` or `server`.
    pub kind: String,
    /// Conditions of the rule in short form, one text for each alternative.
    pub matches: Vec<String>,
    /// Pids of the running agents: of the roots of `sessions` or, without a service, of the processes that match.
    #[serde(default)]
    pub running: Vec<u32>,
    /// Open sessions that the user may see.
    pub sessions: Vec<SessionInfo>,
}

/// Answer to `GET /v1/agents?test=PID`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RuleTestResponse {
    /// Pid of the process.
    pub pid: u32,
    /// Command line without secrets, possibly truncated.
    pub command: String,
    /// Kernel's short name.
    pub comm: String,
    /// Path of the executable; empty if it cannot be read.
    pub exe: String,
    /// Path of its script, with links resolved, if it is an interpreter that runs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// Rule that recognises it: the first that matches. Boundaries come first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Rule that comes nearest, if one has anything to do with the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest: Option<RuleTest>,
    /// Boundaries that match, and all rules for agents and servers: those that match in the order of evaluation, then the
    /// others, the nearest first.
    pub rules: Vec<RuleTest>,
}

/// Result of a rule for a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RuleTest {
    /// Pid of the process.
    pub pid: u32,
    /// Name of the rule.
    pub name: String,
    /// `agent`, `server` or `boundary`.
    pub kind: String,
    /// Whether the rule matches.
    pub matches: bool,
    /// Key of the condition that failed, such as `script`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// Patterns of that condition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patterns: Vec<String>,
    /// Reason why it failed, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}
