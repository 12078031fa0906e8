//! Finds matchers that can never match.

use super::matcher::{Condition, Field, Matcher};
use super::{Pattern, names};

impl Matcher {
    /// Returns why the matcher can never match, `None` if it can.
    ///
    /// It cannot if a negative condition excludes what a positive one requires, or if a script is required of programs
    /// that are no interpreters.
    pub fn impossible(&self) -> Option<&'static str> {
        let is_excluded = |condition: &Condition| {
            let not = |other: &&Condition| other.negative && other.field == condition.field;
            let mut not = self.conditions().iter().filter(not);
            let excluded = if condition.field == Field::Args {
                not.any(|other| begins_with(condition, other))
            } else {
                let not: Vec<_> = not
                    .flat_map(|other| &other.any_of)
                    .map(Pattern::text)
                    .collect();
                condition.any_of.iter().all(|p| not.contains(&p.text()))
            };
            !condition.negative && excluded
        };
        if self.conditions().iter().any(is_excluded) {
            return Some("its conditions contradict each other");
        }
        let runs_none = self.needs_script() && names::interpreters(self).next().is_none();
        runs_none.then_some("it has `script`, but its `exe` is no interpreter that reaper knows")
    }
}

/// Returns whether the patterns of `one`, for positional arguments, begin with those of `other`.
fn begins_with(one: &Condition, other: &Condition) -> bool {
    let pairs = || one.any_of.iter().zip(&other.any_of);
    one.any_of.len() >= other.any_of.len() && pairs().all(|(a, b)| a.text() == b.text())
}
