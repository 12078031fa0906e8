#![doc = include_str!("../docs/architecture.md")]

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
pub mod client {
    pub use crate::api::client::{Client, ClientError, ServiceResponse};
}
