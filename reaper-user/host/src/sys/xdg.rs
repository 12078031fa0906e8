//! Where a user's files are, by the XDG Base Directory Specification.

use std::env;
use std::path::PathBuf;

/// What has to outlive the program: `$XDG_STATE_HOME`, by default `~/.local/state`; `None` where no variable tells.
pub fn state_home() -> Option<PathBuf> {
    let home = || Some(absolute("HOME")?.join(".local/state"));
    absolute("XDG_STATE_HOME").or_else(home)
}

/// What a variable says, if that is of any use.
pub fn absolute(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(variable)?);
    path.is_absolute().then_some(path)
}
