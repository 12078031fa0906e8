//! Directories of a user's own service, by the XDG Base Directory Specification.

use std::path::PathBuf;

use super::Failure;
use crate::config::Config;
use reaper_host::sys::paths::USER_RUNTIME;
use reaper_host::sys::xdg::{absolute, state_home};

/// Returns the directory of the lock and the socket: `$XDG_RUNTIME_DIR/reaper` (on macOS `$TMPDIR/reaper`).
///
/// `None` if the variable is not set.
pub(super) fn runtime_dir() -> Option<PathBuf> {
    Some(absolute(USER_RUNTIME)?.join("reaper"))
}

/// Returns the directory of the journal: `$XDG_STATE_HOME/reaper`, by default `~/.local/state/reaper`.
pub(super) fn state_dir() -> Option<PathBuf> {
    Some(state_home()?.join("reaper"))
}

/// Sets the directories to those of a user, unless the config names others.
///
/// # Errors
/// The environment variables for these directories are not set.
pub(super) fn place(config: &mut Config) -> Result<(), Failure> {
    let built_in = Config::default();
    let unknown = |what: &str, variable: &str| {
        Failure::Usage(format!(
            "--user: there is no directory for {what}, as {variable} is not set; set it to an absolute path"
        ))
    };
    if config.runtime_dir == built_in.runtime_dir {
        config.runtime_dir = runtime_dir().ok_or_else(|| unknown("the socket", USER_RUNTIME))?;
    }
    if config.journal_dir == built_in.journal_dir {
        config.journal_dir = state_dir().ok_or_else(|| unknown("the journal", "HOME"))?;
    }
    Ok(())
}
