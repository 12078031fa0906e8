//! Compiled rules. They classify programs as agents, servers and boundaries, and find the rules that keep, reap or
//! report members.
//!
//! [`Ruleset::classify`] runs for every exec on the host. The usual result, no rule, allocates nothing: two hash
//! look-ups, by comm and by file name, find the few rules that can match. The arguments are read only for these.
//!
//! # Order
//! Boundaries are checked before servers and servers before agents, because an agent's server runs the agent's program:
//! `codex app-server` is a server and no agent. Within each kind the first match in the given order wins; the user's
//! rules come before the built-in ones.
//!
//! Keeps, reaps and reports are *member rules*: they are evaluated for members only, in one order.
//! [`Ruleset::matching_member_rules`] checks their conditions on the program; the policy checks the others.
//!
//! # Unknown fields
//! An empty field is unknown. It fulfils no condition, not even a negative one.

mod arguments;
mod impossible;
mod index;
mod matcher;
mod mismatch;
mod misread;
mod names;
mod pattern;
mod script;
mod undecided;
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
pub use mismatch::{Mismatch, Nearness, nearest};
pub use names::NameTable;
pub use pattern::{COMM_MAX, Pattern, PatternError};
pub(crate) use script::of as script_of;
pub use script::{is_interpreter, name as script_name, path as script_path, without_version};
pub(crate) use when::LONGEST;
pub use when::{SessionCondition, UidCondition, When};

/// Limit on environment markers, the first of which is `KEEP_MARKER`: the fact has one bit for each.
pub const MARKERS_MAX: usize = 64;

/// Environment variable that users set for processes to keep.
static KEEP_MARKER: LazyLock<Pattern> = LazyLock::new(|| Pattern::exactly("REAPER_KEEP=1"));

/// Environment variables that tmux, screen and zellij set for the processes below them.
static MULTIPLEXER_MARKERS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let globs = ["TMUX=*", "STY=*", "ZELLIJ=*"];
    globs
        .iter()
        .filter_map(|glob| Pattern::marker(glob).ok())
        .collect()
});

/// Action of a rule on the processes that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Ends membership: neither the process nor its descendants are members of the session above.
    Boundary,
    /// Makes the process the root of a session that is never nested: it is an agent's server.
    #[serde(skip)]
    Server,
    /// Makes the process the root of a session.
    #[serde(skip)]
    Agent,
    /// Keeps the member.
    Keep,
    /// Reaps the member, even while its root is alive if the rule's `session` condition allows that.
    Reap,
    /// Keeps the member and reports it to the user.
    Report,
    /// Reports the member once it has exited with status 0: what it started runs on, and is no member.
    Note,
}

impl Action {
    /// Returns the name in configs and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Action::Boundary => "boundary",
            Action::Server => "server",
            Action::Agent => "agent",
            Action::Keep => "keep",
            Action::Reap => "reap",
            Action::Report => "report",
            Action::Note => "note",
        }
    }

    /// Returns whether a process that matches is the root of a session.
    pub fn opens_session(self) -> bool {
        matches!(self, Action::Agent | Action::Server)
    }

    /// Returns whether rules with this action have conditions on the program only, and apply to any process.
    pub fn is_of_program(self) -> bool {
        self.rank() != MEMBER_RANK
    }

    /// Returns the place of the action in the evaluation. Rules of one rank are evaluated in the given order.
    fn rank(self) -> u8 {
        match self {
            Action::Boundary => 0,
            Action::Server => 1,
            Action::Agent => 2,
            Action::Keep | Action::Reap | Action::Report => MEMBER_RANK,
            Action::Note => MEMBER_RANK + 1,
        }
    }
}

/// Kind of a session, by its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionKind {
    /// An AI coding agent.
    Agent,
    /// An agent's server, which outlives the process that started it.
    Server,
}

impl SessionKind {
    /// Returns the name in the event stream and in the API.
    pub fn name(self) -> &'static str {
        match self {
            SessionKind::Agent => "agent",
            SessionKind::Server => "server",
        }
    }

    /// Returns the kind of the sessions that a rule with this action opens: an agent's, unless it is
    /// [`Action::Server`].
    pub fn of(action: Action) -> SessionKind {
        match action {
            Action::Server => SessionKind::Server,
            _ => SessionKind::Agent,
        }
    }
}

