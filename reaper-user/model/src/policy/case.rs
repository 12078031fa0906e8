//! Asking the rules about one member.

mod idle;

use std::borrow::Cow;

use super::{MatchedRules, Reason, Verdict, facts_and_owner};
use crate::Model;
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts};
use crate::ruleset::{Action, Rule, RuleId, SessionIs, SessionKind, UidIs, When};
use crate::session::{RootExit, Session};

/// A member, and what a judgement rests on.
pub(super) struct Case<'a> {
    model: &'a Model,
    node: &'a Node,
    session: &'a Session,
    /// `None`: its root lives.
    due: Option<RootExit>,
    matched_rules: Cow<'a, MatchedRules>,
}

/// What the rules come to, with that of the default.
pub(super) struct RuleDecision {
    pub verdict: Verdict,
    pub reason: Reason,
    pub rule: Option<RuleId>,
    pub needs: FactSet,
    pub until: Option<u64>,
}

/// What a process does for its relatives.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Hold {
    #[default]
    Nobody,
    /// That depends on these facts of this process. The rule may hold them.
    Ask(RuleId, FactSet, ProcessKey),
    /// They wait with it, until this monotonic time.
    Until(RuleId, u64),
    /// They are kept with it, by this rule if there is one. That may change at this monotonic time though nothing happens.
    Keep(Option<RuleId>, Option<u64>),
}

/// What one rule says.
enum RuleResult {
    NoMatch,
    /// That depends on these.
    Ask(FactSet),
    /// What it depends on cannot be read.
    Unreadable,
    /// It will, at this monotonic time.
    Wait(u64),
    Applies,
}

