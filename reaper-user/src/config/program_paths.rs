//! Warnings about rules whose `exe` names a file that can never be the program of a process: a link or a script.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use reaper_model::rules::read::RuleEntry;
use reaper_model::ruleset::{Condition, Field, Pattern};

/// Returns warnings about the rules of a file, each with its byte offset.
pub(super) fn warnings(rules: &[RuleEntry]) -> Vec<(usize, String)> {
    let mut warnings = Vec::new();
    for RuleEntry { rule, offset, .. } in rules.iter().filter(|entry| entry.enabled) {
        let name = &rule.name;
        let conditions = rule
            .matchers
            .iter()
            .flat_map(|matcher| matcher.conditions());
        let exe = conditions.filter(|c| c.field == Field::Exe && !c.negative);
        for what in exe
            .flat_map(|condition: &Condition| condition.any_of.iter())
            .filter_map(problem)
        {
            warnings.push((*offset, format!("`{name}`: {what}")));
        }
    }
    warnings
}

/// Returns why no process can have this path as its program; `None` if one can, or if there is no such file.
fn problem(exe: &Pattern) -> Option<String> {
    let path = Path::new(exe.text());
    if !exe.is_exact() || !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let resolved = path.canonicalize().ok()?;
    let mut head = [0; 2];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    if read.is_ok() && head == *b"#!" {
        return Some(format!(
            "`exe` can never match {}, which is a script: match it with `script`, or write `reaper agent add {}`",
            path.display(),
            path.display()
        ));
    }
    (resolved != path).then(|| {
        format!(
            "`exe` can never match {}, which is a link: write {}",
            path.display(),
            resolved.display()
        )
    })
}