/// Rank of the rules that are evaluated for members.
const MEMBER_RANK: u8 = 3;

/// A named rule. It applies if one of its matchers matches and its other conditions hold.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Name, unique in a ruleset.
    pub name: Arc<str>,
    /// Action of the rule on the processes that it matches.
    pub action: Action,
    /// Alternative conditions on the program. If empty, every program matches.
    pub matchers: Vec<Matcher>,
    /// Conditions on the member. Empty for agents, servers and boundaries.
    pub when: When,
    /// Delay of the action in nanoseconds, during which the member is kept. 0 for agents, servers and boundaries.
    ///
    /// It starts when the member becomes due. While the root is alive, it starts when the member becomes an orphan, or
    /// for any other member at its own start. It never starts before the member itself.
    pub delay_ns: u64,
    /// Age in nanoseconds up to which the member is kept, in place of a delay; 0 for none. Then the rules below decide. For
    /// a process that started after the exit of its root, it is counted from that exit, so that no respawning process is
    /// kept forever.
    pub until_age_ns: u64,
    /// Whether the delay starts again at its end if the member or a descendant was in use: a client was connected, or it
    /// used more CPU time or I/O than a heartbeat.
    pub while_used: bool,
    /// Time between SIGTERM and SIGKILL for the programs that the rule matches, whichever rule reaps them, in
    /// nanoseconds. 0 for the general grace. Does not shorten that one.
    pub grace_ns: u64,
    /// Whether a person works in the program, so that an agent below it is attended without a terminal. False for all
    /// rules but boundaries.
    pub attends: bool,
    /// Where to find the ids of an agent's conversations, if the agent can hand one over to another process.
    pub conversation: Option<Arc<ConversationSource>>,
}

impl Rule {
    /// Creates a rule with conditions on the program only.
    pub fn new(name: &str, action: Action, matchers: Vec<Matcher>) -> Rule {
        Rule {
            name: name.into(),
            action,
            matchers,
            when: When::default(),
            delay_ns: 0,
            until_age_ns: 0,
            while_used: false,
            grace_ns: 0,
            attends: false,
            conversation: None,
        }
    }

    /// Returns whether the conditions on the program hold. Rules about windows match every program until one has a window;
    /// only then is this checked.
    pub(crate) fn matches_program(&self, image: &Image) -> bool {
        let subject = Subject::new(image);
        let mut matchers = self.matchers.iter();
        self.matchers.is_empty() || matchers.any(|matcher| matcher.is_match(&subject))
    }

    /// Returns whether the action follows only after a delay or at an age.
    pub fn has_delay(&self) -> bool {
        self.delay_ns > 0 || self.until_age_ns > 0
    }

    /// Returns whether the rule can keep a due member, at least for the time of its delay.
    pub fn may_keep(&self) -> bool {
        let keeps = match self.action {
            Action::Keep | Action::Report => true,
            Action::Reap => self.has_delay(),
            Action::Boundary | Action::Server | Action::Agent | Action::Note => false,
        };
        keeps && self.when.is_of(false)
    }

    /// Returns whether a member that this rule keeps also keeps its ancestors and descendants.
    ///
    /// A rule that reaps does so during its delay. A keep does so for members that listen, since others may be
    /// connected, and for programs with a window.
    pub fn keeps_relatives(&self) -> bool {
        let serves = self.when.listening == Some(true) || self.when.window;
        self.may_keep() && (self.action == Action::Reap || serves)
    }
}

/// Index of a rule in its [`Ruleset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(u32);

/// Effect of a program on sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The process becomes the root of a session, by this rule.
    Agent(RuleId),
    /// The process becomes the root of a session that is never nested, by this rule.
    Server(RuleId),
    /// The process leaves its session with its descendants, by this rule.
    Boundary(RuleId),
    /// No effect: the process belongs to the session of its parent.
    Plain,
}

