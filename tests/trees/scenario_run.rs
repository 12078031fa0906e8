//! Runs a scenario through one event source and checks what that source supports.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use super::checks;
use super::source_support::{self, Exemption, SourceKind, SourceSupport};
use crate::daemon::Event;
use crate::proc::ProcessKey;
use crate::world::{World, eventually};

/// Limit on the attempts of a scenario, for sources that can lose messages and report it.
pub const TRIES: usize = 10;

/// Run of a scenario through one source.
pub struct ScenarioRun {
    pub source: SourceKind,
    pub support: SourceSupport,
    /// Whether the source reported lost messages.
    lost: Cell<bool>,
    /// Exempted roles so far, with the lower support for each.
    exempted: RefCell<Vec<Exemption>>,
}

impl ScenarioRun {
    /// Runs a scenario through a source. Repeats it if the source lost messages.
    pub fn run(source: SourceKind, name: &'static str, scenario: fn(&ScenarioRun)) {
        let view = ScenarioRun {
            source,
            support: source.support_for(name),
            lost: Cell::new(false),
            exempted: RefCell::default(),
        };
        for left in (0..TRIES).rev() {
            scenario(&view);
            if !view.lost.replace(false) {
                return source_support::record(name, source, view.support, view.exempted.take());
            }
            assert!(left > 0, "messages were lost in each attempt");
            println!("{name}: the source lost messages; running the scenario again");
        }
    }

    /// Returns whether every event must be reported.
    pub fn is_fully_supported(&self) -> bool {
        self.support == SourceSupport::Full
    }

    /// Returns whether every due process must be reaped.
    pub fn ends_all(&self) -> bool {
        matches!(
            self.support,
            SourceSupport::Full | SourceSupport::ReapsAll(_)
        )
    }

    /// Returns whether agents must be recognised and their sessions closed.
    pub(super) fn knows_agents(&self) -> bool {
        let unknown = [source_support::TOO_FAST, source_support::TOO_SHORT];
        !unknown.contains(&self.support)
    }

    /// Notes a role as exempted if the source supports its start method less. Returns whether it is exempted.
    pub fn exempt(&self, role: &'static str, method: &str) -> bool {
        let exemption = self.source.exemption_for(method);
        let mut all = self.exempted.borrow_mut();
        all.retain(|(known, _)| *known != role);
        all.extend(exemption.map(|support| (role, support)));
        exemption.is_some()
    }

    /// Returns the daemon's arguments for this source.
    pub fn source_arguments(&self) -> [&'static str; 2] {
        ["--source", self.source.name()]
    }

    /// Starts the daemon on the launcher's tree.
    pub fn watch(&self, world: &mut World, config: &str) {
        world.start_daemon(config, &self.source_arguments());
    }

    /// Waits until a source other than eBPF has seen these roles. Only eBPF reports the program of a process that exits at
    /// once.
    pub fn await_seen(&self, world: &World, roles: &[&str]) {
        if self.source != SourceKind::Ebpf && self.knows_agents() {
            let source = self.source;
            roles
                .iter()
                .for_each(|role| await_seen(world, source, role));
        }
    }

    /// Waits until these roles have exited, if the source reaps every due process.
    pub fn await_gone(&self, world: &World, roles: &[&str]) {
        if self.ends_all() {
            world.await_gone(roles);
        }
    }

    /// Waits until `n` sessions are closed, if the source recognises agents.
    pub fn await_closed(&self, world: &World, n: usize) {
        if !self.knows_agents() {
            return;
        }
        eventually(&format!("{n} sessions closed"), || {
            let events = world.daemon().events();
            let closed = events.iter().filter(|e| e.event == "session.close");
            (closed.count() >= n).then_some(())
        });
    }

    /// As [`ScenarioRun::stop`], and ends the world.
    pub fn end(&self, mut world: World, survivors: &[&str]) -> Option<Vec<Event>> {
        self.stop(&mut world, survivors)
    }

    /// Stops the daemon and checks the stream. Asserts that the roles in `survivors`, the launcher and the canaries live and
    /// were not touched. Returns the events if the source fully supports the scenario.
    pub fn stop(&self, world: &mut World, survivors: &[&str]) -> Option<Vec<Event>> {
        let survivors = [&["launcher", "canary", "canary-orphan"], survivors].concat();
        if self.knows_agents() {
            await_outcomes(world);
        }
        world.assert_alive(&survivors);
        let events = world.stop();
        let survivors: Vec<ProcessKey> = survivors
            .iter()
            .flat_map(|role| world.processes(role))
            .collect();
        checks::assert_untouched(&events, &survivors);
        let lost = |e: &Event| e.event == "gap.open" && e.reason.as_deref() == Some("records_lost");
        if self.source == SourceKind::ProcConnector && events.iter().any(lost) {
            checks::only_members_signalled(world, &events);
            self.lost.set(true);
            return None;
        }
        if self.knows_agents() {
            checks::assert_well_formed(world, &events);
        } else {
            // The daemon was stopped while it reaped.
            checks::only_members_signalled(world, &events);
        }
        self.is_fully_supported().then_some(events)
    }
}

/// Waits until each process of this role has an event with its present program.
///
/// The proc connector reports a fork before it reads the program, and an agent that exits in between is not recognised. For
/// the test's worker program any of its events is enough.
pub fn await_seen(world: &World, source: SourceKind, role: &str) {
    let worker = world.dir().join("bin/worker");
    eventually(&format!("'{role}' is seen"), || {
        let events = world.daemon().events();
        let seen = |key: &ProcessKey| {
            let own = || events.iter().rev().filter(|e| e.is_about(*key));
            own().next()?;
            let reported = own().find_map(|e| e.executable.as_deref());
            // A process that has exited needs an event only.
            let Ok(present) = std::fs::read_link(format!("/proc/{}/exe", key.pid)) else {
                return Some(());
            };
            let is_any_enough = source != SourceKind::Procfs && present == worker;
            (is_any_enough || reported == present.to_str()).then_some(())
        };
        let processes = world.processes(role);
        let are_all_seen = processes.iter().all(|key| seen(key).is_some());
        (!processes.is_empty() && are_all_seen).then_some(())
    });
}

/// Waits until each process that is being reaped has an outcome. A daemon that stops earlier reports a failure, or nothing.
pub fn await_outcomes(world: &World) {
    eventually("each reaped process has an outcome", || {
        let events = world.daemon().events();
        let ids = |which: &dyn Fn(&Event) -> bool| -> BTreeSet<&str> {
            let named = events.iter().filter(|e| which(e));
            named.filter_map(|e| e.entity_id.as_deref()).collect()
        };
        let begun = |e: &Event| e.event == "signal" || e.decision.as_deref() == Some("reap");
        ids(&begun)
            .is_subset(&ids(&|e| e.event == "outcome"))
            .then_some(())
    });
}
