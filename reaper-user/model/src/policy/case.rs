//! Asking the rules about one member.

mod idle;

use std::borrow::Cow;

use super::{Reason, Verdict, Weighed};
use crate::Model;
use crate::Node;
use crate::agent::{Action, Rule, RuleId, SessionIs, SessionKind, UidIs, When};
use crate::facts::{Facts, Known, Needs};
use crate::session::{RootGone, Session};

/// A member, and what a judgement rests on.
pub(super) struct Case<'a> {
    model: &'a Model,
    node: &'a Node,
    session: &'a Session,
    /// `None`: its root lives.
    due: Option<RootGone>,
    weighed: Cow<'a, Weighed>,
}

/// What the rules come to, with that of the default.
pub(super) struct Said {
    pub verdict: Verdict,
    pub reason: Reason,
    pub rule: Option<RuleId>,
    pub needs: Needs,
    pub until: Option<u64>,
}

/// What a member does for its kin.
pub(super) enum Hold {
    Nobody,
    /// That depends on these, by a rule that may hold them.
    Ask(RuleId, Needs),
    /// They wait with it, until this monotonic time.
    Until(RuleId, u64),
    /// They are kept with it, and that may change at this monotonic time though nothing happens.
    Keep(RuleId, Option<u64>),
}

/// What one rule says.
enum Says {
    Nothing,
    /// That depends on these.
    Ask(Needs),
    /// What it depends on cannot be read.
    Unreadable,
    /// It will, at this monotonic time.
    Wait(u64),
    Act,
}

/// Whether something holds that may have to be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    No,
    Ask(Needs),
    Unreadable,
    Yes,
}