/// Result of matching the rules against a program with data that was read after its exec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramMatch {
    /// Program as the model has it, with the beginning of the command line.
    pub image: Arc<Image>,
    /// Effect of the program on sessions.
    pub class: Class,
    /// Result of [`Ruleset::matching_member_rules`].
    pub member_rules: Arc<[RuleId]>,
}

/// Compiled rules.
#[derive(Clone, Default)]
pub struct Ruleset {
    /// Rules by rank, and within a rank in the given order.
    rules: Arc<[Rule]>,
    boundaries: Index,
    servers: Index,
    agents: Index,
    member_rules: Index,
    notes: Index,
    /// Session conditions of the rules that keep relatives, and whether the rule is about windows.
    keeping_relatives: Vec<(SessionCondition, bool)>,
    /// Member rules without conditions on the program. For most programs no others match.
    any_program: Arc<[RuleId]>,
    markers: Vec<Pattern>,
    multiplexer_bits: u64,
    honor_keep: bool,
}

impl Ruleset {
    /// Compiles rules, given in the order of their evaluation.
    pub fn new(mut rules: Vec<Rule>) -> Ruleset {
        rules.sort_by_key(|rule| rule.action.rank());
        let mut markers = vec![KEEP_MARKER.clone()];
        for rule in &mut rules {
            rule.when.marker_bits = assign_bits(&mut markers, &rule.when.markers);
        }
        let mut multiplexer_bits = 0;
        if rules.iter().any(|rule| rule.when.multiplexed.is_some()) {
            multiplexer_bits = assign_bits(&mut markers, &MULTIPLEXER_MARKERS);
        }
        let index = |rank| Index::new(&rules, rank);
        let (boundaries, servers, agents) = (index(0), index(1), index(2));
        let member_rules = index(MEMBER_RANK);
        let keeping_relatives = rules.iter().filter(|rule| rule.keeps_relatives());
        Ruleset {
            keeping_relatives: keeping_relatives
                .map(|rule| (rule.when.session, rule.when.window))
                .collect(),
            boundaries,
            servers,
            agents,
            any_program: member_rules.any_program().collect(),
            notes: index(Action::Note.rank()),
            member_rules,
            rules: rules.into(),
            markers,
            multiplexer_bits,
            honor_keep: false,
        }
    }

    /// Sets whether a process with `REAPER_KEEP=1` in its environment (marker 0) is kept.
    pub fn with_honor_keep(mut self, honor_keep: bool) -> Ruleset {
        self.honor_keep = honor_keep;
        self
    }

    /// Returns whether a process with `REAPER_KEEP=1` in its environment is kept.
    pub fn honors_keep(&self) -> bool {
        self.honor_keep
    }

    /// Returns the environment markers that rules check: patterns over `NAME=value`, one for each bit of
    /// [`Facts::markers`](super::facts::Facts::markers). The first is `REAPER_KEEP=1`.
    pub fn marker_patterns(&self) -> &[Pattern] {
        &self.markers
    }

