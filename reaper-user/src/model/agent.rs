//! Which programs are agents, where membership stops, and what is kept: rules over comm, exe and argv.
//!
//! Pure: a [`Ruleset`] is compiled once and then only asked. Every exec on the host passes through
//! [`Ruleset::classify`], so the usual answer, "no rule", allocates nothing: two hash look-ups, by comm
//! and by the file name of the executable, find the few rules that can match at all, and the command
//! line is joined only if one of those has got that far.
//!
//! # Order
//! Boundaries are asked before agents, because an agent's own shared daemon runs the agent's program:
//! `codex app-server` is a boundary and no agent. Within each kind the first match in the order given
//! wins (the user's rules come before the built-in ones). Keeps are another question, asked of a member
//! that is about to be reaped.
//!
//! # What is not known
//! A field that is empty is not known and fulfils no condition on it, not even a negative one.

mod index;
mod pattern;
mod script;

#[cfg(test)]
mod tests;

use std::cell::OnceCell;
use std::sync::Arc;

use crate::model::event::{Image, Uids};
use index::Index;
pub use pattern::{COMM_MAX, Pattern, PatternError};

/// What a rule says of the processes that it matches. In the order in which they are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Membership of a session stops here: neither this process nor its descendants are members.
    Boundary,
    /// The root of a session.
    Agent,
    /// A member like any other, but not reaped.
    Keep,
}

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

/// A named rule: it matches if one of its matchers does.
#[derive(Clone, Debug)]
pub struct Rule {
    pub name: Arc<str>,
    pub action: Action,
    /// Alternatives. None at all: every image matches (only with `other_uid`).
    pub matchers: Vec<Matcher>,
    /// Holds only for members that run under another uid than the root of their session.
    pub other_uid: bool,
}

/// A rule of one [`Ruleset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(u32);

/// What a program is to the tree of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Agent(RuleId),
    Boundary(RuleId),
    /// No rule: it is what its parent is.
    Plain,
}

/// All rules, compiled.
#[derive(Clone, Default)]
pub struct Ruleset {
    /// Sorted by action, and within one in the order given.
    rules: Vec<Rule>,
    boundaries: Index,
    agents: Index,
    keeps: Index,
}

impl Ruleset {
    /// Of rules in the order in which they are to be asked.
    pub fn new(mut rules: Vec<Rule>) -> Ruleset {
        rules.sort_by_key(|rule| rule.action);
        let of = |action| Index::new(&rules, action);
        let (boundaries, agents, keeps) =
            (of(Action::Boundary), of(Action::Agent), of(Action::Keep));
        Ruleset {
            rules,
            boundaries,
            agents,
            keeps,
        }
    }

    /// What a program is. Asked at every exec.
    pub fn classify(&self, image: &Image) -> Class {
        let subject = Subject::new(image);
        if let Some(id) = self.boundaries.first(&self.rules, &subject, false) {
            Class::Boundary(id)
        } else if let Some(id) = self.agents.first(&self.rules, &subject, false) {
            Class::Agent(id)
        } else {
            Class::Plain
        }
    }

    /// The agent rule that matches, whether or not a boundary does too.
    pub fn agent(&self, image: &Image) -> Option<RuleId> {
        self.agents.first(&self.rules, &Subject::new(image), false)
    }

    /// The boundary rule that matches.
    pub fn boundary(&self, image: &Image) -> Option<RuleId> {
        self.boundaries
            .first(&self.rules, &Subject::new(image), false)
    }

    /// The rule that keeps a member of a session whose root runs under the uids `root`. Another real
    /// or another effective uid is another uid.
    pub fn keep(&self, image: &Image, uids: Uids, root: Uids) -> Option<RuleId> {
        self.keeps
            .first(&self.rules, &Subject::new(image), uids != root)
    }

    /// A boundary or a keep that would match if the part of the command line said so that was cut off:
    /// all else that it asks for holds.
    pub fn might_spare(&self, image: &Image) -> Option<RuleId> {
        if !image.truncated {
            return None;
        }
        let subject = Subject {
            line_is_open: true,
            ..Subject::new(image)
        };
        let boundary = self.boundaries.first(&self.rules, &subject, false);
        boundary.or_else(|| self.keeps.first(&self.rules, &subject, false))
    }

    /// # Panics
    /// If the id is of a larger set.
    pub fn rule(&self, id: RuleId) -> &Rule {
        &self.rules[id.0 as usize]
    }

    pub fn name(&self, id: RuleId) -> &Arc<str> {
        &self.rule(id).name
    }

    /// All rules, in the order in which they are asked.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }
}

impl std::fmt::Debug for Ruleset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.rules).finish()
    }
}

impl Matcher {
    pub fn new(mut conditions: Vec<Condition>) -> Matcher {
        conditions.sort_by_key(|c| c.field);
        Matcher(conditions)
    }

    /// Whether it says what a program is, not only what it is not.
    pub fn is_positive(&self) -> bool {
        self.0.iter().any(|condition| !condition.negative)
    }

    fn is_match(&self, subject: &Subject<'_>) -> bool {
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
    fn needs_script(&self) -> bool {
        self.0
            .iter()
            .any(|c| c.field == Field::Script && !c.negative)
    }

    /// The names of `field` outside of which this never matches, if they can be listed.
    fn names(&self, field: Field) -> Option<impl Iterator<Item = &[u8]>> {
        let listed = |c: &&Condition| {
            c.field == field && !c.negative && c.any_of.iter().all(|p| p.name().is_some())
        };
        let condition = self.0.iter().find(listed)?;
        Some(condition.any_of.iter().filter_map(Pattern::name))
    }
}

/// An image while it is being asked about: what has to be worked out for it is worked out once.
struct Subject<'a> {
    image: &'a Image,
    exe: &'a [u8],
    script: OnceCell<&'a [u8]>,
    line: OnceCell<Vec<u8>>,
    /// The command line is cut, and its end might say anything.
    line_is_open: bool,
}

impl<'a> Subject<'a> {
    fn new(image: &'a Image) -> Subject<'a> {
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

    fn field(&self, field: Field) -> &[u8] {
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

    fn exe_name(&self) -> &'a [u8] {
        self.exe.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}
