//! HTTP API of the service on a Unix socket.
//!
//! ```text
//!   client ──HTTP/1.1 over a Unix socket──▶ server (thread "api") ──EngineRequest──▶ engine
//!          ◀─────────── JSON ────────────── show: text, memory    ◀──EngineReply───  copies its state
//! ```
//!
//! The engine only copies state that it has in memory. The server does the slow work on other threads: it redacts
//! command lines and reads /proc. All paths are versioned under `/v1`:
//!
//! | | |
//! |---|---|
//! | `GET /v1/status` | [`Status`] |
//! | `GET /v1/tree?agent=NAME&all=true` | [`TreeResponse`] |
//! | `GET /v1/explain/PID` | [`Explanation`] |
//! | `GET /v1/agents` | [`AgentsResponse`] |
//! | `GET /v1/agents?test=PID` | [`RuleTestResponse`] |
//! | `GET /v1/keeps` | [`KeepsResponse`] |
//! | `POST /v1/keeps` | [`KeepParams`] → [`KeepResult`] |
//! | `DELETE /v1/keeps/PID` | [`KeepResult`] |
//! | `GET /v1/scan?min_age_s=N`, `POST` reaps | [`ScanReport`] |
//! | `GET /v1/history?since_s=N&agent=NAME&session=NAME&pid=N,N&limit=N` | [`History`] |
//! | `GET /v1/config` | [`ShownConfig`] |
//! | `POST /v1/config/reload` | [`Reloaded`] |
//!
//! Refusals are answered by [`ErrorResponse`]. If the service is busy, `Retry-After` says when to try again.
//!
//! The socket's peer credentials identify the user. Root sees and controls all processes. Other users see the
//! processes of their own uid and control those that kill(2) lets them signal.
//!
//! Fields named `_s` are whole seconds, `_ns` nanoseconds since boot (CLOCK_BOOTTIME). Memory is in bytes.

pub mod client;
pub mod leftovers;
pub mod messages;
pub mod peer;
pub mod recognition;
pub mod server;
mod show;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::export::{ConfigFile, FreedMemory, KeepAdvice, counted, memory_text};
use crate::journal::history::HistoryOutcome;

/// File name of the socket in the runtime directory, for a service without `--scope`.
pub const SOCKET: &str = "reaper.sock";

/// Longest time for which `reaper keep` can keep a process: ten years.
pub const KEEP_MAX_S: u64 = 10 * 366 * 24 * 3600;

/// Reason why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// `eperm`, `not_found`, `bad_request`, `conflict`, `too_large`, `timeout`, `busy`, `wrong_method`, `failed`.
    pub error: String,
    /// Cause and what to do, in one sentence.
    pub message: String,
}

/// Decision about a process, in the terms of the event stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// `GET /v1/status`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the service's program.
    pub version: String,
    /// Pid of the service.
    pub pid: u32,
    /// `enforce` or `observe`.
    pub mode: String,
    /// Reason why the service only observes although the config says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_reason: Option<String>,
    /// Config file.
    #[serde(flatten)]
    pub config: ConfigFile,
    /// Refusal of the config file at the last reload. The config from before is still in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_refused: Option<RefusedConfig>,
    /// Settings of the config file that wait for a restart of the service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub config_waiting: Vec<String>,
    /// Source of events.
    pub source: String,
    /// Higher-priority sources that could not be used, each with the reason.
    #[serde(default)]
    pub rejected_sources: Vec<String>,
    /// Scope as given on the command line; empty for the whole host.
    pub scope: Vec<String>,
    /// Time when the service started to watch, to the second (RFC 3339).
    pub since: String,
    /// Time since the service started to watch.
    pub uptime_s: u64,
    /// Number of known processes.
    pub processes: u64,
    /// Number of open sessions that the user may see.
    pub sessions_open: u64,
    /// Number of sessions opened since the start.
    pub sessions: u64,
    /// Number of events read from the source since the start.
    pub events: u64,
    /// Number of events lost since the start.
    pub lost: u64,
    /// Number of periods in which events may have been lost.
    pub gaps: u64,
    /// Reason why events are missing now. Until the gap is closed, nothing new is decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<String>,
    /// Number of lines of the event stream since the start that were dropped because a reader was too slow, or that
    /// could not be written.
    #[serde(default)]
    pub stream_dropped: u64,
    /// Reason why lines of the event stream cannot be written now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_error: Option<String>,
    /// Number of signals sent since the start.
    pub signals: u64,
    /// Number of processes that have exited after a signal of the service.
    pub reaped: u64,
    /// Number of living processes that are kept although their agent has exited.
    pub kept: u64,
    /// Number of processes that could not be ended.
    pub failed: u64,
    /// Number of processes that would have been reaped so far; observe mode only.
    pub would_have_reaped: u64,
    /// Memory of the reaped processes.
    #[serde(flatten)]
    pub memory: FreedMemory,
    /// Capabilities that the service holds and can use.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// Capabilities that the service lacks, each with what it lacks without.
    #[serde(default)]
    pub missing_capabilities: Vec<String>,
    /// Number of zombies whose parent is a member. They hold no memory and are not in the other counts.
    pub zombies: u64,
    /// Directory of the pins; absent if tracking ends with the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin_dir: Option<String>,
}

