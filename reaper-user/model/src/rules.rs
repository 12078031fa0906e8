//! Reads and checks the rules of a config file, and merges them with the built-in ones.
//!
//! [`read`] documents the rule language, in which the built-in [`catalogue`] is written too. Errors list the first
//! problem of each rule, with its byte offset in the text.

pub mod catalogue;
pub mod conversation;
pub mod read;
pub mod suggest;
#[cfg(test)]
mod tests;
pub mod warn;

use std::collections::HashSet;

use serde::Deserialize;
use toml::de::DeTable;

use crate::ruleset::{MARKERS_MAX, Pattern, Rule, Ruleset};
use crate::value::{Problem, get, list_or_none, nearest};
use read::RuleEntry;

/// Top-level keys of a config file that configure rules.
pub const KEYS: [&str; 8] = [
    "honor_keep",
    "enable",
    "defaults",
    "agent",
    "server",
    "boundary",
    "keep",
    "rule",
];

/// The `[defaults]` table: whether each part of the built-in catalogue is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table: [defaults]")]
pub struct Defaults {
    /// Whether the built-in agents and their servers are recognised.
    pub agents: bool,
    /// Whether the built-in boundaries apply.
    pub boundaries: bool,
    /// Whether the built-in rules for members apply.
    pub keeps: bool,
}

impl Default for Defaults {
    fn default() -> Defaults {
        Defaults {
            agents: true,
            boundaries: true,
            keeps: true,
        }
    }
}

/// Rules of a config file, and the rules in force with it.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether a process with `REAPER_KEEP=1` in its environment is kept.
    pub honor_keep: bool,
    /// Parts of the built-in catalogue that are in force.
    pub defaults: Defaults,
    /// Rules of the file itself, in its order, including disabled ones.
    pub user_rules: Vec<RuleEntry>,
    /// Rules of the catalogue that are in force or replaced by a rule of the file.
    pub built_in: Vec<Rule>,
    /// Enabled rules of the file, then those of the catalogue.
    ///
    /// A rule of the catalogue is in force if `defaults` or `enable` selects it and no rule of the file has its name.
    pub in_force: Ruleset,
}

impl Rules {
    /// Reads the rules of a parsed config file.
    ///
    /// # Errors
    /// Lists the first problem of each rule and the first one of the other keys.
    pub fn read(root: &DeTable<'_>) -> Result<Rules, Vec<Problem>> {
        let mut problems = Vec::new();
        let user_rules = read::read(root, &mut problems);
        let (honor_keep, defaults, enable) = switches(root).unwrap_or_else(|problem| {
            problems.push(problem);
            (true, Defaults::default(), Vec::new())
        });
        let built_in = catalogue::selected(defaults, &enable);
        let own = user_rules.iter().filter(|entry| entry.enabled);
        let is_own = |rule: &&Rule| user_rules.iter().any(|entry| entry.rule.name == rule.name);
        let others = built_in.iter().filter(|rule| !is_own(rule));
        let all: Vec<Rule> = own
            .map(|entry| &entry.rule)
            .chain(others)
            .cloned()
            .collect();
        problems.extend(too_many_markers(&all));
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Rules {
            honor_keep,
            defaults,
            user_rules,
            built_in,
            in_force: Ruleset::new(all).with_honor_keep(honor_keep),
        })
    }
}

/// Returns the rules in force with an empty config file.
pub fn built_in() -> Ruleset {
    Ruleset::new(catalogue::rules()).with_honor_keep(true)
}

/// Reads `honor_keep`, `defaults` and `enable` (names of built-in rules).
fn switches(root: &DeTable<'_>) -> Result<(bool, Defaults, Vec<String>), Problem> {
    let honor_keep = get(root, "honor_keep", bool::deserialize)?;
    let defaults = get(root, "defaults", Defaults::deserialize)?;
    let enable = get(root, "enable", |names| {
        let entries = catalogue::entries();
        let known: Vec<&str> = entries.iter().map(|entry| &*entry.rule.name).collect();
        list_or_none(names, |name| match nearest(name, &known) {
            Some(near) if near == name => Ok(name.to_owned()),
            Some(near) => Err(format!(
                "no built-in rule is named {name:?}: did you mean `{near}`?"
            )),
            None => Err(format!(
                "no built-in rule is named {name:?}: `reaper config show --defaults` lists them"
            )),
        })
    })?;
    Ok((
        honor_keep.unwrap_or(true),
        defaults.unwrap_or_default(),
        enable.unwrap_or_default(),
    ))
}

/// Returns a problem if the rules together use more environment globs than there are bits.
fn too_many_markers(rules: &[Rule]) -> Option<Problem> {
    let markers = rules.iter().flat_map(|rule| &rule.when.markers);
    let count = markers.map(Pattern::text).collect::<HashSet<_>>().len();
    // One bit is for `REAPER_KEEP=1`, three are for the variables of multiplexers.
    let most = MARKERS_MAX - 4;
    (count > most).then(|| {
        let what = format!(
            "the rules and the built-in ones use {count} different `environment` globs: at most {most} are possible"
        );
        (0, what)
    })
}
