//! The scenario that fits most trees: the agent and all of its processes come up, somebody inside may die first, the agent
//! dies, everybody who is due is ended, everybody else lives.

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

/// The outsiders that each tree has.
const OUTSIDERS: [&str; 3] = ["launcher", "canary", "canary-orphan"];

/// When the daemon begins, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DaemonStart {
    First,
    /// When all of the tree is there.
    Last,
    /// Inside of the tree, started by its `host`.
    Within,
}

/// Whether the program under test may send a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Enforce,
    Observe,
}

/// Who was wronged, whatever else was asked for.
#[derive(Clone, Copy, Debug)]
pub struct ScenarioResult {
    /// Whether the scenario came to its end as it had to.
    pub is_complete: bool,
    /// Processes that had to live, and were signalled or are dead.
    pub wrong_kills: usize,
    /// Processes that had to be ended, and live.
    pub survivors: usize,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, victim, death) = (self.source.name(), self.victim, self.victim_exit);
        write!(f, "'{}' through {source}: ", self.name)?;
        write!(f, "agent '{}', of which '{victim}': {death:?}", self.image)?;
        for part in &self.parts {
            let ProcessSpec {
                role,
                how,
                by,
                times,
                expect: fate,
                ..
            } = part;
            write!(f, "\n  {times} x {role} by {by:?}: {how}: {fate:?}")?;
        }
        Ok(())
    }
}

