//! Directories of a user, by the XDG Base Directory Specification.

use std::env;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, User, access, geteuid};

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
    let below = || Some(home()?.join(below_home));
    absolute(variable).or_else(below)
}

/// Returns `$HOME`. If this user may not enter it, returns the home directory of the user database: programs such as
/// runuser(1) and setpriv(1) can change the user and leave the variable.
fn home() -> Option<PathBuf> {
    let home = absolute("HOME")?;
    if access(&home, AccessFlags::X_OK) != Err(Errno::EACCES) {
        return Some(home);
    }
    let user = User::from_uid(geteuid()).ok().flatten();
    Some(user.map_or(home, |user| user.dir))
}

/// Returns the value of a variable if it is an absolute path.
pub fn absolute(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(variable)?);
    path.is_absolute().then_some(path)
}
