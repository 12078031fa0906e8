//! `reaper config show`.

use std::io::Write;
use std::path::Path;

use super::{Failure, load};
use crate::config::show;

pub(super) fn run(file: Option<&Path>, defaults: bool, json: bool) -> Result<(), Failure> {
    let config = load(file)?;
    let text = match (defaults, json) {
        (true, true) => show::json_defaults().to_string() + "\n",
        (true, false) => show::toml_defaults(),
        (false, true) => show::json(&config).to_string() + "\n",
        (false, false) => show::toml(&config),
    };
    let written = anstream::stdout().write_all(text.as_bytes());
    written.map_err(|error| Failure::Other(error.into()))
}
