//! The rules of a config file: read, checked, and joined with those that are built in.
//!
//! [`read`] documents the language. The built-in [`catalogue`] is written in it too. Reading notes the first problem
//! of each rule, with its place in the text.

pub mod catalogue;
pub mod conversation;
pub mod read;
#[cfg(test)]
mod tests;
pub mod warn;

use std::collections::HashSet;

use serde::Deserialize;
use toml::de::DeTable;

use crate::ruleset::{MARKERS_MAX, Pattern, Rule, Ruleset};
use crate::value::{Problem, get, list, nearest};
use read::RuleEntry;

/// Top-level keys of a config file that are about rules.
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

/// Which parts of the built-in catalogue are in force: `[defaults]`, each `true` unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table: [defaults]")]
pub struct Defaults {
    pub agents: bool,
    pub boundaries: bool,
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

/// What a config file says of rules.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `honor_keep = true`: whether a process with `REAPER_KEEP=1` in its environment is kept.
    pub honor_keep: bool,
    /// `[defaults]`
    pub defaults: Defaults,
    /// Rules of the file itself, in its order.
    pub own: Vec<RuleEntry>,
    /// All rules in force: those of the file, then those of the catalogue that `defaults` leaves on, or `enable`
    /// switches on, and that no rule of the file replaces by its name.
    pub in_force: Ruleset,
}

impl Rules {
    /// Reads the rules of a parsed config file.
    ///
    /// # Errors
    /// The first problem of each rule, and of the other keys.
    pub fn read(root: &DeTable<'_>) -> Result<Rules, Vec<Problem>> {
        let mut problems = Vec::new();
        let own = read::read(root, &mut problems);
        let (honor_keep, defaults, enable) = switches(root).unwrap_or_else(|problem| {
            problems.push(problem);
            (true, Defaults::default(), Vec::new())
        });
        let all = catalogue::merge_user_rules(&own, defaults, &enable);
        problems.extend(too_many_markers(&all));
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Rules {
            honor_keep,
            defaults,
            own,
            in_force: Ruleset::new(all).honoring_keep(honor_keep),
        })
    }
}

/// Returns the rules that an empty config file leaves in force.
pub fn built_in() -> Ruleset {
    Ruleset::new(catalogue::rules()).honoring_keep(true)
}

/// Reads `honor_keep`, `defaults` and `enable`, which has names of built-in rules.
fn switches(root: &DeTable<'_>) -> Result<(bool, Defaults, Vec<String>), Problem> {
    let honor_keep = get(root, "honor_keep", bool::deserialize)?;
    let defaults = get(root, "defaults", Defaults::deserialize)?;
    let enable = get(root, "enable", |names| {
        let entries = catalogue::entries();
        let known: Vec<&str> = entries.iter().map(|entry| &*entry.rule.name).collect();
        list(names, |name| match nearest(name, &known) {
            Some(near) if near == name => Ok(name.to_owned()),
            Some(near) => Err(format!(
                "no built-in rule is named {name:?}: did you mean `{near}`?"
            )),
            None => Err(format!(
                "no built-in rule is named {name:?}: `reaper config show --defaults` has them all"
            )),
        })
    })?;
    Ok((
        honor_keep.unwrap_or(true),
        defaults.unwrap_or_default(),
        enable.unwrap_or_default(),
    ))
}

/// Returns the problem of rules that together ask for more environment globs than there are bits.
fn too_many_markers(rules: &[Rule]) -> Option<Problem> {
    let markers = rules.iter().flat_map(|rule| &rule.when.markers);
    let count = markers.map(Pattern::text).collect::<HashSet<_>>().len();
    // One is `REAPER_KEEP=1`, and three tell of multiplexers.
    let most = MARKERS_MAX - 4;
    (count > most).then(|| {
        let what = format!(
            "the rules ask for {count} different `environment` globs: write at most {most}"
        );
        (0, what)
    })
}
