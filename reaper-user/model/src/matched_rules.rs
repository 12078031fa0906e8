//! Rules that match a program, for any process that runs it.

use std::sync::Arc;

use super::event::Image;
use super::ruleset::{RuleId, Ruleset};

/// Asked for when a process becomes a member and when it runs another program, so that nothing is left to
/// ask when every microsecond counts.
#[derive(Clone, Debug)]
pub(crate) struct MatchedRules {
    /// Those that hold if the rest of what they ask for does, in the order in which they are asked.
    pub rules: Arc<[RuleId]>,
    /// Its program, or the end of its command line, is not known; and the rule that might then hold.
    pub unreadable: Option<Option<RuleId>>,
}

impl MatchedRules {
    pub fn new(rules: &Ruleset, image: &Image) -> MatchedRules {
        let judging = rules.matching_member_rules(image);
        let might = rules.unread_keep(image, &judging).map(Some);
        MatchedRules {
            unreadable: image.exe.is_empty().then_some(None).or(might),
            rules: judging,
        }
    }
}
