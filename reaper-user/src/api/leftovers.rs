//! Scans for leftovers, as the server needs them.

use std::time::Duration;

use super::messages::ScanContext;
use super::peer::Peer;
use super::{ErrorResponse, ScanReport};

/// Finds and reaps leftovers for `/v1/scan`. Both methods block, so the server calls them on threads of their own.
pub trait Leftovers: Send + Sync {
    /// Scans all processes for `peer` and adds what it finds to a report of members.
    ///
    /// # Errors
    /// The process table cannot be read.
    fn report(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ErrorResponse>;

    /// As [`report`](Leftovers::report), and ends the processes that are due.
    ///
    /// # Errors
    /// Another scan is reaping already, or the process table or the keeps of users cannot be read.
    fn reap(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ErrorResponse>;
}
