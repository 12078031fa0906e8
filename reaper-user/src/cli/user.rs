//! Directories of a user's own service, by the XDG Base Directory Specification.

use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::{Failure, load};
use crate::config::Config;
use crate::export::message;
use reaper_host::sys::paths::{self, USER_RUNTIME};
use reaper_host::sys::xdg::{absolute, config_home, state_home};

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

/// Service whose config file is meant, if no `--config` names one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfigOwner {
    /// The service of the host.
    Host,
    /// A user's own service, with `$XDG_CONFIG_HOME/reaper/config.toml`, by default in `~/.config`.
    User,
}

impl ConfigOwner {
    /// Returns the owner of the config that this user would edit: the host for root.
    pub(super) fn this_user() -> ConfigOwner {
        match geteuid().is_root() {
            true => ConfigOwner::Host,
            false => ConfigOwner::User,
        }
    }

    /// Returns the path of the file, which need not exist.
    ///
    /// # Errors
    /// The environment variables for a user's directory are not set.
    pub(super) fn path(self) -> Result<PathBuf, Failure> {
        if self == ConfigOwner::Host {
            return Ok(paths::CONFIG.into());
        }
        let home = config_home().map(|home| home.join("reaper/config.toml"));
        home.ok_or_else(|| {
            let what = "there is no directory for the config, as neither XDG_CONFIG_HOME nor HOME is set; set one of them to \
                        an absolute path, or name a file";
            Failure::Usage(what.into())
        })
    }
}

/// Loads a config file as [`load`] does, for a command that sends no signals. If the default file of this user cannot be
/// read, says so and returns the built-in settings.
pub(super) fn load_readable(config: Option<&Path>) -> Result<Config, Failure> {
    let failure = match load(config) {
        Err(failure) if config.is_none() && ConfigOwner::this_user() == ConfigOwner::User => {
            failure
        }
        loaded => return loaded,
    };
    let is_unread = match &failure {
        Failure::Config(error) => error.problems.iter().all(|problem| problem.place.is_none()),
        _ => true,
    };
    if !is_unread {
        return Err(failure);
    }
    message!("reaper: {failure}; the built-in settings are used here");
    Ok(Config::default())
}

/// Sets the directory of the lock and the socket to that of a user, unless the config names another.
///
/// # Errors
/// The environment variable for this directory is not set.
pub(super) fn place_runtime_dir(config: &mut Config) -> Result<(), Failure> {
    if config.runtime_dir == Config::default().runtime_dir {
        let unknown = || no_directory("the socket", USER_RUNTIME, "--runtime-dir");
        config.runtime_dir = runtime_dir().ok_or_else(unknown)?;
    }
    Ok(())
}

/// Sets the directory of the journal to that of a user, unless the config names another.
///
/// # Errors
/// The environment variables for this directory are not set.
pub(super) fn place_journal_dir(config: &mut Config) -> Result<(), Failure> {
    if config.journal_dir == Config::default().journal_dir {
        let unknown = || no_directory("the journal", "HOME", "--journal-dir");
        config.journal_dir = state_dir().ok_or_else(unknown)?;
    }
    Ok(())
}

fn no_directory(what: &str, variable: &str, option: &str) -> Failure {
    Failure::Usage(format!(
        "--user: there is no directory for {what}, as {variable} is not set; set it to an absolute path, or name a \
         directory with {option}"
    ))
}
