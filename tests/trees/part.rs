//! What a tree consists of, and what becomes of each part of it.

use std::fmt;

/// What becomes of the processes of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Reaped when the agent is gone.
    Reaped,
    /// Orphaned under the living agent, and reaped when that is gone.
    Detached,
    /// A member that is spared, with this reason.
    Kept(&'static str),
    /// All of this is decided about it, and it is ended if the last of it says so.
    Decided(&'static [Said]),
    /// Membership stops at it, by this rule.
    Boundary(&'static str),
    /// An agent's server by this rule: the root of a session of its own, which outlives its starter.
    Server(&'static str),
    /// No member, or its own agent lives: nothing is decided about it.
    Outside,
    /// Killed by the test while the agent lives.
    First,
}

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Said {
    pub decision: &'static str,
    pub reason: &'static str,
    /// Name of the rule; where there is none here, any will do.
    pub rule: Option<&'static str>,
}

impl Said {
    pub const fn new(decision: &'static str, reason: &'static str) -> Said {
        Said {
            decision,
            reason,
            rule: None,
        }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.decision, self.reason)?;
        match self.rule {
            Some(rule) => write!(f, " {rule}"),
            None => Ok(()),
        }
    }
}

const DETACHED: Said = Said::new("keep", "detached");
const REAPED: Said = Said::new("reap", "root_exited");

/// Who starts a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    Agent,
    /// The launcher, before the agent.
    Launcher,
    /// Another part, which the launcher starts.
    Part(&'static str),
}

/// The processes of one role.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub role: &'static str,
    /// How it is started ([`Stage::spawn`](crate::actor)); empty if somebody else does.
    pub how: &'static str,
    pub by: Starter,
    pub times: usize,
    pub fate: Fate,
    /// Role of the adopter in the orphan event it must have; none where it may have none.
    pub adopter: Option<&'static str>,
    /// Who it is, if it is there already and not of this test.
    pub pid: Option<i32>,
    /// Whether something else than a signal to it may end it first.
    pub may_fall: bool,
    /// In what way it is started, where nobody's `how` says so.
    pub way: &'static str,
}

impl Part {
    pub const fn new(
        role: &'static str,
        how: &'static str,
        fate: Fate,
        adopter: Option<&'static str>,
    ) -> Part {
        Part {
            role,
            how,
            by: Starter::Agent,
            times: 1,
            fate,
            adopter,
            pid: None,
            may_fall: false,
            way: "",
        }
    }
    /// A child of the agent, orphaned by its death.
    pub const fn child(role: &'static str, how: &'static str) -> Part {
        Part::new(role, how, Fate::Reaped, Some("launcher"))
    }
    /// A member whose parent is not the agent, or not only.
    pub const fn below(role: &'static str, how: &'static str) -> Part {
        Part::new(role, how, Fate::Reaped, None)
    }
    pub const fn detached(role: &'static str, how: &'static str) -> Part {
        Part::new(role, how, Fate::Detached, Some("launcher"))
    }
    pub const fn kept(role: &'static str, how: &'static str, reason: &'static str) -> Part {
        Part::new(role, how, Fate::Kept(reason), None)
    }
    pub const fn outside(role: &'static str, how: &'static str) -> Part {
        Part::new(role, how, Fate::Outside, None)
    }
    pub const fn first(role: &'static str) -> Part {
        Part::new(role, "", Fate::First, None)
    }
    pub const fn plays(self, how: &'static str) -> Part {
        Part { how, ..self }
    }
    pub const fn times(self, times: usize) -> Part {
        Part { times, ..self }
    }
    pub const fn to(self, adopter: &'static str) -> Part {
        Part {
            adopter: Some(adopter),
            ..self
        }
    }
    pub const fn may_fall(self) -> Part {
        Part {
            may_fall: true,
            ..self
        }
    }

    pub const fn by_way(self, way: &'static str) -> Part {
        Part { way, ..self }
    }

    /// What must be decided about each, and nothing else.
    pub fn decisions(&self) -> Vec<Said> {
        match self.fate {
            Fate::Reaped => vec![REAPED],
            Fate::Detached => vec![DETACHED, REAPED],
            Fate::Kept(reason) => vec![Said::new("keep", reason)],
            Fate::Decided(all) => all.to_vec(),
            Fate::Boundary(_) | Fate::Server(_) | Fate::Outside | Fate::First => Vec::new(),
        }
    }
    /// Whether anything is to be told of it.
    pub fn is_told(&self) -> bool {
        !matches!(self.fate, Fate::Outside | Fate::First)
    }
    /// Whether it is ended by the program under test.
    pub fn dies(&self) -> bool {
        let last = self.decisions().pop();
        last.is_some_and(|said| said.decision == "reap")
    }
    /// Whether it lives to the end.
    pub fn lives(&self) -> bool {
        self.fate != Fate::First && !self.dies()
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
pub fn arguments(parts: &[Part], starter: Starter) -> Vec<String> {
    let its = parts
        .iter()
        .filter(|p| p.by == starter && !p.how.is_empty());
    its.map(Part::argument).collect()
}

/// Who starts a part, if that is a part too, and in what way: the first of the words that say how it is started, behind
/// those that say with what.
pub fn origin<'a>(parts: &'a [Part], part: &Part) -> (Option<&'a Part>, &'static str) {
    let words = |how: &'static str| how.split([' ', '+', '=']);
    let named = |role: &str| parts.iter().find(|p| p.role == role);
    if !part.how.is_empty() {
        let maker = match part.by {
            Starter::Part(role) => named(role),
            Starter::Agent | Starter::Launcher => None,
        };
        // What `env:NAME=VALUE` has is no word of its own.
        return (maker, way(part.how.split(' ')));
    }
    let maker = parts.iter().find(|p| words(p.how).any(|w| w == part.role));
    let after = |maker: &Part| {
        let mut rest = words(maker.how);
        rest.find(|word| *word == part.role);
        way(rest)
    };
    (maker, maker.map_or(part.way, after))
}

/// The first word that does not only say with what.
fn way(mut words: impl Iterator<Item = &'static str>) -> &'static str {
    let bare = ["env-i", "no-input", "fork"];
    let with = |word: &&str| bare.contains(word) || word.contains(':');
    words.find(|word| !with(word)).unwrap_or_default()
}

/// How somebody ends.
#[derive(Clone, Copy, Debug)]
pub enum Death {
    /// By the test's SIGKILL.
    Killed,
    /// By what it does itself, with this exit code.
    Exits(&'static str, i32),
    /// By what it does itself, with this signal.
    Falls(&'static str, &'static str),
    /// By what it does itself, with status 0, and its child of the same kind takes its place.
    Relaunches,
    /// Not at all: all that is decided is decided while it lives.
    Lives,
    /// Its leader thread is gone, and it is not.
    LosesLeader,
}

impl Death {
    /// What an agent is told to do when its gate is opened.
    pub fn how(self) -> Option<&'static str> {
        match self {
            Death::Killed | Death::Lives => None,
            Death::Exits(how, _) | Death::Falls(how, _) => Some(how),
            Death::Relaunches => Some("exit 0"),
            Death::LosesLeader => Some("leader-first"),
        }
    }

    /// Exit code and signal, if it is the end of a session.
    pub fn status(self) -> Option<(Option<i32>, Option<&'static str>)> {
        match self {
            Death::Killed => Some((None, Some("SIGKILL"))),
            Death::Exits(_, code) => Some((Some(code), None)),
            Death::Falls(_, signal) => Some((None, Some(signal))),
            Death::Relaunches | Death::Lives | Death::LosesLeader => None,
        }
    }
}
