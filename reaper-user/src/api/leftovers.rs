//! Trait through which the server scans for leftovers.

use std::time::Duration;

use super::messages::ScanContext;
use super::peer::Peer;
use super::{ProblemDetails, ScanReport};

/// Finds and reaps leftovers for `/v1/scan`. Both methods block, so the server calls them on worker threads.
pub trait Leftovers: Send + Sync {
    /// Scans all processes and adds the leftovers of the user `peer` to a report of members; for root, those of all
    /// users.
    ///
    /// `watched` is the state of the engine. `min_age` is the minimum age of an orphaned tool shell; `None` stands for
    /// the default of 10 minutes.
    ///
    /// # Errors
    /// The process table cannot be read.
    fn report(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ProblemDetails>;

    /// Does the same as [`report`](Leftovers::report), and reaps the leftovers that are due.
    ///
    /// # Errors
    /// Another scan is reaping, or the process table or the users' keeps cannot be read.
    fn reap(
        &self,
        report: &mut ScanReport,
        watched: &ScanContext,
        peer: Peer,
        min_age: Option<Duration>,
    ) -> Result<(), ProblemDetails>;
}
