//! The precision corpus: scenarios as data, each run on real processes against its expected decisions.

mod read;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use libtest_mimic::Trial;

use crate::cgroup;
use crate::trees::{Mode, ScenarioResult, trial};
use read::{CORPUS, Entry};

/// Names of those that have come to their end.
static TOLD: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
/// How often one was run.
static RUN: AtomicUsize = AtomicUsize::new(0);
static WRONG_KILLS: AtomicUsize = AtomicUsize::new(0);
static SURVIVORS: AtomicUsize = AtomicUsize::new(0);

/// Scenarios that are also played in `observe`: each decision that they know besides reaping at once.
const OBSERVED: [&str; 4] = [
    "npm-server-under-an-agent-that-quits",
    "kept-by-a-rule-of-ones-own",
    "many-servers-that-are-reported",
    "gemini-inner-process-dies",
];

/// Every scenario through the probes; what sources differ in, the trees show.
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
    let play = move || {
        let scenario = entry.scenario();
        scenario.run(mode, |result| record_result(&entry.name, result));
    };
    let left_out = entry.needs_cgroup() && !cgroup::can_be_made();
    trial(kind, &entry.name, play).with_ignored_flag(left_out)
}

fn record_result(name: &'static str, toll: ScenarioResult) {
    if toll.is_complete {
        let mut names = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name);
    }
    RUN.fetch_add(1, Ordering::Relaxed);
    WRONG_KILLS.fetch_add(toll.wrong_kills, Ordering::Relaxed);
    SURVIVORS.fetch_add(toll.survivors, Ordering::Relaxed);
}

/// What has come of those that have been run, if any has.
pub fn summary() -> Option<String> {
    let told = TOLD.lock().unwrap_or_else(PoisonError::into_inner).len();
    let (wrong, left) = (&WRONG_KILLS, &SURVIVORS);
    let line = || {
        format!(
            "scenarios {told}, wrong kills {}, survivors {}",
            wrong.load(Ordering::Relaxed),
            left.load(Ordering::Relaxed)
        )
    };
    (RUN.load(Ordering::Relaxed) > 0).then(line)
}

/// What a scenario may be an entry of: what users have been through, what is never signalled, where membership
/// stops, what is kept, what people mark, and what each agent looks like.
const CATEGORIES: [&str; 19] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "never", "boundary",
    "keep", "mark", "agent",
];

/// Whether there is a scenario of each entry and of each rule that is built in.
pub fn completeness() -> Trial {
    trial("corpus", "completeness", || {
        let all = &CORPUS.scenario;
        assert!(all.len() >= 60, "{} scenarios", all.len());
        let names: BTreeSet<&str> = all.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names.len(), all.len(), "names of scenarios");
        let entries: BTreeSet<&str> = all.iter().map(|entry| entry.category.as_str()).collect();
        assert_eq!(entries, BTreeSet::from(CATEGORIES), "entries");
        let spoken: BTreeSet<&str> = all.iter().flat_map(Entry::rules).collect();
        let builtin: toml::Table = toml::from_str(include_str!(
            "../../reaper-user/model/src/rules/catalogue.toml"
        ))
        .expect("the catalogue");
        let rules = builtin
            .values()
            .filter_map(|rules| rules.as_array())
            .flatten();
        let names = rules.filter_map(|rule| rule.get("name")?.as_str());
        let silent: Vec<&str> = names.filter(|name| !spoken.contains(name)).collect();
        assert!(silent.is_empty(), "rules without a scenario: {silent:?}");
    })
}
