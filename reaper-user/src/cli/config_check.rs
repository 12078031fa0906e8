//! `reaper config check`.

use std::path::Path;

use super::Failure;
use crate::config::Config;
use crate::model::agent::Action;

pub(super) fn run(file: &Path) -> Result<(), Failure> {
    let config = Config::load(file)?;
    let count = |action| {
        config
            .rules
            .rules()
            .iter()
            .filter(|rule| rule.action == action)
            .count()
    };
    anstream::println!(
        "{}: fine; mode {}, {} agents, {} boundaries, {} keeps",
        file.display(),
        config.mode.name(),
        count(Action::Agent),
        count(Action::Boundary),
        count(Action::Keep),
    );
    Ok(())
}