fn last_word(how: &'static str) -> &'static str {
    how.rsplit(' ').next().unwrap_or(how)
}

/// A tree, and what becomes of it.
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
    pub fn victim_exit(self, death: VictimExit) -> Scenario {
        Scenario {
            victim_exit: death,
            ..self
        }
    }
    /// This part dies instead of the agent: its fate is [`Fate::First`].
    pub fn victim(self, victim: &'static str) -> Scenario {
        Scenario { victim, ..self }
    }
    /// The agent is this program instead of claude.
    pub fn image(self, image: &'static str) -> Scenario {
        Scenario { image, ..self }
    }
    /// The agent must be recognised by this rule; if it has no name, by none.
    pub fn recognised(self, rule: &'static str) -> Scenario {
        Scenario {
            agent: Some(rule),
            ..self
        }
    }
    /// What the launcher starts, which starts the agent; its role is the name of its play.
    pub fn via(self, how: &'static str) -> Scenario {
        Scenario {
            via: Some(how),
            ..self
        }
    }
    pub fn config(self, config: &'static str) -> Scenario {
        Scenario { config, ..self }
    }
    /// All of it is there before the daemon.
    pub fn daemon_after_tree(self) -> Scenario {
        Scenario {
            begins: DaemonStart::Last,
            ..self
        }
    }
    /// The daemon is started by `host`, as `daemon`.
    pub fn daemon_inside_tree(self) -> Scenario {
        Scenario {
            begins: DaemonStart::Within,
            ..self
        }
    }
    /// Orphans go to PID 1.
    pub fn no_subreaper(self) -> Scenario {
        Scenario {
            subreaper: false,
            ..self
        }
    }
    /// When the agent has died, the same tree is started once more, and lives.
    pub fn second_tree(self) -> Scenario {
        Scenario {
            second_tree: true,
            ..self
        }
    }
    /// There is a cgroup named as one of systemd's services, for [`in-unit`](crate::process).
    pub fn in_unit(self) -> Scenario {
        Scenario {
            in_unit: true,
            ..self
        }
    }
    /// Programs that there are besides those of each world ([`World::provide`]).
    pub fn programs(self, programs: Vec<(&'static str, &'static [String])>) -> Scenario {
        Scenario { programs, ..self }
    }
    /// The daemon sees it through this source.
    pub fn through(self, source: SourceKind) -> Scenario {
        Scenario { source, ..self }
    }
    /// What else must be true at the end, in enforce.
    pub fn also(self, check: fn(&World)) -> Scenario {
        Scenario {
            also: Some(check),
            ..self
        }
    }

    fn promise(&self) -> SourceSupport {
        self.source.support_for(self.name)
    }

    /// Whether no more is promised of the scenario as a whole than that nobody is wronged.
    fn is_harmless(&self) -> bool {
        matches!(
            self.promise(),
            SourceSupport::NoWrongKill(_) | SourceSupport::Unsupported(_)
        )
    }

    /// What is promised of a part alone, if that is less: the source excuses it, or somebody above it.
    fn exemption(&self, part: &ProcessSpec) -> Option<SourceSupport> {
        let (maker, way) = origin(&self.parts, part);
        let excuse = self.source.exemption_for(way);
        excuse.or_else(|| self.exemption(maker.filter(|maker| maker.role != part.role)?))
    }

    /// The parts to which has to happen what is said of them.
    fn not_excused(&self) -> impl Iterator<Item = &ProcessSpec> {
        let all = self.parts.iter().filter(|_| !self.is_harmless());
        all.filter(|part| self.exemption(part).is_none())
    }

    /// The others.
    fn exemptions(&self) -> Vec<Exemption> {
        let excused = |part: &ProcessSpec| Some((part.role, self.exemption(part)?));
        self.parts.iter().filter_map(excused).collect()
    }

    /// Whether the daemon may be stopped in the middle of it.
    fn is_too_fast(&self) -> bool {
        let excuses = self.parts.iter().filter_map(|part| self.exemption(part));
        std::iter::once(self.promise())
            .chain(excuses)
            .any(|promise| promise == source_support::TOO_FAST)
    }

    fn leeway(&self) -> Tolerance {
        Tolerance {
            unread: self.source != SourceKind::Ebpf,
            earlier: self.promise() != SourceSupport::Full,
        }
    }

    /// Whether the session ends with its agent, and nobody in it is waited for.
    fn closes(&self) -> bool {
        let waits =
            |part: &ProcessSpec| part.decisions().iter().any(|said| said.decision == "wait");
        self.status().is_some() && !self.parts.iter().any(waits)
    }

    /// How the end of a session must be told, if it is one.
    fn status(&self) -> Option<(Option<i32>, Option<&'static str>)> {
        self.victim_exit.status().filter(|_| self.agent != Some(""))
    }

    /// Whether the agent itself lives to the end.
    fn agent_lives(&self) -> bool {
        self.victim != "agent"
            || matches!(
                self.victim_exit,
                VictimExit::StaysAlive | VictimExit::LeaderThreadExits
            )
    }

    /// Roles that outlive all.
    fn spared(&self) -> BTreeSet<&'static str> {
        let agent = self.agent_lives().then_some(["agent", "leaderless"]);
        let others = OUTSIDERS.into_iter().chain(self.via.map(last_word));
        let parts = self.parts.iter().filter(|p| !p.dies()).map(|p| p.role);
        others
            .chain(agent.into_iter().flatten())
            .chain(parts)
            .collect()
    }

    /// Living processes that should be gone: all below the launcher whose role is not one that lives, and whoever
    /// reported a role that does not, wherever it is now. Where somebody is excused, who has not reported may be theirs.
    fn survivors(&self, world: &World) -> Vec<ProcessKey> {
        let excused = self.exemptions();
        let mut spared = self.spared();
        spared.extend(excused.iter().map(|(role, _)| *role));
        let newcomers = world.processes_of_second_tree();
        let everybody = world.all_processes();
        let (lives, gone): (Vec<_>, Vec<_>) = everybody
            .into_iter()
            .partition(|(role, id)| spared.contains(role.as_str()) || newcomers.contains(id));
        let lives: BTreeSet<ProcessKey> = lives.into_iter().map(|(_, id)| id).collect();
        let below = world
            .living()
            .into_iter()
            .map(|s| s.id)
            .filter(|id| !lives.contains(id) && excused.is_empty());
        below
            .chain(
                gone.into_iter()
                    .map(|(_, id)| id)
                    .filter(|id| id.is_alive()),
            )
            .collect()
    }

    /// Returns the decisions that each role must have, in words.
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

    /// Counted from the processes themselves and the signals that were told, however far the scenario has come.
    fn result(&self, world: &World, mode: Mode, told: bool) -> ScenarioResult {
        let signals = daemon::signals(world.dir());
        let mut spared = self.spared();
        if mode == Mode::Observe {
            spared.extend(self.parts.iter().map(|p| p.role));
        }
        let first = self
            .parts
            .iter()
            .filter(|p| p.expect == Expectation::KilledByTest);
        for part in first {
            spared.remove(part.role);
        }
        if self.begins == DaemonStart::Within {
            // The test has ended it by now.
            spared.remove("daemon");
        }
        let newcomers = world.processes_of_second_tree();
        let wronged = |id: &ProcessKey| !id.is_alive() || signals.iter().any(|e| e.is_about(*id));
        let must_live = world
            .all_processes()
            .into_iter()
            .filter(|(role, id)| spared.contains(role.as_str()) || newcomers.contains(id))
            .map(|(_, id)| id);
        let wronged: BTreeSet<ProcessKey> = must_live.filter(wronged).collect();
        let over =
            !world.processes(self.victim).iter().any(|id| id.is_alive()) || self.agent_lives();
        ScenarioResult {
            is_complete: told,
            wrong_kills: wronged.len(),
            survivors: if over && mode == Mode::Enforce && !self.is_harmless() {
                self.survivors(world).len()
            } else {
                0
            },
        }
    }
}
