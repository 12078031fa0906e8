//! Precision corpus: scenarios in TOML, each run on real processes and checked against its expected decisions.

mod read;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use libtest_mimic::Trial;

use crate::cgroup;
use crate::trees::{Mode, ScenarioResult, has_programs, trial};
use read::{CORPUS, Entry};

/// Names of scenarios that passed.
static COMPLETED: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
/// Number of runs.
static RUNS: AtomicUsize = AtomicUsize::new(0);
static WRONG_KILLS: AtomicUsize = AtomicUsize::new(0);
static SURVIVORS: AtomicUsize = AtomicUsize::new(0);
/// Whether containers can be started.
static HAS_PODMAN: LazyLock<bool> = LazyLock::new(|| has_programs(&["podman", "crun"], "podman"));

/// Scenarios that also run in `observe` mode. Together they have each decision except an immediate reap.
const OBSERVED: [&str; 4] = [
    "npm-server-under-an-agent-that-quits",
    "kept-by-a-rule-of-ones-own",
    "many-servers-that-are-reported",
    "gemini-inner-process-dies",
];

/// Returns every scenario with the eBPF source. The tests in `trees` cover the differences between sources.
pub fn trials() -> Vec<Trial> {
    let all = CORPUS.scenario.iter();
    let observed = all
        .clone()
        .filter(|entry| OBSERVED.contains(&entry.name.as_str()));
    let observed = observed.map(|entry| entry_trial("observe", entry, Mode::Observe));
    all.map(|entry| entry_trial("corpus", entry, Mode::Enforce))
        .chain(observed)
        .collect()
}

fn entry_trial(kind: &str, entry: &'static Entry, mode: Mode) -> Trial {
    let run = move || {
        let scenario = entry.scenario();
        scenario.run(mode, |result| record_result(&entry.name, result));
    };
    let ignored =
        entry.needs_cgroup() && !cgroup::can_be_made() || entry.needs_podman() && !*HAS_PODMAN;
    trial(kind, &entry.name, run).with_ignored_flag(ignored)
}

fn record_result(name: &'static str, result: ScenarioResult) {
    if result.is_complete {
        let mut names = COMPLETED.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name);
    }
    RUNS.fetch_add(1, Ordering::Relaxed);
    WRONG_KILLS.fetch_add(result.wrong_kills, Ordering::Relaxed);
    SURVIVORS.fetch_add(result.survivors, Ordering::Relaxed);
}

/// Returns the totals of all runs; `None` if no scenario has run.
pub fn summary() -> Option<String> {
    let completed = COMPLETED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .len();
    let line = || {
        format!(
            "scenarios {completed}, wrong kills {}, survivors {}",
            WRONG_KILLS.load(Ordering::Relaxed),
            SURVIVORS.load(Ordering::Relaxed)
        )
    };
    (RUNS.load(Ordering::Relaxed) > 0).then(line)
}

/// Categories of scenarios, which `scenarios.toml` explains.
const CATEGORIES: [&str; 19] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "never", "boundary",
    "keep", "marker", "agent",
];

/// Rule without a scenario: its display server would be seen by the services of all other tests, whose probes then signal
/// nothing. The model's tests and those of the reader cover it.
const WINDOWS: &str = "windows";

/// Returns a test that there is a scenario of each category and of each built-in rule.
pub fn completeness() -> Trial {
    trial("corpus", "completeness", || {
        let all = &CORPUS.scenario;
        assert!(all.len() >= 60, "{} scenarios", all.len());
        let names: BTreeSet<&str> = all.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names.len(), all.len(), "names are not unique");
        let categories: BTreeSet<&str> = all.iter().map(|entry| entry.category.as_str()).collect();
        assert_eq!(categories, BTreeSet::from(CATEGORIES), "categories");
        let tested: BTreeSet<&str> = all.iter().flat_map(Entry::rules).collect();
        let builtin: toml::Table = toml::from_str(include_str!(
            "../../reaper-user/model/src/rules/catalogue.toml"
        ))
        .expect("the catalogue");
        let rules = builtin
            .values()
            .filter_map(|rules| rules.as_array())
            .flatten();
        let names = rules.filter_map(|rule| rule.get("name")?.as_str());
        let untested = names.filter(|name| !tested.contains(name) && *name != WINDOWS);
        let untested: Vec<&str> = untested.collect();
        assert!(
            untested.is_empty(),
            "rules without a scenario: {untested:?}"
        );
    })
}
