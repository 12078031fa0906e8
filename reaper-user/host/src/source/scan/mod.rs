//! Looks at the process table again and again: for where nobody tells what happens.
//!
//! What a pass saw is compared with what the one before it saw ([`table`]); how often is up to what happens ([`interval`]).
//! How a pass looks is each system's own.

pub mod error;
pub mod interval;
#[cfg(target_os = "linux")]
mod linux;
pub mod table;

pub use interval::ScanOptions;
#[cfg(target_os = "linux")]
pub use linux::Scan;
