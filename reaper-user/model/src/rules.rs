//! The rules of a config file: read, checked, and joined with those that are built in.
//!
//! [`read`] documents the language. The built-in [`catalogue`] is written in it too. Reading notes every problem with
//! its place in the text instead of stopping at the first.

pub mod catalogue;
pub mod conversation;
pub mod read;
pub mod reader;
#[cfg(test)]
mod tests;
pub mod warn;
mod when;

use toml::de::DeTable;

use crate::ruleset::Ruleset;
use read::RuleEntry;
use reader::Reader;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Reads the rules of a parsed config file. Notes problems in `r`.
    pub fn read(r: &mut Reader, root: &DeTable<'_>) -> Rules {
        let mut honor_keep = true;
        r.flag(root, "honor_keep", &mut honor_keep);
        let mut defaults = Defaults::default();
        if let Some(table) = r.table(root, "defaults") {
            r.known_keys(table, &["agents", "boundaries", "keeps"], " in [defaults]");
            r.flag(table, "agents", &mut defaults.agents);
            r.flag(table, "boundaries", &mut defaults.boundaries);
            r.flag(table, "keeps", &mut defaults.keeps);
        }
        let own = read::read(r, root);
        let enable = enabled(r, root);
        let all = catalogue::merge_user_rules(&own, defaults, &enable);
        when::check_marker_count(r, &all);
        Rules {
            honor_keep,
            defaults,
            own,
            in_force: Ruleset::new(all).honoring_keep(honor_keep),
        }
    }
}

/// Returns the rules that an empty config file leaves in force.
pub fn built_in() -> Ruleset {
    Ruleset::new(catalogue::rules()).honoring_keep(true)
}

/// Reads `enable`: names of built-in rules.
fn enabled(r: &mut Reader, root: &DeTable<'_>) -> Vec<String> {
    let names = root
        .get("enable")
        .map_or(Vec::new(), |value| r.strings("enable", value));
    let known = catalogue::entries();
    let known: Vec<&str> = known.iter().map(|written| &*written.rule.name).collect();
    for (at, name) in &names {
        r.known_name(*at, name, &known, "`enable` names no built-in rule");
    }
    names.into_iter().map(|(_, name)| name.into()).collect()
}
