//! Rules that reap only a program of which enough is known.

use super::{Case, ConditionResult};
use crate::facts::FactSet;
use crate::ruleset::{Action, Rule};

impl Case<'_> {
    /// Evaluates whether the program still matches a rule that reaps, once its missing parts are read: the rule was
    /// matched with the beginning of a long command line, or with the path of a script as given. Other rules keep the
    /// process, so they may match early.
    pub(super) fn program(&self, rule: &Rule) -> ConditionResult {
        if rule.action != Action::Reap {
            return ConditionResult::Yes;
        }
        let (open, read) = (rule.undecided(&self.node.image), self.read());
        // The rules of the case match the whole command line, if that was read.
        let end = match open.contains(FactSet::ARGUMENTS) {
            true => ConditionResult::of(FactSet::ARGUMENTS, &read.arguments, |_| true),
            false => ConditionResult::Yes,
        };
        let script = match open.contains(FactSet::SCRIPT) {
            true => ConditionResult::of(FactSet::SCRIPT, &read.script, |resolved| {
                let mut rules = resolved.member_rules.iter();
                rules.any(|id| *self.model.rules.name(*id) == rule.name)
            }),
            false => ConditionResult::Yes,
        };
        end.and(script)
    }
}
