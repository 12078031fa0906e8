//! `reaper config check`: validates a config file.

use std::path::Path;

use super::Failure;
use super::show::{width, wrap};
use super::user::ConfigOwner;
use crate::config::Config;
use crate::export::{message, print, printable};

pub(super) fn run(file: Option<&Path>) -> Result<(), Failure> {
    let default = || ConfigOwner::this_user().path();
    let file = file.map_or_else(default, |file| Ok(file.to_owned()))?;
    let config = Config::load(&file)?;
    let path = file.display();
    for warning in &config.warnings {
        let (line, column) = warning.place.unwrap_or((1, 1));
        message!("{path}:{line}:{column}: warning: {}", warning.message);
    }
    let (mode, summary) = (config.mode.name(), config.summary());
    let summary_line = printable(&format!("{path}: ok; mode {mode}, {summary}"), usize::MAX);
    let written = print(wrap(&summary_line, 0, width()));
    written.map_err(Failure::stdout)
}
