//! How a scenario is told.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::{DaemonStart, Mode, OUTSIDERS, Scenario, ScenarioResult, last_word};
use crate::cgroup::Cgroup;
use crate::daemon;
use crate::proc::ProcessKey;
use crate::trees::checks;
use crate::trees::process_spec::{Expectation, ProcessSpec, StartedBy, VictimExit, arguments};
use crate::trees::scenario_run::{TRIES, await_outcomes, await_seen};
use crate::trees::source_support::{self, Exemption, SourceKind, SourceSupport};
use crate::world::{World, eventually};

impl Scenario {
    /// In enforce nobody who is due survives and nobody else is touched; in observe the same is decided and
    /// nobody is touched at all. `count` is told who was wronged before this panics of it.
    pub fn run(&self, mode: Mode, count: impl Fn(ScenarioResult)) {
        let mut tries = TRIES;
        while !self.try_run(mode, tries > 1, &count) {
            tries -= 1;
            let name = self.name;
            println!("{name}: the kernel had no room for a message, so it is told once more");
        }
    }

    /// Whether it comes to its end: not so if the source has said that something was lost, and nobody was wronged.
    fn try_run(&self, mode: Mode, again: bool, count: impl Fn(ScenarioResult)) -> bool {
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
        let told = catch_unwind(AssertUnwindSafe(|| self.run_and_check(&mut world, mode)));
        let toll = self.result(&world, mode, told.is_ok());
        let lossy = self.source == SourceKind::ProcConnector;
        if told.is_err()
            && again
            && lossy
            && toll.wrong_kills == 0
            && daemon::has_lost_records(world.dir())
        {
            return false;
        }
        count(toll);
        if let Err(panic) = told {
            resume_unwind(panic);
        }
        true
    }

