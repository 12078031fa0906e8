//! Checks of a new rule: that it recognises its program, and nothing that must not be an agent.

use std::path::Path;

use super::super::Failure;
use crate::config::new_agent::NewAgent;
use crate::config::{Config, Diagnostic};
use reaper_model::event::{Image, ProcEntry};
use reaper_model::leftover::ProcessTable;
use reaper_model::ruleset::{Class, Ruleset};

/// Returns an error if a rule recognises the program already, or if it is a boundary, such as a terminal multiplexer.
pub(super) fn refuse_known(rules: &Ruleset, image: &Image) -> Result<(), String> {
    match rules.classify(image) {
        Class::Plain => Ok(()),
        Class::Boundary(id) => Err(format!(
            "it is a boundary by the rule \"{}\", so no agent rule would apply",
            rules.name(id)
        )),
        Class::Agent(id) | Class::Server(id) => Err(format!(
            "the rule \"{}\" recognises it already",
            rules.name(id)
        )),
    }
}

/// Returns the text to append. It has the rule of the agent. Also returns the config with it.
pub(super) fn appended(
    old: &str,
    known: &Ruleset,
    agent: &NewAgent,
    file: &Path,
) -> Result<(String, Config), Failure> {
    let end = match old {
        "" => "",
        old if old.ends_with('\n') => "\n",
        _ => "\n\n",
    };
    let block = format!("{end}# Added by `reaper agent add`.\n{}", agent.toml());
    if known.rules().iter().any(|rule| *rule.name == *agent.name) {
        let what = format!(
            "a rule is named {:?} already: give another name with --name",
            agent.name
        );
        return Err(Failure::Refused(what));
    }
    let config = Config::parse(&format!("{old}{block}"), file)?;
    Ok((block, config))
}

/// Returns the running processes that the rule recognises.
pub(super) fn matching<'t>(
    rules: &Ruleset,
    name: &str,
    table: &'t ProcessTable,
) -> Vec<&'t ProcEntry> {
    let entries = table.rows.values().map(|row| &row.entry);
    let mut all: Vec<_> = entries
        .filter(|entry| recognises(rules, name, &entry.image))
        .collect();
    all.sort_unstable_by_key(|entry| (entry.key.start, entry.key.pid));
    all
}

pub(super) fn recognises(rules: &Ruleset, name: &str, image: &Image) -> bool {
    matches!(rules.classify(image), Class::Agent(id) if **rules.name(id) == *name)
}

/// Checks that the rule recognises the program, and nothing that must not be an agent.
pub(super) fn check(
    rules: &Ruleset,
    name: &str,
    image: &Image,
    matching: &[&ProcEntry],
    table: &ProcessTable,
) -> Result<(), String> {
    if !recognises(rules, name, image) {
        return Err(
            "the rule would not recognise it; write one by hand, see `reaper agents --test`".into(),
        );
    }
    let parent = |pid: &u32| {
        table
            .rows
            .get(pid)
            .map(|row| row.entry.parent)
            .filter(|pid| *pid > 0)
    };
    let above: Vec<u32> = std::iter::successors(Some(std::process::id()), parent)
        .take(table.rows.len() + 1)
        .collect();
    for pid in matching.iter().map(|entry| entry.key.pid) {
        if pid == 1 {
            return Err("the rule would match the init process".into());
        } else if above.contains(&pid) {
            return Err(format!(
                "the rule would match process {pid}, an ancestor of this command; run it from another terminal"
            ));
        }
    }
    Ok(())
}

/// Returns the warnings about the rules behind `old`.
pub(super) fn warnings(all: &[Diagnostic], old: &str) -> Vec<String> {
    let lines = old.lines().count();
    let is_new = |warning: &&Diagnostic| warning.place.is_some_and(|(line, _)| line > lines);
    all.iter()
        .filter(is_new)
        .map(|warning| warning.message.clone())
        .collect()
}
