//! Trees that must end with no survivor, and the canaries alive: the table of those that one story fits, and
//! those with a story of their own.

pub mod judge;
mod nested;
mod part;
mod pids;
pub mod promise;
mod races;
mod special;
mod story;
mod table;

use libtest_mimic::{Failed, Trial};

pub use part::{Death, Fate, Part, Said, Starter};
pub use promise::Source;
pub use story::{Mode, Scenario, Toll};
pub use table::OWN_RULES;

/// The grace that all trees get unless they say otherwise.
pub const CONFIG: &str = "grace = \"500ms\"\n";

/// Every tree of the table in `enforce`, seen through another source than the probes.
pub fn through(source: Source) -> Vec<Trial> {
    table::rows()
        .into_iter()
        .map(|row| row.through(source))
        .map(|row| {
            trial(source.name(), row.name, move || {
                row.play(Mode::Enforce, drop)
            })
        })
        .collect()
}

/// Every tree in `enforce`.
pub fn trials() -> Vec<Trial> {
    let rows = table::rows()
        .into_iter()
        .map(|row| trial("enforce", row.name, move || row.play(Mode::Enforce, drop)));
    let special = special::STORIES
        .iter()
        .chain(nested::STORIES)
        .chain(pids::STORIES)
        .chain(races::STORIES);
    rows.chain(special.map(|(name, story)| trial("enforce", name, story)))
        .collect()
}

/// Every tree of the table in `observe`.
pub fn observed() -> Vec<Trial> {
    table::rows()
        .into_iter()
        .map(|row| trial("observe", row.name, move || row.play(Mode::Observe, drop)))
        .collect()
}

/// A story that fails by panicking.
pub fn trial(kind: &str, name: &str, story: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(format!("{kind}::{name}"), move || -> Result<(), Failed> {
        story();
        Ok(())
    })
}

/// Runs a story as the init of a pid namespace of its own.
pub fn in_capsule(name: &str) {
    let story = pids::INSIDE.iter().find(|(n, _)| *n == name);
    story
        .unwrap_or_else(|| panic!("no story is called '{name}'"))
        .1();
}
