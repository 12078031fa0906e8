//! The story that fits most trees: the agent and all of its cast come up, somebody inside may die first, the agent
//! dies, everybody who is due is ended, everybody else lives.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::judge::Leeway;
use super::part::{Death, Fate, Part, Starter, arguments, origin};
use super::promise::{self, Missed, Promise, Source};
use super::view::{TRIES, await_outcomes, await_seen};
use super::{CONFIG, judge};
use crate::cgroup::Cgroup;
use crate::daemon;
use crate::proc::Identity;
use crate::world::{World, eventually};

/// The outsiders that each tree has.
const SPARED: [&str; 3] = ["launcher", "canary", "stray"];

/// When the daemon begins, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begins {
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
pub struct Toll {
    /// Whether the story came to its end as it had to.
    pub told: bool,
    /// Processes that had to live, and were signalled or are dead.
    pub wrong_kills: usize,
    /// Processes that had to be ended, and live.
    pub survivors: usize,
}

fn last_word(how: &'static str) -> &'static str {
    how.rsplit(' ').next().unwrap_or(how)
}

/// A tree, and what becomes of it.
pub struct Scenario {
    pub name: &'static str,
    parts: Vec<Part>,
    death: Death,
    victim: &'static str,
    image: &'static str,
    agent: Option<&'static str>,
    via: Option<&'static str>,
    config: &'static str,
    begins: Begins,
    subreaper: bool,
    again: bool,
    in_unit: bool,
    programs: Vec<(&'static str, &'static [String])>,
    source: Source,
    also: Option<fn(&World)>,
}

impl Scenario {
    pub fn new(name: &'static str, parts: &[Part]) -> Scenario {
        Scenario {
            name,
            parts: parts.to_vec(),
            death: Death::Killed,
            victim: "agent",
            image: "claude",
            agent: None,
            via: None,
            config: CONFIG,
            begins: Begins::First,
            subreaper: true,
            again: false,
            in_unit: false,
            programs: Vec::new(),
            source: Source::Ebpf,
            also: None,
        }
    }
    pub fn dies(self, death: Death) -> Scenario {
        Scenario { death, ..self }
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
    /// When the agent has died, the same tree is started once more, and lives.
    pub fn again(self) -> Scenario {
        Scenario {
            again: true,
            ..self
        }
    }
    /// There is a cgroup named as one of systemd's services, for [`in-unit`](crate::actor).
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
    pub fn through(self, source: Source) -> Scenario {
        Scenario { source, ..self }
    }
    /// What else must be true at the end, in enforce.
    pub fn also(self, check: fn(&World)) -> Scenario {
        Scenario {
            also: Some(check),
            ..self
        }
    }

    /// In enforce nobody who is due survives and nobody else is touched; in observe the same is decided and
    /// nobody is touched at all. `count` is told who was wronged before this panics of it.
    pub fn play(&self, mode: Mode, count: impl Fn(Toll)) {
        let mut tries = TRIES;
        while !self.is_told(mode, tries > 1, &count) {
            tries -= 1;
            let name = self.name;
            println!("{name}: the kernel had no room for a message, so it is told once more");
        }
    }

    /// Whether it came to its end: not so if the source has said that something was lost, and nobody was wronged.
    fn is_told(&self, mode: Mode, again: bool, count: impl Fn(Toll)) -> bool {
        // It can go only when those in it have gone.
        let unit = self.in_unit.then(|| Cgroup::new(".service"));
        let mut world = World::new(self.subreaper);
        if let Some(unit) = unit.as_ref() {
            let unit = unit.as_ref().expect("a cgroup v2, for a unit of its own");
            symlink(unit.path(), world.dir().join("unit")).expect("link the cgroup");
        }
        for (name, words) in &self.programs {
            world.provide(name, words);
        }
        let told = catch_unwind(AssertUnwindSafe(|| self.tell(&mut world, mode)));
        let toll = self.toll(&world, mode, told.is_ok());
        let lossy = self.source == Source::ProcConnector;
        if told.is_err() && again && lossy && toll.wrong_kills == 0 && daemon::lost(world.dir()) {
            return false;
        }
        count(toll);
        if let Err(panic) = told {
            resume_unwind(panic);
        }
        true
    }

    fn promise(&self) -> Promise {
        self.source.promises(self.name)
    }

    /// Whether no more is promised of the story as a whole than that nobody is wronged.
    fn is_harmless(&self) -> bool {
        matches!(self.promise(), Promise::Harmless(_) | Promise::Refused(_))
    }

    /// What is promised of a part alone, if that is less: the source may miss it, or somebody above it.
    fn missed(&self, part: &Part) -> Option<Promise> {
        let (maker, way) = origin(&self.parts, part);
        let missed = self.source.misses(way);
        missed.or_else(|| self.missed(maker.filter(|maker| maker.role != part.role)?))
    }

    /// The parts to which has to happen what is said of them.
    fn held(&self) -> impl Iterator<Item = &Part> {
        let all = self.parts.iter().filter(|_| !self.is_harmless());
        all.filter(|part| self.missed(part).is_none())
    }

    /// The others.
    pub fn excused(&self) -> Vec<Missed> {
        let missed = |part: &Part| Some((part.role, self.missed(part)?));
        self.parts.iter().filter_map(missed).collect()
    }

    /// Whether the daemon may be stopped in the middle of it.
    fn is_too_fast(&self) -> bool {
        let missed = self.parts.iter().filter_map(|part| self.missed(part));
        std::iter::once(self.promise())
            .chain(missed)
            .any(|promise| promise == promise::TOO_FAST)
    }

    fn tell(&self, world: &mut World, mode: Mode) {
        let promise = self.promise();
        let (whole, harmless) = (promise == Promise::Whole, self.is_harmless());
        let (excused, too_fast) = (self.excused(), self.is_too_fast());
        self.up_to_the_death(world, mode);
        if self.again {
            self.start_again(world);
        }
        if mode == Mode::Enforce {
            if !harmless {
                eventually("nobody left who is due", || {
                    self.left(world).is_empty().then_some(())
                });
            }
            if self.closes() && !too_fast {
                world.await_event("the session is closed", |e| e.event == "session.close");
            }
        }
        self.await_decisions(world);
        if whole && self.status().is_some() {
            let agent = world.one(self.victim);
            world.await_event("the agent's end", |e| e.is("session.root_gone", agent));
        }
        if whole && mode == Mode::Observe {
            self.await_adopters(world);
        }
        if mode == Mode::Enforce && !too_fast {
            await_outcomes(world);
        }
        for part in &self.parts {
            if part.lives() || mode == Mode::Observe && part.fate != Fate::First {
                world.assert_alive(&[part.role]);
            }
        }
        world.assert_alive(&SPARED);
        let newcomers = world.second_act();
        let all_held = !harmless && excused.is_empty();
        if let Some(check) = self.also.filter(|_| mode == Mode::Enforce && all_held) {
            check(world);
        }
        let events = world.stop();
        if too_fast {
            judge::only_members_signalled(world, &events);
        } else {
            judge::sound(world, &events);
        }
        judge::untouched(&events, &newcomers);
        judge::unsignalled(world, &events, &self.parts);
        if mode == Mode::Observe {
            let signal = events.iter().find(|e| e.event == "signal");
            assert!(signal.is_none(), "a signal was sent in observe: {signal:?}");
            judge::decided_before_the_end(&events);
        }
        if let Some(rule) = self.agent {
            judge::recognised(world, &events, "agent", rule);
        }
        if let Some(status) = self.status().filter(|_| whole) {
            judge::death(world, &events, self.victim, status);
        }
        let leeway = self.leeway();
        for part in self.held() {
            judge::decided(world, &events, part, leeway);
            if part.dies() {
                if whole {
                    judge::adopted(world, &events, part, mode == Mode::Observe);
                }
                if mode == Mode::Enforce {
                    judge::reaped(world, &events, part, leeway);
                }
            }
        }
        let role = |(role, _): &Missed| self.parts.iter().find(|part| part.role == *role);
        let mut missed = excused;
        missed.retain(|missed| role(missed).is_some_and(Part::is_told));
        promise::count(self.name, self.source, promise, missed);
    }

    fn leeway(&self) -> Leeway {
        Leeway {
            unread: self.source != Source::Ebpf,
            earlier: self.promise() != Promise::Whole,
        }
    }

    /// Whether the session ends with its agent, and nobody in it is waited for.
    fn closes(&self) -> bool {
        let waits = |part: &Part| part.decisions().iter().any(|said| said.decision == "wait");
        self.status().is_some() && !self.parts.iter().any(waits)
    }

    /// How the end of a session must be told, if it is one.
    fn status(&self) -> Option<(Option<i32>, Option<&'static str>)> {
        self.death.status().filter(|_| self.agent != Some(""))
    }

    fn up_to_the_death(&self, world: &mut World, mode: Mode) {
        let mode = match mode {
            Mode::Enforce => "--enforce",
            Mode::Observe => "--observe",
        };
        let how = [mode, "--source", self.source.name()];
        if self.begins == Begins::First {
            world.watch(self.config, &how);
        }
        for part in &self.parts {
            if let Some(pid) = part.pid {
                world.introduce(part.role, pid);
            }
        }
        for part in self.parts.iter().filter(|p| p.by == Starter::Launcher) {
            let its = arguments(&self.parts, Starter::Part(part.role));
            let how: Vec<_> = [part.how.to_owned()].into_iter().chain(its).collect();
            world.start(part.role, &how.join(" "));
            world.await_cast(part.role, 1);
        }
        self.start(world);
        if self.begins == Begins::Within {
            world.watch_from_within(self.config, &how);
        }
        for part in &self.parts {
            world.await_cast(part.role, part.times);
        }
        world.await_cast("agent", 1);
        if self.begins == Begins::Last {
            world.watch(self.config, &how);
        }
        if self.source != Source::Ebpf && self.begins == Begins::First {
            self.await_seen(world);
        }
        let first = |part: &&Part| part.fate == Fate::First && part.role != self.victim;
        for part in self.parts.iter().filter(first) {
            world.kill(part.role);
        }
        // What is decided under the living agent is decided before it dies.
        let before = !matches!(self.death, Death::Relaunches);
        let whole = self.promise() == Promise::Whole;
        for part in self.held().filter(|p| whole && before && p.is_detached()) {
            for who in world.cast(part.role) {
                world.await_event("an orphan is detached", |e| {
                    e.is("decision", who) && e.reason.as_deref() == Some("detached")
                });
            }
        }
        match self.death {
            Death::Lives => {}
            Death::Killed => world.kill(self.victim),
            _ => world.open(&format!("die-{}", self.victim)),
        }
        match self.death {
            Death::LosesLeader => drop(world.await_cast("leaderless", 1)),
            Death::Relaunches => {
                world.await_event("a relaunch", |e| e.event == "session.relaunch");
            }
            _ => {}
        }
    }

    /// What looks has to have seen the agent, and of the others all whom it can: none but the probes know what was gone
    /// before.
    fn await_seen(&self, world: &World) {
        let known = self.status().is_some();
        let agents: &[&str] = if known { &["agent"] } else { &[] };
        let members = self.held().filter(|part| part.is_told());
        let roles = members.map(|part| part.role);
        for role in agents.iter().copied().chain(roles) {
            await_seen(world, self.source, role);
        }
    }

    fn start(&self, world: &mut World) {
        let mut args = arguments(&self.parts, Starter::Agent);
        if let Some(how) = self.death.how().filter(|_| self.victim == "agent") {
            args.push(format!("die={}", how.replace(' ', "+")));
        }
        match self.via {
            Some(how) => {
                let words: Vec<_> = [how.to_owned()].into_iter().chain(args).collect();
                world.start(last_word(how), &words.join(" "));
            }
            None => world.order(self.image, "agent", "agent", &args),
        }
    }

    fn start_again(&self, world: &mut World) {
        world.end_act();
        self.start(world);
        let its = self.parts.iter().filter(|p| p.by == Starter::Agent);
        let all = its.map(|part| part.times).sum::<usize>() + 1;
        eventually("the same tree once more", || {
            (world.second_act().len() >= all).then_some(())
        });
    }

    /// Whether the agent itself lives to the end.
    fn agent_lives(&self) -> bool {
        self.victim != "agent" || matches!(self.death, Death::Lives | Death::LosesLeader)
    }

    /// Roles that outlive all.
    fn spared(&self) -> BTreeSet<&'static str> {
        let agent = self.agent_lives().then_some(["agent", "leaderless"]);
        let others = SPARED.into_iter().chain(self.via.map(last_word));
        let parts = self.parts.iter().filter(|p| !p.dies()).map(|p| p.role);
        others
            .chain(agent.into_iter().flatten())
            .chain(parts)
            .collect()
    }

    /// Living processes that should be gone: all below the launcher whose role is not one that lives, and whoever
    /// reported a role that does not, wherever it is now. Where somebody may escape, who has not reported may be theirs.
    fn left(&self, world: &World) -> Vec<Identity> {
        let excused = self.excused();
        let mut spared = self.spared();
        spared.extend(excused.iter().map(|(role, _)| *role));
        let newcomers = world.second_act();
        let everybody = world.everybody();
        let (lives, gone): (Vec<_>, Vec<_>) = everybody
            .into_iter()
            .partition(|(role, id)| spared.contains(role.as_str()) || newcomers.contains(id));
        let lives: BTreeSet<Identity> = lives.into_iter().map(|(_, id)| id).collect();
        let below = world
            .living()
            .into_iter()
            .map(|s| s.id)
            .filter(|id| !lives.contains(id) && excused.is_empty());
        below
            .chain(gone.into_iter().map(|(_, id)| id).filter(|id| id.lives()))
            .collect()
    }

    /// Counted from the processes themselves and the signals that were told, however far the story has come.
    fn toll(&self, world: &World, mode: Mode, told: bool) -> Toll {
        let signals = daemon::signals(world.dir());
        let mut spared = self.spared();
        if mode == Mode::Observe {
            spared.extend(self.parts.iter().map(|p| p.role));
        }
        let first = self.parts.iter().filter(|p| p.fate == Fate::First);
        for part in first {
            spared.remove(part.role);
        }
        if self.begins == Begins::Within {
            // The test has ended it by now.
            spared.remove("daemon");
        }
        let newcomers = world.second_act();
        let wronged = |id: &Identity| !id.lives() || signals.iter().any(|e| e.about(*id));
        let must_live = world
            .everybody()
            .into_iter()
            .filter(|(role, id)| spared.contains(role.as_str()) || newcomers.contains(id))
            .map(|(_, id)| id);
        let wronged: BTreeSet<Identity> = must_live.filter(wronged).collect();
        let over = !world.cast(self.victim).iter().any(|id| id.lives()) || self.agent_lives();
        Toll {
            told,
            wrong_kills: wronged.len(),
            survivors: if over && mode == Mode::Enforce && !self.is_harmless() {
                self.left(world).len()
            } else {
                0
            },
        }
    }

    /// Waits until it is told who has adopted each who is due. Without the probes that is looked for when there is time.
    fn await_adopters(&self, world: &World) {
        let due = |part: &&Part| part.dies() && part.adopter.is_some();
        for part in self.parts.iter().filter(due) {
            eventually(&format!("the adopter of '{}'", part.role), || {
                let told = |who: &Identity| judge::adopter(&world.daemon().events(), *who);
                let cast = world.cast(part.role);
                cast.iter().all(|who| told(who).is_some()).then_some(())
            });
        }
    }

    /// Waits until all is decided about each of whom that has to be told.
    fn await_decisions(&self, world: &World) {
        let earlier = self.leeway().earlier;
        for part in self.held() {
            let of_each = part.decisions();
            let least = if earlier { 1 } else { of_each.len() };
            let Some(last) = of_each.last() else { continue };
            eventually(&format!("every decision about '{}'", part.role), || {
                let events = world.daemon().events();
                let starved = judge::starved(&events);
                let mut said: BTreeMap<Identity, Vec<String>> = BTreeMap::new();
                for (who, _, reason, _) in judge::decisions(world, &events, part.role) {
                    said.entry(who).or_default().push(reason);
                }
                let is_over = |who: &Identity| {
                    let said = said.get(who).map_or(&[][..], Vec::as_slice);
                    let last = said.iter().any(|reason| reason == last.reason);
                    last && said.len() >= least || starved.contains(who)
                };
                world.cast(part.role).iter().all(is_over).then_some(())
            });
        }
    }
}
