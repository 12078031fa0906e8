//! Where a user's own service has its files, by the XDG Base Directory Specification.

use std::path::PathBuf;

use super::Failure;
use crate::config::Config;
use reaper_host::sys::paths::USER_RUNTIME;
use reaper_host::sys::xdg::{absolute, state_home};

/// Where its lock and its socket are: `$XDG_RUNTIME_DIR/reaper` (on macOS `$TMPDIR/reaper`); `None` where there is no such directory.
pub(super) fn runtime_dir() -> Option<PathBuf> {
    Some(absolute(USER_RUNTIME)?.join("reaper"))
}

/// Where its journal is: `$XDG_STATE_HOME/reaper`, by default `~/.local/state/reaper`.
pub(super) fn state_dir() -> Option<PathBuf> {
    Some(state_home()?.join("reaper"))
}

/// Puts the files of a service where a user's are, unless the config says where they are.
///
/// # Errors
/// There is no telling where a user's are.
pub(super) fn place(config: &mut Config) -> Result<(), Failure> {
    let built_in = Config::default();
    let unknown = |what: &str, variable: &str| {
        Failure::Usage(format!(
            "--user: no directory for {what}: set {variable} to an absolute path"
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
