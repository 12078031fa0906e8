//! `reaper config show`: prints settings and rules, by default those of the running service.

use std::path::PathBuf;

use clap::Args;

use super::client::client;
use super::user::load_readable;
use super::{Failure, ServiceArgs, load, sockets};
use crate::api::client::ClientError;
use crate::config::show::{ShownConfig, toml_defaults};
use crate::export::{message, print, printable, to_json};

pub(super) const HELP: &str = "\
Without a service, shows what a daemon that is started now would use.

Examples:
  # Show what the running service uses
  sudo reaper config show

  # Show all built-in rules, for example to copy one
  reaper config show --defaults

  # Show what a daemon with this file would use
  reaper config show --config my.toml

  # List the names of all rules in force
  reaper config show --json | jq '.rules[].name'";

#[derive(Args)]
pub(super) struct ShowArgs {
    /// Show what a daemon with this file would use.
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    /// Show the built-in settings as written, including disabled rules.
    #[arg(long, conflicts_with_all = ["config", "socket"])]
    defaults: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

pub(super) fn run(args: &ShowArgs) -> Result<(), Failure> {
    let json = args.service.json;
    let text = match (args.defaults, &args.config) {
        (true, _) if json => to_json(&ShownConfig::defaults()),
        (true, _) => toml_defaults().into_bytes(),
        (false, Some(file)) => shown(&ShownConfig::new(&load(Some(file))?), json),
        (false, None) => shown(&running(&args.service)?, json),
    };
    print(text).map_err(Failure::stdout)
}

/// Returns the config of the running service. Without one, returns that of a service that is started now, unless the
/// user has named a socket.
fn running(service: &ServiceArgs) -> Result<ShownConfig, Failure> {
    match client(service).get("/v1/config") {
        Err(error @ ClientError::NoService { .. })
            if sockets::named(service.socket.as_deref()).is_none() =>
        {
            let config = load_readable(None)?;
            let text = format!("reaper: {}", Failure::from(error));
            text.lines().for_each(|line| message!("{line}"));
            message!("so the settings below are those of a service that would be started now");
            Ok(ShownConfig::new(&config))
        }
        response => Ok(response?.read()?),
    }
}

/// Returns a config as TOML, or as JSON.
fn shown(config: &ShownConfig, json: bool) -> Vec<u8> {
    if json {
        return to_json(config);
    }
    let file = printable(&config.file.to_string(), usize::MAX);
    format!("# Config file: {file}\n{}", config.toml()).into_bytes()
}
