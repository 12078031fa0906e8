//! The built-in rules, read from `catalogue.toml`.

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

/// Returns the built-in rules that `defaults` or `enable`, a list of names, selects.
pub(super) fn selected(defaults: Defaults, enable: &[String]) -> Vec<Rule> {
    let is_selected = |RuleEntry { rule, enabled, .. }: &RuleEntry| {
        let by_default = match rule.action {
            Action::Agent | Action::Server => defaults.agents,
            Action::Boundary => defaults.boundaries,
            Action::Keep | Action::Reap | Action::Report | Action::Note => defaults.keeps,
        };
        *enabled && by_default || enable.iter().any(|name| **name == *rule.name)
    };
    let selected = entries().into_iter().filter(is_selected);
    selected.map(|entry| entry.rule).collect()
}
