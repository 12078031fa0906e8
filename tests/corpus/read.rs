//! Reads `scenarios.toml`, which documents the keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde::Deserialize;

use crate::trees::{DecisionSpec, Expectation, ProcessSpec, Scenario, StartedBy, VictimExit};

/// Contents of the file. Static, because the specifications of scenarios borrow from it.
pub static CORPUS: LazyLock<Corpus> = LazyLock::new(|| {
    let mut corpus: Corpus = toml::from_str(include_str!("scenarios.toml"))
        .unwrap_or_else(|e| panic!("scenarios.toml: {e}"));
    let workflows = std::mem::take(&mut corpus.workflow);
    let scenarios = workflows.iter().flat_map(Workflow::scenarios);
    corpus.scenario.extend(scenarios);
    corpus
});

/// Exits of the agent in each workflow: end of the scenario's name, and `victim_exit`.
const EXITS: [(&str, &str); 4] = [
    ("under-an-agent-that-crashes", "segfault"),
    ("under-a-killed-agent", "killed"),
    ("under-an-agent-that-hangs-up", "SIGHUP"),
    ("under-an-agent-that-quits", "exit 0"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corpus {
    /// Path below the test's directory and first arguments of each program.
    program: BTreeMap<String, Vec<String>>,
    pub scenario: Vec<Entry>,
    #[serde(default)]
    workflow: Vec<Workflow>,
}

/// Tree that is tried with each of [`EXITS`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Workflow {
    name: String,
    category: String,
    #[serde(default)]
    config: String,
    processes: Vec<ProcessEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub name: String,
    pub category: String,
    #[serde(default = "claude")]
    image: String,
    agent: Option<String>,
    via: Option<String>,
    #[serde(default = "killed")]
    victim_exit: String,
    #[serde(default = "the_agent")]
    victim: String,
    #[serde(default)]
    config: String,
    #[serde(default = "first")]
    daemon: String,
    #[serde(default = "yes")]
    subreaper: bool,
    #[serde(default)]
    second_tree: bool,
    #[serde(default)]
    unit: bool,
    processes: Vec<ProcessEntry>,
    /// Decisions of each of `processes`, parsed from `expect`.
    #[serde(skip)]
    decisions: std::sync::OnceLock<Vec<Vec<DecisionSpec>>>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProcessEntry {
    role: String,
    #[serde(default)]
    how: String,
    #[serde(default = "the_agent")]
    by: String,
    #[serde(default = "one")]
    times: usize,
    pid: Option<i32>,
    #[serde(default = "reaped")]
    expect: String,
    /// Replaces `expect` in the scenario of a workflow in which the agent exits with status 0.
    expect_after_0: Option<String>,
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

impl Workflow {
    /// Returns one scenario for each exit.
    fn scenarios(&self) -> impl Iterator<Item = Entry> {
        EXITS.into_iter().map(|(end, victim_exit)| {
            let processes = self.processes.iter().cloned().map(|mut process| {
                let after_0 = process.expect_after_0.take();
                if let Some(expect) = after_0.filter(|_| victim_exit == "exit 0") {
                    process.expect = expect;
                }
                process
            });
            Entry {
                name: format!("{}-{end}", self.name),
                category: self.category.clone(),
                image: claude(),
                agent: None,
                via: None,
                victim_exit: victim_exit.into(),
                victim: the_agent(),
                config: self.config.clone(),
                daemon: first(),
                subreaper: true,
                second_tree: false,
                unit: false,
                processes: processes.collect(),
                decisions: std::sync::OnceLock::new(),
            }
        })
    }
}

impl Entry {
    /// Returns the names of the rules that it expects to decide.
    pub fn rules(&'static self) -> BTreeSet<&'static str> {
        let parts = self.parts().into_iter();
        let of_parts = parts.flat_map(|part| match part.expect {
            Expectation::Boundary(rule) | Expectation::Server(rule) | Expectation::Noted(rule) => {
                vec![rule]
            }
            _ => part.decisions().iter().filter_map(|s| s.rule).collect(),
        });
        of_parts.chain(self.agent.as_deref()).collect()
    }

    /// # Panics
    /// A value is unknown.
    pub fn scenario(&'static self) -> Scenario {
        let config = format!("grace = \"200ms\"\nkill_timeout = \"10s\"\n{}", self.config).leak();
        let mut scenario = Scenario::new(&self.name, &self.parts())
            .image(&self.image)
            .victim_exit(self.victim_exit())
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
            other => panic!("{}: unknown value of daemon: {other:?}", self.name),
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

    /// Returns whether the scenario needs a new cgroup.
    pub fn needs_cgroup(&self) -> bool {
        self.unit
    }

    /// Returns whether the scenario starts a container of podman.
    pub fn needs_podman(&self) -> bool {
        let mut parts = self.processes.iter();
        parts.any(|part| part.how.starts_with("podman-"))
    }

    fn victim_exit(&'static self) -> VictimExit {
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
                    code.unwrap_or_else(|| panic!("{}: unknown victim_exit {how:?}", self.name)),
                )
            }
        }
    }

    fn parts(&'static self) -> Vec<ProcessSpec> {
        let decisions = self.decisions.get_or_init(|| {
            let expected = self.processes.iter().map(|part| part.expect.as_str());
            // Leaked, because each entry lives as long as the program.
            expected
                .map(|expect| parse_decisions(Box::leak(expect.into())))
                .collect()
        });
        let parts = self.processes.iter().zip(decisions);
        parts
            .map(|(part, decisions)| part.part(decisions))
            .collect()
    }

    /// Returns the programs that its start methods and `image` name.
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
    fn part(&'static self, decisions: &'static [DecisionSpec]) -> ProcessSpec {
        let expect = match self.expect.as_str() {
            "reaped" => Expectation::Reaped,
            "detached" => Expectation::Detached,
            "no-decision" => Expectation::NoDecision,
            "ends" => Expectation::Ends,
            "killed-by-test" => Expectation::KilledByTest,
            other => match other.split_once(' ') {
                Some(("boundary", rule)) => Expectation::Boundary(rule),
                Some(("server", rule)) => Expectation::Server(rule),
                Some(("noted", rule)) => Expectation::Noted(rule),
                _ => Expectation::Decided(decisions),
            },
        };
        let adopter = self.adopter.as_deref();
        let part = ProcessSpec::new(&self.role, &self.how, expect, adopter).times(self.times);
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

/// Parses decisions such as `keep detached, wait rule_delay asked-for-servers`. The rule is optional.
fn parse_decisions(expect: &'static str) -> Vec<DecisionSpec> {
    let decisions = expect.split(", ").filter_map(|decision| {
        let mut words = decision.split(' ');
        let (decision, reason) = (words.next()?, words.next()?);
        let rule = words.next();
        Some(DecisionSpec {
            decision,
            reason,
            rule,
        })
    });
    decisions.collect()
}
