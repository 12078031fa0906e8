//! Rules that match the program of a process, by the image and by facts that were read later.

use std::borrow::Cow;
use std::sync::Arc;

use crate::facts::{Fact, FactSet};
use crate::matched_rules::MatchedRules;
use crate::ruleset::RuleId;
use crate::{Model, Node};

impl MatchedRules {
    /// Returns the rules that match a process by what is known best: the whole command line, the resolved script, or
    /// the image.
    pub fn of<'a>(model: &Model, node: &'a Node) -> Cow<'a, MatchedRules> {
        let facts = node.facts();
        if let Some(Fact::Known(whole)) = facts.map(|facts| &facts.arguments) {
            return Cow::Owned(MatchedRules {
                rules: Arc::clone(&whole.member_rules),
                unreadable: None,
            });
        }
        let own = match &node.state.cached.matched_rules {
            Some(known) => Cow::Borrowed(known),
            None => Cow::Owned(MatchedRules::new(&model.rules, &node.image)),
        };
        match facts.map(|facts| &facts.script) {
            Some(Fact::Known(read)) => Cow::Owned(MatchedRules {
                rules: Arc::clone(&read.member_rules),
                unreadable: own.unreadable,
            }),
            _ => own,
        }
    }

    /// Returns the rule that might match the end of the command line, if that is unread. Returns `None` if it was read,
    /// was unreadable, or cannot matter.
    pub fn wants_arguments(model: &Model, node: &Node) -> Option<RuleId> {
        let might = MatchedRules::of(model, node).unreadable.flatten()?;
        (!node.missing_facts(FactSet::ARGUMENTS).is_empty()).then_some(might)
    }
}
