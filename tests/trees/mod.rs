//! Trees that must end with no survivor, and the canaries alive: the table of those that one scenario fits, and
//! those with a scenario of their own.

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

use libtest_mimic::{Failed, Trial};

pub use process_spec::{DecisionSpec, Expectation, ProcessSpec, StartedBy, VictimExit};
pub use scenario::{Mode, Scenario, ScenarioResult};
use scenario_run::ScenarioRun;
pub use source_support::SourceKind;
pub use table::OWN_RULES;

use crate::cgroup;
use crate::report;
use crate::schedule::TestSlot;

/// What all trees get unless they say otherwise: a short grace, and time enough for one that is killed to end where the
/// machine is busy with others.
pub const CONFIG: &str = "grace = \"200ms\"\nkill_timeout = \"10s\"\n";

/// A scenario with a play of its own.
type ScenarioEntry = (&'static str, fn(&ScenarioRun));

/// Those with a play of their own, and whether there is here what they need.
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

/// Every tree in `enforce`.
pub fn trials() -> Vec<Trial> {
    trials_through("enforce", SourceKind::Ebpf)
}

/// Rows of the table that are also played in `observe`: each way in which a session ends, goes on or holds back its members.
const OBSERVED: [&str; 7] = [
    "plain",
    "before-the-daemon",
    "double-fork",
    "exit-0",
    "outer-agent-first",
    "keep-rule",
    "boundary",
];

/// Trees of the table in `observe`.
pub fn observed() -> Vec<Trial> {
    let rows = table::rows().into_iter();
    let rows = rows.filter(|row| OBSERVED.contains(&row.name));
    rows.map(|row| trial("observe", row.name, move || row.run(Mode::Observe, drop)))
        .collect()
}

/// Every tree in `enforce`, seen through another source than the probes.
pub fn through(source: SourceKind) -> Vec<Trial> {
    trials_through(source.name(), source)
}

/// Trees that are too large for every run.
pub fn soaks() -> Vec<Trial> {
    let rows = table::soaks().into_iter();
    rows.map(|row| trial("soak", row.name, move || row.run(Mode::Enforce, drop)))
        .collect()
}

fn trials_through(kind: &str, source: SourceKind) -> Vec<Trial> {
    let told = |((name, scenario), possible): (ScenarioEntry, bool)| {
        trial(kind, name, move || ScenarioRun::run(source, name, scenario))
            .with_ignored_flag(!possible)
    };
    let play = |row: Scenario| trial(kind, row.name, move || row.run(Mode::Enforce, drop));
    let rows = table::rows().into_iter();
    let rows = rows.map(|row| play(row.through(source)));
    rows.chain(special_scenarios().map(told)).collect()
}

/// A scenario that fails by panicking.
pub fn trial(kind: &str, name: &str, scenario: impl FnOnce() + Send + 'static) -> Trial {
    let name = format!("{kind}::{name}");
    Trial::test(name.clone(), move || -> Result<(), Failed> {
        let _turn = TestSlot::of(&name);
        report::of(&name, scenario)
    })
}

/// Runs a scenario as the init of a pid namespace of its own.
pub fn in_pid_namespace(name: &str, source: &str) {
    let scenario = pids::INSIDE.iter().find(|(n, _)| *n == name);
    let (name, scenario) = scenario.unwrap_or_else(|| panic!("no scenario is called '{name}'"));
    let source = SourceKind::ALL.into_iter().find(|of| of.name() == source);
    ScenarioRun::run(source.expect("a source"), name, *scenario);
}
