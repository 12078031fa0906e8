//! Access to the host: the events that the kernel reports, and what can be read about processes.
//!
//! - [`source`] delivers the events: eBPF probes, the proc connector, or scans of the process table.
//! - [`facts`] reads on worker threads what no event reports.
//! - [`workers`] provides the threads for reads that can block.
//! - [`kernel`] has the traits through which the engine uses all of this.
//! - [`advice`] says what a user can do about an error of the operating system.
//! - [`sys`] wraps system calls. Only this module and `source/ebpf` contain `unsafe` code.
//!
//! This crate makes no decision about a process and sends no signal by itself. It uses only the types of
//! `reaper-model` and `reaper-common`.
//!
//! A module with a twin in a `darwin.rs` or below a `darwin/` has another implementation on macOS. The module
//! declaration selects it.
#![warn(missing_docs)]

pub mod advice;
#[cfg(test)]
mod damage;
pub mod facts;
pub mod kernel;
pub mod source;
pub mod sys;
pub mod workers;
