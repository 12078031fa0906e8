//! Stops the engine: ends what is due, within limits.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::idle_timer::sleep_until;
use super::{Engine, EngineError};
use crate::api::messages::EngineRequest;
use reaper_host::advice::Advised as _;
use reaper_host::sys;

/// Limit of the time that a stopping service spends on decisions about due members, in nanoseconds.
const DECIDE_MAX_NS: u64 = 2_000_000_000;
/// Limit of the time that a stopping service spends on open escalations, in nanoseconds.
const ESCALATE_MAX_NS: u64 = 10_000_000_000;

/// Request to stop the engine.
pub struct Stop {
    /// Reason for the summary in the stream, such as `SIGTERM`.
    pub reason: &'static str,
    /// Whether the next service continues: pinned probes stay active, and open escalations stay open.
    pub hands_over: bool,
    /// Completes when the engine must stop without ending anything else.
    pub at_once: Pin<Box<dyn Future<Output = ()>>>,
}

impl Stop {
    /// Creates a request to end what is due and to remove the probes.
    pub fn because(reason: &'static str) -> Stop {
        Stop {
            reason,
            hands_over: false,
            at_once: Box::pin(std::future::pending()),
        }
    }
}

impl Engine {
    /// Evaluates and signals due members, and waits for the facts that this needs and for open escalations. Answers
    /// requests meanwhile.
    ///
    /// Stops early if `at_once` completes, or if no escalation can make progress within [`ESCALATE_MAX_NS`]. Does not
    /// wait for the delays of rules.
    ///
    /// # Errors
    /// The source or a file descriptor cannot be polled.
    pub(super) async fn finish_due(
        &mut self,
        at_once: Pin<Box<dyn Future<Output = ()>>>,
        requests: &mut mpsc::Receiver<EngineRequest>,
    ) -> Result<(), EngineError> {
        let registered = sys::readable(&self.source)
            .and_then(|events| Ok((events, sys::readable(self.ingest.reaper.exit_poll())?)));
        let (events, confirm) = match registered {
            Ok(registered) => registered,
            Err(error) => {
                let error = error.advised();
                tracing::warn!("cannot wait for what is due: {error}; stopping at once");
                return Ok(());
            }
        };
        let clock = Arc::clone(&self.kernel.clock);
        let began = clock.monotonic();
        tokio::pin!(at_once);
        self.settle();
        while let Some(deadline) = self.next_stop_deadline(began) {
            tokio::select! {
                biased;
                () = &mut at_once => break,
                ready = events.readable() => ready?.clear_ready(),
                () = self.deferred.facts.ready() => {}
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.on_pidfds_readable();
                }
                Some(request) = requests.recv() => {
                    self.on_request(request);
                }
                () = sleep_until(&*clock, Some(deadline)) => {}
            }
            if self
                .ingest
                .reaper
                .next_deadline()
                .is_some_and(|at| at <= clock.monotonic())
            {
                self.advance_escalations();
            }
            self.settle();
        }
        Ok(())
    }

    /// Returns the time until which a stopping engine waits, in ns of CLOCK_MONOTONIC. `None` if it waits for nothing.
    /// `began` is when it began to stop.
    fn next_stop_deadline(&self, began: u64) -> Option<u64> {
        let now = self.kernel.clock.monotonic();
        let decided_by = began.saturating_add(DECIDE_MAX_NS);
        let is_deciding = now < decided_by && self.deferred.is_reading() && self.undecided() > 0;
        let ended_by = began.saturating_add(ESCALATE_MAX_NS);
        let escalation = self.ingest.reaper.next_deadline();
        let escalation = escalation.filter(|at| *at < ended_by && now < ended_by);
        let decision = is_deciding.then_some(decided_by);
        decision.into_iter().chain(escalation).min()
    }
}
