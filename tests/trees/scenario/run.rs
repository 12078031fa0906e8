//! How a scenario is told.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::{Begins, Mode, SPARED, Scenario, Toll, last_word};
use crate::cgroup::Cgroup;
use crate::daemon;
use crate::proc::Identity;
use crate::trees::checks;
use crate::trees::process_spec::{AgentExit, Expectation, ProcessSpec, StartedBy, arguments};
use crate::trees::promise::{self, Excused, Promise, Source};
use crate::trees::view::{TRIES, await_outcomes, await_seen};
use crate::world::{World, eventually};

impl Scenario {
    /// In enforce nobody who is due survives and nobody else is touched; in observe the same is decided and
    /// nobody is touched at all. `count` is told who was wronged before this panics of it.
    pub fn run(&self, mode: Mode, count: impl Fn(Toll)) {
        let mut tries = TRIES;
        while !self.comes_to_its_end(mode, tries > 1, &count) {
            tries -= 1;
            let name = self.name;
            println!("{name}: the kernel had no room for a message, so it is told once more");
        }
    }

    /// Whether it comes to its end: not so if the source has said that something was lost, and nobody was wronged.
    fn comes_to_its_end(&self, mode: Mode, again: bool, count: impl Fn(Toll)) -> bool {
        // It can go only when those in it have gone.
        let unit = self.in_unit.then(|| Cgroup::new(".service"));
        let mut world = World::new(self.subreaper);
        world.expect(self.to_string(), self.expected());
        if let Some(unit) = &unit {
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

    fn tell(&self, world: &mut World, mode: Mode) {
        let promise = self.promise();
        let (whole, harmless) = (promise == Promise::Whole, self.is_harmless());
        let (mut excused, too_fast) = (self.excused(), self.is_too_fast());
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
            world.await_event("the agent's end", |e| e.is("session.root_exit", agent));
        }
        if whole && mode == Mode::Observe {
            self.await_adopters(world, |_| true);
        }
        if mode == Mode::Enforce && !too_fast {
            await_outcomes(world);
        }
        for part in &self.parts {
            if part.lives() || mode == Mode::Observe && part.fate != Expectation::First {
                world.assert_alive(&[part.role]);
            }
        }
        world.assert_alive(&SPARED);
        let newcomers = world.processes_of_second_step();
        let none_excused = !harmless && excused.is_empty();
        if let Some(check) = self.also.filter(|_| mode == Mode::Enforce && none_excused) {
            check(world);
        }
        let events = world.stop();
        if too_fast {
            checks::only_members_signalled(world, &events);
        } else {
            checks::sound(world, &events);
        }
        checks::untouched(&events, &newcomers);
        checks::unsignalled(world, &events, &self.parts);
        if mode == Mode::Observe {
            let signal = events.iter().find(|e| e.event == "signal");
            assert!(signal.is_none(), "a signal was sent in observe: {signal:?}");
            checks::decided_before_the_end(&events);
        }
        if let Some(rule) = self.agent {
            checks::recognised(world, &events, "agent", rule);
        }
        if let Some(status) = self.status().filter(|_| whole) {
            checks::death(world, &events, self.victim, status);
        }
        let leeway = self.leeway();
        for part in self.not_excused() {
            checks::decided(world, &events, part, leeway);
            if part.dies() {
                if whole {
                    checks::adopted(world, &events, part, mode == Mode::Observe);
                }
                if mode == Mode::Enforce {
                    checks::reaped(world, &events, part, leeway);
                }
            }
        }
        let role = |(role, _): &Excused| self.parts.iter().find(|part| part.role == *role);
        excused.retain(|one| role(one).is_some_and(ProcessSpec::is_told));
        promise::count(self.name, self.source, promise, excused);
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
        for part in self.parts.iter().filter(|p| p.by == StartedBy::Launcher) {
            let its = arguments(&self.parts, StartedBy::Part(part.role));
            let how: Vec<_> = [part.how.to_owned()].into_iter().chain(its).collect();
            world.start(part.role, &how.join(" "));
            world.await_processes(part.role, 1);
        }
        self.start(world);
        if self.begins == Begins::Within {
            world.watch_from_within(self.config, &how);
        }
        for part in &self.parts {
            world.await_processes(part.role, part.times);
        }
        world.await_processes("agent", 1);
        if self.begins == Begins::Last {
            world.watch(self.config, &how);
        }
        if self.source != Source::Ebpf && self.begins == Begins::First {
            self.await_seen(world);
        }
        let first =
            |part: &&ProcessSpec| part.fate == Expectation::First && part.role != self.victim;
        for part in self.parts.iter().filter(first) {
            world.kill(part.role);
        }
        // What is decided under the living agent is decided before it dies.
        let before = !matches!(self.death, AgentExit::Relaunches);
        let whole = self.promise() == Promise::Whole;
        for part in self
            .not_excused()
            .filter(|p| whole && before && p.is_detached())
        {
            for who in world.processes(part.role) {
                world.await_event("an orphan is detached", |e| {
                    e.is("decision", who) && e.reason.as_deref() == Some("detached")
                });
            }
        }
        // And it is known who has adopted it: a member may be ended before somebody has looked whom it had adopted.
        if whole && before {
            self.await_adopters(world, ProcessSpec::is_detached);
        }
        match self.death {
            AgentExit::Lives => {}
            AgentExit::Killed => world.kill(self.victim),
            _ => world.open(&format!("die-{}", self.victim)),
        }
        match self.death {
            AgentExit::LosesLeader => drop(world.await_processes("leaderless", 1)),
            AgentExit::Relaunches => {
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
        let members = self.not_excused().filter(|part| part.is_told());
        let roles = members.map(|part| part.role);
        for role in agents.iter().copied().chain(roles) {
            await_seen(world, self.source, role);
        }
    }

    fn start(&self, world: &mut World) {
        let mut args = arguments(&self.parts, StartedBy::Agent);
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
        world.begin_second_step();
        self.start(world);
        let its = self.parts.iter().filter(|p| p.by == StartedBy::Agent);
        let all = its.map(|part| part.times).sum::<usize>() + 1;
        eventually("the same tree once more", || {
            (world.processes_of_second_step().len() >= all).then_some(())
        });
    }

    /// Waits until it is told who has adopted each `of` those who are due. Without the probes that is looked for when there
    /// is time.
    fn await_adopters(&self, world: &World, of: impl Fn(&ProcessSpec) -> bool) {
        let due = |part: &&ProcessSpec| part.dies() && part.adopter.is_some() && of(part);
        for part in self.parts.iter().filter(due) {
            eventually(&format!("the adopter of '{}'", part.role), || {
                let told = |who: &Identity| checks::adopter(&world.daemon().events(), *who);
                let processes = world.processes(part.role);
                processes
                    .iter()
                    .all(|who| told(who).is_some())
                    .then_some(())
            });
        }
    }

    /// Waits until all is decided about each of whom that has to be told.
    fn await_decisions(&self, world: &World) {
        let earlier = self.leeway().earlier;
        for part in self.not_excused() {
            let of_each = part.decisions();
            let least = if earlier { 1 } else { of_each.len() };
            let Some(last) = of_each.last() else { continue };
            eventually(&format!("every decision about '{}'", part.role), || {
                let events = world.daemon().events();
                let starved = checks::starved(&events);
                let mut said: BTreeMap<Identity, Vec<String>> = BTreeMap::new();
                for (who, _, reason, _) in checks::decisions(world, &events, part.role) {
                    said.entry(who).or_default().push(reason);
                }
                let is_over = |who: &Identity| {
                    let said = said.get(who).map_or(&[][..], Vec::as_slice);
                    let last = said.iter().any(|reason| reason == last.reason);
                    last && said.len() >= least || starved.contains(who)
                };
                world.processes(part.role).iter().all(is_over).then_some(())
            });
        }
    }
}
