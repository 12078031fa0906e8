//! Runs a scenario and checks its result.

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
    /// Runs the scenario. In enforce mode, every due process must be reaped and no other process touched. In observe mode,
    /// the decisions must be the same and no process touched. Passes the result to `count` before a panic.
    pub fn run(&self, mode: Mode, count: impl Fn(ScenarioResult)) {
        let mut tries = TRIES;
        while !self.try_run(mode, tries > 1, &count) {
            tries -= 1;
            let name = self.name;
            println!("{name}: the source lost messages; running the scenario again");
        }
    }

    /// Runs the scenario once. Returns false if it must be repeated, because the source lost messages.
    fn try_run(&self, mode: Mode, again: bool, count: impl Fn(ScenarioResult)) -> bool {
        // Dropped after the world: a cgroup can be removed only when it is empty.
        let unit = self.in_unit.then(|| Cgroup::new(".service"));
        let mut world = World::new(self.subreaper);
        world.expect(self.to_string(), self.expected());
        if let Some(unit) = &unit {
            symlink(unit.path(), world.dir().join("unit")).expect("link the cgroup");
        }
        for (name, words) in &self.programs {
            world.provide(name, words);
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_and_check(&mut world, mode)));
        let result = self.result(&world, mode, outcome.is_ok());
        let lossy = self.source == SourceKind::ProcConnector;
        if outcome.is_err()
            && again
            && lossy
            && result.wrong_kills == 0
            && daemon::has_lost_records(world.dir())
        {
            return false;
        }
        count(result);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        true
    }

    fn run_and_check(&self, world: &mut World, mode: Mode) {
        let support = self.support();
        let (full, harmless) = (support == SourceSupport::Full, self.is_harmless());
        let (mut exempted, too_fast) = (self.exemptions(), self.is_too_fast());
        self.run_until_victim_exit(world, mode);
        if self.second_tree {
            self.start_again(world);
        }
        if mode == Mode::Enforce {
            if !harmless {
                eventually("every due process is gone", || {
                    self.survivors(world).is_empty().then_some(())
                });
            }
            if self.closes() && !too_fast {
                world.await_event("the session is closed", |e| e.event == "session.close");
            }
        }
        self.await_decisions(world);
        if full && self.status().is_some() {
            let agent = world.process(self.victim);
            world.await_event("the agent's exit", |e| e.is("session.root_exit", agent));
        }
        if full && mode == Mode::Observe {
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
        let second_tree = world.processes_of_second_tree();
        let none_exempted = !harmless && exempted.is_empty();
        if let Some(check) = self.also.filter(|_| mode == Mode::Enforce && none_exempted) {
            check(world);
        }
        let events = world.stop();
        if too_fast {
            checks::only_members_signalled(world, &events);
        } else {
            checks::assert_well_formed(world, &events);
        }
        checks::assert_untouched(&events, &second_tree);
        checks::assert_unsignalled(world, &events, &self.parts);
        if mode == Mode::Observe {
            let signal = events.iter().find(|e| e.event == "signal");
            assert!(signal.is_none(), "a signal was sent in observe: {signal:?}");
            checks::assert_decided_before_close(&events);
        }
        if let Some(rule) = self.agent {
            checks::assert_recognised(world, &events, "agent", rule);
        }
        if let Some(status) = self.status().filter(|_| full) {
            checks::assert_root_exit(world, &events, self.victim, status);
        }
        let leeway = self.leeway();
        for part in self.not_exempted() {
            checks::assert_decisions(world, &events, part, leeway);
            if part.dies() {
                if full {
                    checks::assert_adopter(world, &events, part, mode == Mode::Observe);
                }
                if mode == Mode::Enforce {
                    checks::assert_reaped(world, &events, part, leeway);
                }
            }
        }
        let role = |(role, _): &Exemption| self.parts.iter().find(|part| part.role == *role);
        exempted.retain(|one| role(one).is_some_and(ProcessSpec::has_events));
        source_support::record(self.name, self.source, support, exempted);
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
        // Decisions that need a living agent must be made before its exit.
        let before = !matches!(self.victim_exit, VictimExit::Relaunches);
        let full = self.support() == SourceSupport::Full;
        for part in self
            .not_exempted()
            .filter(|p| full && before && p.is_detached())
        {
            for key in world.processes(part.role) {
                world.await_event("an orphan is detached", |e| {
                    e.is("decision", key) && e.reason.as_deref() == Some("detached")
                });
            }
        }
        // The adopter must be known too: an adopting member may be reaped before the service reads its children.
        if full && before {
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

    /// Waits until a polling source has seen the agent and the members. Only eBPF reports processes that exited before a
    /// scan.
    fn await_seen(&self, world: &World) {
        let known = self.status().is_some();
        let agents: &[&str] = if known { &["agent"] } else { &[] };
        let members = self.not_exempted().filter(|part| part.has_events());
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
        eventually("the second tree has started", || {
            (world.processes_of_second_tree().len() >= all).then_some(())
        });
    }

    /// Waits until an event names the adopter of each due process that `of` accepts. Sources other than eBPF look for it
    /// later.
    fn await_adopters(&self, world: &World, of: impl Fn(&ProcessSpec) -> bool) {
        let due = |part: &&ProcessSpec| part.dies() && part.adopter.is_some() && of(part);
        for part in self.parts.iter().filter(due) {
            eventually(&format!("the adopter of '{}'", part.role), || {
                let adopter = |key: &ProcessKey| checks::adopter(&world.daemon().events(), *key);
                let processes = world.processes(part.role);
                processes
                    .iter()
                    .all(|key| adopter(key).is_some())
                    .then_some(())
            });
        }
    }

    /// Waits until each process has all expected decisions.
    fn await_decisions(&self, world: &World) {
        let earlier = self.leeway().earlier;
        for part in self.not_exempted() {
            let of_each = part.decisions();
            let least = if earlier { 1 } else { of_each.len() };
            let Some(last) = of_each.last() else { continue };
            eventually(&format!("every decision about '{}'", part.role), || {
                let events = world.daemon().events();
                let undecided = checks::undecided(&events, part);
                let mut said: BTreeMap<ProcessKey, Vec<String>> = BTreeMap::new();
                for (key, _, reason, _) in checks::decisions(world, &events, part.role) {
                    said.entry(key).or_default().push(reason);
                }
                let is_decided = |key: &ProcessKey| {
                    let said = said.get(key).map_or(&[][..], Vec::as_slice);
                    let last = said.iter().any(|reason| reason == last.reason);
                    last && said.len() >= least || undecided.contains(key)
                };
                world
                    .processes(part.role)
                    .iter()
                    .all(is_decided)
                    .then_some(())
            });
        }
    }
}
