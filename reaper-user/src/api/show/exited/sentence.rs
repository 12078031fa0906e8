//! The sentences about a process that has exited.

use jiff::Timestamp;

use super::{Exited, exit_text, seconds_between};
use crate::export::{duration, memory_text, outcome_reason_text, reason_text, time};
use crate::journal::history::{HistoryDecision, HistoryOutcome};

impl Exited {
    /// Returns how and when the process ended: what was done to it and why, or that it exited by itself. If its end is
    /// unknown, returns the last decision, if there was one.
    pub(super) fn why(&self, now: Timestamp) -> String {
        let cause = self.cause();
        let because = cause.as_ref().map(|cause| format!(", {cause}"));
        let because = because.unwrap_or_default();
        let ago = |at: Timestamp| format!("{} ago", time(seconds_between(at, now)));
        if let Some(outcome) = self.process.outcomes.last() {
            return self.after_outcome(outcome, &ago(outcome.time), &because);
        }
        let due = match (&cause, self.enforce) {
            (None, _) => String::new(),
            (Some(cause), true) => format!(" It was to be reaped: {cause}."),
            (Some(cause), false) => {
                format!(" It would have been reaped, but this service only observes: {cause}.")
            }
        };
        match (&self.exit, &self.signal) {
            (Some((at, _)), Some((_, signal))) => {
                format!("Ended {}, after {signal}{because}.", ago(*at))
            }
            (Some((at, how)), None) => match &how.signal {
                Some(signal) => format!(
                    "Ended {} by {signal}, which this service did not send.{due}",
                    ago(*at)
                ),
                None => format!("Exited by itself {} ({}).{due}", ago(*at), exit_text(how)),
            },
            (None, _) => match self.process.decisions.last() {
                Some(HistoryDecision {
                    time,
                    decision,
                    reason,
                    ..
                }) => format!(
                    "Not running any more. The last decision, {}, was {decision}: {}.",
                    ago(*time),
                    cause.as_deref().unwrap_or_else(|| reason_text(reason))
                ),
                None => format!("Not running any more.{due}"),
            },
        }
    }

    /// Returns what followed from the decision to reap it. `because` is the cause after a comma.
    fn after_outcome(&self, outcome: &HistoryOutcome, ago: &str, because: &str) -> String {
        match (&*outcome.outcome, &outcome.signal, &outcome.reason) {
            ("ended", Some(signal), _) => format!("Reaped {ago}: {signal}{because}."),
            ("failed", _, Some(reason)) => {
                let reason = outcome_reason_text(reason);
                format!("Could not be ended {ago}: {reason}{because}.")
            }
            (_, _, Some(reason)) if reason != "already_exited" => {
                let reason = outcome_reason_text(reason);
                format!("Not signalled {ago}: {reason}{because}.")
            }
            _ => {
                let cause = self.cause();
                let due = cause.map(|cause| format!(" It was to be reaped: {cause}."));
                let due = due.unwrap_or_default();
                format!("Exited {ago}, before a signal was sent.{due}")
            }
        }
    }

    /// Returns why it was to be reaped, `None` if it was not.
    fn cause(&self) -> Option<String> {
        if let Some(evidence) = &self.leftover {
            return Some(format!(
                "an agent left it behind before this service started ({evidence})"
            ));
        }
        let decision = self
            .process
            .decisions
            .last()
            .filter(|_| self.process.is_reaped())?;
        let by_root = ["root_exited", "forked_after_root_exit"].contains(&&*decision.reason);
        let Some(session) = self.session.as_ref().filter(|_| by_root) else {
            let text = match (&*decision.reason, &decision.rule) {
                ("reap_rule", Some(rule)) => return Some(format!("the rule \"{rule}\" reaps it")),
                (reason, _) => reason_text(reason),
            };
            return Some(text.into());
        };
        // A nested root is reaped when an outer agent exits.
        if let Some(outer) = session
            .outer_id
            .as_ref()
            .filter(|_| session.root_pid == self.process.pid)
        {
            return Some(format!(
                "the agent of the session {outer}, in which it ran, exited"
            ));
        }
        let how = session.root_exit.as_ref();
        let how = how.map(|(_, exit)| exit.predicate());
        let how = how.unwrap_or_else(|| "exited".into());
        Some(format!(
            "its agent {} ({}) {how}",
            session.agent, session.root_pid
        ))
    }

    /// Returns how it exited, as far as that is not in [`Exited::why`].
    pub(super) fn next(&self) -> String {
        let Some(outcome) = self.process.outcomes.last() else {
            return "It has exited, so nothing happens to it.".into();
        };
        match &*outcome.outcome {
            "ended" => {
                let after = outcome
                    .duration_ns
                    .map(|ns| format!(" {} after the first signal", duration(ns)));
                let (rss, swap) = (outcome.rss.unwrap_or(0), outcome.swap.unwrap_or(0));
                let freed = rss > 0 || swap > 0;
                let freed = freed.then(|| format!("; {} freed", memory_text(rss, swap)));
                format!(
                    "It exited{} ({}){}.",
                    after.unwrap_or_default(),
                    exit_text(&outcome.exit),
                    freed.unwrap_or_default()
                )
            }
            _ => "It has exited since, so nothing happens to it.".into(),
        }
    }
}
