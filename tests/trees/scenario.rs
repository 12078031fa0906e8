//! Common scenario of most trees. The agent and its processes start. A process of the tree may be killed first. Then
//! the agent exits. Every due process is reaped, and every other process lives.

mod run;

use std::collections::BTreeSet;
use std::fmt;

use super::CONFIG;
use super::checks::Tolerance;
use super::process_spec::{Expectation, ProcessSpec, VictimExit, origin};
use super::source_support::{self, Exemption, SourceKind, SourceSupport};
use crate::daemon;
use crate::proc::ProcessKey;
use crate::world::World;

/// Roles outside of the agent's tree in every world.
const OUTSIDERS: [&str; 3] = ["launcher", "canary", "canary-orphan"];

/// Time and place of the daemon's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DaemonStart {
    First,
    /// After the whole tree.
    Last,
    /// Inside the tree, started by its `host`.
    Within,
}

/// Mode of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Enforce,
    Observe,
}

/// Counts of wrong kills and survivors, also of a scenario that failed.
#[derive(Clone, Copy, Debug)]
pub struct ScenarioResult {
    /// Whether the scenario passed.
    pub is_complete: bool,
    /// Number of processes that had to live, but were signalled or are dead.
    pub wrong_kills: usize,
    /// Number of processes that had to be reaped, but live.
    pub survivors: usize,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, victim, exit) = (self.source.name(), self.victim, self.victim_exit);
        write!(f, "'{}' through {source}: ", self.name)?;
        write!(f, "agent '{}', exit of '{victim}': {exit:?}", self.image)?;
        for part in &self.parts {
            let ProcessSpec {
                role,
                how,
                by,
                times,
                expect,
                ..
            } = part;
            write!(f, "\n  {times} x {role} by {by:?}: {how}: {expect:?}")?;
        }
        Ok(())
    }
}

