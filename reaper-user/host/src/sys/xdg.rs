//! Directories of a user, by the XDG Base Directory Specification.

use std::env;
use std::path::PathBuf;

/// Returns the directory for persistent state: `$XDG_STATE_HOME`, by default `$HOME/.local/state`.
/// A variable that is not an absolute path counts as not set. `None` if neither is set.
pub fn state_home() -> Option<PathBuf> {
    base("XDG_STATE_HOME", ".local/state")
}

/// Returns the directory for config files: `$XDG_CONFIG_HOME`, by default `$HOME/.config`. Otherwise as [`state_home`].
pub fn config_home() -> Option<PathBuf> {
    base("XDG_CONFIG_HOME", ".config")
}

/// Returns the value of a variable, by default a directory below the home directory.
fn base(variable: &str, below_home: &str) -> Option<PathBuf> {
    let home = || Some(absolute("HOME")?.join(below_home));
    absolute(variable).or_else(home)
}

/// Returns the value of a variable if it is an absolute path.
pub fn absolute(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(variable)?);
    path.is_absolute().then_some(path)
}