    fn run_and_check(&self, world: &mut World, mode: Mode) {
        let promise = self.promise();
        let (whole, harmless) = (promise == SourceSupport::Full, self.is_harmless());
        let (mut excused, too_fast) = (self.exemptions(), self.is_too_fast());
        self.run_until_victim_exit(world, mode);
        if self.second_tree {
            self.start_again(world);
        }
        if mode == Mode::Enforce {
            if !harmless {
                eventually("nobody left who is due", || {
                    self.survivors(world).is_empty().then_some(())
                });
            }
            if self.closes() && !too_fast {
                world.await_event("the session is closed", |e| e.event == "session.close");
            }
        }
        self.await_decisions(world);
        if whole && self.status().is_some() {
            let agent = world.process(self.victim);
            world.await_event("the agent's end", |e| e.is("session.root_exit", agent));
        }
        if whole && mode == Mode::Observe {
            self.await_adopters(world, |_| true);
        }
        if mode == Mode::Enforce && !too_fast {
            await_outcomes(world);
        }
        for part in &self.parts {
            if part.lives() || mode == Mode::Observe && part.expect != Expectation::KilledByTest {
                world.assert_alive(&[part.role]);
            }
        }
        world.assert_alive(&OUTSIDERS);
        let newcomers = world.processes_of_second_tree();
        let none_excused = !harmless && excused.is_empty();
        if let Some(check) = self.also.filter(|_| mode == Mode::Enforce && none_excused) {
            check(world);
        }
        let events = world.stop();
        if too_fast {
            checks::only_members_signalled(world, &events);
        } else {
            checks::assert_well_formed(world, &events);
        }
        checks::assert_untouched(&events, &newcomers);
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
            checks::assert_root_exit(world, &events, self.victim, status);
        }
        let leeway = self.leeway();
        for part in self.not_excused() {
            checks::assert_decisions(world, &events, part, leeway);
            if part.dies() {
                if whole {
                    checks::assert_adopter(world, &events, part, mode == Mode::Observe);
                }
                if mode == Mode::Enforce {
                    checks::assert_reaped(world, &events, part, leeway);
                }
            }
        }
        let role = |(role, _): &Exemption| self.parts.iter().find(|part| part.role == *role);
        excused.retain(|one| role(one).is_some_and(ProcessSpec::has_events));
        source_support::record(self.name, self.source, promise, excused);
    }

    fn run_until_victim_exit(&self, world: &mut World, mode: Mode) {
        let mode = match mode {
            Mode::Enforce => "--enforce",
            Mode::Observe => "--observe",
        };
        let how = [mode, "--source", self.source.name()];
        if self.begins == DaemonStart::First {
            world.start_daemon(self.config, &how);
        }
        for part in &self.parts {
            if let Some(pid) = part.pid {
                world.register_existing(part.role, pid);
            }
        }
        for part in self.parts.iter().filter(|p| p.by == StartedBy::Launcher) {
            let its = arguments(&self.parts, StartedBy::Process(part.role));
            let how: Vec<_> = [part.how.to_owned()].into_iter().chain(its).collect();
            world.spawn(part.role, &how.join(" "));
            world.await_processes(part.role, 1);
        }
        self.start(world);
        if self.begins == DaemonStart::Within {
            world.start_daemon_inside_tree(self.config, &how);
        }
        for part in &self.parts {
            world.await_processes(part.role, part.times);
        }
        world.await_processes("agent", 1);
        if self.begins == DaemonStart::Last {
            world.start_daemon(self.config, &how);
        }
        if self.source != SourceKind::Ebpf && self.begins == DaemonStart::First {
            self.await_seen(world);
        }
        let first = |part: &&ProcessSpec| {
            part.expect == Expectation::KilledByTest && part.role != self.victim
        };
        for part in self.parts.iter().filter(first) {
            world.kill(part.role);
        }
        // What is decided under the living agent is decided before it dies.
        let before = !matches!(self.victim_exit, VictimExit::Relaunches);
        let whole = self.promise() == SourceSupport::Full;
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
        match self.victim_exit {
            VictimExit::StaysAlive => {}
            VictimExit::Killed => world.kill(self.victim),
            _ => world.open_gate(&format!("die-{}", self.victim)),
        }
        match self.victim_exit {
            VictimExit::LeaderThreadExits => drop(world.await_processes("leaderless", 1)),
            VictimExit::Relaunches => {
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
        let members = self.not_excused().filter(|part| part.has_events());
        let roles = members.map(|part| part.role);
        for role in agents.iter().copied().chain(roles) {
            await_seen(world, self.source, role);
        }
    }

    fn start(&self, world: &mut World) {
        let mut args = arguments(&self.parts, StartedBy::Agent);
        if let Some(how) = self.victim_exit.how().filter(|_| self.victim == "agent") {
            args.push(format!("die={}", how.replace(' ', "+")));
        }
        match self.via {
            Some(how) => {
                let words: Vec<_> = [how.to_owned()].into_iter().chain(args).collect();
                world.spawn(last_word(how), &words.join(" "));
            }
            None => world.launch(self.image, "agent", "agent", &args),
        }
    }

    fn start_again(&self, world: &mut World) {
        world.begin_second_tree();
        self.start(world);
        let its = self.parts.iter().filter(|p| p.by == StartedBy::Agent);
        let all = its.map(|part| part.times).sum::<usize>() + 1;
        eventually("the same tree once more", || {
            (world.processes_of_second_tree().len() >= all).then_some(())
        });
    }

    /// Waits until it is told who has adopted each `of` those who are due. Without the probes that is looked for when there
    /// is time.
    fn await_adopters(&self, world: &World, of: impl Fn(&ProcessSpec) -> bool) {
        let due = |part: &&ProcessSpec| part.dies() && part.adopter.is_some() && of(part);
        for part in self.parts.iter().filter(due) {
            eventually(&format!("the adopter of '{}'", part.role), || {
                let told = |who: &ProcessKey| checks::adopter(&world.daemon().events(), *who);
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
                let undecided = checks::undecided(&events, part);
                let mut said: BTreeMap<ProcessKey, Vec<String>> = BTreeMap::new();
                for (who, _, reason, _) in checks::decisions(world, &events, part.role) {
                    said.entry(who).or_default().push(reason);
                }
                let is_over = |who: &ProcessKey| {
                    let said = said.get(who).map_or(&[][..], Vec::as_slice);
                    let last = said.iter().any(|reason| reason == last.reason);
                    last && said.len() >= least || undecided.contains(who)
                };
                world.processes(part.role).iter().all(is_over).then_some(())
            });
        }
    }
}
