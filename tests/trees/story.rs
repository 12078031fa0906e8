//! The story that fits most trees: the agent and all of its cast come up, somebody inside may die first, the agent
//! dies, everybody who is due is ended, everybody else lives.

use std::collections::BTreeSet;

use super::{CONFIG, judge};
use crate::proc::Identity;
use crate::world::{World, eventually};

/// What becomes of the processes of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Reaped when the agent is gone.
    Reaped,
    /// Orphaned under the living agent, and reaped when that is gone.
    Detached,
    /// A member that is spared, with this reason.
    Kept(&'static str),
    /// No member: nothing is decided about it.
    Outside,
    /// Killed by the test while the agent lives.
    First,
}

/// The processes of one role.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub role: &'static str,
    /// How the agent starts it ([`Stage::spawn`](crate::actor)); empty if somebody else does.
    pub how: &'static str,
    pub times: usize,
    pub fate: Fate,
    /// Role of the adopter in the orphan event it must have; none where it may have none.
    pub adopter: Option<&'static str>,
    /// Whether something else than a signal to it may end it first.
    pub may_fall: bool,
}

impl Part {
    const fn new(
        role: &'static str,
        how: &'static str,
        fate: Fate,
        adopter: Option<&'static str>,
    ) -> Part {
        Part {
            role,
            how,
            times: 1,
            fate,
            adopter,
            may_fall: false,
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

    /// What must be decided about each, and nothing else.
    pub fn decisions(&self) -> &'static [(&'static str, &'static str)] {
        match self.fate {
            Fate::Reaped => &[("reap", "root_gone")],
            Fate::Detached => &[("keep", "detached"), ("reap", "root_gone")],
            Fate::Kept("other_uid") => &[("keep", "other_uid")],
            Fate::Kept("keep_rule") => &[("keep", "keep_rule")],
            Fate::Kept("below_kept") => &[("keep", "below_kept")],
            Fate::Kept("never_self") => &[("keep", "never_self")],
            Fate::Kept(_) | Fate::Outside | Fate::First => &[],
        }
    }
    pub fn dies(&self) -> bool {
        matches!(self.fate, Fate::Reaped | Fate::Detached)
    }
}

/// How the agent ends.
#[derive(Clone, Copy, Debug)]
pub enum Death {
    /// By the test's SIGKILL.
    Killed,
    /// By what it does itself, with this exit code.
    Exits(&'static str, i32),
    /// By what it does itself, with this signal.
    Falls(&'static str, &'static str),
}

/// When the daemon begins, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begins {
    First,
    /// When all of the tree is there.
    Last,
    /// Inside of the tree, started by its `host`.
    Within,
}

/// A row of the table.
pub struct Scenario {
    pub name: &'static str,
    parts: Vec<Part>,
    death: Death,
    image: &'static str,
    via: Option<&'static str>,
    config: &'static str,
    begins: Begins,
    subreaper: bool,
    also: Option<fn(&World)>,
}

impl Scenario {
    pub fn new(name: &'static str, parts: &[Part]) -> Scenario {
        Scenario {
            name,
            parts: parts.to_vec(),
            death: Death::Killed,
            image: "claude",
            via: None,
            config: CONFIG,
            begins: Begins::First,
            subreaper: true,
            also: None,
        }
    }
    pub fn dies(self, death: Death) -> Scenario {
        Scenario { death, ..self }
    }
    /// The agent is this program instead of claude.
    pub fn image(self, image: &'static str) -> Scenario {
        Scenario { image, ..self }
    }
    /// What the launcher starts, which starts the agent.
    pub fn via(self, play: &'static str) -> Scenario {
        Scenario {
            via: Some(play),
            ..self
        }
    }
    pub fn config(self, config: &'static str) -> Scenario {
        Scenario { config, ..self }
    }
    /// All of it is there before the daemon.
    pub fn before(self) -> Scenario {
        Scenario {
            begins: Begins::Last,
            ..self
        }
    }
    /// The daemon is started by `host`, as `daemon`.
    pub fn within(self) -> Scenario {
        Scenario {
            begins: Begins::Within,
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
    /// What else must be true at the end, in enforce.
    pub fn also(self, check: fn(&World)) -> Scenario {
        Scenario {
            also: Some(check),
            ..self
        }
    }

    /// Nobody who is due survives, nobody else is touched.
    pub fn enforce(&self) {
        let mut world = World::new(self.subreaper);
        self.up_to_the_death(&mut world, "--enforce");
        eventually("nobody left who is due", || {
            self.left(&world).is_empty().then_some(())
        });
        world.await_event("the session is closed", |e| e.event == "session.close");
        self.await_decisions(&world);
        self.assert_others_alive(&world);
        if let Some(check) = self.also {
            check(&world);
        }
        let events = world.stop();
        judge::sound(&world, &events);
        judge::death(&world, &events, self.status());
        for part in &self.parts {
            judge::decided(&world, &events, part);
            if part.dies() {
                judge::reaped(&world, &events, part);
                judge::adopted(&world, &events, part, false);
            }
        }
    }

    /// The same is decided, and nobody is touched.
    pub fn observe(&self) {
        let mut world = World::new(self.subreaper);
        self.up_to_the_death(&mut world, "--observe");
        self.await_decisions(&world);
        for part in &self.parts {
            if part.fate != Fate::First {
                world.assert_alive(&[part.role]);
            }
        }
        self.assert_others_alive(&world);
        let events = world.stop();
        assert!(
            !events.iter().any(|e| e.event == "signal"),
            "a signal was sent in observe"
        );
        judge::sound(&world, &events);
        judge::death(&world, &events, self.status());
        for part in &self.parts {
            judge::decided(&world, &events, part);
            if part.dies() {
                judge::adopted(&world, &events, part, true);
            }
        }
    }

    fn up_to_the_death(&self, world: &mut World, mode: &str) {
        if self.begins == Begins::First {
            world.watch(self.config, &[mode]);
        }
        self.start(world);
        if self.begins == Begins::Within {
            world.watch_from_within(self.config, &[mode]);
        }
        for part in &self.parts {
            world.await_cast(part.role, part.times);
        }
        world.await_cast("agent", 1);
        if self.begins == Begins::Last {
            world.watch(self.config, &[mode]);
        }
        for part in self.parts.iter().filter(|p| p.fate == Fate::First) {
            world.kill(part.role);
        }
        // What is decided under the living agent is decided before it dies.
        for part in self.parts.iter().filter(|p| p.fate == Fate::Detached) {
            for who in world.cast(part.role) {
                world.await_event("an orphan is detached", |e| e.is("decision", who));
            }
        }
        match self.death {
            Death::Killed => world.kill("agent"),
            Death::Exits(..) | Death::Falls(..) => world.open("die-agent"),
        }
    }

    fn start(&self, world: &mut World) {
        let mut args: Vec<String> = Vec::new();
        for part in self.parts.iter().filter(|p| !p.how.is_empty()) {
            args.push(format!(
                "{}*{}={}",
                part.role,
                part.times,
                part.how.replace(' ', "+")
            ));
        }
        if let Death::Exits(how, _) | Death::Falls(how, _) = self.death {
            args.push(format!("die={}", how.replace(' ', "+")));
        }
        match self.via {
            Some(play) => world.order("worker", play, play, &args),
            None => world.order(self.image, "agent", "agent", &args),
        }
    }

    /// How the agent's end is told: exit code, signal.
    fn status(&self) -> (Option<i32>, Option<&'static str>) {
        match self.death {
            Death::Killed => (None, Some("SIGKILL")),
            Death::Exits(_, code) => (Some(code), None),
            Death::Falls(_, signal) => (None, Some(signal)),
        }
    }

    /// Living processes that should be gone: all below the launcher whose role is not one that lives, and whoever
    /// reported a role that does not, wherever it is now.
    fn left(&self, world: &World) -> Vec<Identity> {
        let spared = ["launcher", "canary", "stray"].into_iter().chain(self.via);
        let spared = spared.chain(self.parts.iter().filter(|p| !p.dies()).map(|p| p.role));
        let spared: BTreeSet<&str> = spared.collect();
        let everybody = world.everybody();
        let (lives, gone): (Vec<_>, Vec<_>) = everybody
            .into_iter()
            .partition(|(r, _)| spared.contains(r.as_str()));
        let lives: BTreeSet<Identity> = lives.into_iter().map(|(_, id)| id).collect();
        let below = world
            .living()
            .into_iter()
            .map(|s| s.id)
            .filter(|id| !lives.contains(id));
        below
            .chain(gone.into_iter().map(|(_, id)| id).filter(|id| id.lives()))
            .collect()
    }

    fn assert_others_alive(&self, world: &World) {
        world.assert_alive(&["launcher", "canary", "stray"]);
        for part in &self.parts {
            if matches!(part.fate, Fate::Kept(_) | Fate::Outside) {
                world.assert_alive(&[part.role]);
            }
        }
    }

    fn await_decisions(&self, world: &World) {
        for part in &self.parts {
            let wanted = part.decisions().len() * world.cast(part.role).len();
            eventually(&format!("every decision about '{}'", part.role), || {
                (judge::decisions(world, &world.daemon().events(), part.role).len() >= wanted)
                    .then_some(())
            });
        }
    }
}
