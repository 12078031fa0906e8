//! How a scenario with a play of its own is seen: through a source, and as far as that promises.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use super::checks;
use super::source_support::{self, Exemption, SourceKind, SourceSupport};
use crate::daemon::Event;
use crate::proc::ProcessKey;
use crate::world::{World, eventually};

/// How often a scenario is told at most where the source can lose messages of a sudden, and says so.
pub const TRIES: usize = 10;

/// See the module.
pub struct ScenarioRun {
    pub source: SourceKind,
    pub promise: SourceSupport,
    /// The kernel had no room for a message, and that was told.
    lost: Cell<bool>,
    /// Of whom less is promised than of the scenario, as far as has been noted.
    excused: RefCell<Vec<Exemption>>,
}

impl ScenarioRun {
    /// Tells a scenario through a source. Where that has lost something of a sudden, it is told once more.
    pub fn run(source: SourceKind, name: &'static str, scenario: fn(&ScenarioRun)) {
        let view = ScenarioRun {
            source,
            promise: source.support_for(name),
            lost: Cell::new(false),
            excused: RefCell::default(),
        };
        for left in (0..TRIES).rev() {
            scenario(&view);
            if !view.lost.replace(false) {
                return source_support::record(name, source, view.promise, view.excused.take());
            }
            assert!(left > 0, "messages were lost each time");
            println!("{name}: the kernel had no room for a message, so it is told once more");
        }
    }

    /// Whether everything must be told.
    pub fn is_whole(&self) -> bool {
        self.promise == SourceSupport::Full
    }

    /// Whether everybody who is due must be ended.
    pub fn ends_all(&self) -> bool {
        matches!(
            self.promise,
            SourceSupport::Full | SourceSupport::ReapsAll(_)
        )
    }

    /// Whether the agents must be known for what they are, and their sessions come to an end.
    pub(super) fn knows_agents(&self) -> bool {
        let unknown = [source_support::TOO_FAST, source_support::TOO_SHORT];
        !unknown.contains(&self.promise)
    }

    /// Whether one that is started in this way is excused, where the others must be ended: which is noted.
    pub fn add_excused(&self, role: &'static str, way: &str) -> bool {
        let excuse = self.source.exemption_for(way);
        let mut all = self.excused.borrow_mut();
        all.retain(|(known, _)| *known != role);
        all.extend(excuse.map(|promise| (role, promise)));
        excuse.is_some()
    }

    /// What the daemon is asked for.
    pub fn source_arguments(&self) -> [&'static str; 2] {
        ["--source", self.source.name()]
    }

    /// Starts the daemon on the launcher and what is below it.
    pub fn watch(&self, world: &mut World, config: &str) {
        world.start_daemon(config, &self.source_arguments());
    }

    /// What looks has to have found these: none but the probes know what was gone before.
    pub fn await_seen(&self, world: &World, roles: &[&str]) {
        if self.source != SourceKind::Ebpf && self.knows_agents() {
            let source = self.source;
            roles
                .iter()
                .for_each(|role| await_seen(world, source, role));
        }
    }

    /// Waits until these are gone, if they must be.
    pub fn await_gone(&self, world: &World, roles: &[&str]) {
        if self.ends_all() {
            world.await_gone(roles);
        }
    }

    /// Waits until so many sessions are closed, if they must be.
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

    /// Ends the daemon. Nobody of these, whom nobody may end, was touched, nor was an outsider, and what was said is
    /// sound. Gives what was said if it must be everything.
    pub fn end(&self, mut world: World, spared: &[&str]) -> Option<Vec<Event>> {
        self.stop(&mut world, spared)
    }

    /// The same, and leaves the world for more to be asked of it.
    pub fn stop(&self, world: &mut World, spared: &[&str]) -> Option<Vec<Event>> {
        let spared = [&["launcher", "canary", "canary-orphan"], spared].concat();
        if self.knows_agents() {
            await_outcomes(world);
        }
        world.assert_alive(&spared);
        let events = world.stop();
        let spared: Vec<ProcessKey> = spared
            .iter()
            .flat_map(|role| world.processes(role))
            .collect();
        checks::assert_untouched(&events, &spared);
        let lost = |e: &Event| e.event == "gap.open" && e.reason.as_deref() == Some("records_lost");
        if self.source == SourceKind::ProcConnector && events.iter().any(lost) {
            checks::only_members_signalled(world, &events);
            self.lost.set(true);
            return None;
        }
        if self.knows_agents() {
            checks::assert_well_formed(world, &events);
        } else {
            // The daemon was stopped in the middle of it.
            checks::only_members_signalled(world, &events);
        }
        self.is_whole().then_some(events)
    }
}

/// Waits until something was told of each process of this role; where it is only looked at, as the program that it is
/// by now.
pub fn await_seen(world: &World, source: SourceKind, role: &str) {
    eventually(&format!("'{role}' is seen"), || {
        let events = world.daemon().events();
        let told = |who: &ProcessKey| {
            let mut of_it = events.iter().rev().filter(|e| e.is_about(*who));
            if source != SourceKind::Procfs {
                return of_it.next().map(drop);
            }
            let last = of_it.find_map(|e| e.executable.as_deref())?;
            let now = std::fs::read_link(format!("/proc/{}/exe", who.pid)).ok();
            now.is_none_or(|now| now.as_os_str() == last).then_some(())
        };
        let processes = world.processes(role);
        processes
            .iter()
            .all(|who| told(who).is_some())
            .then_some(())
    });
}

/// Waits until it is told what became of each who was to be reaped: a daemon that is stopped before that tells of a
/// failure, or of nothing.
pub fn await_outcomes(world: &World) {
    eventually("each end is told", || {
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
