//! The host: what the kernel reports and what can be read of processes.
//!
//! - [`source`] delivers the events: eBPF probes, the proc connector, or scans of the process table.
//! - [`facts`] reads what no event reports, on worker threads.
//! - [`workers`] are the threads for reads that can block.
//! - [`kernel`] has the traits through which the engine uses all of this.
//! - [`sys`] wraps system calls. `unsafe` code is there and in `source/ebpf` alone.
//!
//! Nothing here decides about a process or signals one on its own: the crate knows the vocabulary of `reaper-model`, no more.
//!
//! Modules with a twin in a `darwin.rs` or below a `darwin/` have another implementation on macOS, chosen where they are
//! declared.

#[cfg(test)]
mod damage;
pub mod facts;
pub mod kernel;
pub mod source;
pub mod sys;
pub mod workers;