fn last_word(how: &'static str) -> &'static str {
    how.rsplit(' ').next().unwrap_or(how)
}

/// Tree of processes and its expected end.
pub struct Scenario {
    pub name: &'static str,
    parts: Vec<ProcessSpec>,
    victim_exit: VictimExit,
    victim: &'static str,
    image: &'static str,
    agent: Option<&'static str>,
    via: Option<&'static str>,
    config: &'static str,
    begins: DaemonStart,
    subreaper: bool,
    second_tree: bool,
    in_unit: bool,
    programs: Vec<(&'static str, &'static [String])>,
    source: SourceKind,
    also: Option<fn(&World)>,
}

impl Scenario {
    pub fn new(name: &'static str, parts: &[ProcessSpec]) -> Scenario {
        Scenario {
            name,
            parts: parts.to_vec(),
            victim_exit: VictimExit::Killed,
            victim: "agent",
            image: "claude",
            agent: None,
            via: None,
            config: CONFIG,
            begins: DaemonStart::First,
            subreaper: true,
            second_tree: false,
            in_unit: false,
            programs: Vec::new(),
            source: SourceKind::Ebpf,
            also: None,
        }
    }
    pub fn victim_exit(self, exit: VictimExit) -> Scenario {
        Scenario {
            victim_exit: exit,
            ..self
        }
    }
    /// Sets the role that exits instead of the agent. Its expectation is [`Expectation::KilledByTest`].
    pub fn victim(self, victim: &'static str) -> Scenario {
        Scenario { victim, ..self }
    }
    /// Sets the agent's program; the default is claude.
    pub fn image(self, image: &'static str) -> Scenario {
        Scenario { image, ..self }
    }
    /// Requires that the agent is recognised by this rule; by none if `rule` is empty.
    pub fn recognised(self, rule: &'static str) -> Scenario {
        Scenario {
            agent: Some(rule),
            ..self
        }
    }
    /// Sets a process that the launcher starts and that starts the agent. Its role is the name of its behaviour.
    pub fn via(self, how: &'static str) -> Scenario {
        Scenario {
            via: Some(how),
            ..self
        }
    }
    pub fn config(self, config: &'static str) -> Scenario {
        Scenario { config, ..self }
    }
    /// Starts the daemon after the whole tree.
    pub fn daemon_after_tree(self) -> Scenario {
        Scenario {
            begins: DaemonStart::Last,
            ..self
        }
    }
    /// Starts the daemon by the role `host`, with the role `daemon`.
    pub fn daemon_inside_tree(self) -> Scenario {
        Scenario {
            begins: DaemonStart::Within,
            ..self
        }
    }
    /// Lets PID 1 adopt the orphans.
    pub fn no_subreaper(self) -> Scenario {
        Scenario {
            subreaper: false,
            ..self
        }
    }
    /// Starts the same tree again after the agent's exit. The second tree must live.
    pub fn second_tree(self) -> Scenario {
        Scenario {
            second_tree: true,
            ..self
        }
    }
    /// Creates a cgroup with the name of a systemd service, for [`in-unit`](crate::process).
    pub fn in_unit(self) -> Scenario {
        Scenario {
            in_unit: true,
            ..self
        }
    }
    /// Adds programs to those of each world ([`World::provide`]).
    pub fn programs(self, programs: Vec<(&'static str, &'static [String])>) -> Scenario {
        Scenario { programs, ..self }
    }
    /// Sets the daemon's event source.
    pub fn through(self, source: SourceKind) -> Scenario {
        Scenario { source, ..self }
    }
    /// Adds a check at the end, in enforce mode.
    pub fn also(self, check: fn(&World)) -> Scenario {
        Scenario {
            also: Some(check),
            ..self
        }
    }

    fn support(&self) -> SourceSupport {
        self.source.support_for(self.name)
    }

    /// Returns whether the source guarantees no more than that no process is killed wrongly.
    fn is_harmless(&self) -> bool {
        matches!(
            self.support(),
            SourceSupport::NoWrongKill(_) | SourceSupport::Unsupported(_)
        )
    }

    /// Returns the lower support for a part, if the source exempts its start method or that of an ancestor.
    fn exemption(&self, part: &ProcessSpec) -> Option<SourceSupport> {
        let (starter, method) = origin(&self.parts, part);
        let own = self.source.exemption_for(method);
        own.or_else(|| self.exemption(starter.filter(|starter| starter.role != part.role)?))
    }

    /// Returns the parts that must meet their expectation.
    fn not_exempted(&self) -> impl Iterator<Item = &ProcessSpec> {
        let all = self.parts.iter().filter(|_| !self.is_harmless());
        all.filter(|part| self.exemption(part).is_none())
    }

    /// Returns the exempted parts.
    fn exemptions(&self) -> Vec<Exemption> {
        let exempted = |part: &ProcessSpec| Some((part.role, self.exemption(part)?));
        self.parts.iter().filter_map(exempted).collect()
    }

    /// Returns whether the daemon may still be reaping when it is stopped.
    fn is_too_fast(&self) -> bool {
        let exemptions = self.parts.iter().filter_map(|part| self.exemption(part));
        std::iter::once(self.support())
            .chain(exemptions)
            .any(|support| support == source_support::TOO_FAST)
    }

    fn leeway(&self) -> Tolerance {
        Tolerance {
            unread: self.source != SourceKind::Ebpf,
            earlier: self.support() != SourceSupport::Full,
        }
    }

    /// Returns whether the session closes after the agent's exit, without a member whose decision is `wait`.
    fn closes(&self) -> bool {
        let waits =
            |part: &ProcessSpec| part.decisions().iter().any(|said| said.decision == "wait");
        self.status().is_some() && !self.parts.iter().any(waits)
    }

    /// Returns the exit status that the stream must report, if the agent's exit closes a session.
    fn status(&self) -> Option<(Option<i32>, Option<&'static str>)> {
        self.victim_exit.status().filter(|_| self.agent != Some(""))
    }

    /// Returns whether the agent lives to the end.
    fn agent_lives(&self) -> bool {
        self.victim != "agent"
            || matches!(
                self.victim_exit,
                VictimExit::StaysAlive | VictimExit::LeaderThreadExits
            )
    }

    /// Returns the roles that must live to the end.
    fn living_roles(&self) -> BTreeSet<&'static str> {
        let agent = self.agent_lives().then_some(["agent", "leaderless"]);
        let others = OUTSIDERS.into_iter().chain(self.via.map(last_word));
        let parts = self.parts.iter().filter(|p| p.lives()).map(|p| p.role);
        others
            .chain(agent.into_iter().flatten())
            .chain(parts)
            .collect()
    }

    /// Returns living processes that must have exited: descendants of the launcher without a role that lives, and any process
    /// that reported another role. With exemptions, processes without a role do not count, because an exempted process may
    /// have started them.
    fn survivors(&self, world: &World) -> Vec<ProcessKey> {
        let exempted = self.exemptions();
        let mut living = self.living_roles();
        living.extend(exempted.iter().map(|(role, _)| *role));
        let second_tree = world.processes_of_second_tree();
        let (lives, gone): (Vec<_>, Vec<_>) = world
            .all_processes()
            .into_iter()
            .partition(|(role, id)| living.contains(role.as_str()) || second_tree.contains(id));
        let lives: BTreeSet<ProcessKey> = lives.into_iter().map(|(_, id)| id).collect();
        let below = world
            .living()
            .into_iter()
            .map(|s| s.id)
            .filter(|id| !lives.contains(id) && exempted.is_empty());
        below
            .chain(
                gone.into_iter()
                    .map(|(_, id)| id)
                    .filter(|id| id.is_alive()),
            )
            .collect()
    }

    /// Returns the expected decisions of each role as text.
    fn expected(&self) -> Vec<(&'static str, String)> {
        let of_part = |part: &ProcessSpec| match part.expect {
            Expectation::Boundary(rule) => format!("boundary {rule}"),
            Expectation::Server(rule) => format!("server {rule}"),
            _ => {
                let said = part.decisions().into_iter();
                let words = said.map(|said| said.to_string());
                words.collect::<Vec<_>>().join(", ")
            }
        };
        let parts = self.parts.iter();
        parts.map(|part| (part.role, of_part(part))).collect()
    }

    /// Counts wrong kills and survivors from the processes and the reported signals, also if the scenario failed.
    fn result(&self, world: &World, mode: Mode, is_complete: bool) -> ScenarioResult {
        let signals = daemon::signals(world.dir());
        let mut living = self.living_roles();
        if mode == Mode::Observe {
            living.extend(self.parts.iter().map(|p| p.role));
        }
        let first = self
            .parts
            .iter()
            .filter(|p| p.expect == Expectation::KilledByTest);
        for part in first {
            living.remove(part.role);
        }
        if self.begins == DaemonStart::Within {
            // The test has stopped it.
            living.remove("daemon");
        }
        let second_tree = world.processes_of_second_tree();
        let wronged = |id: &ProcessKey| !id.is_alive() || signals.iter().any(|e| e.is_about(*id));
        let must_live = world
            .all_processes()
            .into_iter()
            .filter(|(role, id)| living.contains(role.as_str()) || second_tree.contains(id))
            .map(|(_, id)| id);
        let wronged: BTreeSet<ProcessKey> = must_live.filter(wronged).collect();
        let is_over =
            !world.processes(self.victim).iter().any(|id| id.is_alive()) || self.agent_lives();
        ScenarioResult {
            is_complete,
            wrong_kills: wronged.len(),
            survivors: if is_over && mode == Mode::Enforce && !self.is_harmless() {
                self.survivors(world).len()
            } else {
                0
            },
        }
    }
}
