//! Another source takes the place of one that tells nothing any more: the best of those below it that can be used.

use std::time::Duration;

use super::Engine;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::{Lost, SourceError};

/// How long after none could be opened it is tried again, at first and at most.
const DELAY_MIN: Duration = Duration::from_millis(50);
const DELAY_MAX: Duration = Duration::from_secs(1);

/// What became of the source that the service began with.
#[derive(Default)]
pub struct Failover {
    /// Why it is of no use, where it does not know that itself.
    broken: Option<String>,
    /// No other could be opened: when the next attempt is, in ns of the monotonic clock, and how long after the last.
    again: Option<(u64, Duration)>,
    /// Another has taken its place, and nobody waits for that yet: when that is to be tried.
    new: Option<u64>,
}

impl Failover {
    /// When to see to it again, in ns of the monotonic clock.
    pub(super) fn next(&self) -> Option<u64> {
        self.again.map(|(at, _)| at).or(self.new)
    }

    /// Whether it is time to begin to wait for another source.
    pub(super) fn is_new(&self, now: u64) -> bool {
        self.new.is_some_and(|at| at <= now)
    }

    /// That has begun.
    pub(super) fn on_registered(&mut self) {
        self.new = None;
    }

    /// It could not be begun, as for want of open files.
    pub(super) fn put_off(&mut self, now: u64) {
        self.new = Some(now + DELAY_MIN.as_nanos() as u64);
    }
}

impl Engine {
    /// The source cannot be used any more: without this word it would never wake the service again.
    pub(super) fn on_source_failure(&mut self, error: &SourceError) {
        self.failover.broken = Some(error.to_string());
        self.fail_over();
    }

    /// If the source has failed, goes on with the next one, and looks for what was missed. Where there is none for
    /// now, the process table is looked at until there is. Gives whether it has failed.
    pub(super) fn fail_over(&mut self) -> bool {
        let failure = self.source.failure().map(|failure| failure.to_string());
        let Some(reason) = failure.or_else(|| self.failover.broken.clone()) else {
            return false;
        };
        if self
            .failover
            .next()
            .is_some_and(|at| at > self.kernel.clock.monotonic())
        {
            return true;
        }
        let failed = self.source.kind();
        match (self.kernel.open_fallback)(failed) {
            Ok((source, passed)) => {
                tracing::error!("{reason}: going on by {}", source.name());
                // What it has pinned would go on by marks that nobody keeps.
                self.disarm();
                self.source = source;
                let known = self.model.tree.iter();
                self.source
                    .import_keys(&mut known.map(|node| node.exact_key().unwrap_or(node.key)));
                let source = failed.name();
                self.settings
                    .rejected_sources
                    .push(RejectedSource { source, reason });
                self.settings.rejected_sources.extend(passed);
                self.failover = Failover {
                    new: Some(0),
                    ..Failover::default()
                };
                // The one before had told of everybody.
                self.model.set_complete_until(self.complete_until);
                self.escalations_announced = false;
                self.model.set_misses_moves(!self.source.reports_moves());
                (self.lost, self.skipped_probes, self.untracked_members) = (Lost::default(), 0, 0);
                self.ingest.map_changes = self.model.tree.iter().map(|node| node.key).collect();
            }
            Err(error) => {
                if self.failover.again.is_none() {
                    tracing::error!(
                        "{reason}; and no other source can be used: {error}; trying again"
                    );
                }
                let delay = self
                    .failover
                    .again
                    .map_or(DELAY_MIN, |(_, delay)| (2 * delay).min(DELAY_MAX));
                self.failover.again = Some((
                    self.kernel.clock.monotonic() + delay.as_nanos() as u64,
                    delay,
                ));
            }
        }
        // How much has not been told nobody knows.
        self.open_gap("source_failed", Lost::default());
        true
    }
}
