//! What a tree consists of, and what becomes of each part of it.

use std::fmt;

/// What becomes of the processes of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Reaped when the agent is gone.
    Reaped,
    /// Orphaned under the living agent, and reaped when that is gone.
    Detached,
    /// A member that is spared, with this reason.
    Kept(&'static str),
    /// All of this is decided about it, and it is ended if the last of it says so.
    Decided(&'static [DecisionSpec]),
    /// Membership stops at it, by this rule.
    Boundary(&'static str),
    /// An agent's server by this rule: the root of a session of its own, which outlives its starter.
    Server(&'static str),
    /// No member, or its own agent lives: nothing is decided about it.
    NoDecision,
    /// Killed by the test while the agent lives.
    KilledByTest,
}

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DecisionSpec {
    pub decision: &'static str,
    pub reason: &'static str,
    /// Name of the rule; where there is none here, any will do.
    pub rule: Option<&'static str>,
}

impl DecisionSpec {
    pub const fn new(decision: &'static str, reason: &'static str) -> DecisionSpec {
        DecisionSpec {
            decision,
            reason,
            rule: None,
        }
    }
}

impl fmt::Display for DecisionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.decision, self.reason)?;
        match self.rule {
            Some(rule) => write!(f, " {rule}"),
            None => Ok(()),
        }
    }
}

const DETACHED: DecisionSpec = DecisionSpec::new("keep", "detached");
const REAPED: DecisionSpec = DecisionSpec::new("reap", "root_exited");

/// Who starts a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    Agent,
    /// The launcher, before the agent.
    Launcher,
    /// Another part, which the launcher starts.
    Process(&'static str),
}

/// The processes of one role.
#[derive(Clone, Copy, Debug)]
pub struct ProcessSpec {
    pub role: &'static str,
    /// How it is started ([`Stage::spawn`](crate::process)); empty if somebody else does.
    pub how: &'static str,
    pub by: StartedBy,
    pub times: usize,
    pub expect: Expectation,
    /// Role of the adopter in the orphan event it must have; none where it may have none.
    pub adopter: Option<&'static str>,
    /// Who it is, if it is there already and not of this test.
    pub pid: Option<i32>,
    /// Whether something else than a signal to it may end it first.
    pub may_exit_first: bool,
    /// In what way it is started, where nobody's `how` says so.
    pub start_method: &'static str,
}

impl ProcessSpec {
    pub const fn new(
        role: &'static str,
        how: &'static str,
        expect: Expectation,
        adopter: Option<&'static str>,
    ) -> ProcessSpec {
        ProcessSpec {
            role,
            how,
            by: StartedBy::Agent,
            times: 1,
            expect,
            adopter,
            pid: None,
            may_exit_first: false,
            start_method: "",
        }
    }
    /// A child of the agent, orphaned by its death.
    pub const fn child(role: &'static str, how: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::Reaped, Some("launcher"))
    }
    /// A member whose parent is not the agent, or not only.
    pub const fn below(role: &'static str, how: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::Reaped, None)
    }
    pub const fn detached(role: &'static str, how: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::Detached, Some("launcher"))
    }
    pub const fn kept(role: &'static str, how: &'static str, reason: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::Kept(reason), None)
    }
    pub const fn no_decision(role: &'static str, how: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::NoDecision, None)
    }
    pub const fn killed_by_test(role: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, "", Expectation::KilledByTest, None)
    }
    pub const fn started_as(self, how: &'static str) -> ProcessSpec {
        ProcessSpec { how, ..self }
    }
    pub const fn times(self, times: usize) -> ProcessSpec {
        ProcessSpec { times, ..self }
    }
    pub const fn to(self, adopter: &'static str) -> ProcessSpec {
        ProcessSpec {
            adopter: Some(adopter),
            ..self
        }
    }
    pub const fn may_fall(self) -> ProcessSpec {
        ProcessSpec {
            may_exit_first: true,
            ..self
        }
    }

    pub const fn by_way(self, way: &'static str) -> ProcessSpec {
        ProcessSpec {
            start_method: way,
            ..self
        }
    }

    /// What must be decided about each, and nothing else.
    pub fn decisions(&self) -> Vec<DecisionSpec> {
        match self.expect {
            Expectation::Reaped => vec![REAPED],
            Expectation::Detached => vec![DETACHED, REAPED],
            Expectation::Kept(reason) => vec![DecisionSpec::new("keep", reason)],
            Expectation::Decided(all) => all.to_vec(),
            Expectation::Boundary(_)
            | Expectation::Server(_)
            | Expectation::NoDecision
            | Expectation::KilledByTest => Vec::new(),
        }
    }
    /// Whether anything is to be told of it.
    pub fn has_events(&self) -> bool {
        !matches!(
            self.expect,
            Expectation::NoDecision | Expectation::KilledByTest
        )
    }
    /// Whether it is ended by the program under test.
    pub fn dies(&self) -> bool {
        let last = self.decisions().pop();
        last.is_some_and(|said| said.decision == "reap")
    }
    /// Whether it lives to the end.
    pub fn lives(&self) -> bool {
        self.expect != Expectation::KilledByTest && !self.dies()
    }
    /// Whether it is an orphan while its agent lives.
    pub fn is_detached(&self) -> bool {
        self.decisions().first() == Some(&DETACHED)
    }

    /// In the words of an agent's arguments.
    fn argument(&self) -> String {
        let how = self.how.replace('+', "{plus}").replace(' ', "+");
        format!("{}*{}={how}", self.role, self.times)
    }
}

