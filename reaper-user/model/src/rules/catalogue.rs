//! The built-in rules, read from `catalogue.toml`.

use std::collections::HashSet;

use toml::de::DeTable;

use super::Defaults;
use super::read::{self, RuleEntry};
use crate::ruleset::{Action, Rule};

#[cfg(test)]
mod tests;

/// Text of the catalogue, which `reaper config show --defaults` prints.
pub const TEXT: &str = include_str!("catalogue.toml");

/// Returns all built-in rules, including disabled ones.
pub fn entries() -> Vec<RuleEntry> {
    let root = DeTable::parse(TEXT).expect("the built-in catalogue is valid TOML");
    let mut problems = Vec::new();
    let rules = read::read(root.get_ref(), &mut problems);
    assert!(problems.is_empty(), "catalogue.toml: {problems:?}");
    rules
}

/// Returns the enabled built-in rules.
pub fn rules() -> Vec<Rule> {
    let enabled = entries().into_iter().filter(|entry| entry.enabled);
    enabled.map(|entry| entry.rule).collect()
}

/// Returns the enabled rules of the user, then the built-in rules that are in force and not replaced by name.
///
/// `enable` lists built-in rules that are in force whatever `defaults` says.
pub(super) fn merge_user_rules(
    user_rules: &[RuleEntry],
    defaults: Defaults,
    enable: &[String],
) -> Vec<Rule> {
    let names: HashSet<_> = user_rules
        .iter()
        .map(|entry| entry.rule.name.clone())
        .collect();
    let is_in_force = |RuleEntry { rule, enabled, .. }: &RuleEntry| {
        let by_default = match rule.action {
            Action::Agent | Action::Server => defaults.agents,
            Action::Boundary => defaults.boundaries,
            Action::Keep | Action::Reap | Action::Report => defaults.keeps,
        };
        let enabled = *enabled && by_default || enable.iter().any(|name| **name == *rule.name);
        enabled && !names.contains(&rule.name)
    };
    let user_rules = user_rules.iter().filter(|entry| entry.enabled).cloned();
    let built_in = entries().into_iter().filter(is_in_force);
    user_rules.chain(built_in).map(|entry| entry.rule).collect()
}
