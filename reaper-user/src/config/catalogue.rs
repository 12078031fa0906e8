//! The rules that are built in: `catalogue.toml`, in the language of the user's own rules.

use std::collections::HashSet;

use toml::de::DeTable;

use super::reader::Reader;
use super::{Defaults, rules};
use crate::model::agent::{Action, Rule};

#[cfg(test)]
mod tests;

/// The catalogue as it is written, to be shown.
pub const TEXT: &str = include_str!("../catalogue.toml");

/// All built-in rules.
pub fn rules() -> Vec<Rule> {
    let root = DeTable::parse(TEXT).expect("the built-in catalogue is TOML");
    let mut reader = Reader::default();
    let rules = rules::read(&mut reader, root.get_ref());
    reader
        .finish("catalogue.toml".as_ref(), TEXT)
        .expect("the built-in catalogue has no problem");
    rules
}

/// The user's rules, and after them those built-in ones that are switched on and not replaced by name.
pub(super) fn added_to(mut own: Vec<Rule>, on: Defaults) -> Vec<Rule> {
    let names: HashSet<_> = own.iter().map(|rule| rule.name.clone()).collect();
    let wanted = |rule: &Rule| {
        let on = match rule.action {
            Action::Agent => on.agents,
            Action::Boundary => on.boundaries,
            Action::Keep => on.keeps,
        };
        on && !names.contains(&rule.name)
    };
    own.extend(rules().into_iter().filter(wanted));
    own
}
