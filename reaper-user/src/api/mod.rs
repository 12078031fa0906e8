//! The service's socket: questions from outside, and what is answered.
//!
//! ```text
//!   client ──HTTP/1.1 over a Unix socket──▶ server (thread "api") ──Ask──▶ engine
//!          ◀─────────── JSON ────────────── show: words, memory ◀─Answer──  copies what it knows
//! ```
//!
//! The engine only copies what it has in memory; what takes time (command lines without their secrets, a look
//! at /proc) is the server's. All is versioned under `/v1`:
//!
//! | | |
//! |---|---|
//! | `GET /v1/status` | [`Status`] |
//! | `GET /v1/tree?agent=NAME&all=true` | [`TreeResponse`] |
//! | `GET /v1/explain/PID` | [`Explanation`] |
//! | `GET /v1/agents` | [`AgentsResponse`] |
//! | `GET /v1/keeps` | [`KeepsResponse`] |
//! | `POST /v1/keeps` | [`KeepParams`] → [`KeepDone`] |
//! | `DELETE /v1/keeps/PID` | [`KeepDone`] |
//! | `GET /v1/scan?min_age_s=N`, `POST` reaps | [`ScanReport`] |
//! | `GET /v1/history?since_s=N&agent=NAME&session=NAME` | [`History`] |
//! | `POST /v1/config/reload` | [`Reloaded`] |
//!
//! What is refused is answered by [`ErrorResponse`]; where there is no room now, `Retry-After` says when to ask again. Who asks is known by the socket's peer credentials: root sees and
//! reaches all, others see the processes of their own uid and reach what kill(2) would let them signal.
//!
//! Times named `_s` are whole seconds; `_ns` are nanoseconds since boot, and memory is in bytes.

pub mod client;
pub mod leftovers;
pub mod messages;
pub mod peer;
pub mod server;
mod show;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::export::FreedMemory;

/// Name of the socket in the runtime directory, for a service that watches the whole host.
pub const SOCKET: &str = "reaper.sock";

/// The longest time for which anything can be kept: ten years.
pub const KEEP_MAX_S: u64 = 10 * 366 * 24 * 3600;

/// Why a question is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// `eperm`, `not_found`, `bad_request`, `conflict`, `too_large`, `timeout`, `busy`, `wrong_method`, `failed`.
    pub error: String,
    /// A sentence that says what is wrong and what to do.
    pub message: String,
}

/// What was decided about a process, in the words of the event stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInfo {
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: String,
    pub reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Until this is over, it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
}

/// A process as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    pub pid: u32,
    pub start_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_pid: Option<u32>,
    /// The command line without its secrets, perhaps cut; in brackets the kernel's name where there is none.
    pub command: String,
    /// Effective.
    pub uid: u32,
    pub age_s: u64,
    /// Resident memory; absent where it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// The innermost session that it is a member of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// It is that session's root.
    pub session_root: bool,
    /// An orphan whose agent lives.
    pub detached: bool,
    /// A member whose agent is gone.
    pub due: bool,
    /// It has exited, and its parent has not waited for it: it holds no memory.
    pub zombie: bool,
    /// Membership stops here, by the rule of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundary: Option<String>,
    /// What makes it a member though no event reported its birth: `process_group`, `kernel_session`, `cgroup`, `marker` or `cwd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// The variable of its environment that says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_variable: Option<String>,
    /// The agent's directory, in which or below which it works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_directory: Option<String>,
    /// Of members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<DecisionInfo>,
}

/// `GET /v1/status`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    /// `enforce` or `observe`.
    pub mode: String,
    /// Why the service only observes, whatever the config says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_reason: Option<String>,
    /// Where its events come from.
    pub source: String,
    /// Which better sources could not be used, and why.
    #[serde(default)]
    pub rejected_sources: Vec<String>,
    /// As it was given; empty is the whole host.
    pub scope: Vec<String>,
    /// Time of day at which it began to watch, to the second (RFC 3339).
    pub since: String,
    pub uptime_s: u64,
    /// Processes known.
    pub processes: u64,
    /// Sessions that are open, of those whom the one who asks may see.
    pub sessions_open: u64,
    /// Sessions begun since the start.
    pub sessions: u64,
    pub events: u64,
    pub lost: u64,
    /// Stretches of time in which events may have been missing.
    pub gaps: u64,
    /// Why events are missing now, where they are: nothing new is decided meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<String>,
    pub signals: u64,
    pub reaped: u64,
    /// Processes that are kept though their agent is gone, now.
    pub kept: u64,
    pub failed: u64,
    /// In observe: processes that would have been reaped so far.
    pub would_have_reaped: u64,
    /// Of those reaped.
    #[serde(flatten)]
    pub memory: FreedMemory,
    /// Members that have exited and that their parent has not waited for, now: they hold no memory, and are in
    /// none of these figures.
    pub zombies: u64,
    /// Directory of the pins; absent where tracking ends with the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin_dir: Option<String>,
}

