//! Processes that users keep.

use serde::{Deserialize, Serialize};

use super::process::ProcessInfo;

/// Longest time for which `reaper keep` can keep a process: ten years.
pub const KEEP_MAX_S: u64 = 10 * 366 * 24 * 3600;

/// `GET /v1/keeps`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepsResponse {
    /// Kept processes that the user may see.
    pub keeps: Vec<KeepInfo>,
}

/// Process kept with `reaper keep`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepInfo {
    /// Process that is kept.
    pub process: ProcessInfo,
    /// Uid of the user that keeps it.
    pub by_uid: u32,
    /// Time left; absent if it is kept until it exits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
    /// Whether its descendants are kept with it.
    pub tree: bool,
}

/// Body of `POST /v1/keeps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepParams {
    /// Process to keep, which must be a member of a session.
    pub pid: u32,
    /// Time to keep it; absent for until it exits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_s: Option<u64>,
    /// Whether to keep its descendants with it.
    #[serde(default)]
    pub tree: bool,
}

/// Result of a keep or unkeep request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepResult {
    /// Process in the request.
    pub pid: u32,
    /// Number of processes affected, with this one.
    pub processes: u64,
    /// Whether it is in the journal and survives a restart of the service.
    pub durable: bool,
    /// Decision about a released process and its reason, as in [`Explanation::why`](super::explanation::Explanation::why).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Next step for a released process, as in [`Explanation::next`](super::explanation::Explanation::next).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
