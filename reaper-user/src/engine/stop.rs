//! Stops the engine: ends what is due, within limits.

use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::Engine;
use super::idle_timer::sleep_until;
use crate::api::messages::EngineRequest;
use crate::export::ProcessRef;
use reaper_host::advice::Advised as _;
use reaper_host::sys;
use reaper_model::event::ProcessKey;
use reaper_model::policy::Verdict;

/// Limit of processes that the summary names as waiting.
const WAITING_MAX: usize = 5;
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
    /// Stops early if `at_once` completes, if no escalation can make progress within [`ESCALATE_MAX_NS`], or, with a
    /// warning, if the source or a file descriptor cannot be polled. Does not wait for the delays of rules.
    pub(super) async fn finish_due(
        &mut self,
        at_once: Pin<Box<dyn Future<Output = ()>>>,
        requests: &mut mpsc::Receiver<EngineRequest>,
    ) {
        if let Err(error) = self.wait_for_due(at_once, requests).await {
            let error = error.advised();
            tracing::warn!("cannot wait for what is due: {error}; stopping at once");
        }
    }

    /// As [`Engine::finish_due`].
    ///
    /// # Errors
    /// The source or a file descriptor cannot be polled.
    async fn wait_for_due(
        &mut self,
        at_once: Pin<Box<dyn Future<Output = ()>>>,
        requests: &mut mpsc::Receiver<EngineRequest>,
    ) -> io::Result<()> {
        let events = sys::readable(&self.source)?;
        let confirm = sys::readable(self.ingest.reaper.exit_poll())?;
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

    /// Returns the number of members that wait, and the first of them: for the delay of a rule, or for the first decision
    /// after the exit of their agent.
    pub(super) fn waiting(&self) -> (u64, Vec<ProcessRef>) {
        let mut waiting: Vec<ProcessKey> = Vec::new();
        for session in self.model.sessions.iter() {
            let is_due = self.model.sessions.due(session.id).is_some();
            let waits = |key: &ProcessKey| match self.ingest.decided.get(key) {
                Some((verdict, _)) => *verdict == Verdict::Wait,
                None => is_due,
            };
            waiting.extend(self.members_of(session.id).filter(waits));
        }
        waiting.sort_unstable();
        let nodes = waiting.iter().filter_map(|key| self.model.tree.get(*key));
        let first = nodes.map(|node| ProcessRef::new(&self.model, node));
        (waiting.len() as u64, first.take(WAITING_MAX).collect())
    }

    /// Returns when a stopping engine must continue, even if no event arrives, in ns of CLOCK_MONOTONIC: the next step
    /// of an escalation, or the time limit for decisions. `None` if it waits for neither. `began` is when it began to
    /// stop.
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
