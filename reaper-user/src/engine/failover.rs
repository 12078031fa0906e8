//! Replaces a source that has failed by the best lower-priority source that works.

use std::time::Duration;

use super::Engine;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::{Lost, SourceError};

/// Delays before the next attempt if no other source can be opened: the first and the longest.
const DELAY_MIN: Duration = Duration::from_millis(50);
const DELAY_MAX: Duration = Duration::from_secs(1);

/// State of a source failover.
#[derive(Default)]
pub struct Failover {
    /// Reason why the source is unusable, if the source itself has not reported that.
    failure: Option<String>,
    /// Next attempt to open another source, in ns of CLOCK_MONOTONIC, and the delay before it. `None` without a
    /// failure.
    retry: Option<(u64, Duration)>,
    /// Time at which to register the new source for polling, in ns of CLOCK_MONOTONIC. `None` once it is registered.
    register_at: Option<u64>,
}

impl Failover {
    /// Returns the time of the next attempt to open or register a source, in ns of CLOCK_MONOTONIC. `None` without one.
    pub(super) fn next(&self) -> Option<u64> {
        self.retry.map(|(at, _)| at).or(self.register_at)
    }

    /// Returns whether a new source must be registered for polling now.
    pub(super) fn must_register(&self, now: u64) -> bool {
        self.register_at.is_some_and(|at| at <= now)
    }

    pub(super) fn on_registered(&mut self) {
        self.register_at = None;
    }

    /// Schedules another attempt to register the new source after [`DELAY_MIN`], for example if there were too many
    /// open files. `now` is in ns of CLOCK_MONOTONIC.
    pub(super) fn retry_registration(&mut self, now: u64) {
        self.register_at = Some(now + DELAY_MIN.as_nanos() as u64);
    }
}

impl Engine {
    /// Replaces the source after an error that would prevent it from waking the engine.
    pub(super) fn on_source_failure(&mut self, error: &SourceError) {
        self.failover.failure = Some(error.to_string());
        self.fail_over();
    }

    /// Switches to the next source if the current one has failed, and opens a gap for the missed events. If no other
    /// source can be opened, tries again later. Returns whether the source has failed, even if it was replaced.
    pub(super) fn fail_over(&mut self) -> bool {
        let reported = self.source.failure().map(|failure| failure.to_string());
        let Some(reason) = reported.or_else(|| self.failover.failure.clone()) else {
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
            Ok((source, rejected)) => {
                tracing::error!(
                    "the event source {} failed: {reason}; using {} until the service restarts",
                    failed.name(),
                    source.name()
                );
                // Pinned probes would continue to act on maps that are no longer updated.
                self.disarm();
                self.source = source;
                let known = self.model.tree.iter();
                self.source
                    .import_keys(&mut known.map(|node| node.exact_key().unwrap_or(node.key)));
                let source = failed.name();
                self.settings
                    .rejected_sources
                    .push(RejectedSource { source, reason });
                self.settings.rejected_sources.extend(rejected);
                self.failover = Failover {
                    register_at: Some(0),
                    ..Failover::default()
                };
                // The earlier source had reported all processes.
                self.model.set_complete_until(self.complete_until);
                self.escalations_announced = false;
                self.model.set_misses_moves(!self.source.reports_moves());
                (self.lost, self.skipped_probes, self.untracked_members) = (Lost::default(), 0, 0);
                let all = self.model.tree.iter().map(|node| node.key);
                self.ingest.map_changes.extend(all);
            }
            Err(error) => {
                if self.failover.retry.is_none() {
                    tracing::error!(
                        "the event source {} failed: {reason}; no other source can be used: {error}; trying again until one can be used",
                        failed.name()
                    );
                }
                let delay = self
                    .failover
                    .retry
                    .map_or(DELAY_MIN, |(_, delay)| (2 * delay).min(DELAY_MAX));
                self.failover.retry = Some((
                    self.kernel.clock.monotonic() + delay.as_nanos() as u64,
                    delay,
                ));
            }
        }
        // The number of missed events is unknown.
        self.open_gap("source_failed", Lost::default());
        true
    }
}
