//! `reaper config check`.

use std::io::Write;
use std::path::Path;

use super::Failure;
use crate::config::Config;

pub(super) fn run(file: &Path) -> Result<(), Failure> {
    let config = Config::load(file)?;
    let path = file.display();
    for warning in &config.warnings {
        let (line, column) = warning.place.unwrap_or((1, 1));
        anstream::eprintln!("{path}:{line}:{column}: warning: {}", warning.what);
    }
    let written = writeln!(
        anstream::stdout(),
        "{path}: fine; mode {}, {}",
        config.mode.name(),
        config.summary(),
    );
    written.map_err(|error| Failure::Other(error.into()))
}
