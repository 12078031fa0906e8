#![doc = include_str!("../docs/architecture.md")]

pub mod api;
pub mod cli;
pub mod config;
#[cfg(test)]
#[path = "../host/src/damage.rs"]
#[allow(dead_code, reason = "the tests of reaper-host use the rest")]
mod damage;
pub mod engine;
pub mod export;
pub mod journal;
pub mod leftovers;
pub mod reap;
#[cfg(target_os = "linux")]
pub mod run;
