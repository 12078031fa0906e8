//! Rules that match a program, whatever process runs it.

use std::sync::Arc;

use super::event::Image;
use super::ruleset::{RuleId, Ruleset};

/// Result of matching rules with a program. Computed when a process becomes a member or executes, so that the decision
/// itself is fast.
#[derive(Clone, Debug)]
pub(crate) struct MatchedRules {
    /// Rules that apply if their remaining conditions hold, in the order of evaluation.
    pub rules: Arc<[RuleId]>,
    /// Set if the program or the end of its command line is unknown, with the rule that might then apply, if any.
    pub unreadable: Option<Option<RuleId>>,
}

impl MatchedRules {
    /// Matches the rules with a program as its exec reported it.
    pub fn new(rules: &Ruleset, image: &Image) -> MatchedRules {
        let judging = rules.matching_member_rules(image);
        let might = rules.unread_keep(image, &judging).map(Some);
        MatchedRules {
            unreadable: image.exe.is_empty().then_some(None).or(might),
            rules: judging,
        }
    }
}
