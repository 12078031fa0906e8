//! Trees that must end with no survivor, and the canaries alive: the table of those that one story fits, and
//! those with a story of their own.

mod handover;
pub mod judge;
mod nested;
mod part;
mod pids;
pub mod promise;
mod races;
mod scripts;
mod servers;
mod special;
mod story;
mod table;
mod view;

use libtest_mimic::{Failed, Trial};

pub use part::{Death, Fate, Part, Said, Starter};
pub use promise::Source;
pub use story::{Mode, Scenario, Toll};
pub use table::OWN_RULES;
use view::View;

use crate::cgroup;
use crate::report;
use crate::schedule::Turn;

/// What all trees get unless they say otherwise: a short grace, and time enough for one that is killed to end where the
/// machine is busy with others.
pub const CONFIG: &str = "grace = \"200ms\"\nkill_timeout = \"10s\"\n";

/// A story with a play of its own.
type Story = (&'static str, fn(&View));

/// Those with a play of their own, and whether there is here what they need.
fn special() -> impl Iterator<Item = (Story, bool)> {
    let all = [
        (special::STORIES, true),
        (special::IN_TMUX, special::has_tmux()),
        (special::IN_A_CGROUP, cgroup::can_be_made()),
        (nested::STORIES, true),
        (handover::STORIES, true),
        (pids::STORIES, true),
        (races::STORIES, true),
        (scripts::STORIES, true),
        (scripts::ON_FUSE, scripts::has_fuse()),
        (servers::STORIES, true),
    ];
    let each = |(stories, possible): (&'static [Story], bool)| {
        stories.iter().map(move |story| (*story, possible))
    };
    all.into_iter().flat_map(each)
}

/// Every tree in `enforce`.
pub fn trials() -> Vec<Trial> {
    seen("enforce", Source::Ebpf)
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
    rows.map(|row| trial("observe", row.name, move || row.play(Mode::Observe, drop)))
        .collect()
}

/// Every tree in `enforce`, seen through another source than the probes.
pub fn through(source: Source) -> Vec<Trial> {
    seen(source.name(), source)
}

/// Trees that are too large for every run.
pub fn soaks() -> Vec<Trial> {
    let rows = table::soaks().into_iter();
    rows.map(|row| trial("soak", row.name, move || row.play(Mode::Enforce, drop)))
        .collect()
}

fn seen(kind: &str, source: Source) -> Vec<Trial> {
    let told = |((name, story), possible): (Story, bool)| {
        trial(kind, name, move || View::tell(source, name, story)).with_ignored_flag(!possible)
    };
    let play = |row: Scenario| trial(kind, row.name, move || row.play(Mode::Enforce, drop));
    let rows = table::rows().into_iter();
    let rows = rows.map(|row| play(row.through(source)));
    rows.chain(special().map(told)).collect()
}

/// A story that fails by panicking.
pub fn trial(kind: &str, name: &str, story: impl FnOnce() + Send + 'static) -> Trial {
    let name = format!("{kind}::{name}");
    Trial::test(name.clone(), move || -> Result<(), Failed> {
        let _turn = Turn::of(&name);
        report::of(&name, story)
    })
}

/// Runs a story as the init of a pid namespace of its own.
pub fn in_capsule(name: &str, source: &str) {
    let story = pids::INSIDE.iter().find(|(n, _)| *n == name);
    let (name, story) = story.unwrap_or_else(|| panic!("no story is called '{name}'"));
    let source = Source::ALL.into_iter().find(|of| of.name() == source);
    View::tell(source.expect("a source"), name, *story);
}
