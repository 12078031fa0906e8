//! Event source that scans the process table, for hosts where the kernel reports no events to this user.
//!
//! Each pass is compared with the previous one ([`table`]). The interval between passes depends on activity
//! ([`interval`]). Each operating system has its own way to read the table.

pub mod error;
pub mod interval;
#[cfg(target_os = "linux")]
mod linux;
pub mod table;

pub use interval::ScanOptions;
#[cfg(target_os = "linux")]
pub use linux::Scan;
