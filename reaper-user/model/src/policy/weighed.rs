//! What the rules say of a program, whoever runs it.

use std::borrow::Cow;
use std::sync::Arc;

use crate::Model;
use crate::agent::RuleId;
use crate::event::Image;
use crate::facts::{Known, Needs};
use crate::tree::Node;

/// Asked for when a process becomes a member and when it runs another program, so that nothing is left to
/// ask when every microsecond counts.
#[derive(Clone, Debug)]
pub(crate) struct Weighed {
    /// Those that hold if the rest of what they ask for does, in the order in which they are asked.
    pub rules: Arc<[RuleId]>,
    /// Its program, or the end of its command line, is not known; and the rule that might then hold.
    pub unreadable: Option<Option<RuleId>>,
}

impl Weighed {
    pub fn new(model: &Model, image: &Image) -> Weighed {
        let rules = model.rules.judging(image);
        let might = model.rules.might_spare(image, &rules).map(Some);
        Weighed {
            unreadable: image.exe.is_empty().then_some(None).or(might),
            rules,
        }
    }

    pub fn of<'a>(model: &Model, node: &'a Node) -> Cow<'a, Weighed> {
        let facts = node.facts();
        if let Some(Known::Is(whole)) = facts.map(|facts| &facts.arguments) {
            return Cow::Owned(Weighed {
                rules: Arc::clone(&whole.judging),
                unreadable: None,
            });
        }
        let own = match &node.weighed {
            Some(known) => Cow::Borrowed(known),
            None => Cow::Owned(Weighed::new(model, &node.image)),
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
