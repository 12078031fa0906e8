//! Tracks the process trees of AI coding agents and ends what they leave behind.
//!
//! This crate contains the command `reaper` and the parts of it that other programs can use:
//!
//! - [`run`] supervises one command. It needs neither privileges nor a service.
//! - [`client`] sends requests to a running service (`sudo reaper daemon`).
//!
//! # Run a command
//!
//! [`run::Run`] starts a command and waits for it. When the command exits or a time limit expires, it ends each process
//! that the command has left. That includes processes that used `setsid` or a double fork:
//!
//! ```
//! use std::process::Command;
//! use std::time::Duration;
//!
//! use reaper::run::{Run, RunOutcome};
//!
//! let mut command = Command::new("sh");
//! command.args(["-c", "setsid sleep 600 & exit 3"]);
//! let mut run = Run::new(command);
//! run.timeout = Some(Duration::from_secs(60));
//!
//! let report = run.supervise()?;
//! assert_eq!(report.outcome, RunOutcome::Failed); // exit status 3
//! assert_eq!(report.ended, 1); // the `sleep`
//! assert!(report.survivors.is_empty());
//! # Ok::<(), reaper::run::RunError>(())
//! ```
//!
//! The calling process becomes the parent of all descendants of the command, so it must have no other children. A
//! program with other children starts a separate process for the run.
//!
//! # Ask a running service
//!
//! A service watches all agents of the host. [`client::Client`] sends it requests over its Unix socket and parses the
//! JSON responses. The module lists the paths and their types:
//!
//! ```no_run
//! use reaper::client::{Client, ClientError, KeepParams, KeepResult, TreeResponse};
//!
//! let client = Client::new("/run/reaper/reaper.sock");
//! let tree: TreeResponse = match client.get("/v1/tree") {
//!     Ok(response) => response.read()?,
//!     Err(ClientError::NoService { path, .. }) => {
//!         println!("no service runs on {}", path.display());
//!         return Ok(());
//!     }
//!     Err(error) => return Err(error),
//! };
//! for group in &tree.groups {
//!     for row in &group.processes {
//!         println!("{} {}", row.process.pid, row.process.command);
//!     }
//! }
//!
//! // Keep process 4250 for an hour, even if its agent exits.
//! let params = KeepParams { pid: 4250, for_s: Some(3600), tree: false };
//! let kept: KeepResult = client.post("/v1/keeps", &params)?.read()?;
//! println!("{} processes are kept", kept.processes);
//! # Ok::<(), ClientError>(())
//! ```
//!
//! [`docs`] has all pages of the documentation, among them the architecture.
#![warn(missing_docs)]

mod api;
pub mod cli;
mod config;
#[cfg(test)]
#[path = "../host/src/damage.rs"]
#[allow(dead_code, reason = "the tests of reaper-host use the rest")]
mod damage;
pub mod docs;
mod engine;
mod export;
mod journal;
mod leftovers;
mod reap;
#[cfg(target_os = "linux")]
pub mod run;

/// Client of a running service: requests on its Unix socket.
///
/// | request | response |
/// |---|---|
/// | `GET /v1/status` | [`Status`] |
/// | `GET /v1/tree?agent=NAME&all=true` | [`TreeResponse`] |
/// | `GET /v1/explain/PID` | [`Explanation`] |
/// | `GET /v1/agents` | [`AgentsResponse`] |
/// | `GET /v1/agents?test=PID` | [`RuleTestResponse`] |
/// | `GET /v1/keeps` | [`KeepsResponse`] |
/// | `POST /v1/keeps` with [`KeepParams`] | [`KeepResult`] |
/// | `DELETE /v1/keeps/PID` | [`KeepResult`] |
/// | `GET /v1/scan?min_age_s=N`, `POST` reaps | [`ScanReport`] |
/// | `GET /v1/history?since_s=N&agent=NAME&session=NAME&pid=N,N&limit=N` | [`History`] |
/// | `GET /v1/config` | [`ShownConfig`] |
/// | `POST /v1/config/reload` | [`Reloaded`] |
///
/// Fields named `_s` are whole seconds, `_ns` nanoseconds since boot (CLOCK_BOOTTIME). Memory is in bytes.
pub mod client {
    pub use crate::api::client::{Client, ClientError, ServiceResponse};
    pub use crate::api::{
        AgentInfo, AgentsResponse, AncestorInfo, DecisionInfo, Explanation, Finding, History,
        KEEP_MAX_S, KeepInfo, KeepParams, KeepResult, KeepsResponse, NamedProcess, ProblemDetails,
        ProcessInfo, RefusedConfig, Reloaded, RuleTest, RuleTestResponse, ScanReport, SessionInfo,
        ShownConfig, Status, TreeGroup, TreeResponse, TreeRow, WaitInfo,
    };
    pub use crate::export::{ConfigFile, ExitInfo, FreedMemory, KeepAdvice};
    pub use crate::journal::history::{
        HistoryDecision, HistoryOutcome, HistoryProcess, HistorySession,
    };
}
