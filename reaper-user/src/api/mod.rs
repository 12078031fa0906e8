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
//! | request | response |
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
mod types;

use serde::{Deserialize, Serialize};

pub use types::agents::{AgentInfo, AgentsResponse, RuleTest, RuleTestResponse};
pub use types::explanation::{AncestorInfo, Explanation};
pub use types::keeps::{KEEP_MAX_S, KeepInfo, KeepParams, KeepResult, KeepsResponse};
pub use types::process::{DecisionInfo, NamedProcess, ProcessInfo};
pub use types::scan::{Finding, ScanReport};
pub use types::status::{RefusedConfig, Status};
pub use types::tree::{SessionInfo, TreeGroup, TreeResponse, TreeRow, WaitInfo};

/// File name of the socket in the runtime directory, for a service without `--scope`.
pub const SOCKET: &str = "reaper.sock";

/// Reason why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// `eperm`, `not_found`, `bad_request`, `conflict`, `too_large`, `timeout`, `busy`, `wrong_method`, `failed`.
    pub error: String,
    /// Cause and what to do, in one sentence.
    pub message: String,
}

impl ErrorResponse {
    /// Returns the refusal to show a process of another user.
    pub(crate) fn not_visible(pid: u32) -> ErrorResponse {
        let message = format!(
            "process {pid} belongs to another user, and only its owner or root can see it; run this with sudo"
        );
        ErrorResponse::new("eperm", message)
    }
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
