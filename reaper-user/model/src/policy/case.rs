//! Evaluates the rules for one member.

mod facts;
mod idle;
mod program;
mod used;

use std::borrow::Cow;

use super::{MatchedRules, Reason, Verdict, facts_and_owner};
use crate::Model;
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts};
use crate::ruleset::{Action, Rule, RuleId, SessionCondition, SessionKind, UidCondition, When};
use crate::session::{RootExit, Session};

/// Input of an evaluation.
pub(super) struct Case<'a> {
    model: &'a Model,
    node: &'a Node,
    session: &'a Session,
    /// Exit of the root that made the member due; `None` while the root is alive.
    due: Option<RootExit>,
    matched_rules: Cow<'a, MatchedRules>,
}

/// Result of all rules, or of the default if none applies.
pub(super) struct RuleDecision {
    pub verdict: Verdict,
    pub reason: Reason,
    pub rule: Option<RuleId>,
    pub needs: FactSet,
    pub until: Option<u64>,
}

/// Effect of a process on its relatives.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Hold {
    #[default]
    Nothing,
    /// Depends on these facts of this process. The rule may hold the relatives.
    Needs(RuleId, FactSet, ProcessKey),
    /// The relatives wait until this time (`CLOCK_MONOTONIC`, ns).
    Until(RuleId, u64),
    /// The relatives are kept, by this rule if there is one. The time (`CLOCK_MONOTONIC`, ns) is that at which this may
    /// change without an event.
    Keep(Option<RuleId>, Option<u64>),
}

/// Result of one rule.
enum RuleResult {
    NoMatch,
    /// Depends on these facts.
    Needs(FactSet),
    /// Depends on an unreadable fact.
    Unreadable,
    /// Applies from this time on (`CLOCK_MONOTONIC`, ns).
    Wait(u64),
    Applies,
}

/// Interval at which a rule about pipes is evaluated again, in ns.
const PIPE_RECHECK_NS: u64 = 60_000_000_000;

/// Result of a condition that may depend on unread facts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ConditionResult {
    No,
    Needs(FactSet),
    Unreadable,
    Yes,
}