/// The arguments by which `starter` starts its parts.
pub fn arguments(parts: &[ProcessSpec], starter: StartedBy) -> Vec<String> {
    let its = parts
        .iter()
        .filter(|p| p.by == starter && !p.how.is_empty());
    its.map(ProcessSpec::argument).collect()
}

/// Who starts a part, if that is a part too, and in what way: the first of the words that say how it is started, behind
/// those that say with what.
pub fn origin<'a>(
    parts: &'a [ProcessSpec],
    part: &ProcessSpec,
) -> (Option<&'a ProcessSpec>, &'static str) {
    let words = |how: &'static str| how.split([' ', '+', '=']);
    let named = |role: &str| parts.iter().find(|p| p.role == role);
    if !part.how.is_empty() {
        let maker = match part.by {
            StartedBy::Process(role) => named(role),
            StartedBy::Agent | StartedBy::Launcher => None,
        };
        // What `env:NAME=VALUE` has is no word of its own.
        return (maker, way(part.how.split(' ')));
    }
    let maker = parts.iter().find(|p| words(p.how).any(|w| w == part.role));
    let after = |maker: &ProcessSpec| {
        let mut rest = words(maker.how);
        rest.find(|word| *word == part.role);
        way(rest)
    };
    (maker, maker.map_or(part.start_method, after))
}

/// The first word that does not only say with what.
fn way(mut words: impl Iterator<Item = &'static str>) -> &'static str {
    let bare = ["env-i", "no-input", "fork"];
    let with = |word: &&str| bare.contains(word) || word.contains(':');
    words.find(|word| !with(word)).unwrap_or_default()
}

/// How somebody ends.
#[derive(Clone, Copy, Debug)]
pub enum VictimExit {
    /// By the test's SIGKILL.
    Killed,
    /// By what it does itself, with this exit code.
    Exited(&'static str, i32),
    /// By what it does itself, with this signal.
    Signalled(&'static str, &'static str),
    /// By what it does itself, with status 0, and its child of the same kind takes its place.
    Relaunches,
    /// Not at all: all that is decided is decided while it lives.
    StaysAlive,
    /// Its leader thread is gone, and it is not.
    LeaderThreadExits,
}

impl VictimExit {
    /// What an agent is told to do when its gate is opened.
    pub fn how(self) -> Option<&'static str> {
        match self {
            VictimExit::Killed | VictimExit::StaysAlive => None,
            VictimExit::Exited(how, _) | VictimExit::Signalled(how, _) => Some(how),
            VictimExit::Relaunches => Some("exit 0"),
            VictimExit::LeaderThreadExits => Some("leader-first"),
        }
    }

    /// Exit code and signal, if it is the end of a session.
    pub fn status(self) -> Option<(Option<i32>, Option<&'static str>)> {
        match self {
            VictimExit::Killed => Some((None, Some("SIGKILL"))),
            VictimExit::Exited(_, code) => Some((Some(code), None)),
            VictimExit::Signalled(_, signal) => Some((None, Some(signal))),
            VictimExit::Relaunches | VictimExit::StaysAlive | VictimExit::LeaderThreadExits => None,
        }
    }
}
