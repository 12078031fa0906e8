//! Conditions on a program: which field must match which patterns.

use std::cell::OnceCell;

use super::Pattern;
use super::arguments::{self, Syntax};
use super::script::{self, Script};
use crate::event::Image;

/// Field of an [`Image`] that a condition matches. Cheap ones come first, and are checked first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    /// Name of the process in the kernel, at most 15 bytes.
    Comm,
    /// Path of the script that an interpreter runs, as given or with links resolved; or `-m NAME` for a python module.
    Script,
    /// Path of the executable with links resolved.
    Exe,
    /// First argument, by which the program was called.
    Arg0,
    /// Positional arguments. If an interpreter runs a script, those of the script.
    Args,
    /// Options with their values. If an interpreter runs a script, those of the script.
    Options,
    /// Whole command line: the arguments joined by single spaces.
    Argv,
}

impl Field {
    /// Returns the key of the field in a rule.
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

    /// Returns whether the field comes from the argument vector, which the source may have truncated.
    pub fn is_of_arguments(self) -> bool {
        self >= Field::Arg0
    }
}

/// Test of one field: one of the patterns matches, or, if negative, none does.
#[derive(Clone, Debug)]
pub struct Condition {
    /// Field that the patterns are compared with.
    pub field: Field,
    /// Patterns. For [`Field::Args`] one per positional argument, all of which must match.
    pub any_of: Vec<Pattern>,
    /// Whether none of the patterns may match.
    pub negative: bool,
}

/// Conditions on a program that must all hold.
#[derive(Clone, Debug)]
pub struct Matcher {
    conditions: Vec<Condition>,
    syntax: Syntax,
}

/// Writes the conditions on one line, such as `comm a | b*, not exe /opt/**`.
impl std::fmt::Display for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, condition) in self.conditions.iter().enumerate() {
            let field = condition.field.name();
            let and = if n > 0 { ", " } else { "" };
            let not = if condition.negative { "not " } else { "" };
            write!(f, "{and}{not}{field}")?;
            for (n, pattern) in condition.any_of.iter().enumerate() {
                let is_sequence = n == 0 || condition.field == Field::Args;
                let separator = if is_sequence { " " } else { " | " };
                write!(f, "{separator}{}", pattern.text())?;
            }
        }
        Ok(())
    }
}

impl Matcher {
    /// Creates a matcher with the default syntax of arguments. Conditions may be in any order.
    pub fn new(mut conditions: Vec<Condition>) -> Matcher {
        conditions.sort_by_key(|c| c.field);
        Matcher {
            conditions,
            syntax: Syntax::default(),
        }
    }

    /// Returns the matcher with another syntax of the arguments.
    pub fn with_syntax(self, syntax: Syntax) -> Matcher {
        Matcher { syntax, ..self }
    }

    /// Returns the conditions, the cheapest first.
    pub fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    /// Returns the syntax that separates options from positional arguments.
    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }

    /// Returns whether at least one condition requires a match. The others are negative: they forbid one.
    pub fn is_positive(&self) -> bool {
        self.conditions.iter().any(|condition| !condition.negative)
    }

    /// Returns whether the matcher matches. If arguments or a resolved path are missing, whether it may match with them.
    pub(super) fn is_match(&self, subject: &Subject<'_>) -> bool {
        // A matcher with argument conditions only could match almost every truncated command line, so it does not count.
        let names_program = |c: &Condition| !c.negative && !c.field.is_of_arguments();
        if subject.is_cut && !self.conditions.iter().any(names_program) {
            return false;
        }
        self.conditions.iter().all(|condition| {
            let found = subject.matches(condition, &self.syntax);
            found.is_none_or(|found| found != condition.negative)
        })
    }

    /// Returns whether only an interpreter with a script can match.
    pub(super) fn needs_script(&self) -> bool {
        self.conditions
            .iter()
            .any(|c| c.field == Field::Script && !c.negative)
    }

    /// Returns the only names that can match: comms, or file names for [`Field::Exe`]. `None` if they cannot be listed.
    pub(super) fn names(&self, field: Field) -> Option<impl Iterator<Item = &[u8]>> {
        let listed = |c: &&Condition| {
            c.field == field && !c.negative && c.any_of.iter().all(|p| p.name().is_some())
        };
        let condition = self.conditions.iter().find(listed)?;
        Some(condition.any_of.iter().filter_map(Pattern::name))
    }
}

