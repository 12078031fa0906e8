//! Looks at the process table again and again: for where nobody tells what happens.
//!
//! What a pass saw is compared with what the one before it saw ([`table`]); how often is up to what happens ([`pace`]).
//! How a pass looks is each system's own.

pub mod interval;
#[cfg(target_os = "linux")]
mod linux;
pub mod table;

#[cfg(target_os = "linux")]
pub use linux::{Scan, ScanError};

use std::time::Duration;

/// How often it looks.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// While something happens.
    pub min_interval: Duration,
    /// While nothing does.
    pub max_interval: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            min_interval: Duration::from_millis(50),
            max_interval: Duration::from_secs(2),
        }
    }
}
