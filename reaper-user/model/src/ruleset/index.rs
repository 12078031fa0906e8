//! Index of rules by the names that their conditions require, so that an exec is checked against few of them.

use std::collections::HashMap;

use super::{Field, Rule, RuleId, Subject, names, script};

/// Position of a rule, and of a matcher in it. Ordered like the evaluation.
type Place = (u32, u32);

/// The rules of one rank.
#[derive(Clone, Default)]
pub(super) struct Index {
    /// Matchers that require one of these file names of the executable.
    by_exe: HashMap<Box<[u8]>, Vec<Place>>,
    /// Matchers that require one of these comms.
    by_comm: HashMap<Box<[u8]>, Vec<Place>>,
    /// Matchers with a `script` condition, by the place of the interpreter on whose scripts they are tried.
    scripts: HashMap<usize, Vec<Place>>,
    /// Matchers that require no name, which are tried on every program.
    rest: Vec<Place>,
    /// Rules without conditions on the program, and those about windows.
    any_program: Vec<u32>,
}

impl Index {
    /// Creates the index of the rules of one rank.
    pub(super) fn new(rules: &[Rule], rank: u8) -> Index {
        let mut index = Index::default();
        for (at, rule) in (0..)
            .zip(rules)
            .filter(|(_, rule)| rule.action.rank() == rank)
        {
            // Few processes have a window, so the program is checked only then.
            if rule.matchers.is_empty() || rule.when.window {
                index.any_program.push(at);
                continue;
            }
            for (nth, matcher) in (0..).zip(&rule.matchers) {
                let place = (at, nth);
                if matcher.needs_script() {
                    for one in names::interpreters(matcher) {
                        index.scripts.entry(one).or_default().push(place);
                    }
                } else if let Some(names) = matcher.names(Field::Exe) {
                    names.for_each(|n| index.by_exe.entry(n.into()).or_default().push(place));
                } else if let Some(names) = matcher.names(Field::Comm) {
                    names.for_each(|n| index.by_comm.entry(n.into()).or_default().push(place));
                } else {
                    index.rest.push(place);
                }
            }
        }
        index
    }

    /// Returns the rules without conditions on the program, and those about windows.
    pub(super) fn any_program(&self) -> impl Iterator<Item = RuleId> {
        self.any_program.iter().copied().map(RuleId)
    }

    /// Returns the first rule with a matcher that matches the program.
    pub(super) fn first(&self, rules: &[Rule], subject: &Subject<'_>) -> Option<RuleId> {
        let mut best = None;
        for (at, nth) in self.places(subject) {
            let earlier = best.is_none_or(|b| at < b);
            if earlier && rules[at as usize].matchers[nth as usize].is_match(subject) {
                best = Some(at);
            }
        }
        best.map(RuleId)
    }

    /// Returns all rules with a matcher that matches the program, without order and with duplicates.
    pub(super) fn all(&self, rules: &[Rule], subject: &Subject<'_>) -> Vec<RuleId> {
        let matches =
            |(at, nth): &(u32, u32)| rules[*at as usize].matchers[*nth as usize].is_match(subject);
        let places = self.places(subject).filter(matches);
        places.map(|(at, _)| RuleId(at)).collect()
    }

    /// Returns whether a rule asks for the script of the interpreter with this file name.
    pub(super) fn reads_scripts_of(&self, exe_name: &[u8]) -> bool {
        script::interpreter(exe_name).is_some_and(|one| self.scripts.contains_key(&one))
    }

    /// Returns the matchers that can match the program by its names.
    fn places(&self, subject: &Subject<'_>) -> impl Iterator<Item = Place> {
        let exe_name = subject.exe_name();
        let lists = [
            self.by_comm.get(subject.field(Field::Comm)),
            self.by_exe.get(exe_name),
            script::interpreter(exe_name).and_then(|one| self.scripts.get(&one)),
            Some(&self.rest),
        ];
        lists.into_iter().flatten().flatten().copied()
    }
}
