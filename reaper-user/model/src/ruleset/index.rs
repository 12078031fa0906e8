//! Finds the few rules that can match an image, by names that they cannot do without.

use std::collections::HashMap;

use super::script::is_interpreter;
use super::{Field, Rule, RuleId, Subject};

/// A matcher of a rule, both by position. Ordered as they are asked.
type Place = (u32, u32);

/// The rules of one rank.
#[derive(Clone, Default)]
pub(super) struct Index {
    by_exe: HashMap<Box<[u8]>, Vec<Place>>,
    by_comm: HashMap<Box<[u8]>, Vec<Place>>,
    /// What asks for a script, and is tried on interpreters.
    scripts: Vec<Place>,
    /// What names nothing, and has to be tried on everything.
    rest: Vec<Place>,
    /// Rules that look at no program.
    bare: Vec<u32>,
}

impl Index {
    pub(super) fn new(rules: &[Rule], rank: u8) -> Index {
        let mut index = Index::default();
        for (at, rule) in (0..)
            .zip(rules)
            .filter(|(_, rule)| rule.action.rank() == rank)
        {
            if rule.matchers.is_empty() {
                index.bare.push(at);
            }
            for (nth, matcher) in (0..).zip(&rule.matchers) {
                let place = (at, nth);
                if matcher.needs_script() {
                    index.scripts.push(place);
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

    pub(super) fn bare(&self) -> impl Iterator<Item = RuleId> {
        self.bare.iter().copied().map(RuleId)
    }

    /// The first rule that matches the program.
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

    /// All rules that match the program, but for the bare ones; in no order, and perhaps twice.
    pub(super) fn all(&self, rules: &[Rule], subject: &Subject<'_>) -> Vec<RuleId> {
        let matches =
            |(at, nth): &(u32, u32)| rules[*at as usize].matchers[*nth as usize].is_match(subject);
        let places = self.places(subject).filter(matches);
        places.map(|(at, _)| RuleId(at)).collect()
    }

    /// What can match at all.
    fn places(&self, subject: &Subject<'_>) -> impl Iterator<Item = Place> {
        let exe_name = subject.exe_name();
        let lists = [
            self.by_comm.get(subject.field(Field::Comm)),
            self.by_exe.get(exe_name),
            is_interpreter(exe_name).then_some(&self.scripts),
            Some(&self.rest),
        ];
        lists.into_iter().flatten().flatten().copied()
    }
}
