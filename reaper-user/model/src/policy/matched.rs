//! Rules that match the program of a process, by the image and by facts that were read later.

use std::borrow::Cow;
use std::sync::Arc;

use crate::facts::{Fact, FactSet};
use crate::matched_rules::MatchedRules;
use crate::ruleset::{ProgramMatch, RuleId, Ruleset};
use crate::{Model, Node};

impl MatchedRules {
    /// Returns the rules that match a process by what is known best: the whole command line, the resolved script, or
    /// the image.
    pub fn of<'a>(model: &Model, node: &'a Node) -> Cow<'a, MatchedRules> {
        let facts = node.facts();
        if let Some(Fact::Known(whole)) = facts.map(|facts| &facts.arguments) {
            let script = facts.map(|facts| &facts.script);
            return Cow::Owned(MatchedRules {
                rules: with_keeps(&model.rules, whole, script),
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

    /// Returns what to read of a program because it may make another rule keep the process, with that rule: the end of
    /// the command line, the resolved path of the script, or both. Returns `None` if they were read, were unreadable, or
    /// cannot matter.
    pub fn wants(model: &Model, node: &Node) -> Option<(RuleId, FactSet)> {
        let end = MatchedRules::of(model, node).unreadable.flatten();
        let script = MatchedRules::unresolved(model, node);
        let mut wanted = [(end, FactSet::ARGUMENTS), (script, FactSet::SCRIPT)]
            .into_iter()
            .filter(|(_, fact)| !node.missing_facts(*fact).is_empty())
            .filter_map(|(might, fact)| Some((might?, fact)));
        let (might, first) = wanted.next()?;
        Some((might, wanted.fold(first, |all, (_, fact)| all | fact)))
    }

    /// Returns whether an unread or unreadable part of the program might make another rule keep the process. The inner
    /// value is that rule, if it is known.
    pub fn unknown(model: &Model, node: &Node) -> Option<Option<RuleId>> {
        let own = MatchedRules::of(model, node).unreadable;
        own.or_else(|| MatchedRules::unresolved(model, node).map(Some))
    }

    /// Returns the rule that might keep the process by the resolved path of its script, while that is unknown.
    fn unresolved(model: &Model, node: &Node) -> Option<RuleId> {
        let script = node.facts().map(|facts| &facts.script);
        if matches!(script, Some(Fact::Known(_))) {
            return None;
        }
        let matched = MatchedRules::of(model, node);
        model.rules.unresolved_keep(&node.image, &matched.rules)
    }
}

/// Returns the rules that match the whole command line, and those that may keep the process by the resolved path of its
/// script: the path may have been unreadable when the command line was read.
fn with_keeps(
    rules: &Ruleset,
    whole: &ProgramMatch,
    script: Option<&Fact<ProgramMatch>>,
) -> Arc<[RuleId]> {
    let Some(Fact::Known(resolved)) = script else {
        return Arc::clone(&whole.member_rules);
    };
    let missing = |id: &&RuleId| rules.rule(**id).may_keep() && !whole.member_rules.contains(id);
    let mut all = whole.member_rules.to_vec();
    all.extend(resolved.member_rules.iter().filter(missing));
    all.sort_unstable();
    all.into()
}
