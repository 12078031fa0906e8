//! Which programs are agents, where membership stops, and what is kept, reaped and reported: rules over comm,
//! exe and argv, and over what else is known of a process.
//!
//! Pure: a [`Ruleset`] is compiled once and then only asked. Every exec on the host passes through
//! [`Ruleset::classify`], so the usual answer, "no rule", allocates nothing: two hash look-ups, by comm
//! and by the file name of the executable, find the few rules that can match at all, and the arguments
//! are read only if one of those has got that far.
//!
//! # Order
//! Boundaries are asked before servers and servers before agents, because an agent's server runs the agent's program:
//! `codex app-server` is a server and no agent. Within each kind the first match in the order given
//! wins (the user's rules come before the built-in ones). Those that keep, reap or report are another
//! question, asked of members, and in one order among themselves: [`Ruleset::matching_member_rules`] finds those whose
//! program it is, and the policy asks for the rest.
//!
//! # What is not known
//! A field that is empty is not known and fulfils no condition on it, not even a negative one.

mod arguments;
mod index;
mod matcher;
mod names;
mod pattern;
mod script;
mod when;

#[cfg(test)]
mod tests;

use std::sync::{Arc, LazyLock};

use serde::Deserialize;

use crate::conversation::ConversationSource;
use crate::event::{ExitStatus, Image};
use crate::facts::FactSet;
pub use arguments::Syntax;
use index::Index;
use matcher::Subject;
pub use matcher::{Condition, Field, Matcher};
pub use names::NameTable;
pub use pattern::{COMM_MAX, Pattern, PatternError};
pub use script::path as script_path;
pub(crate) use when::LONGEST;
pub use when::{SessionIs, UidIs, When};

/// Most marks, the first of which is `KEEP_MARKER`: a fact has a bit for each.
pub const MARKERS_MAX: usize = 64;

/// What users put in the environment of what is to be kept.
static KEEP_MARKER: LazyLock<Pattern> = LazyLock::new(|| Pattern::exactly("REAPER_KEEP=1"));

/// What tmux, screen and zellij put in the environment of what runs below them.
static MULTIPLEXER_MARKERS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let marks = ["TMUX=*", "STY=*", "ZELLIJ=*"];
    marks
        .iter()
        .filter_map(|mark| Pattern::marker(mark).ok())
        .collect()
});

/// What a rule says of the processes that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Membership of a session stops here: neither this process nor its descendants are members.
    Boundary,
    /// An agent's server: the root of a session that is nested in no other, whatever started it.
    #[serde(skip)]
    Server,
    /// The root of a session.
    #[serde(skip)]
    Agent,
    /// A member like any other, but not reaped.
    Keep,
    /// It is reaped, also under a living agent.
    Reap,
    /// It is kept, and a person should look at it.
    Report,
}

impl Action {
    pub fn name(self) -> &'static str {
        match self {
            Action::Boundary => "boundary",
            Action::Server => "server",
            Action::Agent => "agent",
            Action::Keep => "keep",
            Action::Reap => "reap",
            Action::Report => "report",
        }
    }

    /// Whether a process that matches is the root of a session.
    pub fn opens_session(self) -> bool {
        matches!(self, Action::Agent | Action::Server)
    }

    /// Whether it looks at the program alone, and not at a member of a session.
    pub fn is_of_program(self) -> bool {
        self.rank() != JUDGING
    }

    /// Rules of one rank are asked together, in the order given.
    fn rank(self) -> u8 {
        match self {
            Action::Boundary => 0,
            Action::Server => 1,
            Action::Agent => 2,
            Action::Keep | Action::Reap | Action::Report => JUDGING,
        }
    }
}

/// What the root of a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionKind {
    Agent,
    /// An agent's server, which outlives the process that started it.
    Server,
}

impl SessionKind {
    /// Name in the event stream and in the API.
    pub fn name(self) -> &'static str {
        match self {
            SessionKind::Agent => "agent",
            SessionKind::Server => "server",
        }
    }

    pub fn of(action: Action) -> SessionKind {
        match action {
            Action::Server => SessionKind::Server,
            _ => SessionKind::Agent,
        }
    }
}

/// Rank of the rules that are asked about members.
const JUDGING: u8 = 3;

/// A named rule: it holds if one of its matchers does, and all that it asks for besides.
#[derive(Clone, Debug)]
pub struct Rule {
    pub name: Arc<str>,
    pub action: Action,
    /// Alternatives. None at all: every image matches.
    pub matchers: Vec<Matcher>,
    /// Empty for agents, servers and boundaries.
    pub when: When,
    /// Nanoseconds from when a member became due (or was orphaned under a living agent, or began, if neither)
    /// until the action is taken; it is kept until then. 0 for agents, servers and boundaries.
    pub after: u64,
    /// Of agents that can leave a conversation to another process: where its id is found.
    pub conversation: Option<Arc<ConversationSource>>,
}

impl Rule {
    /// A rule that looks at the program alone.
    pub fn new(name: &str, action: Action, matchers: Vec<Matcher>) -> Rule {
        Rule {
            name: name.into(),
            action,
            matchers,
            when: When::default(),
            after: 0,
            conversation: None,
        }
    }

