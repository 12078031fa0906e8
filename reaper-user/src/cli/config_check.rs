//! `reaper config check`.

use std::io::Write;
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
    let written = writeln!(
        anstream::stdout(),
        "{}: fine; mode {}, {} agents, {} boundaries, {} keeps",
        file.display(),
        config.mode.name(),
        count(Action::Agent),
        count(Action::Boundary),
        count(Action::Keep),
    );
    written.map_err(|error| Failure::Other(error.into()))
}
