//! Describes why a process waits for the delay of a rule, for the event stream.

use super::Engine;
use crate::export::{Listener, WaitInfo};
use reaper_model::Node;
use reaper_model::event::ProcessKey;
use reaper_model::facts::Fact;
use reaper_model::policy::{Decision, Verdict};
use reaper_model::ruleset::{Rule, SessionCondition, When};

/// Limit of relatives among which a listening one is searched.
const RELATIVES_MAX: usize = 1000;

impl Engine {
    /// Returns the end of a wait with its conditions. Returns `None` for any other decision.
    pub(super) fn wait_info(&self, key: ProcessKey, decision: &Decision) -> Option<WaitInfo> {
        let until = decision
            .until
            .filter(|_| decision.verdict == Verdict::Wait)?;
        let clock = &self.kernel.clock;
        let remaining = until.saturating_sub(clock.monotonic());
        let mut rules = self.model.rules.rules().iter();
        let named = |rule: &&Rule| Some(&rule.name) == decision.rule.as_ref();
        let when = rules.find(named).map(|rule| &rule.when);
        let is_due = decision.due.is_some();
        let listens = when.is_some_and(|when| is_due && when.listening == Some(true));
        Some(WaitInfo {
            until: clock.boot_time().saturating_add(remaining),
            conditions: when.map_or_else(Vec::new, |when| conditions(when, is_due)),
            listener: listens.then(|| self.listener(key)).flatten(),
            ports: Vec::new(),
        })
    }

    /// Returns the relative with which a process waits because it listens. Returns `None` if the process itself listens,
    /// or if there is no such relative.
    fn listener(&self, key: ProcessKey) -> Option<Listener> {
        let listens = |node: &&Node| {
            let facts = node.facts();
            facts.is_some_and(|facts| facts.listening == Fact::Known(true))
        };
        let tree = &self.model.tree;
        if tree.get(key).is_some_and(|node| listens(&node)) {
            return None;
        }
        let mut below = tree.descendants(key).take(RELATIVES_MAX);
        let mut above = tree.ancestors(key).take(RELATIVES_MAX);
        let below = below.find(listens).map(|node| (node, true));
        let (node, is_below) = below.or_else(|| above.find(listens).map(|node| (node, false)))?;
        Some(Listener {
            key: node.key,
            comm: node.image.comm.clone(),
            is_below,
        })
    }
}

/// Returns the names of the conditions that people can act on. Facts from /proc count only for a due process: for any
/// other one, they are read after the delay.
fn conditions(when: &When, is_due: bool) -> Vec<&'static str> {
    let session = match when.session {
        SessionCondition::Gone => Some("root_exited"),
        SessionCondition::Exited => Some("root_not_killed"),
        SessionCondition::Ok => Some("root_succeeded"),
        SessionCondition::Failed => Some("root_failed"),
        SessionCondition::Signalled => Some("root_killed"),
        SessionCondition::Alive | SessionCondition::Any => None,
    };
    let process = [
        (is_due && when.listening == Some(true), "listening"),
        (when.orphan == Some(true), "orphan"),
        (when.children == Some(false), "childless"),
        (when.detached == Some(true), "detached"),
        (is_due && when.piped == Some(true), "piped"),
    ];
    let process = process.into_iter().filter(|(holds, _)| *holds);
    let process = process.map(|(_, name)| name);
    process.chain(session.filter(|_| is_due)).collect()
}