    /// Whether it can save a member that is due, for a while at least.
    pub fn may_keep(&self) -> bool {
        let spares = match self.action {
            Action::Keep | Action::Report => true,
            Action::Reap => self.after > 0,
            Action::Boundary | Action::Server | Action::Agent => false,
        };
        spares && self.when.is_of(false)
    }

    /// Whether the members that it keeps need their relatives for as long: those with a delay before they are reaped, and
    /// those that others may be connected to.
    pub fn keeps_relatives(&self) -> bool {
        self.may_keep() && (self.action == Action::Reap || self.when.listening == Some(true))
    }
}

/// A rule of one [`Ruleset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(u32);

/// What a program is to the tree of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Agent(RuleId),
    Server(RuleId),
    Boundary(RuleId),
    /// No rule: it is what its parent is.
    Plain,
}

/// What the rules say of a program by what was read of it after its exec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramMatch {
    /// The program as the model has it, with the beginning of the command line.
    pub image: Arc<Image>,
    pub class: Class,
    /// See [`Ruleset::matching_member_rules`].
    pub member_rules: Arc<[RuleId]>,
}

/// All rules, compiled.
#[derive(Clone, Default)]
pub struct Ruleset {
    /// Sorted by rank, and within one in the order given.
    rules: Vec<Rule>,
    boundaries: Index,
    servers: Index,
    agents: Index,
    judging: Index,
    /// Sessions of the rules that hold relatives.
    holding: Vec<SessionIs>,
    /// Those of `judging` that look at no program: all that most programs have.
    bare: Arc<[RuleId]>,
    /// See [`Ruleset::marker_patterns`].
    marks: Vec<Pattern>,
    multiplexer_bits: u64,
    honor_keep: bool,
}

impl Ruleset {
    /// Of rules in the order in which they are to be asked.
    pub fn new(mut rules: Vec<Rule>) -> Ruleset {
        rules.sort_by_key(|rule| rule.action.rank());
        let mut marks = vec![KEEP_MARKER.clone()];
        for rule in &mut rules {
            rule.when.marker_bits = bits(&mut marks, &rule.when.markers);
        }
        let mut multiplexer_bits = 0;
        if rules.iter().any(|rule| rule.when.multiplexed.is_some()) {
            multiplexer_bits = bits(&mut marks, &MULTIPLEXER_MARKERS);
        }
        let of = |rank| Index::new(&rules, rank);
        let (boundaries, servers, agents, judging) = (of(0), of(1), of(2), of(JUDGING));
        let holding = rules.iter().filter(|rule| rule.keeps_relatives());
        Ruleset {
            holding: holding.map(|rule| rule.when.session).collect(),
            boundaries,
            servers,
            agents,
            bare: judging.bare().collect(),
            judging,
            rules,
            marks,
            multiplexer_bits,
            honor_keep: false,
        }
    }

    /// The same, and whether what has `REAPER_KEEP=1` in its environment is kept, by mark 0.
    pub fn honoring_keep(mut self, honor_keep: bool) -> Ruleset {
        self.honor_keep = honor_keep;
        self
    }

    /// Whether mark 0 keeps.
    pub fn honors_keep(&self) -> bool {
        self.honor_keep
    }

    /// The marks that rules ask for: patterns over `NAME=value`, one for each bit of
    /// [`Facts::markers`](super::facts::Facts::markers). The first is `REAPER_KEEP=1`.
    pub fn marker_patterns(&self) -> &[Pattern] {
        &self.marks
    }

