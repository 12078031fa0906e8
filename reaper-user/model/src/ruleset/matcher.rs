//! What of an image has to look how.

use std::cell::OnceCell;

use super::Pattern;
use super::arguments::{self, Syntax};
use super::script::{self, Script};
use crate::event::Image;

/// What of an [`Image`] a condition looks at. Cheap ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    Comm,
    /// The path of the script that an interpreter runs, as it was given to it and with links resolved; or `-m NAME` of a
    /// python module.
    Script,
    Exe,
    /// The first argument: the name that the program was called by.
    Arg0,
    /// The positional arguments, of a script where an interpreter runs one.
    Args,
    /// The options, each with its value, of a script where an interpreter runs one.
    Options,
    /// The whole command line: the arguments joined by single spaces.
    Argv,
}

impl Field {
    /// Name of the field in a rule.
    pub fn name(self) -> &'static str {
        match self {
            Field::Comm => "comm",
            Field::Script => "script",
            Field::Exe => "exe",
            Field::Arg0 => "arg0",
            Field::Args => "args",
            Field::Options => "options",
            Field::Argv => "argv",
        }
    }

    /// Whether it is read from the argument vector, of which the source may have cut off the end.
    pub fn is_of_arguments(self) -> bool {
        self >= Field::Arg0
    }
}

/// One test of one field: some pattern matches, or, if negative, none does.
#[derive(Clone, Debug)]
pub struct Condition {
    pub field: Field,
    /// For [`Field::Args`] one pattern per positional argument, all of which must match.
    pub any_of: Vec<Pattern>,
    pub negative: bool,
}

/// A conjunction of conditions.
#[derive(Clone, Debug)]
pub struct Matcher {
    conditions: Vec<Condition>,
    syntax: Syntax,
}

/// In short: what of an image has to look how.
impl std::fmt::Display for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, condition) in self.conditions.iter().enumerate() {
            let field = condition.field.name();
            let and = if n > 0 { ", " } else { "" };
            let not = if condition.negative { "not " } else { "" };
            write!(f, "{and}{not}{field}")?;
            for (n, pattern) in condition.any_of.iter().enumerate() {
                let all = n == 0 || condition.field == Field::Args;
                let or = if all { " " } else { " | " };
                write!(f, "{or}{}", pattern.text())?;
            }
        }
        Ok(())
    }
}

impl Matcher {
    pub fn new(mut conditions: Vec<Condition>) -> Matcher {
        conditions.sort_by_key(|c| c.field);
        Matcher {
            conditions,
            syntax: Syntax::default(),
        }
    }

    /// The same matcher with another way to read arguments.
    pub fn with_syntax(self, syntax: Syntax) -> Matcher {
        Matcher { syntax, ..self }
    }

    pub fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }

    /// Whether it can never match: it denies what it asks for, or wants a script of what runs none.
    pub fn is_impossible(&self) -> bool {
        let denied = |condition: &Condition| {
            let not = |other: &&Condition| other.negative && other.field == condition.field;
            let mut not = self.conditions.iter().filter(not);
            let is_denied = if condition.field == Field::Args {
                not.any(|other| begins_with(condition, other))
            } else {
                let not: Vec<_> = not
                    .flat_map(|other| &other.any_of)
                    .map(Pattern::text)
                    .collect();
                condition.any_of.iter().all(|p| not.contains(&p.text()))
            };
            !condition.negative && is_denied
        };
        let mut programs = self.names(Field::Exe).into_iter().flatten().peekable();
        let runs_none = programs.peek().is_some() && !programs.any(script::is_interpreter);
        self.conditions.iter().any(denied) || self.needs_script() && runs_none
    }

    /// Whether it says what a program is, not only what it is not.
    pub fn is_positive(&self) -> bool {
        self.conditions.iter().any(|condition| !condition.negative)
    }

    pub(super) fn is_match(&self, subject: &Subject<'_>) -> bool {
        // A matcher on arguments alone has nothing left to go by.
        let named = |c: &Condition| !c.negative && !c.field.is_of_arguments();
        if subject.is_cut && !self.conditions.iter().any(named) {
            return false;
        }
        self.conditions.iter().all(|condition| {
            let found = subject.matches(condition, &self.syntax);
            found.is_none_or(|found| found != condition.negative)
        })
    }

    /// Whether it holds for what an interpreter runs only.
    pub(super) fn needs_script(&self) -> bool {
        self.conditions
            .iter()
            .any(|c| c.field == Field::Script && !c.negative)
    }

    /// The names of `field` outside of which this never matches, if they can be listed.
    pub(super) fn names(&self, field: Field) -> Option<impl Iterator<Item = &[u8]>> {
        let listed = |c: &&Condition| {
            c.field == field && !c.negative && c.any_of.iter().all(|p| p.name().is_some())
        };
        let condition = self.conditions.iter().find(listed)?;
        Some(condition.any_of.iter().filter_map(Pattern::name))
    }
}