    /// Returns where the agents of these rules leave the ids of their conversations.
    pub fn conversations(&self) -> Vec<Arc<ConversationSource>> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| rule.conversation.clone()).collect()
    }

    /// Returns whether `REAPER_KEEP=1` is the only environment marker.
    pub fn needs_only_keep_marker(&self) -> bool {
        self.markers.len() <= 1
    }

    /// Returns the bits of the markers that tmux, screen and zellij set, 0 if no rule checks them.
    pub fn multiplexer_bits(&self) -> u64 {
        self.multiplexer_bits
    }

    /// Returns the facts to read before a member is due: rules may need them, and they rarely change without an exec.
    /// These are at most [`FactSet::MARKERS`] and [`FactSet::UNIT`].
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

    /// Returns whether a rule may keep relatives in a session whose root exited with this status. Rules about windows count
    /// only with `has_display`.
    pub fn may_keep_relatives(&self, status: ExitStatus, has_display: bool) -> bool {
        let may = |(session, is_of_window): &(SessionCondition, bool)| {
            session.holds(Some(status)) != Some(false) && (has_display || !is_of_window)
        };
        self.keeping_relatives.iter().any(may)
    }

    /// Returns whether a rule may reap or report members whose root is alive. `orphans` selects members that are
    /// orphans, or, if false, all others. Rules about roots (`idle`, `server`) do not count.
    pub fn has_rules_for_living(&self, orphans: bool) -> bool {
        let acts = |rule: &&Rule| rule.action.rank() == MEMBER_RANK && rule.action != Action::Keep;
        let mut acting = self.rules.iter().filter(acts);
        acting.any(|rule| {
            let when = &rule.when;
            !when.is_of_root() && when.is_of(true) && when.orphan.is_none_or(|of| of == orphans)
        })
    }

    /// Classifies a program. Runs for every exec on the host.
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

    /// Returns the agent rule that matches, even if a boundary or server rule matches too. Returns `None` if none does.
    pub fn agent(&self, image: &Image) -> Option<RuleId> {
        self.agents.first(&self.rules, &Subject::new(image))
    }

    /// Returns the boundary or server rule that matches, if any. The process is then no member of its parent's session.
    pub fn leaves_session(&self, image: &Image) -> Option<RuleId> {
        match self.classify(image) {
            Class::Boundary(id) | Class::Server(id) => Some(id),
            Class::Agent(_) | Class::Plain => None,
        }
    }

    /// Returns the first rule that reports this program after its exit.
    pub fn note(&self, image: &Image) -> Option<RuleId> {
        self.notes.first(&self.rules, &Subject::new(image))
    }

    /// Returns the member rules whose conditions on the program hold, in the order of evaluation.
    pub fn matching_member_rules(&self, image: &Image) -> Arc<[RuleId]> {
        let found = self.member_rules.all(&self.rules, &Subject::new(image));
        if found.is_empty() {
            return Arc::clone(&self.any_program);
        }
        let mut all: Vec<RuleId> = self.any_program.iter().copied().chain(found).collect();
        all.sort_unstable();
        all.dedup();
        all.into()
    }

    /// Returns a boundary, a server or a rule that may keep, if the missing end of the command line could make it match.
    ///
    /// `matching` are the member rules that match anyway. Returns `None` if the command line is complete.
    pub fn unread_keep(&self, image: &Image, matching: &[RuleId]) -> Option<RuleId> {
        let cut_off = image.truncated.then(|| Subject::cut_off(image))?;
        self.may_keep(&cut_off, matching)
    }

    /// As [`Ruleset::unread_keep`], for the resolved path of the script that an interpreter runs. Returns `None` if the
    /// program runs no script, or if the path as given already classifies it.
    pub fn unresolved_keep(&self, image: &Image, matching: &[RuleId]) -> Option<RuleId> {
        script_path(image).filter(|_| image.script.is_empty())?;
        let might = self.may_keep(&Subject::unresolved(image), matching)?;
        (self.classify(image) == Class::Plain).then_some(might)
    }

    /// Returns a rule for which [`Ruleset::unread_keep`] or [`Ruleset::unresolved_keep`] holds.
    pub(crate) fn unknown_keep(&self, image: &Image, matching: &[RuleId]) -> Option<RuleId> {
        let unread = self.unread_keep(image, matching);
        unread.or_else(|| self.unresolved_keep(image, matching))
    }

    /// Returns the first rule that a partly unknown program may match and that keeps it or lets it leave its session.
    fn may_keep(&self, subject: &Subject<'_>, matching: &[RuleId]) -> Option<RuleId> {
        let leaving = [&self.boundaries, &self.servers];
        let leaving = leaving
            .iter()
            .find_map(|kind| kind.first(&self.rules, subject));
        let keeps = |id: &RuleId| self.rule(*id).may_keep() && !matching.contains(id);
        let all = || self.member_rules.all(&self.rules, subject);
        leaving.or_else(|| all().into_iter().filter(keeps).min())
    }

    /// Returns whether a program runs a script whose resolved path a rule may ask for.
    pub fn reads_script(&self, image: &Image) -> bool {
        let exe_name = Subject::new(image).exe_name();
        let kinds = [
            &self.boundaries,
            &self.servers,
            &self.agents,
            &self.member_rules,
        ];
        kinds.iter().any(|kind| kind.reads_scripts_of(exe_name)) && script_path(image).is_some()
    }

    /// Matches the rules against a program with this complete command line, and with the absolute path of the script
    /// that it runs, links resolved. The path is empty if the program runs no script or the path is unreadable.
    pub fn matched(&self, image: &Arc<Image>, argv: Vec<u8>, script: Vec<u8>) -> ProgramMatch {
        let whole = Image {
            argv,
            truncated: false,
            script,
            ..Image::clone(image)
        };
        self.matched_as(image, &whole)
    }

    /// Matches the rules against an interpreter whose script has this absolute path, links resolved.
    pub fn matched_script(&self, image: &Arc<Image>, script: Vec<u8>) -> ProgramMatch {
        let resolved = Image {
            script,
            ..Image::clone(image)
        };
        self.matched_as(image, &resolved)
    }

    /// Matches the rules against `read`, and returns the result for `image`.
    fn matched_as(&self, image: &Arc<Image>, read: &Image) -> ProgramMatch {
        ProgramMatch {
            image: Arc::clone(image),
            class: self.classify(read),
            member_rules: self.matching_member_rules(read),
        }
    }

    /// Returns the longest grace of rules that match a program, in ns; 0 for none. Conditions on the member do not count:
    /// a database needs its time whichever rule reaps it.
    pub fn longest_grace(&self, matching: &[RuleId]) -> u64 {
        let graces = matching.iter().map(|id| self.rule(*id).grace_ns);
        graces.max().unwrap_or(0)
    }

    /// Returns the rule with this id.
    ///
    /// # Panics
    /// If the id comes from a larger ruleset.
    pub fn rule(&self, id: RuleId) -> &Rule {
        &self.rules[id.0 as usize]
    }

    /// Returns the name of the rule with this id. Panics as [`Ruleset::rule`].
    pub fn name(&self, id: RuleId) -> &Arc<str> {
        &self.rule(id).name
    }

    /// Returns the agent or server rule with this name.
    pub fn session_rule(&self, name: &str) -> Option<RuleId> {
        let is_it = |rule: &Rule| rule.action.opens_session() && *rule.name == *name;
        let found = (0..).zip(self.rules.iter()).find(|(_, rule)| is_it(rule));
        found.map(|(at, _)| RuleId(at))
    }

    /// Returns the names of the rules for agents and servers.
    pub fn agent_names(&self) -> Vec<&str> {
        let rules = self.rules.iter();
        let rules = rules.filter(|rule| rule.action.opens_session());
        rules.map(|rule| &*rule.name).collect()
    }

    /// Returns all rules in the order of evaluation.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the rules that make members of any program wait after some exit of their agent. `attended` is that of the
    /// session.
    pub fn waits(&self, agent: &str, attended: bool) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| {
            let when = &rule.when;
            rule.action == Action::Reap
                && rule.matchers.is_empty()
                && rule.has_delay()
                && !matches!(when.session, SessionCondition::Alive)
                && when.attended.is_none_or(|wanted| wanted == attended)
                && (when.agents.is_empty() || when.agents.iter().any(|name| **name == *agent))
        })
    }

    /// Returns all rules in the order of evaluation, shared.
    pub fn shared_rules(&self) -> Arc<[Rule]> {
        Arc::clone(&self.rules)
    }
}

/// Adds patterns to the markers, unless they are there already, and returns their bits. A pattern beyond
/// [`MARKERS_MAX`] gets no bit.
fn assign_bits(markers: &mut Vec<Pattern>, patterns: &[Pattern]) -> u64 {
    let mut bits = 0;
    for pattern in patterns {
        let is_it = |known: &Pattern| known.text() == pattern.text();
        let bit = markers.iter().position(is_it).unwrap_or_else(|| {
            markers.push(pattern.clone());
            markers.len() - 1
        });
        bits |= 1u64.checked_shl(bit as u32).unwrap_or(0);
    }
    bits
}

impl std::fmt::Debug for Ruleset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.rules.iter()).finish()
    }
}
