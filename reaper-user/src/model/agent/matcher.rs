//! What of an image has to look how.

use std::cell::OnceCell;

use super::{Pattern, script};
use crate::model::event::Image;

/// What of an [`Image`] a condition looks at. Cheap ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    Comm,
    /// The path of the script that an interpreter runs, as it was given to it.
    Script,
    Exe,
    /// The whole command line: the arguments joined by single spaces.
    Argv,
}

/// One test of one field: some pattern matches, or, if negative, none does.
#[derive(Clone, Debug)]
pub struct Condition {
    pub field: Field,
    pub any_of: Vec<Pattern>,
    pub negative: bool,
}

/// A conjunction of conditions.
#[derive(Clone, Debug)]
pub struct Matcher(Vec<Condition>);

/// In short: what of an image has to look how.
impl std::fmt::Display for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, condition) in self.0.iter().enumerate() {
            let field = match condition.field {
                Field::Comm => "comm",
                Field::Script => "script",
                Field::Exe => "exe",
                Field::Argv => "argv",
            };
            let and = if n > 0 { ", " } else { "" };
            let not = if condition.negative { "not " } else { "" };
            write!(f, "{and}{not}{field}")?;
            for (n, pattern) in condition.any_of.iter().enumerate() {
                let or = if n > 0 { " | " } else { " " };
                write!(f, "{or}{}", pattern.text())?;
            }
        }
        Ok(())
    }
}

impl Matcher {
    pub fn new(mut conditions: Vec<Condition>) -> Matcher {
        conditions.sort_by_key(|c| c.field);
        Matcher(conditions)
    }

    pub fn conditions(&self) -> &[Condition] {
        &self.0
    }

    /// Whether it can never match: it denies what it asks for, or wants a script of what runs none.
    pub fn is_impossible(&self) -> bool {
        let denied = |condition: &Condition| {
            let not = self
                .0
                .iter()
                .filter(|other| other.negative && other.field == condition.field);
            let not = || not.clone().flat_map(|other| &other.any_of);
            let is_denied = |p: &Pattern| not().any(|other| other.text() == p.text());
            !condition.negative && condition.any_of.iter().all(is_denied)
        };
        let mut programs = self.names(Field::Exe).into_iter().flatten().peekable();
        let runs_none = programs.peek().is_some() && !programs.any(script::is_interpreter);
        self.0.iter().any(denied) || self.needs_script() && runs_none
    }

    /// Whether it says what a program is, not only what it is not.
    pub fn is_positive(&self) -> bool {
        self.0.iter().any(|condition| !condition.negative)
    }

    pub(super) fn is_match(&self, subject: &Subject<'_>) -> bool {
        // Of what asks for a command line alone there is nothing to go by.
        let named = |c: &Condition| !c.negative && c.field != Field::Argv;
        if subject.line_is_open && !self.0.iter().any(named) {
            return false;
        }
        self.0.iter().all(|condition| {
            if subject.line_is_open && condition.field == Field::Argv {
                return true;
            }
            let bytes = subject.field(condition.field);
            !bytes.is_empty()
                && condition.any_of.iter().any(|p| p.is_match(bytes)) != condition.negative
        })
    }

    /// Whether it holds for what an interpreter runs only.
    pub(super) fn needs_script(&self) -> bool {
        self.0
            .iter()
            .any(|c| c.field == Field::Script && !c.negative)
    }

    /// The names of `field` outside of which this never matches, if they can be listed.
    pub(super) fn names(&self, field: Field) -> Option<impl Iterator<Item = &[u8]>> {
        let listed = |c: &&Condition| {
            c.field == field && !c.negative && c.any_of.iter().all(|p| p.name().is_some())
        };
        let condition = self.0.iter().find(listed)?;
        Some(condition.any_of.iter().filter_map(Pattern::name))
    }
}

/// An image while it is being asked about: what has to be worked out for it is worked out once.
pub(super) struct Subject<'a> {
    image: &'a Image,
    exe: &'a [u8],
    script: OnceCell<&'a [u8]>,
    line: OnceCell<Vec<u8>>,
    /// The command line is cut, and its end might say anything.
    line_is_open: bool,
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
            line_is_open: false,
        }
    }

    /// One whose command line goes on as nobody knows.
    pub(super) fn cut_off(image: &'a Image) -> Subject<'a> {
        Subject {
            line_is_open: true,
            ..Subject::new(image)
        }
    }

    pub(super) fn field(&self, field: Field) -> &[u8] {
        match field {
            Field::Comm => &self.image.comm,
            Field::Exe => self.exe,
            Field::Script => self
                .script
                .get_or_init(|| script::of(self.exe_name(), self.image)),
            Field::Argv => self.line.get_or_init(|| {
                // Programs that overwrite their title leave NULs at the end.
                let end = self
                    .image
                    .argv
                    .iter()
                    .rposition(|b| *b != 0)
                    .map_or(0, |last| last + 1);
                self.image.argv[..end]
                    .iter()
                    .map(|b| if *b == 0 { b' ' } else { *b })
                    .collect()
            }),
        }
    }

    pub(super) fn exe_name(&self) -> &'a [u8] {
        self.exe.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}
