//! Explains why a rule does not match a program, and which rule comes nearest.

use std::cmp::Reverse;
use std::fmt::{self, Display, Formatter};

use super::matcher::{Condition, Field, Matcher, Subject};
use super::{Action, Pattern, Rule, script};
use crate::event::Image;

/// File names, without extension, that many unrelated scripts have.
const COMMON: [&[u8]; 9] = [
    b"index",
    b"cli",
    b"main",
    b"__main__",
    b"run",
    b"app",
    b"server",
    b"start",
    b"agent",
];

/// Condition of a rule that does not hold for a program.
///
/// Its text follows `whose`, such as `` `exe` does not match /usr/bin/node``.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Key of the condition in a config, such as `script` or `not_options`.
    pub key: String,
    /// Patterns of the condition.
    pub patterns: Vec<String>,
    /// Value that was compared; empty if it is unknown or was the command line, which may contain secrets.
    pub found: Vec<u8>,
    cause: Cause,
    /// How near the rule came, by which rules can be sorted.
    pub nearness: Nearness,
}

/// How near a rule comes to a program: the larger, the nearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nearness {
    /// 0 if the rule has nothing to do with the program, up to 3 if only conditions on its arguments fail.
    program: u8,
    /// Number of conditions that hold, without the negative ones.
    held: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// The program has no such value, or it is unknown.
    Missing,
    /// No pattern matches.
    NoMatch,
    /// A pattern would match if the path were absolute.
    Relative,
    /// This pattern matches, but must not.
    Excluded(String),
}

impl Display for Mismatch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (key, found) = (&self.key, String::from_utf8_lossy(&self.found));
        match &self.cause {
            Cause::Excluded(pattern) => write!(f, "`{key}` excludes {pattern}"),
            Cause::Relative => write!(f, "`{key}` needs an absolute path, not {found}"),
            Cause::Missing if key == "script" => {
                write!(f, "`{key}` matches only interpreters that run a script")
            }
            Cause::Missing => write!(
                f,
                "`{key}` has no value to compare with: it is missing or unknown"
            ),
            Cause::NoMatch if found.is_empty() => {
                write!(f, "`{key}` does not match the command line")
            }
            Cause::NoMatch => write!(f, "`{key}` does not match {found}"),
        }
    }
}

impl Rule {
    /// Returns the condition on the program that does not hold, `None` if the rule matches the program.
    ///
    /// If the rule has several alternatives, this is the condition of the nearest one.
    pub fn mismatch(&self, image: &Image) -> Option<Mismatch> {
        let subject = Subject::new(image);
        let mut best: Option<Mismatch> = None;
        for matcher in &self.matchers {
            let mismatch = matcher.mismatch(&subject)?;
            if best
                .as_ref()
                .is_none_or(|best| mismatch.nearness > best.nearness)
            {
                best = Some(mismatch);
            }
        }
        best
    }
}

/// Returns the agent rule that comes nearest to one of the programs, with the place of that program. `None` if no rule
/// has anything to do with them.
///
/// Without a mismatch, the rule matches, and may be a server's.
pub fn nearest<'r>(
    rules: &'r [Rule],
    images: &[&Image],
) -> Option<(usize, &'r Rule, Option<Mismatch>)> {
    let rules = rules.iter().filter(|rule| rule.action.opens_session());
    let pairs = rules.flat_map(|rule| {
        let all = images.iter().enumerate();
        all.map(move |(at, image)| (at, rule, rule.mismatch(image)))
    });
    let nearness = |mismatch: &Option<Mismatch>| match mismatch {
        Some(mismatch) => mismatch.nearness,
        None => Nearness {
            program: u8::MAX,
            held: 0,
        },
    };
    let near = pairs.filter(|(_, rule, mismatch)| {
        let is_agent = rule.action == Action::Agent;
        nearness(mismatch).program > 0 && (is_agent || mismatch.is_none())
    });
    // The first of several equal ones.
    near.min_by_key(|(at, _, mismatch)| (Reverse(nearness(mismatch)), *at))
}

impl Matcher {
    /// Returns the first condition that does not hold. `None` if all hold.
    fn mismatch(&self, subject: &Subject<'_>) -> Option<Mismatch> {
        let holds = |c: &&Condition| subject.matches(c, self.syntax()) != Some(c.negative);
        let (held, failed): (Vec<_>, Vec<_>) = self.conditions().iter().partition(holds);
        let first = *failed.first()?;
        let names_it = |c: &&&Condition| subject.is_named_by(c);
        let wrong_program = failed.iter().filter(|c| c.is_of_program());
        let program = match wrong_program.clone().count() {
            _ if !held.iter().chain(&failed).any(|c| subject.is_named_by(c)) => 0,
            0 => 3,
            wrong if wrong == failed.len() && wrong_program.filter(names_it).count() == wrong => 2,
            _ => 1,
        };
        let held = held.iter().filter(|c| !c.negative).count();
        let not = if first.negative { "not_" } else { "" };
        Some(Mismatch {
            key: format!("{not}{}", first.field.name()),
            patterns: first.any_of.iter().map(|p| p.text().into()).collect(),
            found: subject.path(first.field).to_vec(),
            cause: subject.cause(first, self),
            nearness: Nearness { program, held },
        })
    }
}

impl Condition {
    /// Returns whether the condition says which program it is, not how it was called.
    fn is_of_program(&self) -> bool {
        !self.negative && !self.field.is_of_arguments()
    }
}

impl Subject<'_> {
    /// Returns the name or path that a field has, resolved if known. Empty for the arguments.
    fn path(&self, field: Field) -> &[u8] {
        match field {
            Field::Script if !self.image.script.is_empty() => &self.image.script,
            field if field.is_of_arguments() => b"",
            field => self.field(field),
        }
    }

    /// Returns whether a pattern has the same file name as the program, and no common one.
    fn is_named_by(&self, condition: &Condition) -> bool {
        let last = |path: &[u8]| {
            path.rsplit(|b| *b == b'/')
                .next()
                .unwrap_or_default()
                .to_vec()
        };
        let given = [self.path(condition.field), self.field(condition.field)].map(last);
        let is_distinctive = |name: &[u8]| {
            let stem = name.split(|b| *b == b'.').next().unwrap_or_default();
            !COMMON.contains(&stem) && script::interpreter(name).is_none()
        };
        let is_it = |pattern: &Pattern| {
            let name = last(pattern.text().as_bytes());
            !name.is_empty() && given.contains(&name) && is_distinctive(&name)
        };
        condition.is_of_program() && condition.any_of.iter().any(is_it)
    }

    /// Returns why a condition does not hold.
    fn cause(&self, condition: &Condition, matcher: &Matcher) -> Cause {
        let found = self.path(condition.field);
        if condition.negative {
            let matches = |pattern: &&Pattern| {
                let one = Condition {
                    any_of: vec![(*pattern).clone()],
                    ..condition.clone()
                };
                self.matches(&one, matcher.syntax()) == Some(true)
            };
            let one = condition.any_of.iter().find(matches);
            return one.map_or(Cause::Missing, |pattern| {
                Cause::Excluded(pattern.text().into())
            });
        }
        let of_arguments = condition.field.is_of_arguments();
        if self.field(condition.field).is_empty() {
            return Cause::Missing;
        }
        let absolute = [b"/", found.strip_prefix(b"./").unwrap_or(found)].concat();
        let would_match = condition.any_of.iter().any(|p| p.is_match(&absolute));
        match !of_arguments && !found.starts_with(b"/") && would_match {
            true => Cause::Relative,
            false => Cause::NoMatch,
        }
    }
}

#[cfg(test)]
mod tests;