/// Whether the positional arguments that one condition asks for begin with those of another.
fn begins_with(one: &Condition, other: &Condition) -> bool {
    let pairs = || one.any_of.iter().zip(&other.any_of);
    one.any_of.len() >= other.any_of.len() && pairs().all(|(a, b)| a.text() == b.text())
}

/// An image while it is being asked about: what has to be worked out for it is worked out once.
pub(super) struct Subject<'a> {
    image: &'a Image,
    exe: &'a [u8],
    script: OnceCell<Option<Script<'a>>>,
    line: OnceCell<Vec<u8>>,
    /// Whether the missing end of a truncated argument vector counts as unknown.
    is_cut: bool,
}

impl<'a> Subject<'a> {
    pub(super) fn new(image: &'a Image) -> Subject<'a> {
        // What /proc appends once the file has been replaced, as agents that update themselves do.
        let exe = image.exe.strip_suffix(b" (deleted)").unwrap_or(&image.exe);
        Subject {
            image,
            exe,
            script: OnceCell::new(),
            line: OnceCell::new(),
            is_cut: false,
        }
    }

    /// An image whose arguments go on in a way that is not known.
    pub(super) fn cut_off(image: &'a Image) -> Subject<'a> {
        Subject {
            is_cut: true,
            ..Subject::new(image)
        }
    }

    /// Whether some pattern of the condition matches. A field that is not known fulfils no condition. Returns
    /// `None` if the missing arguments decide.
    fn matches(&self, condition: &Condition, syntax: &Syntax) -> Option<bool> {
        let Condition {
            field,
            any_of,
            negative,
        } = condition;
        if field.is_of_arguments() && self.image.argv.is_empty() {
            return (!self.is_cut).then_some(*negative);
        }
        match field {
            Field::Arg0 => {
                let mut args = self.image.args();
                let arg0 = args.next().unwrap_or_default();
                if self.is_cut && args.next().is_none() {
                    return any_match_from(any_of, arg0);
                }
                Some(any_of.iter().any(|p| p.is_match(arg0)))
            }
            Field::Args => self.words(syntax).begin_with(any_of),
            Field::Options => self.words(syntax).have_option(any_of),
            Field::Argv if self.is_cut => any_match_from(any_of, self.field(*field)),
            Field::Comm | Field::Exe | Field::Script | Field::Argv => {
                let bytes = self.field(*field);
                if bytes.is_empty() {
                    return Some(*negative);
                }
                let resolved = match field {
                    Field::Script => &self.image.script[..],
                    _ => b"",
                };
                let is_resolved = |p: &Pattern| !resolved.is_empty() && p.is_match(resolved);
                let is_match = |p: &Pattern| p.is_match(bytes) || is_resolved(p);
                Some(any_of.iter().any(is_match))
            }
        }
    }

    /// The arguments after the program's name, or after the script that an interpreter runs.
    fn words<'s>(
        &'s self,
        syntax: &'s Syntax,
    ) -> arguments::Words<'s, impl Iterator<Item = &'s [u8]>> {
        let skipped = self.script().map_or(1, |script| script.at + 1);
        arguments::read(self.image, skipped, self.is_cut, syntax)
    }

    fn script(&self) -> Option<&Script<'a>> {
        let script = self
            .script
            .get_or_init(|| script::of(self.exe_name(), self.image));
        script.as_ref()
    }

    /// The bytes of a field that is one string; empty if unknown.
    pub(super) fn field(&self, field: Field) -> &[u8] {
        match field {
            Field::Comm => &self.image.comm,
            Field::Exe => self.exe,
            Field::Script => self.script().map_or(b"", |script| &script.name),
            Field::Arg0 | Field::Args | Field::Options | Field::Argv => {
                self.line.get_or_init(|| line(self.image))
            }
        }
    }

    pub(super) fn exe_name(&self) -> &'a [u8] {
        self.exe.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}

/// Whether some pattern matches bytes that begin with `front`. Returns `None` if what follows decides.
fn any_match_from(patterns: &[Pattern], front: &[u8]) -> Option<bool> {
    let mut known = Some(false);
    for pattern in patterns {
        match pattern.is_match_from(front) {
            Some(true) => return Some(true),
            Some(false) => {}
            None => known = None,
        }
    }
    known
}

/// The arguments joined by single spaces.
fn line(image: &Image) -> Vec<u8> {
    // Programs that overwrite their title leave NULs at the end.
    let end = image.argv.iter().rposition(|b| *b != 0);
    let argv = &image.argv[..end.map_or(0, |last| last + 1)];
    let spaced = |b: &u8| if *b == 0 { b' ' } else { *b };
    argv.iter().map(spaced).collect()
}