    /// Returns where agents leave the ids of their conversations, by the rules that say so.
    pub fn conversations(&self) -> Vec<Arc<ConversationSource>> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| rule.conversation.clone()).collect()
    }

    /// Whether `REAPER_KEEP=1` is all that rules ask of an environment.
    pub fn needs_only_keep_marker(&self) -> bool {
        self.marks.len() <= 1
    }

    /// Marks of which one is there below tmux, screen or zellij, if there is a rule that asks.
    pub fn multiplexer_bits(&self) -> u64 {
        self.multiplexer_bits
    }

    /// Which facts are worth reading before anything is due, since a rule will ask for them and they change
    /// with the program only.
    pub fn facts_to_prefetch(&self) -> FactSet {
        let mut needs = FactSet::NONE;
        if self.honor_keep {
            needs |= FactSet::MARKERS;
        }
        for rule in self.rules.iter().filter(|rule| rule.may_keep()) {
            let when = &rule.when;
            if when.marker_bits != 0 || when.multiplexed.is_some() {
                needs |= FactSet::MARKERS;
            }
            if when.own_unit.is_some() || !when.units.is_empty() {
                needs |= FactSet::UNIT;
            }
        }
        needs
    }

    /// Whether there is a rule that may hold relatives in a session whose root has ended so.
    pub fn may_keep_relatives(&self, ended: ExitStatus) -> bool {
        let may = |session: &SessionIs| session.holds(Some(ended)) != Some(false);
        self.holding.iter().any(may)
    }

    /// Whether there is a rule that may say something of members of a living agent: of its orphans, or of the
    /// others.
    pub fn has_rules_for_living(&self, orphans: bool) -> bool {
        let said = |rule: &&Rule| rule.action.rank() == JUDGING && rule.action != Action::Keep;
        let mut said = self.rules.iter().filter(said);
        said.any(|rule| {
            let when = &rule.when;
            !when.is_of_root() && when.is_of(true) && when.orphan.is_none_or(|of| of == orphans)
        })
    }

    /// What a program is. Asked at every exec.
    pub fn classify(&self, image: &Image) -> Class {
        let subject = Subject::new(image);
        if let Some(id) = self.boundaries.first(&self.rules, &subject) {
            Class::Boundary(id)
        } else if let Some(id) = self.servers.first(&self.rules, &subject) {
            Class::Server(id)
        } else if let Some(id) = self.agents.first(&self.rules, &subject) {
            Class::Agent(id)
        } else {
            Class::Plain
        }
    }

    /// The agent rule that matches, whether or not a boundary or a server does too.
    pub fn agent(&self, image: &Image) -> Option<RuleId> {
        self.agents.first(&self.rules, &Subject::new(image))
    }

    /// Returns the boundary or server that matches: a process of this program is no member of the session above it.
    pub fn leaves_session(&self, image: &Image) -> Option<RuleId> {
        match self.classify(image) {
            Class::Boundary(id) | Class::Server(id) => Some(id),
            Class::Agent(_) | Class::Plain => None,
        }
    }

    /// The rules that keep, reap or report programs like this one, as far as that is a question of the program,
    /// in the order in which they are to be asked.
    pub fn matching_member_rules(&self, image: &Image) -> Arc<[RuleId]> {
        let found = self.judging.all(&self.rules, &Subject::new(image));
        if found.is_empty() {
            return Arc::clone(&self.bare);
        }
        let mut all: Vec<RuleId> = self.bare.iter().copied().chain(found).collect();
        all.sort_unstable();
        all.dedup();
        all.into()
    }

    /// A boundary, a server, or a rule that may spare, that would match if the part of the command line said so that was
    /// cut off: all else that it asks of the program holds. `judging` are those that match anyway.
    pub fn unread_keep(&self, image: &Image, judging: &[RuleId]) -> Option<RuleId> {
        if !image.truncated {
            return None;
        }
        let subject = Subject::cut_off(image);
        let leaves = [&self.boundaries, &self.servers];
        let leaves = leaves
            .iter()
            .find_map(|kind| kind.first(&self.rules, &subject));
        let spares = |id: &RuleId| self.rule(*id).may_keep() && !judging.contains(id);
        let all = || self.judging.all(&self.rules, &subject);
        leaves.or_else(|| all().into_iter().filter(spares).min())
    }

    /// Returns what the rules say of a program with this whole command line.
    pub fn matched(&self, image: &Arc<Image>, argv: Vec<u8>) -> ProgramMatch {
        let whole = Image {
            argv,
            truncated: false,
            ..Image::clone(image)
        };
        self.matched_as(image, &whole)
    }

    /// Returns what the rules say of an interpreter whose script has this absolute path, links resolved.
    pub fn matched_script(&self, image: &Arc<Image>, script: Vec<u8>) -> ProgramMatch {
        let resolved = Image {
            script,
            ..Image::clone(image)
        };
        self.matched_as(image, &resolved)
    }

    fn matched_as(&self, image: &Arc<Image>, read: &Image) -> ProgramMatch {
        ProgramMatch {
            image: Arc::clone(image),
            class: self.classify(read),
            member_rules: self.matching_member_rules(read),
        }
    }

    /// # Panics
    /// If the id is of a larger set.
    pub fn rule(&self, id: RuleId) -> &Rule {
        &self.rules[id.0 as usize]
    }

    pub fn name(&self, id: RuleId) -> &Arc<str> {
        &self.rule(id).name
    }

    /// Returns the rule of this name that opens sessions: of an agent or of a server.
    pub fn session_rule(&self, name: &str) -> Option<RuleId> {
        let is_it = |rule: &Rule| rule.action.opens_session() && *rule.name == *name;
        let found = (0..).zip(&self.rules).find(|(_, rule)| is_it(rule));
        found.map(|(at, _)| RuleId(at))
    }

    /// All rules, in the order in which they are asked.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }
}

/// The bits of patterns among all marks, which takes them in.
fn bits(marks: &mut Vec<Pattern>, patterns: &[Pattern]) -> u64 {
    let mut bits = 0;
    for pattern in patterns {
        let is_it = |known: &Pattern| known.text() == pattern.text();
        let bit = marks.iter().position(is_it).unwrap_or_else(|| {
            marks.push(pattern.clone());
            marks.len() - 1
        });
        bits |= 1u64.checked_shl(bit as u32).unwrap_or(0);
    }
    bits
}

impl std::fmt::Debug for Ruleset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.rules).finish()
    }
}
