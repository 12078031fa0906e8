//! The rules that are built in: `catalogue.toml`, in the language of the user's own rules.

use std::collections::HashSet;

use toml::de::DeTable;

use super::Defaults;
use super::read::{self, RuleEntry};
use crate::ruleset::{Action, Rule};

#[cfg(test)]
mod tests;

/// The catalogue as it is written, to be shown.
pub const TEXT: &str = include_str!("catalogue.toml");

/// All built-in rules, those among them that are off unless they are switched on.
pub fn entries() -> Vec<RuleEntry> {
    let root = DeTable::parse(TEXT).expect("the built-in catalogue is TOML");
    let mut problems = Vec::new();
    let rules = read::read(root.get_ref(), &mut problems);
    assert!(problems.is_empty(), "catalogue.toml: {problems:?}");
    rules
}

/// The built-in rules that are on.
pub fn rules() -> Vec<Rule> {
    let on = entries().into_iter().filter(|written| written.enabled);
    on.map(|written| written.rule).collect()
}

/// The user's rules that are on, and after them those built-in ones that are, and are not replaced by name.
/// `enable` are names of built-in rules.
pub(super) fn merge_user_rules(own: &[RuleEntry], on: Defaults, enable: &[String]) -> Vec<Rule> {
    let names: HashSet<_> = own
        .iter()
        .map(|written| written.rule.name.clone())
        .collect();
    let wanted = |RuleEntry { rule, enabled, .. }: &RuleEntry| {
        let on = match rule.action {
            Action::Agent | Action::Server => on.agents,
            Action::Boundary => on.boundaries,
            Action::Keep | Action::Reap | Action::Report => on.keeps,
        };
        let enabled = *enabled && on || enable.iter().any(|name| **name == *rule.name);
        enabled && !names.contains(&rule.name)
    };
    let own = own.iter().filter(|written| written.enabled).cloned();
    let built_in = entries().into_iter().filter(wanted);
    own.chain(built_in).map(|written| written.rule).collect()
}
