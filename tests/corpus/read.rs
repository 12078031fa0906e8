//! The scenarios as they are written down.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde::Deserialize;

use crate::trees::{DecisionSpec, Expectation, ProcessSpec, Scenario, StartedBy, VictimExit};

/// All that is in the file. It is there as long as the program is, and so are the scenarios.
pub static CORPUS: LazyLock<Corpus> = LazyLock::new(|| {
    toml::from_str(include_str!("scenarios.toml")).unwrap_or_else(|e| panic!("scenarios.toml: {e}"))
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corpus {
    /// The first word is a path below the test's directory, the others its first arguments.
    program: BTreeMap<String, Vec<String>>,
    pub scenario: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub name: String,
    /// What of the collected experience with agents it is.
    pub category: String,
    /// The program that is the agent.
    #[serde(default = "claude")]
    image: String,
    /// The rule by which it must be recognised; empty if it must not be.
    agent: Option<String>,
    via: Option<String>,
    #[serde(default = "killed")]
    victim_exit: String,
    /// The role that dies.
    #[serde(default = "the_agent")]
    victim: String,
    #[serde(default)]
    config: String,
    /// `first`, `last` or `within`.
    #[serde(default = "first")]
    daemon: String,
    #[serde(default = "yes")]
    subreaper: bool,
    #[serde(default)]
    second_tree: bool,
    #[serde(default)]
    unit: bool,
    processes: Vec<ProcessEntry>,
    /// The decisions of the parts, read from their fates.
    #[serde(skip)]
    said: std::sync::OnceLock<Vec<Vec<DecisionSpec>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProcessEntry {
    role: String,
    #[serde(default)]
    how: String,
    /// `agent`, `launcher`, or the role of a part that the launcher starts.
    #[serde(default = "the_agent")]
    by: String,
    #[serde(default = "one")]
    times: usize,
    /// Who it is, if it is there already.
    pid: Option<i32>,
    /// `reaped`, `detached`, `no-decision`, `killed-by-test`, `boundary RULE`, `server RULE`, or decisions with commas between, each of the
    /// decision, its reason, and the name of the rule if it matters.
    #[serde(default = "reaped")]
    expect: String,
    adopter: Option<String>,
    #[serde(default)]
    may_exit_first: bool,
}

fn claude() -> String {
    "claude".into()
}
fn killed() -> String {
    "killed".into()
}
fn the_agent() -> String {
    "agent".into()
}
fn first() -> String {
    "first".into()
}
fn reaped() -> String {
    "reaped".into()
}
fn yes() -> bool {
    true
}
fn one() -> usize {
    1
}

impl Entry {
    /// Names of the rules that must have spoken in it.
    pub fn rules(&'static self) -> BTreeSet<&'static str> {
        let parts = self.parts().into_iter();
        let of_parts = parts.flat_map(|part| match part.expect {
            Expectation::Boundary(rule) | Expectation::Server(rule) => vec![rule],
            _ => part.decisions().iter().filter_map(|s| s.rule).collect(),
        });
        of_parts.chain(self.agent.as_deref()).collect()
    }

    /// # Panics
    /// It says something that nobody understands.
    pub fn scenario(&'static self) -> Scenario {
        let config = format!("grace = \"200ms\"\nkill_timeout = \"10s\"\n{}", self.config).leak();
        let mut scenario = Scenario::new(&self.name, &self.parts())
            .image(&self.image)
            .victim_exit(self.death())
            .victim(&self.victim)
            .config(config)
            .programs(self.programs());
        if let Some(rule) = &self.agent {
            scenario = scenario.recognised(rule);
        }
        if let Some(via) = &self.via {
            scenario = scenario.via(via);
        }
        scenario = match self.daemon.as_str() {
            "first" => scenario,
            "last" => scenario.daemon_after_tree(),
            "within" => scenario.daemon_inside_tree(),
            other => panic!("{}: the daemon cannot begin {other:?}", self.name),
        };
        if !self.subreaper {
            scenario = scenario.no_subreaper();
        }
        if self.second_tree {
            scenario = scenario.second_tree();
        }
        if self.unit {
            scenario = scenario.in_unit();
        }
        scenario
    }

    /// Whether it can be told only where one can be made.
    pub fn needs_cgroup(&self) -> bool {
        self.unit
    }

    fn death(&'static self) -> VictimExit {
        match self.victim_exit.as_str() {
            "killed" => VictimExit::Killed,
            "segfault" => VictimExit::Signalled("segfault", "SIGSEGV"),
            "relaunch" => VictimExit::Relaunches,
            "SIGINT" => VictimExit::Signalled("raise SIGINT", "SIGINT"),
            "SIGTERM" => VictimExit::Signalled("raise SIGTERM", "SIGTERM"),
            "SIGHUP" => VictimExit::Signalled("raise SIGHUP", "SIGHUP"),
            "lives" => VictimExit::StaysAlive,
            "leader-first" => VictimExit::LeaderThreadExits,
            how => {
                let code = how.strip_prefix("exit ").and_then(|code| code.parse().ok());
                VictimExit::Exited(
                    how,
                    code.unwrap_or_else(|| panic!("{}: nobody dies {how:?}", self.name)),
                )
            }
        }
    }

    fn parts(&'static self) -> Vec<ProcessSpec> {
        let said = self.said.get_or_init(|| {
            let fates = self.processes.iter().map(|part| part.expect.as_str());
            // Every entry lives as long as the program.
            fates
                .map(|fate| decisions(Box::leak(fate.into())))
                .collect()
        });
        let parts = self.processes.iter().zip(said);
        parts.map(|(part, said)| part.part(said)).collect()
    }

    /// The programs that are named in it.
    fn programs(&'static self) -> Vec<(&'static str, &'static [String])> {
        let how = self.processes.iter().map(|part| part.how.as_str());
        let words = how
            .chain(self.via.as_deref())
            .flat_map(|how| how.split([' ', '+', '=']));
        let named = words.filter_map(|word| word.strip_prefix("as:"));
        let named: BTreeSet<&str> = named.chain([self.image.as_str()]).collect();
        let all = CORPUS.program.iter();
        all.filter(|(name, _)| named.contains(name.as_str()))
            .map(|(name, words)| (name.as_str(), words.as_slice()))
            .collect()
    }
}

impl ProcessEntry {
    fn part(&'static self, said: &'static [DecisionSpec]) -> ProcessSpec {
        let fate = match self.expect.as_str() {
            "reaped" => Expectation::Reaped,
            "detached" => Expectation::Detached,
            "no-decision" => Expectation::NoDecision,
            "killed-by-test" => Expectation::KilledByTest,
            fate => match fate.split_once(' ') {
                Some(("boundary", rule)) => Expectation::Boundary(rule),
                Some(("server", rule)) => Expectation::Server(rule),
                _ => Expectation::Decided(said),
            },
        };
        let adopter = self.adopter.as_deref();
        let part = ProcessSpec::new(&self.role, &self.how, fate, adopter).times(self.times);
        ProcessSpec {
            by: match self.by.as_str() {
                "agent" => StartedBy::Agent,
                "launcher" => StartedBy::Launcher,
                role => StartedBy::Process(role),
            },
            pid: self.pid,
            may_exit_first: self.may_exit_first,
            ..part
        }
    }
}

/// The decisions of a fate that is made of such.
fn decisions(fate: &'static str) -> Vec<DecisionSpec> {
    let said = fate.split(", ").filter_map(|said| {
        let mut words = said.split(' ');
        let (decision, reason) = (words.next()?, words.next()?);
        let rule = words.next();
        Some(DecisionSpec {
            decision,
            reason,
            rule,
        })
    });
    said.collect()
}
