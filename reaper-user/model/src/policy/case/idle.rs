//! Rules about living roots that nothing uses: how long that has to hold, and when to look again.

use super::{Case, ConditionResult};
use crate::facts::{Fact, FactSet, Stdio};
use crate::idle::IdleSince;
use crate::ruleset::{Action, Rule, When};

/// Number of times that an idle session is looked at before its time is over.
const LOOKS: u64 = 6;
/// Longest time between two looks at an idle session, in ns: a short burst of work is within the heartbeat of a long time.
const LOOK_SOON_NS: u64 = 300_000_000_000;
/// Age of a reading beyond which nothing is reaped by it, in ns. A large tree takes its time to be read.
const FRESH_NS: u64 = 60_000_000_000;
/// Shortest time between two looks, in ns. The kernel closes the files of a client after it has reported its exit.
const LOOK_MIN_NS: u64 = 500_000_000;
/// Longest time between two looks at a root whose client is connected, in ns.
const LOOK_MAX_NS: u64 = 600_000_000_000;

impl Case<'_> {
    /// Whether the session has been idle, and its root hung up, for as long as a rule asks. No event reports the end of
    /// such a time, so `until` becomes the time of the next look at the latest. What cannot be read counts as in use.
    pub(super) fn is_idle(&self, rule: &Rule, until: &mut Option<u64>) -> ConditionResult {
        let when = &rule.when;
        let Some(period) = when.idle else {
            return ConditionResult::Yes;
        };
        let now = self.model.monotonic_now();
        let mut since = self.orphaned_since(when);
        match self.read().stdio {
            Fact::Unread => return ConditionResult::Ask(FactSet::STDIO),
            Fact::Known(Stdio::HungUp) => {
                since = since.max(self.node.hung_up_since().unwrap_or(now));
            }
            Fact::Known(Stdio::Other) if !when.hung_up => {}
            Fact::Known(_) | Fact::Unreadable => {
                self.recheck(when, until);
                return ConditionResult::No;
            }
        }
        let soon = (period / LOOKS).min(LOOK_SOON_NS);
        match self.model.idle_since(self.session) {
            IdleSince::Unread => ConditionResult::Ask(FactSet::ACTIVITY),
            IdleSince::InUse => {
                self.recheck_after(soon, until);
                ConditionResult::No
            }
            IdleSince::Since { idle, read_at } => {
                let over = since.max(idle).saturating_add(period);
                let left = over.saturating_sub(now);
                if left == 0 && rule.action == Action::Reap && now > read_at + FRESH_NS {
                    return ConditionResult::Ask(FactSet::ACTIVITY);
                }
                self.recheck_after(if left == 0 { soon } else { left.min(soon) }, until);
                ConditionResult::from(left == 0)
            }
        }
    }

    /// Looks again later at a root that is not what a rule with `idle` asks for. A client may stay for days: the longer it
    /// has been there, the less often it is looked for.
    pub(super) fn recheck(&self, when: &When, until: &mut Option<u64>) {
        if let Some(period) = when.idle {
            let opened = self.model.clock.to_monotonic(self.session.opened_at);
            let since = self.orphaned_since(when).max(opened);
            let waited = self.model.monotonic_now().saturating_sub(since);
            self.recheck_after(waited.clamp(LOOK_MIN_NS, period.max(LOOK_MAX_NS)), until);
        }
    }

    fn recheck_after(&self, delay: u64, until: &mut Option<u64>) {
        let at = self.model.monotonic_now().saturating_add(delay.max(1));
        *until = Some(until.map_or(at, |until| until.min(at)));
    }

    /// Returns since when it has been an orphan, in ns of CLOCK_MONOTONIC; 0 if that is not asked for.
    fn orphaned_since(&self, when: &When) -> u64 {
        let orphaned = self.node.orphaned.filter(|_| when.orphan == Some(true));
        orphaned.map_or(0, |orphaned| self.model.clock.to_monotonic(orphaned.at))
    }
}