/// An image that rules are matched against. Derived values are computed once, when first needed.
pub(super) struct Subject<'a> {
    pub(super) image: &'a Image,
    exe: &'a [u8],
    script: OnceCell<Option<Script<'a>>>,
    /// Arguments joined by spaces.
    line: OnceCell<Vec<u8>>,
    /// Whether arguments may be missing at the end, so that conditions on them can be undecided.
    is_cut: bool,
    /// Whether the resolved path of the script is unknown, so that conditions on it can be undecided.
    is_unresolved: bool,
}

impl<'a> Subject<'a> {
    pub(super) fn new(image: &'a Image) -> Subject<'a> {
        // /proc/PID/exe has this suffix after the file was replaced, as by agents that update themselves.
        let exe = image.exe.strip_suffix(b" (deleted)").unwrap_or(&image.exe);
        Subject {
            image,
            exe,
            script: OnceCell::new(),
            line: OnceCell::new(),
            is_cut: false,
            is_unresolved: false,
        }
    }

    /// Returns an image whose last arguments are missing.
    pub(super) fn cut_off(image: &'a Image) -> Subject<'a> {
        Subject {
            is_cut: true,
            ..Subject::new(image)
        }
    }

    /// Returns an image whose script may be a link to any other, unless its resolved path is known. Its last arguments
    /// may be missing, too.
    pub(super) fn unresolved(image: &'a Image) -> Subject<'a> {
        Subject {
            is_cut: image.truncated,
            is_unresolved: image.script.is_empty() && script::path(image).is_some(),
            ..Subject::new(image)
        }
    }

    /// Returns whether some pattern of the condition matches, `None` if that depends on missing arguments or on the
    /// resolved path of the script.
    ///
    /// For an unknown field, the result is the one with which the condition does not hold.
    pub(super) fn matches(&self, condition: &Condition, syntax: &Syntax) -> Option<bool> {
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
                let found = any_of.iter().any(is_match);
                let is_open = self.is_unresolved && *field == Field::Script;
                (found || !is_open).then_some(found)
            }
        }
    }

    /// Returns the arguments after the program's name, or after the script that an interpreter runs.
    fn words<'s>(
        &'s self,
        syntax: &'s Syntax,
    ) -> arguments::Words<'s, impl Iterator<Item = &'s [u8]>> {
        let skipped = self.script().map_or(1, |script| script.at + 1);
        arguments::read(self.image, skipped, self.is_cut, syntax)
    }

    /// Returns the script that the program runs; `None` if it is no interpreter or runs none.
    fn script(&self) -> Option<&Script<'a>> {
        let script = self
            .script
            .get_or_init(|| script::of(self.exe_name(), self.image));
        script.as_ref()
    }

    /// Returns the text of a field, empty if unknown. For `arg0`, `args`, `options` and `argv` that is the whole command
    /// line.
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

    /// Returns the file name of the executable, without ` (deleted)`.
    pub(super) fn exe_name(&self) -> &'a [u8] {
        self.exe.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}

/// Returns whether some pattern matches bytes that begin with `front`, `None` if that depends on what follows.
fn any_match_from(patterns: &[Pattern], front: &[u8]) -> Option<bool> {
    let mut known = Some(false);
    for pattern in patterns {
        match pattern.matches_prefix(front) {
            Some(true) => return Some(true),
            Some(false) => {}
            None => known = None,
        }
    }
    known
}

/// Returns the arguments joined by single spaces.
fn line(image: &Image) -> Vec<u8> {
    // Programs that write a title over their arguments leave NULs at the end.
    let end = image.argv.iter().rposition(|b| *b != 0);
    let argv = &image.argv[..end.map_or(0, |last| last + 1)];
    let spaced = |b: &u8| if *b == 0 { b' ' } else { *b };
    argv.iter().map(spaced).collect()
}
