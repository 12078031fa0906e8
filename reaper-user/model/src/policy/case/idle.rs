//! Rules about idle living roots: how long a session must be idle, and when to read it again.

use super::{Case, ConditionResult};
use crate::facts::{Fact, FactSet, Stdio};
use crate::idle::IdleSince;
use crate::ruleset::{Action, Rule, When};

/// Number of readings of an idle session during the period of a rule.
const READINGS: u64 = 6;
/// Maximum interval between two readings of an idle session, in ns. Over a longer one, a short burst of work would not
/// exceed what an idle program may use.
const READING_INTERVAL_MAX_NS: u64 = 300_000_000_000;
/// Maximum age of a reading for a decision to reap, in ns. Reading a large tree takes time.
const FRESH_NS: u64 = 60_000_000_000;
/// Minimum interval between two rechecks, in ns. The kernel closes a client's files after it has reported the exit.
const RECHECK_MIN_NS: u64 = 500_000_000;
/// Maximum interval between two rechecks of a root with a connected client, in ns.
const RECHECK_MAX_NS: u64 = 600_000_000_000;

impl Case<'_> {
    /// Returns whether the session was idle, and its root hung up if the rule requires that, for the period of a rule.
    /// True for a rule without a period. No event reports the end of that period, so `until` is lowered to the time of
    /// the next reading. Unreadable facts count as use.
    pub(super) fn is_idle(&self, rule: &Rule, until: &mut Option<u64>) -> ConditionResult {
        let when = &rule.when;
        let Some(period) = when.idle else {
            return ConditionResult::Yes;
        };
        let now = self.model.monotonic_now();
        let mut since = self.orphaned_since(when);
        match self.read().stdio {
            Fact::Unread => return ConditionResult::Needs(FactSet::STDIO),
            Fact::Known(Stdio::HungUp) => {
                since = since.max(self.node.hung_up_since().unwrap_or(now));
            }
            Fact::Known(Stdio::Other) if !when.hung_up => {}
            Fact::Known(_) | Fact::Unreadable => {
                self.recheck(when, until);
                return ConditionResult::No;
            }
        }
        let soon = (period / READINGS).min(READING_INTERVAL_MAX_NS);
        match self.model.idle_since(self.session) {
            IdleSince::Unread => ConditionResult::Needs(FactSet::ACTIVITY),
            IdleSince::InUse => {
                self.recheck_after(soon, until);
                ConditionResult::No
            }
            IdleSince::Since { idle, read_at } => {
                let over = since.max(idle).saturating_add(period);
                let left = over.saturating_sub(now);
                if left == 0 && rule.action == Action::Reap && now > read_at + FRESH_NS {
                    return ConditionResult::Needs(FactSet::ACTIVITY);
                }
                self.recheck_after(if left == 0 { soon } else { left.min(soon) }, until);
                ConditionResult::from(left == 0)
            }
        }
    }

    /// Lowers `until` to the next check of a root that does not meet a rule with `idle`. Does nothing for other rules.
    /// A client may stay for days: the longer the root exists, the longer the interval.
    pub(super) fn recheck(&self, when: &When, until: &mut Option<u64>) {
        if let Some(period) = when.idle {
            let opened = self.model.clock.to_monotonic(self.session.opened_at);
            let since = self.orphaned_since(when).max(opened);
            let waited = self.model.monotonic_now().saturating_sub(since);
            self.recheck_after(
                waited.clamp(RECHECK_MIN_NS, period.max(RECHECK_MAX_NS)),
                until,
            );
        }
    }

    /// Lowers `until` (`CLOCK_MONOTONIC`, ns) to `delay` ns from now.
    pub(super) fn recheck_after(&self, delay: u64, until: &mut Option<u64>) {
        let at = self.model.monotonic_now().saturating_add(delay.max(1));
        *until = Some(until.map_or(at, |until| until.min(at)));
    }

    /// Returns since when the root is an orphan, in ns of `CLOCK_MONOTONIC`; 0 if the rule does not require that.
    fn orphaned_since(&self, when: &When) -> u64 {
        let orphaned = self.node.orphaned.filter(|_| when.orphan == Some(true));
        orphaned.map_or(0, |orphaned| self.model.clock.to_monotonic(orphaned.at))
    }
}
