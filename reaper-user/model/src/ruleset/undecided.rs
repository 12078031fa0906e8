//! Parts of a program that are missing, on which it depends whether a rule matches.

use super::{Field, Matcher, Rule, Subject};
use crate::event::Image;
use crate::facts::FactSet;

impl Rule {
    /// Returns the facts that may show that the rule does not match a program: the whole command line, the resolved
    /// path of the script, or both. Empty if the rule matches whatever they are, or never.
    pub(crate) fn undecided(&self, image: &Image) -> FactSet {
        let subject = Subject::unresolved(image);
        let mut open = FactSet::NONE;
        for matcher in &self.matchers {
            match matcher.undecided(&subject) {
                Some(FactSet::NONE) => return FactSet::NONE,
                Some(facts) => open |= facts,
                None => {}
            }
        }
        open
    }
}

impl Matcher {
    /// Returns the facts that decide whether the matcher matches, empty if it matches without them. Returns `None` if it
    /// cannot match.
    fn undecided(&self, subject: &Subject<'_>) -> Option<FactSet> {
        let mut open = FactSet::NONE;
        for condition in self.conditions() {
            match subject.matches(condition, self.syntax()) {
                Some(found) if found == condition.negative => return None,
                Some(_) => {}
                None if condition.field == Field::Script => open |= FactSet::SCRIPT,
                None => open |= FactSet::ARGUMENTS,
            }
        }
        Some(open)
    }
}
