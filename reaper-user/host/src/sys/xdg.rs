//! Directories of a user, by the XDG Base Directory Specification.

use std::env;
use std::path::PathBuf;

/// Returns the directory for persistent state: `$XDG_STATE_HOME`, by default `$HOME/.local/state`.
/// A variable that is not an absolute path counts as not set. `None` if neither is set.
pub fn state_home() -> Option<PathBuf> {
    let home = || Some(absolute("HOME")?.join(".local/state"));
    absolute("XDG_STATE_HOME").or_else(home)
}

/// Returns the value of a variable if it is an absolute path.
pub fn absolute(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(variable)?);
    path.is_absolute().then_some(path)
}