/// A session, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub id: String,
    pub agent: String,
    /// `agent`, or `server` for an agent's server.
    pub kind: String,
    pub root_pid: u32,
    /// Since it opened.
    pub age_s: u64,
    /// Members that live, nested sessions' not among them.
    pub members: u64,
    /// How many of them are kept though its root is gone.
    pub kept: u64,
    /// The session that this one is nested in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_session_id: Option<String>,
    /// How its root ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_exit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_root_exit_s: Option<u64>,
}

/// `GET /v1/tree`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeResponse {
    pub groups: Vec<TreeGroup>,
}

/// One session with those nested in it, or all that is in none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeGroup {
    /// Absent for processes of no session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// Parents before their children, each directly after those before it among its siblings.
    pub processes: Vec<TreeRow>,
}

/// A process in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRow {
    /// How many of those listed are above it.
    pub depth: usize,
    #[serde(flatten)]
    pub process: ProcessInfo,
}

/// `GET /v1/explain/PID`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    pub process: ProcessInfo,
    /// Who begot it, the nearest first, also those who have exited as far as they are remembered.
    pub lineage: Vec<AncestorInfo>,
    /// Who has it now, where that is not who begot it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adopter: Option<NamedProcess>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// The decision in a sentence.
    pub why: String,
    /// What will happen, and when, in a sentence.
    pub next: String,
    /// What is known of it beside its program, as far as a rule has asked; `"unreadable"` where that failed.
    pub facts: BTreeMap<String, Value>,
}

/// Somebody of whom little is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedProcess {
    pub pid: u32,
    /// The kernel's short name for it; empty if it is not known.
    pub name: String,
}

/// One of those from whom a process descends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AncestorInfo {
    pub pid: u32,
    pub start_ns: u64,
    /// The command line, or the kernel's short name where it is another user's.
    pub command: String,
    pub alive: bool,
    /// How it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// The agent whose root it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundary: Option<String>,
    /// Who has it now, where that is not who begot it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adopter: Option<NamedProcess>,
}

/// `GET /v1/agents`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentsResponse {
    pub agents: Vec<AgentInfo>,
}

/// A rule by which an agent or an agent's server is recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    pub name: String,
    /// `agent` or `server`.
    pub kind: String,
    /// What it asks for, in short: one text for each alternative.
    pub matches: Vec<String>,
    /// Open now, of those whom the one who asks may see.
    pub sessions: Vec<SessionInfo>,
}

/// `GET /v1/keeps`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepsResponse {
    pub keeps: Vec<KeepInfo>,
}

/// A process that a user has asked to be kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepInfo {
    pub process: ProcessInfo,
    /// Who has asked.
    pub by_uid: u32,
    /// For how long still; absent: until it ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
    /// With all that descends from it.
    pub tree: bool,
}

/// Body of `POST /v1/keeps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepParams {
    pub pid: u32,
    /// Absent: until it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_s: Option<u64>,
    /// With all that descends from it.
    #[serde(default)]
    pub tree: bool,
}

/// What an order about a keep came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepDone {
    pub pid: u32,
    /// How many processes it was about.
    pub processes: u64,
    /// It is written down, and holds for the service that comes next too.
    pub durable: bool,
}

/// What one look found: of the service, members and what nobody watched; of `reaper scan` without one, the latter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanReport {
    /// `service` or `command`.
    pub scanned_by: String,
    /// Whether the service only observes, and ends nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observes: bool,
    /// To be reaped, or reaped.
    pub reapable: Vec<Finding>,
    /// Left alone. Members whose agent lives are not listed, unless they are detached.
    pub kept: Vec<Finding>,
    /// Processes that could not be read: they count as living, and nothing is said of them.
    pub unreadable: u64,
    /// Of those that nobody watched, the ones whose end was confirmed; absent where none was to be ended, or it
    /// goes on: the event stream tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// What these gave back, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
}

/// A process and what is to be said of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub pid: u32,
    pub start_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_pid: Option<u32>,
    /// The topmost process of the tree that it is a part of; of a member, the first root of its session.
    pub subtree_root_pid: u32,
    /// Effective.
    pub uid: u32,
    /// As in [`ProcessInfo`].
    pub command: String,
    /// Name of the agent's rule.
    pub agent: String,
    /// That it is a member of; absent where nobody watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// `reap`, `keep`, `report` or `wait`.
    pub decision: String,
    pub reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// What speaks for its being a leftover, where nobody watched: `dead_agent`, `tool_shell`,
    /// `recorded_session` or `marker`. Of a member as in [`ProcessInfo`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// The variable of the environment that says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_variable: Option<String>,
    /// As in [`ProcessInfo`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_directory: Option<String>,
    /// The agent that it names, or that was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_pid: Option<u32>,
    /// All of that in a sentence.
    pub why: String,
    pub age_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// What came of it: `ended`, `failed` or `not_sent`; of members the event stream tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
}

/// `GET /v1/history`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The newest last.
    pub sessions: Vec<crate::journal::history::HistorySession>,
    /// Older ones that were asked for too, and for which there is no room in an answer.
    pub omitted: u64,
}

/// `POST /v1/config/reload`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// A sentence that says what is in force now.
    pub message: String,
}
