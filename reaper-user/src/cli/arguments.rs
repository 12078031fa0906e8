//! Arguments that several commands or platforms share.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Failure;
use super::user::ConfigOwner;
use crate::config::Config;

/// Options of the commands that query the service.
#[derive(Args)]
pub(super) struct ServiceArgs {
    /// Socket of the service.
    ///
    /// The default is the environment variable REAPER_SOCKET, then /run/reaper/reaper.sock, or the socket of your own
    /// service (`reaper daemon --user`) if only that runs. The socket of a service with --scope has the scope in its name.
    #[arg(long, value_name = "PATH")]
    pub(super) socket: Option<PathBuf>,
    /// Print the service's answer as JSON.
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `reaper unpin`.
#[derive(Args)]
pub(super) struct UnpinArgs {
    /// Read the directory of the pins from this config file.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Directory of the pins; overrides the config [default: /sys/fs/bpf/reaper].
    #[arg(long, value_name = "DIR")]
    pub(super) pin_dir: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// Parses a number of things, of which 0 means none.
pub(super) fn parse_count(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| format!("not a number: write 0 to {}", u32::MAX))
}

/// Parses the largest number of things to show, at least 1.
pub(super) fn parse_limit(text: &str) -> Result<u32, String> {
    let limit = text.parse().ok().filter(|limit| *limit > 0);
    limit.ok_or_else(|| format!("write a number from 1 to {}", u32::MAX))
}

/// Loads a config file, by default that of this user (see [`ConfigOwner`]). Without one, the built-in settings apply.
pub(super) fn load(config: Option<&Path>) -> Result<Config, Failure> {
    load_for(config, ConfigOwner::this_user())
}

/// Loads a config file, by default that of `owner`. Without one, the built-in settings apply.
pub(super) fn load_for(config: Option<&Path>, owner: ConfigOwner) -> Result<Config, Failure> {
    Ok(match config {
        Some(file) => Config::load(file)?,
        None => Config::load_if_exists(&owner.path()?)?,
    })
}

/// Returns the absolute path of a directory given with `flag`.
pub(super) fn absolute(flag: &str, directory: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(directory).map_err(|error| {
        let directory = directory.display();
        Failure::Usage(format!(
            "{flag} {directory}: {error}; write an absolute path"
        ))
    })
}
