//! Explanation of a process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::agents::RuleTest;
use super::process::{NamedProcess, ProcessInfo};
use super::tree::SessionInfo;
use crate::export::KeepAdvice;
use crate::journal::history::HistoryOutcome;

/// Answer to `GET /v1/explain/PID`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Explanation {
    /// Process that is explained.
    pub process: ProcessInfo,
    /// Birth ancestors, the nearest first. Includes exited ones that are still in the tree. For an exited process, those up
    /// to its agent at its last decision.
    pub lineage: Vec<AncestorInfo>,
    /// Current parent, if it is not the birth parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adopter: Option<NamedProcess>,
    /// Innermost session of which it is a member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// Decision and its reason as in [`DecisionInfo::text`](super::process::DecisionInfo::text), then details, in sentences.
    pub why: String,
    /// Next step and its time, in one sentence.
    pub next: String,
    /// Agent rule that comes nearest, if none recognises the process or one above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nearest: Option<RuleTest>,
    /// Facts from /proc that rules have requested so far; `"unreadable"` if reading failed.
    pub facts: BTreeMap<String, Value>,
    /// Whether it has exited. The answer then comes from the service's memory or from the journal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exited: bool,
    /// Outcome of the signals to it, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<HistoryOutcome>,
    /// Ways to keep such a process. Absent if it is kept already, was not to be reaped, or is untracked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_with: Option<KeepAdvice>,
}

/// Birth ancestor of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AncestorInfo {
    /// Pid in the PID namespace of the service.
    pub pid: u32,
    /// Start time.
    pub start_ns: u64,
    /// Command line, or the kernel's short name in brackets for a process of another user.
    pub command: String,
    /// Whether it has not exited yet.
    pub alive: bool,
    /// Exit status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Agent whose root it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Rule that makes it a boundary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundary: Option<String>,
    /// Current parent, if it is not the birth parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adopter: Option<NamedProcess>,
}
