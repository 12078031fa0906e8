//! `reaper config show`: prints settings and rules.

use std::path::Path;

use super::{Failure, load};
use crate::config::show;
use crate::export::{print, to_json};

pub(super) fn run(file: Option<&Path>, defaults: bool, json: bool) -> Result<(), Failure> {
    let config = load(file)?;
    let text = match (defaults, json) {
        (true, true) => to_json(&show::json_defaults()),
        (true, false) => show::toml_defaults().into_bytes(),
        (false, true) => to_json(&show::json(&config)),
        (false, false) => show::toml(&config).into_bytes(),
    };
    let written = print(text);
    written.map_err(Failure::stdout)
}
