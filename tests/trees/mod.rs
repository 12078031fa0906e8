//! Tests of process trees: no process that is due survives, and the canaries live.
//!
//! `table` lists the trees that follow one common scenario. The other modules have scenarios of their own.

pub mod checks;
mod handover;
mod nested;
mod pids;
mod process_spec;
mod races;
mod scenario;
mod scenario_run;
mod scripts;
mod servers;
pub mod source_support;
mod special;
mod table;
mod windows;

use libtest_mimic::{Failed, Trial};

pub use pids::run_in_namespace;
pub use process_spec::{DecisionSpec, Expectation, ProcessSpec, StartedBy, VictimExit};
pub use scenario::{Mode, Scenario, ScenarioResult};
use scenario_run::ScenarioRun;
pub use source_support::SourceKind;
pub use table::OWN_RULES;

use crate::cgroup;
use crate::report;
use crate::schedule::TestSlot;

/// Default config of the tests: a short grace period, and enough time for a killed process to exit on a busy machine.
pub const CONFIG: &str = "grace = \"200ms\"\nkill_timeout = \"10s\"\n";

/// Name and function of a scenario that is not in the table.
type ScenarioEntry = (&'static str, fn(&ScenarioRun));

/// Returns the scenarios that are not in the table, and whether this machine has what they need.
fn special_scenarios() -> impl Iterator<Item = (ScenarioEntry, bool)> {
    let all = [
        (special::SCENARIOS, true),
        (special::IN_TMUX, special::has_tmux()),
        (special::IN_A_CGROUP, cgroup::can_be_made()),
        (nested::SCENARIOS, true),
        (handover::SCENARIOS, true),
        (pids::SCENARIOS, true),
        (races::SCENARIOS, true),
        (scripts::SCENARIOS, true),
        (scripts::ON_FUSE, scripts::has_fuse()),
        (servers::SCENARIOS, true),
    ];
    let each = |(scenarios, possible): (&'static [ScenarioEntry], bool)| {
        scenarios.iter().map(move |scenario| (*scenario, possible))
    };
    all.into_iter().flat_map(each)
}

/// Returns every tree in `enforce` mode.
pub fn trials() -> Vec<Trial> {
    let mut all = trials_through("enforce", SourceKind::Ebpf);
    all.push(windows::trial_on_ebpf());
    all.push(special::hook_on_ebpf());
    all
}

/// Rows of the table that also run in `observe` mode: each way in which a session ends, continues or keeps its members.
const OBSERVED: [&str; 7] = [
    "plain",
    "before-the-daemon",
    "double-fork",
    "exit-0",
    "outer-agent-first",
    "keep-rule",
    "boundary",
];

/// Returns trees of the table in `observe` mode.
pub fn observed() -> Vec<Trial> {
    let rows = table::rows().into_iter();
    let rows = rows.filter(|row| OBSERVED.contains(&row.name));
    rows.map(|row| trial("observe", row.name, move || row.run(Mode::Observe, drop)))
        .collect()
}

/// Returns every tree in `enforce` mode, through a source other than eBPF.
pub fn through(source: SourceKind) -> Vec<Trial> {
    trials_through(source.name(), source)
}

/// Returns the soak tests: trees that are too large for every run.
pub fn soaks() -> Vec<Trial> {
    let rows = table::soaks().into_iter();
    rows.map(|row| trial("soak", row.name, move || row.run(Mode::Enforce, drop)))
        .collect()
}

fn trials_through(kind: &str, source: SourceKind) -> Vec<Trial> {
    let special = |((name, scenario), possible): (ScenarioEntry, bool)| {
        trial(kind, name, move || ScenarioRun::run(source, name, scenario))
            .with_ignored_flag(!possible)
    };
    let play = |row: Scenario| trial(kind, row.name, move || row.run(Mode::Enforce, drop));
    let rows = table::rows().into_iter();
    let rows = rows.map(|row| play(row.through(source)));
    rows.chain(special_scenarios().map(special)).collect()
}

/// Returns a test named `KIND::NAME` that fails if `scenario` panics.
pub fn trial(kind: &str, name: &str, scenario: impl FnOnce() + Send + 'static) -> Trial {
    let name = format!("{kind}::{name}");
    Trial::test(name.clone(), move || -> Result<(), Failed> {
        let _turn = TestSlot::of(&name);
        report::of(&name, scenario)
    })
}

/// Returns whether these programs are on PATH. If not, prints that the tests of `what` are left out.
pub fn has_programs(names: &[&str], what: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |name: &&&str| std::env::split_paths(&path).any(|dir| dir.join(name).exists());
    let missing = names.iter().find(|name| !is_there(name));
    if let Some(name) = missing {
        eprintln!("{name} is not installed, so the tests of {what} are left out");
    }
    missing.is_none()
}

/// Runs a scenario as the init process of a new PID namespace.
pub fn in_pid_namespace(name: &str, source: &str) {
    let mut inside = pids::INSIDE.iter().chain([&windows::INSIDE]);
    let scenario = inside.find(|(n, _)| *n == name);
    let (name, scenario) = scenario.unwrap_or_else(|| panic!("no scenario is named '{name}'"));
    let source = SourceKind::ALL.into_iter().find(|of| of.name() == source);
    ScenarioRun::run(source.expect("a source"), name, *scenario);
}
