//! Sources of process events. They know nothing of policy.
//!
//! The engine waits until a source is readable and drains it. It reaches sources only through two traits: every source
//! implements [`Source`], and the kernel probes also implement [`Probes`](probes::Probes). macOS has no probes. A
//! simulated kernel implements [`Source`] over plain data.

#[cfg(any(target_os = "macos", test))]
pub mod darwin;
mod drained;
#[cfg(target_os = "linux")]
pub mod ebpf;
mod error;
mod event_source;
pub mod kind;
pub mod probes;
#[cfg(target_os = "linux")]
pub mod proc_connector;
mod process_table;
#[cfg(target_os = "linux")]
pub mod procfs;
pub mod scan;
pub mod selection;
mod snapshot;

/// Reads the process table on macOS, under the name of the module that reads /proc on Linux.
#[cfg(target_os = "macos")]
pub use darwin::table as procfs;
pub use drained::{Drained, Lost, Malformation};
pub use error::SourceError;
pub use event_source::Source;
pub use kind::SourceKind;
pub use process_table::ProcessTable;