impl<'a> Case<'a> {
    pub fn new(
        model: &'a Model,
        node: &'a Node,
        session: &'a Session,
        due: Option<RootGone>,
    ) -> Case<'a> {
        Case {
            model,
            node,
            session,
            due,
            weighed: Weighed::of(model, node),
        }
    }

    pub fn weighed(&self) -> &Weighed {
        &self.weighed
    }

    /// What the first rule says that says something, or else the default. As long as something has to be read
    /// for it, all that the rules after it want is asked for too.
    pub fn said(&self) -> Said {
        let (mut needs, mut asking, mut matters) = (Needs::NONE, None, self.due.is_some());
        let mut until = None;
        let mut said = self.default();
        for id in self.weighed.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            // An agent that lives is no orphan of itself, whatever its own parent does: only a rule about roots ends it.
            if rule.action == Action::Reap && self.is_living_root() && !rule.when.is_of_root() {
                continue;
            }
            match self.says(rule, &mut until) {
                Says::Nothing => continue,
                Says::Ask(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id));
                    matters |= rule.action != Action::Keep;
                    continue;
                }
                Says::Unreadable => said = Said::new(Verdict::Keep, Reason::Unreadable),
                Says::Wait(over) => {
                    said = Said::new(Verdict::Wait, Reason::Waiting);
                    until = Some(until.map_or(over, |until| over.min(until)));
                }
                // It lives by right of its agent first of all.
                Says::Act if rule.action == Action::Keep && self.due.is_none() => break,
                Says::Act => said = self.acted(rule),
            }
            said.rule = Some(id);
            break;
        }
        // Whether it is kept by this or by that is not worth reading anything.
        matters |= said.verdict != Verdict::Keep;
        if !needs.is_none() && matters {
            said = Said::new(Verdict::Wait, Reason::Unread);
            (said.rule, said.needs) = (asking, needs);
        } else if said.verdict != Verdict::Reap {
            said.until = until;
        }
        said
    }

    fn default(&self) -> Said {
        match self.due {
            Some(_) if self.node.state.member.inferred.is_some() => {
                Said::new(Verdict::Report, Reason::Inferred)
            }
            Some(_) => self.reaped(),
            None if self.node.orphaned.is_some() && !self.is_living_root() => {
                Said::new(Verdict::Keep, Reason::Detached)
            }
            None => Said::new(Verdict::Keep, Reason::RootAlive),
        }
    }

    fn reaped(&self) -> Said {
        let reason = match self.due {
            None => Reason::ReapRule,
            Some(due) if self.model.born_after(self.node, due) => Reason::BornWhileDue,
            Some(_) => Reason::RootGone,
        };
        Said::new(Verdict::Reap, reason)
    }

    fn acted(&self, rule: &Rule) -> Said {
        match rule.action {
            Action::Reap => self.reaped(),
            Action::Report => Said::new(Verdict::Report, Reason::ReportRule),
            _ if rule.when.uid == Some(UidIs::Other) => Said::new(Verdict::Keep, Reason::OtherUid),
            _ => Said::new(Verdict::Keep, Reason::KeepRule),
        }
    }

    fn is_living_root(&self) -> bool {
        self.due.is_none() && self.session.root == self.node.key
    }

    /// What costs nothing is asked first, and what has to be read only if all else holds. `until` is when the
    /// answer may be another though nothing happens.
    fn says(&self, rule: &Rule, until: &mut Option<u64>) -> Says {
        if !self.is_enough_for(rule) {
            return Says::Nothing;
        }
        let when = &rule.when;
        let sure = self.is_session(when.session) == Some(true);
        if !self.is_as_asked(when) || !self.is_of_age(when, until) {
            return Says::Nothing;
        }
        let over = self.since().saturating_add(rule.after);
        let waits = rule.after > 0 && self.model.awake_now() < over;
        // Under a living agent nothing is to be saved meanwhile.
        if waits && self.due.is_none() {
            return Says::Wait(over);
        }
        match self.facts(when) {
            Holds::No => {
                self.look_again(when, until);
                return Says::Nothing;
            }
            Holds::Ask(needs) => return Says::Ask(needs),
            Holds::Unreadable => return Says::Unreadable,
            Holds::Yes if waits => return Says::Wait(over),
            Holds::Yes => {}
        }
        match self.is_idle(rule, until) {
            Holds::No => return Says::Nothing,
            Holds::Ask(needs) => return Says::Ask(needs),
            Holds::Unreadable => return Says::Unreadable,
            Holds::Yes => {}
        }
        // Nobody saw how its root ended: that may delay, and reaps nobody whom a later rule keeps.
        if !sure && rule.action == Action::Reap {
            return Says::Nothing;
        }
        let cpu = when.min_cpu.map_or(Holds::Yes, |least| {
            Holds::of(Needs::CPU, &self.read().cpu, |cpu| *cpu >= least)
        });
        match cpu {
            Holds::No => Says::Nothing,
            Holds::Ask(needs) => Says::Ask(needs),
            Holds::Unreadable => Says::Unreadable,
            Holds::Yes => Says::Act,
        }
    }

    /// The keep that holds for it whatever happens but for an exec: what is below it is kept with it.
    pub fn kept_for_good(&self) -> Option<RuleId> {
        for id in self.weighed.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            if !rule.when.is_lasting() || rule.after > 0 || !self.is_as_asked(&rule.when) {
                continue;
            }
            if !self.is_enough_for(rule) {
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

    /// What it does for its kin: the first rule that holds kin and speaks of it does that, whatever else keeps it,
    /// unless a rule before that has it reaped.
    pub fn holds(&self) -> Hold {
        let (mut needs, mut asking) = (Needs::NONE, None);
        let mut hold = Hold::Nobody;
        for id in self.weighed.rules.iter().copied() {
            let rule = self.model.rules.rule(id);
            // It has been due since the root ended for those who are above and below it.
            let over = self.due.map_or(0, |due| self.model.clock.awake(due.at));
            let over = over.saturating_add(rule.after);
            let reaps = rule.action == Action::Reap;
            let holds = rule.holds_kin() && (!reaps || self.model.awake_now() < over);
            if !holds && !reaps {
                continue;
            }
            let mut until = None;
            match self.says(rule, &mut until) {
                Says::Nothing => continue,
                Says::Ask(wanted) => {
                    needs |= wanted;
                    asking = asking.or(Some(id).filter(|_| holds));
                    continue;
                }
                // It is kept, and the rule after this may hold.
                Says::Unreadable if !holds => continue,
                _ if holds && reaps => hold = Hold::Until(id, over),
                _ if holds => hold = Hold::Keep(id, until),
                Says::Act | Says::Wait(_) | Says::Unreadable => {}
            }
            asking = asking.or(Some(id).filter(|_| holds && !needs.is_none()));
            break;
        }
        asking.map_or(hold, |id| Hold::Ask(id, needs))
    }

    /// Whether a rule about roots asks for nothing that this one can never have, or has not yet.
    pub fn may_be_judged_as_root(&self) -> bool {
        let mut rules = self.weighed.rules.iter();
        rules.any(|id| {
            let when = &self.model.rules.rule(*id).when;
            when.is_of_root() && self.is_as_asked(when)
        })
    }

    /// Whether some rule may come to spare it, now or when something becomes known or changes.
    pub fn may_be_spared(&self) -> bool {
        // Where no rule reaps it, that does.
        if self.node.state.member.inferred.is_some() {
            return true;
        }
        let mut rules = self
            .weighed
            .rules
            .iter()
            .map(|id| self.model.rules.rule(*id));
        rules.any(|rule| {
            let when = &rule.when;
            let read = self.read();
            rule.may_spare()
                && self.is_session(when.session) != Some(false)
                && self.is_agent(when)
                && self.has_uids(when.uid)
                && self.units(when, read) != Holds::No
                && self.marks(when, read) != Holds::No
        })
    }

    /// Whether what makes it a member suffices for what a rule does: where that is evidence, only one that says so
    /// reaps.
    fn is_enough_for(&self, rule: &Rule) -> bool {
        self.node.state.member.inferred.is_none()
            || rule.action != Action::Reap
            || rule.when.inferred == Some(true)
    }

    /// What can be told from what is known anyway.
    fn is_as_asked(&self, when: &When) -> bool {
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
        let born = self.model.clock.awake(self.node.key.start);
        let now = self.model.awake_now();
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
        self.model.clock.awake(from.max(self.node.key.start))
    }

    fn read(&self) -> &Facts {
        self.node.facts().unwrap_or(&Facts::NOTHING)
    }

    /// What has to be read, but for the use of the processor.
    fn facts(&self, when: &When) -> Holds {
        let read = self.read();
        let listening = when.listening.map_or(Holds::Yes, |wanted| {
            Holds::of(Needs::LISTENING, &read.listening, |is| *is == wanted)
        });
        let tty = when.tty.map_or(Holds::Yes, |wanted| {
            Holds::of(Needs::SESSION, &read.session, |now| {
                (now.tty != 0) == wanted
            })
        });
        let new_session = when.new_session.map_or(Holds::Yes, |wanted| {
            let root = self.session.sid;
            let own = Holds::of(Needs::SESSION, &read.session, |now| {
                (now.sid != root) == wanted
            });
            if root == 0 { Holds::Unreadable } else { own }
        });
        let (units, marks) = (self.units(when, read), self.marks(when, read));
        [units, marks, listening, tty, new_session]
            .into_iter()
            .fold(Holds::Yes, Holds::and)
    }

    fn units(&self, when: &When, read: &Facts) -> Holds {
        if when.own_unit.is_none() && when.units.is_empty() {
            return Holds::Yes;
        }
        let own = when.own_unit.map_or(Holds::Yes, |wanted| {
            let root = self.session.cgroup_id;
            if root != 0 && root == self.node.image.cgroup_id {
                return Holds::from(!wanted);
            }
            match (&read.unit, &self.session.unit) {
                (Known::Is(own), _) if own.is_empty() => Holds::from(!wanted),
                (Known::Is(own), Known::Is(root)) => Holds::from((own != root) == wanted),
                (Known::Is(_), _) => match self.model.tells_unit_of_root(self.session) {
                    Some(_) => Holds::Ask(Needs::ROOT_UNIT),
                    None => Holds::Unreadable,
                },
                _ => Holds::of(Needs::UNIT, &read.unit, |_| false),
            }
        });
        let named = Holds::of(Needs::UNIT, &read.unit, |unit| {
            when.units.is_empty() || when.units.iter().any(|glob| glob.is_match(unit.as_bytes()))
        });
        if when.units.is_empty() {
            own
        } else {
            own.and(named)
        }
    }

    fn marks(&self, when: &When, read: &Facts) -> Holds {
        let has = |bits: u64| Holds::of(Needs::MARKS, &read.marks, |marks| marks & bits != 0);
        let marked = if when.marks.is_empty() {
            Holds::Yes
        } else {
            has(when.mark_bits)
        };
        let multiplexed = when.multiplexed.map_or(Holds::Yes, |wanted| {
            let mut above = self.model.tree.ancestors(self.node.key);
            if self.session.multiplexed || above.any(Node::is_multiplexer) {
                return Holds::from(wanted);
            }
            let bits = self.model.rules.multiplexer_bits();
            Holds::of(Needs::MARKS, &read.marks, |marks| {
                (marks & bits != 0) == wanted
            })
        });
        marked.and(multiplexed)
    }
}

impl Said {
    fn new(verdict: Verdict, reason: Reason) -> Said {
        Said {
            verdict,
            reason,
            rule: None,
            needs: Needs::NONE,
            until: None,
        }
    }
}

impl Holds {
    fn of<T>(needs: Needs, fact: &Known<T>, is: impl FnOnce(&T) -> bool) -> Holds {
        match fact {
            Known::Unasked => Holds::Ask(needs),
            Known::Unreadable => Holds::Unreadable,
            Known::Is(fact) => Holds::from(is(fact)),
        }
    }

    /// What does not hold settles it, whatever else is not known; and it is worth reading what may not hold.
    fn and(self, other: Holds) -> Holds {
        match (self, other) {
            (Holds::No, _) | (_, Holds::No) => Holds::No,
            (Holds::Ask(one), Holds::Ask(two)) => Holds::Ask(one | two),
            (Holds::Ask(needs), _) | (_, Holds::Ask(needs)) => Holds::Ask(needs),
            (Holds::Unreadable, _) | (_, Holds::Unreadable) => Holds::Unreadable,
            (Holds::Yes, Holds::Yes) => Holds::Yes,
        }
    }
}

impl From<bool> for Holds {
    fn from(holds: bool) -> Holds {
        if holds { Holds::Yes } else { Holds::No }
    }
}