impl<'a> Case<'a> {
    pub fn new(
        model: &'a Model,
        node: &'a Node,
        session: &'a Session,
        due: Option<RootExit>,
    ) -> Case<'a> {
        Case {
            model,
            node,
            session,
            due,
            matched_rules: MatchedRules::of(model, node),
        }
    }

    /// Returns the result of the first rule that applies, or the default. While facts are unread, the facts that later
    /// rules need are requested as well. Facts that decide only between reasons to keep are not requested.
    pub fn decide(&self) -> RuleDecision {
        let (mut needs, mut asking, mut matters) = (FactSet::NONE, None, self.due.is_some());
        let mut until = None;
        let mut decision = self.default();
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            // A rule for orphans must not end a living agent whose own parent exited. Only rules about roots apply to
            // it.
            if rule.action == Action::Reap && self.is_living_root() && !rule.when.is_of_root() {
                continue;
            }
            match self.evaluate(rule, &mut until) {
                RuleResult::NoMatch => continue,
                RuleResult::Needs(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id));
                    matters |= rule.action != Action::Keep;
                    continue;
                }
                RuleResult::Unreadable => {
                    decision = RuleDecision::new(Verdict::Keep, Reason::Unreadable)
                }
                RuleResult::Wait(over) => {
                    decision = RuleDecision::new(Verdict::Wait, Reason::RuleDelay);
                    until = Some(until.map_or(over, |until| over.min(until)));
                }
                // A living root takes precedence as the reason to keep a member.
                RuleResult::Applies if rule.action == Action::Keep && self.due.is_none() => break,
                RuleResult::Applies => decision = self.act(rule),
            }
            decision.rule = Some(id);
            break;
        }
        // Facts that decide only between reasons to keep are not read.
        matters |= decision.verdict != Verdict::Keep;
        if !needs.is_empty() && matters {
            decision = RuleDecision::new(Verdict::Wait, Reason::Unread);
            (decision.rule, decision.needs) = (asking, needs);
        } else if decision.verdict != Verdict::Reap {
            decision.until = until;
        }
        decision
    }

    /// Returns the decision if no rule applies.
    fn default(&self) -> RuleDecision {
        match self.due {
            Some(_) if self.node.state.member.inferred.is_some() => {
                RuleDecision::new(Verdict::Report, Reason::Inferred)
            }
            Some(_) => self.reap(),
            None if self.node.orphaned.is_some() && !self.is_living_root() => {
                RuleDecision::new(Verdict::Keep, Reason::Detached)
            }
            None => RuleDecision::new(Verdict::Keep, Reason::RootAlive),
        }
    }

    /// Returns the decision to reap, with the reason that fits the state of the root.
    fn reap(&self) -> RuleDecision {
        let reason = match self.due {
            None => Reason::ReapRule,
            Some(due) if self.model.born_after(self.node, due) => Reason::ForkedAfterRootExit,
            Some(_) => Reason::RootExited,
        };
        RuleDecision::new(Verdict::Reap, reason)
    }

    /// Returns the decision that follows from a rule's action, when its conditions are met and its delay has expired.
    fn act(&self, rule: &Rule) -> RuleDecision {
        match rule.action {
            Action::Reap => self.reap(),
            Action::Report => RuleDecision::new(Verdict::Report, Reason::ReportRule),
            _ if rule.when.uid.is_some_and(UidCondition::is_other) => {
                RuleDecision::new(Verdict::Keep, Reason::OtherUid)
            }
            _ => RuleDecision::new(Verdict::Keep, Reason::KeepRule),
        }
    }

    fn is_living_root(&self) -> bool {
        self.due.is_none() && self.session.root == self.node.key
    }

    /// Evaluates one rule. Conditions on known state come first, so that a fact is read only if all else matches.
    /// Lowers `until` to the time at which the result may change without an event.
    fn evaluate(&self, rule: &Rule, until: &mut Option<u64>) -> RuleResult {
        if !self.evidence_suffices(rule) {
            return RuleResult::NoMatch;
        }
        let when = &rule.when;
        let sure = self.is_session(when.session) == Some(true);
        if !self.state_matches(when) || !self.is_of_age(when, until) {
            return RuleResult::NoMatch;
        }
        let over = self.delay_end(rule);
        let waits = rule.has_delay() && self.model.monotonic_now() < over;
        // While the root is alive, facts are read only after the delay.
        if waits && self.due.is_none() {
            return RuleResult::Wait(over);
        }
        match self.facts(rule) {
            ConditionResult::No => {
                self.recheck(when, until);
                return RuleResult::NoMatch;
            }
            ConditionResult::Needs(needs) => return RuleResult::Needs(needs),
            ConditionResult::Unreadable => return RuleResult::Unreadable,
            ConditionResult::Yes => {}
        }
        let over = match rule.while_used {
            true => self.use_end(rule, over),
            false => Some(over),
        };
        match over {
            None => return RuleResult::Needs(FactSet::ACTIVITY),
            Some(over) if rule.has_delay() && self.model.monotonic_now() < over => {
                return RuleResult::Wait(over);
            }
            // From that age on, the rules below decide.
            Some(_) if rule.until_age_ns > 0 => return RuleResult::NoMatch,
            // No event reports that the other end of a pipe is closed.
            Some(_) if when.piped.is_some() && self.due.is_some() => {
                self.recheck_after(PIPE_RECHECK_NS, until);
            }
            Some(_) => {}
        }
        match self.is_idle(rule, until) {
            ConditionResult::No => return RuleResult::NoMatch,
            ConditionResult::Needs(needs) => return RuleResult::Needs(needs),
            ConditionResult::Unreadable => return RuleResult::Unreadable,
            ConditionResult::Yes => {}
        }
        // If the exit of the root was not observed, the rule may delay but not reap: a later rule may keep the process.
        if !sure && rule.action == Action::Reap {
            return RuleResult::NoMatch;
        }
        let cpu = when.min_cpu.map_or(ConditionResult::Yes, |least| {
            ConditionResult::of(FactSet::CPU, &self.read().cpu, |cpu| *cpu >= least)
        });
        match cpu.and(self.program(rule)) {
            ConditionResult::No => RuleResult::NoMatch,
            ConditionResult::Needs(needs) => RuleResult::Needs(needs),
            ConditionResult::Unreadable => RuleResult::Unreadable,
            ConditionResult::Yes => RuleResult::Applies,
        }
    }

    /// Returns whether a rule keeps the process and its descendants permanently.
    ///
    /// Once its login is read, the result can change only at an exec or a change of uids of the process, or at the exit
    /// of the root.
    pub fn permanent_keep(&self) -> Hold {
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            if !rule.when.is_lasting() || rule.has_delay() || !self.state_matches(&rule.when) {
                continue;
            }
            if !self.evidence_suffices(rule) {
                continue;
            }
            match rule.action {
                Action::Reap if self.is_session(rule.when.session) == Some(true) => break,
                Action::Reap => {}
                _ => match self.login(&rule.when) {
                    ConditionResult::No => {}
                    ConditionResult::Needs(needs) => return Hold::Needs(id, needs, self.node.key),
                    ConditionResult::Yes | ConditionResult::Unreadable => {
                        return Hold::Keep(Some(id), None);
                    }
                },
            }
        }
        Hold::Nothing
    }

    /// Returns whether the process keeps its ancestors and descendants, or makes them wait.
    ///
    /// The first matching rule that does so decides, unless an earlier rule reaps the process.
    pub fn holds(&self) -> Hold {
        let (mut needs, mut asking) = (FactSet::NONE, None);
        let mut hold = Hold::Nothing;
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            let over = self.hold_end(rule);
            let reaps = rule.action == Action::Reap;
            let holds = rule.keeps_relatives() && (!reaps || self.model.monotonic_now() < over);
            if !holds && !reaps {
                continue;
            }
            let mut until = None;
            match self.evaluate(rule, &mut until) {
                RuleResult::NoMatch => continue,
                RuleResult::Needs(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id).filter(|_| holds));
                    continue;
                }
                // The process is kept, and a later rule may hold its relatives.
                RuleResult::Unreadable if !holds => continue,
                _ if holds && reaps => hold = Hold::Until(id, over),
                _ if holds => hold = Hold::Keep(Some(id), until),
                RuleResult::Applies | RuleResult::Wait(_) | RuleResult::Unreadable => {}
            }
            asking = asking.or(Some(id).filter(|_| holds && !needs.is_empty()));
            break;
        }
        asking.map_or(hold, |id| {
            let (needs, owner) = facts_and_owner(self.model, self.session, needs);
            Hold::Needs(id, needs, owner.unwrap_or(self.node.key))
        })
    }

    /// Returns whether a rule about roots matches the known state.
    pub fn may_be_judged_as_root(&self) -> bool {
        let mut rules = self.matched_rules.rules.iter();
        rules.any(|id| {
            let when = &self.model.rules.rule(*id).when;
            when.is_of_root() && self.state_matches(when)
        })
    }

    /// Returns whether a rule may keep the process, now or once facts are read or change. True for an inferred member.
    pub fn may_be_kept(&self) -> bool {
        // An inferred member is kept unless a rule reaps it.
        if self.node.state.member.inferred.is_some() {
            return true;
        }
        let mut rules = self
            .matched_rules
            .rules
            .iter()
            .map(|id| self.model.rules.rule(*id));
        rules.any(|rule| {
            let when = &rule.when;
            let read = self.read();
            rule.may_keep()
                && (!when.window || self.model.has_display)
                && self.is_session(when.session) != Some(false)
                && self.is_agent(when)
                && self.has_uids(when.uid)
                && self.units(when, read) != ConditionResult::No
                && self.markers(when, read) != ConditionResult::No
        })
    }

    /// Returns whether the membership is certain enough for the action of a rule. Any rule may keep or report an
    /// inferred member; only a rule that asks for inferred members may reap it.
    fn evidence_suffices(&self, rule: &Rule) -> bool {
        self.node.state.member.inferred.is_none()
            || rule.action != Action::Reap
            || rule.when.inferred == Some(true)
    }

    /// Returns whether the conditions on known state match.
    fn state_matches(&self, when: &When) -> bool {
        let is = |wanted: Option<bool>, is: bool| wanted.is_none_or(|wanted| wanted == is);
        self.is_session(when.session) != Some(false)
            && self.is_agent(when)
            && self.has_uids(when.uid)
            && is(when.orphan, self.node.orphaned.is_some())
            && is(when.inferred, self.node.state.member.inferred.is_some())
            && is(when.children, !self.node.children().is_empty())
            && is(when.attended, self.session.attended)
            && is(when.detached, self.is_detached())
            && (!when.is_of_root() || self.is_living_root())
            && (!when.server || self.session.kind == SessionKind::Server)
    }

    /// Returns whether the condition on the root's exit holds; `None` if the exit was not observed.
    fn is_session(&self, wanted: SessionCondition) -> Option<bool> {
        wanted.holds(self.due.map(|due| due.cause()))
    }

    /// Returns whether another process than the root started the process through `nohup` or `setsid`.
    fn is_detached(&self) -> bool {
        let roots = [self.session.root, self.session.first_root];
        let by_root = self
            .node
            .birth_parent
            .is_some_and(|parent| roots.contains(&parent));
        self.node.state.member.is_detached && !by_root
    }

    fn is_agent(&self, when: &When) -> bool {
        when.agents.is_empty() || when.agents.contains(&self.session.agent)
    }

    fn has_uids(&self, wanted: Option<UidCondition>) -> bool {
        let (own, root) = (self.node.uids, self.session.uids);
        wanted.is_none_or(|wanted| wanted.holds(own, root))
    }

    /// Returns whether the conditions on the age match. Lowers `until` to the time at which this may change.
    fn is_of_age(&self, when: &When, until: &mut Option<u64>) -> bool {
        let born = self.model.clock.to_monotonic(self.node.key.start);
        let now = self.model.monotonic_now();
        let mut before = |age: Option<u64>| {
            let then = age.map(|age| born.saturating_add(age));
            let before = then.filter(|then| now < *then);
            *until = [*until, before].into_iter().flatten().min();
            before.is_some()
        };
        !before(when.min_age) && (when.max_age.is_none() || before(when.max_age))
    }

    /// Returns the end of a rule's delay, or the time at which the member reaches the rule's age (`CLOCK_MONOTONIC`, ns).
    fn delay_end(&self, rule: &Rule) -> u64 {
        if rule.until_age_ns == 0 {
            return self.since().saturating_add(rule.delay_ns);
        }
        let (born, due) = (self.node.key.start, self.due.map(|due| due.at));
        let from = due.map_or(born, |due| due.min(born));
        self.model
            .clock
            .to_monotonic(from)
            .saturating_add(rule.until_age_ns)
    }

    /// Returns until when a rule with a delay holds the relatives of the process (`CLOCK_MONOTONIC`, ns). Towards them the
    /// delay runs from the exit of the root, also for a younger process.
    fn hold_end(&self, rule: &Rule) -> u64 {
        let due = self
            .due
            .map_or(0, |due| self.model.clock.to_monotonic(due.at));
        let over = due.saturating_add(rule.delay_ns);
        let is_younger = self
            .due
            .is_some_and(|due| self.model.born_after(self.node, due));
        match rule.until_age_ns {
            0 if rule.while_used && !is_younger => self.use_end(rule, over).unwrap_or(u64::MAX),
            0 => over,
            _ => self.delay_end(rule),
        }
    }

    /// Returns the start of a rule's delay (`CLOCK_MONOTONIC`, ns).
    fn since(&self) -> u64 {
        let orphaned = self.node.orphaned.map(|orphaned| orphaned.at);
        let from = self.due.map(|due| due.at).or(orphaned).unwrap_or(0);
        self.model.clock.to_monotonic(from.max(self.node.key.start))
    }

    fn read(&self) -> &Facts {
        self.node.facts().unwrap_or(&Facts::NOTHING)
    }
}