/// Whether something holds that may have to be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ConditionResult {
    No,
    Ask(FactSet),
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

    pub fn matched_rules(&self) -> &MatchedRules {
        &self.matched_rules
    }

    /// What the first rule says that says something, or else the default. As long as something has to be read
    /// for it, all that the rules after it want is asked for too.
    pub fn decide(&self) -> RuleDecision {
        let (mut needs, mut asking, mut matters) = (FactSet::NONE, None, self.due.is_some());
        let mut until = None;
        let mut said = self.default();
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            // An agent that lives is no orphan of itself, whatever its own parent does: only a rule about roots ends it.
            if rule.action == Action::Reap && self.is_living_root() && !rule.when.is_of_root() {
                continue;
            }
            match self.evaluate(rule, &mut until) {
                RuleResult::NoMatch => continue,
                RuleResult::Ask(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id));
                    matters |= rule.action != Action::Keep;
                    continue;
                }
                RuleResult::Unreadable => {
                    said = RuleDecision::new(Verdict::Keep, Reason::Unreadable)
                }
                RuleResult::Wait(over) => {
                    said = RuleDecision::new(Verdict::Wait, Reason::RuleDelay);
                    until = Some(until.map_or(over, |until| over.min(until)));
                }
                // It lives by right of its agent first of all.
                RuleResult::Applies if rule.action == Action::Keep && self.due.is_none() => break,
                RuleResult::Applies => said = self.act(rule),
            }
            said.rule = Some(id);
            break;
        }
        // Whether it is kept by this or by that is not worth reading anything.
        matters |= said.verdict != Verdict::Keep;
        if !needs.is_empty() && matters {
            said = RuleDecision::new(Verdict::Wait, Reason::Unread);
            (said.rule, said.needs) = (asking, needs);
        } else if said.verdict != Verdict::Reap {
            said.until = until;
        }
        said
    }

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

    fn reap(&self) -> RuleDecision {
        let reason = match self.due {
            None => Reason::ReapRule,
            Some(due) if self.model.born_after(self.node, due) => Reason::ForkedAfterRootExit,
            Some(_) => Reason::RootExited,
        };
        RuleDecision::new(Verdict::Reap, reason)
    }

    fn act(&self, rule: &Rule) -> RuleDecision {
        match rule.action {
            Action::Reap => self.reap(),
            Action::Report => RuleDecision::new(Verdict::Report, Reason::ReportRule),
            _ if rule.when.uid == Some(UidIs::Other) => {
                RuleDecision::new(Verdict::Keep, Reason::OtherUid)
            }
            _ => RuleDecision::new(Verdict::Keep, Reason::KeepRule),
        }
    }

    fn is_living_root(&self) -> bool {
        self.due.is_none() && self.session.root == self.node.key
    }

    /// What costs nothing is asked first, and what has to be read only if all else holds. `until` is when the
    /// answer may be another though nothing happens.
    fn evaluate(&self, rule: &Rule, until: &mut Option<u64>) -> RuleResult {
        if !self.evidence_suffices(rule) {
            return RuleResult::NoMatch;
        }
        let when = &rule.when;
        let sure = self.is_session(when.session) == Some(true);
        if !self.state_matches(when) || !self.is_of_age(when, until) {
            return RuleResult::NoMatch;
        }
        let over = self.since().saturating_add(rule.after);
        let waits = rule.after > 0 && self.model.monotonic_now() < over;
        // Under a living agent nothing is to be saved meanwhile.
        if waits && self.due.is_none() {
            return RuleResult::Wait(over);
        }
        match self.facts(when) {
            ConditionResult::No => {
                self.recheck(when, until);
                return RuleResult::NoMatch;
            }
            ConditionResult::Ask(needs) => return RuleResult::Ask(needs),
            ConditionResult::Unreadable => return RuleResult::Unreadable,
            ConditionResult::Yes if waits => return RuleResult::Wait(over),
            ConditionResult::Yes => {}
        }
        match self.is_idle(rule, until) {
            ConditionResult::No => return RuleResult::NoMatch,
            ConditionResult::Ask(needs) => return RuleResult::Ask(needs),
            ConditionResult::Unreadable => return RuleResult::Unreadable,
            ConditionResult::Yes => {}
        }
        // Nobody saw how its root ended: that may delay, and reaps nobody whom a later rule keeps.
        if !sure && rule.action == Action::Reap {
            return RuleResult::NoMatch;
        }
        let cpu = when.min_cpu.map_or(ConditionResult::Yes, |least| {
            ConditionResult::of(FactSet::CPU, &self.read().cpu, |cpu| *cpu >= least)
        });
        match cpu {
            ConditionResult::No => RuleResult::NoMatch,
            ConditionResult::Ask(needs) => RuleResult::Ask(needs),
            ConditionResult::Unreadable => RuleResult::Unreadable,
            ConditionResult::Yes => RuleResult::Applies,
        }
    }

    /// The keep that holds for it whatever happens but for an exec: what is below it is kept with it.
    pub fn permanent_keep(&self) -> Option<RuleId> {
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            if !rule.when.is_lasting() || rule.after > 0 || !self.state_matches(&rule.when) {
                continue;
            }
            if !self.evidence_suffices(rule) {
                continue;
            }
            match rule.action {
                Action::Reap if self.is_session(rule.when.session) == Some(true) => return None,
                Action::Reap => {}
                _ => return Some(id),
            }
        }
        None
    }

    /// Returns what it does for its relatives: the first matching rule that holds relatives decides, whatever else keeps
    /// it, unless an earlier rule reaps it.
    pub fn holds(&self) -> Hold {
        let (mut needs, mut asking) = (FactSet::NONE, None);
        let mut hold = Hold::Nobody;
        for id in self.matched_rules.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            // For its relatives, it has been due since the root exited.
            let over = self
                .due
                .map_or(0, |due| self.model.clock.to_monotonic(due.at));
            let over = over.saturating_add(rule.after);
            let reaps = rule.action == Action::Reap;
            let holds = rule.keeps_relatives() && (!reaps || self.model.monotonic_now() < over);
            if !holds && !reaps {
                continue;
            }
            let mut until = None;
            match self.evaluate(rule, &mut until) {
                RuleResult::NoMatch => continue,
                RuleResult::Ask(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id).filter(|_| holds));
                    continue;
                }
                // It is kept, and the rule after this may hold.
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
            Hold::Ask(id, needs, owner.unwrap_or(self.node.key))
        })
    }

    /// Whether a rule about roots asks for nothing that this one can never have, or has not yet.
    pub fn may_be_judged_as_root(&self) -> bool {
        let mut rules = self.matched_rules.rules.iter();
        rules.any(|id| {
            let when = &self.model.rules.rule(*id).when;
            when.is_of_root() && self.state_matches(when)
        })
    }

    /// Whether some rule may come to spare it, now or when something becomes known or changes.
    pub fn may_be_kept(&self) -> bool {
        // Where no rule reaps it, that does.
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
                && self.is_session(when.session) != Some(false)
                && self.is_agent(when)
                && self.has_uids(when.uid)
                && self.units(when, read) != ConditionResult::No
                && self.marks(when, read) != ConditionResult::No
        })
    }

    /// Whether what makes it a member suffices for what a rule does: where that is evidence, only one that says so
    /// reaps.
    fn evidence_suffices(&self, rule: &Rule) -> bool {
        self.node.state.member.inferred.is_none()
            || rule.action != Action::Reap
            || rule.when.inferred == Some(true)
    }

    /// What can be told from what is known anyway.
    fn state_matches(&self, when: &When) -> bool {
        let is = |wanted: Option<bool>, is: bool| wanted.is_none_or(|wanted| wanted == is);
        self.is_session(when.session) != Some(false)
            && self.is_agent(when)
            && self.has_uids(when.uid)
            && is(when.orphan, self.node.orphaned.is_some())
            && is(when.inferred, self.node.state.member.inferred.is_some())
            && is(when.children, !self.node.children().is_empty())
            && (!when.is_of_root() || self.is_living_root())
            && (!when.server || self.session.kind == SessionKind::Server)
    }

    /// `None`: nobody saw how its root ended.
    fn is_session(&self, asked: SessionIs) -> Option<bool> {
        asked.holds(self.due.map(|due| due.cause()))
    }

    fn is_agent(&self, when: &When) -> bool {
        when.agents.is_empty() || when.agents.contains(&self.session.agent)
    }

    fn has_uids(&self, asked: Option<UidIs>) -> bool {
        let (own, root) = (self.node.uids, self.session.uids);
        asked.is_none_or(|asked| asked.holds(own, root))
    }

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

    /// Since when a delay runs, monotonic.
    fn since(&self) -> u64 {
        let orphaned = self.node.orphaned.map(|orphaned| orphaned.at);
        let from = self.due.map(|due| due.at).or(orphaned).unwrap_or(0);
        self.model.clock.to_monotonic(from.max(self.node.key.start))
    }

    fn read(&self) -> &Facts {
        self.node.facts().unwrap_or(&Facts::NOTHING)
    }

    /// What has to be read, but for the use of the processor.
    fn facts(&self, when: &When) -> ConditionResult {
        let read = self.read();
        let listening = when.listening.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(FactSet::LISTENING, &read.listening, |is| *is == wanted)
        });
        let tty = when.tty.map_or(ConditionResult::Yes, |wanted| {
            ConditionResult::of(FactSet::KERNEL_SESSION, &read.kernel_session, |now| {
                (now.tty != 0) == wanted
            })
        });
        let new_session = when.new_session.map_or(ConditionResult::Yes, |wanted| {
            let root = self.session.sid;
            let own = ConditionResult::of(FactSet::KERNEL_SESSION, &read.kernel_session, |now| {
                (now.sid != root) == wanted
            });
            if root == 0 {
                ConditionResult::Unreadable
            } else {
                own
            }
        });
        let (units, marks) = (self.units(when, read), self.marks(when, read));
        [units, marks, listening, tty, new_session]
            .into_iter()
            .fold(ConditionResult::Yes, ConditionResult::and)
    }

    fn units(&self, when: &When, read: &Facts) -> ConditionResult {
        if when.own_unit.is_none() && when.units.is_empty() {
            return ConditionResult::Yes;
        }
        let own = when.own_unit.map_or(ConditionResult::Yes, |wanted| {
            let root = self.session.cgroup_id;
            if root != 0 && root == self.node.image.cgroup_id {
                return ConditionResult::from(!wanted);
            }
            match (&read.unit, &self.session.unit) {
                (Fact::Known(own), _) if own.is_empty() => ConditionResult::from(!wanted),
                (Fact::Known(own), Fact::Known(root)) => {
                    ConditionResult::from((own != root) == wanted)
                }
                (Fact::Known(_), _) => match self.model.unit_source(self.session) {
                    Some(_) => ConditionResult::Ask(FactSet::ROOT_UNIT),
                    None => ConditionResult::Unreadable,
                },
                _ => ConditionResult::of(FactSet::UNIT, &read.unit, |_| false),
            }
        });
        let named = ConditionResult::of(FactSet::UNIT, &read.unit, |unit| {
            when.units.is_empty() || when.units.iter().any(|glob| glob.is_match(unit.as_bytes()))
        });
        if when.units.is_empty() {
            own
        } else {
            own.and(named)
        }
    }

    fn marks(&self, when: &When, read: &Facts) -> ConditionResult {
        let has = |bits: u64| {
            ConditionResult::of(FactSet::MARKERS, &read.markers, |marks| marks & bits != 0)
        };
        let marked = if when.markers.is_empty() {
            ConditionResult::Yes
        } else {
            has(when.marker_bits)
        };
        let multiplexed = when.multiplexed.map_or(ConditionResult::Yes, |wanted| {
            let mut above = self.model.tree.ancestors(self.node.key);
            if self.session.multiplexed || above.any(Node::is_multiplexer) {
                return ConditionResult::from(wanted);
            }
            let bits = self.model.rules.multiplexer_bits();
            ConditionResult::of(FactSet::MARKERS, &read.markers, |marks| {
                (marks & bits != 0) == wanted
            })
        });
        marked.and(multiplexed)
    }
}

impl RuleDecision {
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
    fn of<T>(needs: FactSet, fact: &Fact<T>, is: impl FnOnce(&T) -> bool) -> ConditionResult {
        match fact {
            Fact::Unread => ConditionResult::Ask(needs),
            Fact::Unreadable => ConditionResult::Unreadable,
            Fact::Known(fact) => ConditionResult::from(is(fact)),
        }
    }

    /// What does not hold settles it, whatever else is not known; and it is worth reading what may not hold.
    fn and(self, other: ConditionResult) -> ConditionResult {
        match (self, other) {
            (ConditionResult::No, _) | (_, ConditionResult::No) => ConditionResult::No,
            (ConditionResult::Ask(one), ConditionResult::Ask(two)) => {
                ConditionResult::Ask(one | two)
            }
            (ConditionResult::Ask(needs), _) | (_, ConditionResult::Ask(needs)) => {
                ConditionResult::Ask(needs)
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