impl Status {
    /// Returns whether the service works, and what it has achieved.
    pub fn summary(&self) -> String {
        let sessions = counted(self.sessions_open, "open session", "open sessions");
        let state = match (&self.gap, &*self.mode) {
            (Some(_), _) => "Events are missing, so nothing new is decided",
            (None, "observe") => "Observing only",
            (None, _) => "Reaping",
        };
        let done = match &*self.mode {
            "observe" => {
                let would = counted(self.would_have_reaped, "process", "processes");
                format!("{would} would have been reaped")
            }
            _ => {
                let reaped = counted(self.reaped, "process", "processes");
                let FreedMemory { rss, swap, .. } = self.memory;
                format!("{reaped} reaped, {} freed", memory_text(rss, swap))
            }
        };
        let failed = match self.failed {
            0 => String::new(),
            failed => format!(", {failed} failed"),
        };
        let config = match &self.config_refused {
            Some(_) => "; its config file is refused",
            None => "",
        };
        format!("{state}: {sessions}, {done}{failed}{config}")
    }
}

/// Refusal of a config file that was read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedConfig {
    /// Time of the first refusal since a config was applied, to the second (RFC 3339).
    pub since: String,
    /// Time since then.
    pub age_s: u64,
    /// First problem of the last refusal; absent for users who may not see the config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Snapshot of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// `GET /v1/tree`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeResponse {
    /// Outermost sessions, and with `all=true` the processes without a session.
    pub groups: Vec<TreeGroup>,
}

/// Session with the sessions nested in it, or all processes without a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeGroup {
    /// Absent for processes without a session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// Processes in depth-first order: each parent before its children. Includes zombies below their parents.
    pub processes: Vec<TreeRow>,
}

/// Process in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRow {
    /// Number of listed ancestors.
    pub depth: usize,
    /// Process at this place in the tree.
    #[serde(flatten)]
    pub process: ProcessInfo,
}

/// `GET /v1/explain/PID`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Process that is explained.
    pub process: ProcessInfo,
    /// Birth ancestors, the nearest first. Includes exited ones that are still in the tree.
    pub lineage: Vec<AncestorInfo>,
    /// Current parent, if it is not the birth parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adopter: Option<NamedProcess>,
    /// Innermost session of which it is a member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionInfo>,
    /// Decision and its reason as in [`DecisionInfo::text`], then details, in sentences.
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

/// Process of which only the name is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedProcess {
    /// Pid in the PID namespace of the service.
    pub pid: u32,
    /// Kernel's short name (`comm`); empty if unknown.
    pub name: String,
}

/// Birth ancestor of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// `GET /v1/agents`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentsResponse {
    /// Rules in force for agents and their servers.
    pub agents: Vec<AgentInfo>,
}

/// Rule that recognises an agent or an agent's server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// `GET /v1/agents?test=PID`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Decision about a released process and its reason, as in [`Explanation::why`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Next step for a released process, as in [`Explanation::next`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Result of a scan.
///
/// The service reports members and untracked leftovers. `reaper scan` without a service reports leftovers only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Command line, as in [`ProcessInfo`].
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
    /// [`ProcessInfo`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// Environment variable that is the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_variable: Option<String>,
    /// Directory, as in [`ProcessInfo`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence_directory: Option<String>,
    /// Pid of the agent that the evidence names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_pid: Option<u32>,
    /// Decision and its reason as in [`DecisionInfo::text`]; of a leftover with the evidence.
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

/// `GET /v1/history`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Sessions, the newest last.
    pub sessions: Vec<crate::journal::history::HistorySession>,
    /// Number of older sessions that match but did not fit into the answer.
    pub omitted: u64,
}

/// `GET /v1/config`
pub use crate::config::show::ShownConfig;

/// `POST /v1/config/reload`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Summary of the new config in one sentence.
    pub message: String,
}
