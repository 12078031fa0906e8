//! Finds the few rules that can match an image, by names that they cannot do without.

use std::collections::HashMap;

use super::script::is_interpreter;
use super::{Action, Field, Rule, RuleId, Subject};

/// A matcher of a rule, both by position. Ordered as they are asked.
type Place = (u32, u32);

/// The rules of one action.
#[derive(Clone, Default)]
pub(super) struct Index {
    by_exe: HashMap<Box<[u8]>, Vec<Place>>,
    by_comm: HashMap<Box<[u8]>, Vec<Place>>,
    /// What asks for a script, and is tried on interpreters.
    scripts: Vec<Place>,
    /// What names nothing, and has to be tried on everything.
    rest: Vec<Place>,
    /// Rules that hold for a uid alone.
    bare: Vec<u32>,
}

impl Index {
    pub(super) fn new(rules: &[Rule], action: Action) -> Index {
        let mut index = Index::default();
        for (at, rule) in (0..).zip(rules).filter(|(_, rule)| rule.action == action) {
            if rule.matchers.is_empty() && rule.other_uid {
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

    /// The first rule that matches.
    pub(super) fn first(
        &self,
        rules: &[Rule],
        subject: &Subject<'_>,
        other_uid: bool,
    ) -> Option<RuleId> {
        let exe_name = subject.exe_name();
        let lists = [
            self.by_comm.get(&subject.image.comm[..]),
            self.by_exe.get(exe_name),
            is_interpreter(exe_name).then_some(&self.scripts),
            Some(&self.rest),
        ];
        let mut best = self.bare.first().copied().filter(|_| other_uid);
        for &(at, nth) in lists.into_iter().flatten().flatten() {
            let rule = &rules[at as usize];
            let earlier = best.is_none_or(|b| at < b);
            if earlier
                && (other_uid || !rule.other_uid)
                && rule.matchers[nth as usize].is_match(subject)
            {
                best = Some(at);
            }
        }
        best.map(RuleId)
    }
}
