//! What the rules say of a program, whoever runs it.

use std::borrow::Cow;
use std::sync::Arc;

use crate::agent::RuleId;
use crate::facts::{Known, Needs};
use crate::matched_rules::Weighed;
use crate::{Model, Node};

impl Weighed {
    pub fn of<'a>(model: &Model, node: &'a Node) -> Cow<'a, Weighed> {
        let facts = node.facts();
        if let Some(Known::Is(whole)) = facts.map(|facts| &facts.arguments) {
            return Cow::Owned(Weighed {
                rules: Arc::clone(&whole.judging),
                unreadable: None,
            });
        }
        let own = match &node.state.cached.weighed {
            Some(known) => Cow::Borrowed(known),
            None => Cow::Owned(Weighed::new(&model.rules, &node.image)),
        };
        match facts.map(|facts| &facts.script) {
            Some(Known::Is(read)) => Cow::Owned(Weighed {
                rules: Arc::clone(&read.judging),
                unreadable: own.unreadable,
            }),
            _ => own,
        }
    }

    /// Returns the rule that might hold by the end of the command line, if that has not been read yet.
    pub fn wants_arguments(model: &Model, node: &Node) -> Option<RuleId> {
        let might = Weighed::of(model, node).unreadable.flatten()?;
        (!node.lacks(Needs::ARGUMENTS).is_none()).then_some(might)
    }
}