impl RuleDecision {
    /// Returns whether a rule keeps the process.
    pub fn is_kept(&self) -> bool {
        matches!(self.verdict, Verdict::Keep | Verdict::Report)
    }

    fn new(verdict: Verdict, reason: Reason) -> RuleDecision {
        RuleDecision {
            verdict,
            reason,
            rule: None,
            needs: FactSet::NONE,
            until: None,
        }
    }
}

impl ConditionResult {
    /// Returns the result of the test `is` on a fact. An unread fact asks for `needs`.
    fn of<T>(needs: FactSet, fact: &Fact<T>, is: impl FnOnce(&T) -> bool) -> ConditionResult {
        match fact {
            Fact::Unread => ConditionResult::Needs(needs),
            Fact::Unreadable => ConditionResult::Unreadable,
            Fact::Known(fact) => ConditionResult::from(is(fact)),
        }
    }

    /// Combines two conditions. A failed one decides. Otherwise unread facts come first, since they may fail.
    fn and(self, other: ConditionResult) -> ConditionResult {
        match (self, other) {
            (ConditionResult::No, _) | (_, ConditionResult::No) => ConditionResult::No,
            (ConditionResult::Needs(one), ConditionResult::Needs(two)) => {
                ConditionResult::Needs(one | two)
            }
            (ConditionResult::Needs(needs), _) | (_, ConditionResult::Needs(needs)) => {
                ConditionResult::Needs(needs)
            }
            (ConditionResult::Unreadable, _) | (_, ConditionResult::Unreadable) => {
                ConditionResult::Unreadable
            }
            (ConditionResult::Yes, ConditionResult::Yes) => ConditionResult::Yes,
        }
    }
}

impl From<bool> for ConditionResult {
    fn from(holds: bool) -> ConditionResult {
        if holds {
            ConditionResult::Yes
        } else {
            ConditionResult::No
        }
    }
}
