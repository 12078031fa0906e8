//! Description of a test tree: its processes by role, and what must happen to them.

use std::fmt;

/// Expected fate of the processes of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Reaped when the agent exits.
    Reaped,
    /// Orphaned while the agent lives, and reaped when it exits.
    Detached,
    /// Member that is kept, with this reason.
    Kept(&'static str),
    /// Has exactly these decisions. It is reaped if the last one says so.
    Decided(&'static [DecisionSpec]),
    /// Boundary by this rule: no member, and neither are its descendants.
    Boundary(&'static str),
    /// Agent's server by this rule: root of a separate session, which outlives the process that started it.
    Server(&'static str),
    /// Has no decision: it is no member, or its own agent lives.
    NoDecision,
    /// Has no decision either, and exits after the agent without a signal of the service.
    Ends,
    /// Exits with status 0 while the agent lives, and is reported by this rule, because what it started runs on.
    Noted(&'static str),
    /// Killed by the test while the agent lives.
    KilledByTest,
}

/// Expected decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DecisionSpec {
    pub decision: &'static str,
    pub reason: &'static str,
    /// Name of the rule; `None` accepts any.
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

/// Process that starts a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    Agent,
    /// The launcher, before the agent.
    Launcher,
    /// Another role, which the launcher starts.
    Process(&'static str),
}

/// The processes of one role.
#[derive(Clone, Copy, Debug)]
pub struct ProcessSpec {
    pub role: &'static str,
    /// Start method ([`ProcessContext::spawn`](crate::process)); empty if the arguments of another role start it.
    pub how: &'static str,
    pub by: StartedBy,
    pub times: usize,
    pub expect: Expectation,
    /// Role of the adopter that its orphan event must name; `None` if the event may be missing.
    pub adopter: Option<&'static str>,
    /// Pid, if the process exists before the test.
    pub pid: Option<i32>,
    /// Whether it may exit before it is signalled.
    pub may_exit_first: bool,
    /// Start method, if neither its own `how` nor another role's contains it.
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
    /// Child of the agent that is orphaned when the agent exits.
    pub const fn child(role: &'static str, how: &'static str) -> ProcessSpec {
        ProcessSpec::new(role, how, Expectation::Reaped, Some("launcher"))
    }
    /// Member whose parent is not always the agent.
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
    pub const fn may_exit_first(self) -> ProcessSpec {
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

    /// Returns the exact decisions that each process must have.
    pub fn decisions(&self) -> Vec<DecisionSpec> {
        match self.expect {
            Expectation::Reaped => vec![REAPED],
            Expectation::Detached => vec![DETACHED, REAPED],
            Expectation::Kept(reason) => vec![DecisionSpec::new("keep", reason)],
            Expectation::Decided(all) => all.to_vec(),
            Expectation::Noted(rule) => vec![DecisionSpec {
                rule: Some(rule),
                ..DecisionSpec::new("report", "left_running")
            }],
            Expectation::Boundary(_)
            | Expectation::Server(_)
            | Expectation::NoDecision
            | Expectation::Ends
            | Expectation::KilledByTest => Vec::new(),
        }
    }
    /// Returns whether decisions or events are expected for it.
    pub fn has_events(&self) -> bool {
        !matches!(
            self.expect,
            Expectation::NoDecision | Expectation::Ends | Expectation::KilledByTest
        )
    }
    /// Returns whether the service must reap it.
    pub fn dies(&self) -> bool {
        let last = self.decisions().pop();
        last.is_some_and(|said| said.decision == "reap")
    }
    /// Returns whether it must be alive at the end.
    pub fn lives(&self) -> bool {
        !matches!(
            self.expect,
            Expectation::Ends | Expectation::Noted(_) | Expectation::KilledByTest
        ) && !self.dies()
    }
    /// Returns whether it becomes an orphan while its agent lives.
    pub fn is_detached(&self) -> bool {
        self.decisions().first() == Some(&DETACHED)
    }

    /// Returns the argument by which an agent starts it.
    fn argument(&self) -> String {
        let how = self.how.replace('+', "{plus}").replace(' ', "+");
        format!("{}*{}={how}", self.role, self.times)
    }
}

/// Returns the arguments by which `starter` starts its roles.
pub fn arguments(parts: &[ProcessSpec], starter: StartedBy) -> Vec<String> {
    let its = parts
        .iter()
        .filter(|p| p.by == starter && !p.how.is_empty());
    its.map(ProcessSpec::argument).collect()
}

/// Returns the role that starts a part, if there is one, and the start method: the first keyword that is no modifier.
pub fn origin<'a>(
    parts: &'a [ProcessSpec],
    part: &ProcessSpec,
) -> (Option<&'a ProcessSpec>, &'static str) {
    let words = |how: &'static str| how.split([' ', '+', '=']);
    let named = |role: &str| parts.iter().find(|p| p.role == role);
    if !part.how.is_empty() {
        let starter = match part.by {
            StartedBy::Process(role) => named(role),
            StartedBy::Agent | StartedBy::Launcher => None,
        };
        // Not split at '=': `env:NAME=VALUE` is one word.
        return (starter, start_method(part.how.split(' ')));
    }
    let starter = parts.iter().find(|p| words(p.how).any(|w| w == part.role));
    let after = |starter: &ProcessSpec| {
        let mut rest = words(starter.how);
        rest.find(|word| *word == part.role);
        start_method(rest)
    };
    (starter, starter.map_or(part.start_method, after))
}

/// Returns the first word that is no modifier of a start.
fn start_method(mut words: impl Iterator<Item = &'static str>) -> &'static str {
    let bare = ["env-i", "no-input", "fork"];
    let is_modifier = |word: &&str| bare.contains(word) || word.contains(':');
    words.find(|word| !is_modifier(word)).unwrap_or_default()
}

/// Exit of the process that ends a session.
#[derive(Clone, Copy, Debug)]
pub enum VictimExit {
    /// The test sends SIGKILL.
    Killed,
    /// It exits by itself in this way, with this exit code.
    Exited(&'static str, i32),
    /// It ends itself in this way, by this signal.
    Signalled(&'static str, &'static str),
    /// It exits with status 0, and its child of the same agent becomes the successor.
    Relaunches,
    /// It does not exit: all decisions are made while it lives.
    StaysAlive,
    /// Its leader thread exits, but the process lives.
    LeaderThreadExits,
}

impl VictimExit {
    /// Returns what the process does when its gate opens.
    pub fn how(self) -> Option<&'static str> {
        match self {
            VictimExit::Killed | VictimExit::StaysAlive => None,
            VictimExit::Exited(how, _) | VictimExit::Signalled(how, _) => Some(how),
            VictimExit::Relaunches => Some("exit 0"),
            VictimExit::LeaderThreadExits => Some("leader-first"),
        }
    }

    /// Returns exit code and signal if the exit closes the session.
    pub fn status(self) -> Option<(Option<i32>, Option<&'static str>)> {
        match self {
            VictimExit::Killed => Some((None, Some("SIGKILL"))),
            VictimExit::Exited(_, code) => Some((Some(code), None)),
            VictimExit::Signalled(_, signal) => Some((None, Some(signal))),
            VictimExit::Relaunches | VictimExit::StaysAlive | VictimExit::LeaderThreadExits => None,
        }
    }
}
