//! Status of the service.

use serde::{Deserialize, Serialize};

use crate::export::{ConfigFile, FreedMemory, counted, memory_text};

/// Answer to `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Capabilities that the service lacks, each with the effect of its absence.
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
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RefusedConfig {
    /// Time of the first refusal since a config was applied, to the second (RFC 3339).
    pub since: String,
    /// Time since then.
    pub age_s: u64,
    /// First problem of the last refusal; absent for users who may not see the config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
