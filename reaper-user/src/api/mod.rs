//! HTTP API of the service on a Unix socket.
//!
//! ```text
//!   client ──HTTP/1.1 over a Unix socket──▶ server (thread "api") ──EngineRequest──▶ engine
//!          ◀─────────── JSON ────────────── show: text, memory    ◀──EngineReply───  copies its state
//! ```
//!
//! The engine only copies state that it has in memory. The server does the slow work on other threads: it redacts
//! command lines and reads /proc. `server/route/endpoints.rs` has the table of all endpoints. `docs/openapi.json`
//! describes them; a test makes it from the table and the types.
//!
//! Refusals are answered by [`ProblemDetails`]. If the service is busy, `Retry-After` says when to try again.
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

pub(crate) use hyper::StatusCode;
use serde::{Deserialize, Serialize};

pub(crate) use show::exited::end_in_history;
pub use types::agents::{AgentInfo, AgentsResponse, RuleTest, RuleTestResponse};
pub use types::explanation::{AncestorInfo, Explanation};
pub use types::keeps::{KEEP_MAX_S, KeepInfo, KeepParams, KeepResult, KeepsResponse};
pub use types::process::{DecisionInfo, NamedProcess, ProcessInfo};
pub use types::scan::{Finding, ScanReport};
pub use types::status::{RefusedConfig, Status};
pub use types::tree::{SessionInfo, TreeGroup, TreeResponse, TreeRow, WaitInfo};

/// File name of the socket in the runtime directory, for a service without `--scope`.
pub const SOCKET: &str = "reaper.sock";

/// Reason why a request was refused or failed (problem details of RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProblemDetails {
    /// Always `about:blank`: the status names the kind of problem.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name of the status, such as `Not Found`.
    pub title: String,
    /// HTTP status of the response.
    pub status: u16,
    /// Cause and what to do, in one sentence.
    pub detail: String,
}

impl ProblemDetails {
    /// Creates the reason for a response with this status.
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> ProblemDetails {
        ProblemDetails {
            kind: "about:blank".into(),
            title: status.canonical_reason().unwrap_or_default().into(),
            status: status.as_u16(),
            detail: detail.into(),
        }
    }

    /// Returns the refusal to show a process of another user.
    pub(crate) fn not_visible(pid: u32) -> ProblemDetails {
        let detail = format!(
            "process {pid} belongs to another user, and only its owner or root can see it; run this with sudo"
        );
        ProblemDetails::new(StatusCode::FORBIDDEN, detail)
    }
}

/// Answer to `GET /v1/history`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct History {
    /// Sessions, the newest last.
    pub sessions: Vec<crate::journal::history::HistorySession>,
    /// Number of older sessions that match but did not fit into the answer.
    pub omitted: u64,
}

/// Answer to `GET /v1/config`.
pub use crate::config::show::ShownConfig;

/// Answer to `POST /v1/config/reload`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Reloaded {
    /// Summary of the new config in one sentence.
    pub message: String,
}
