//! Helpers for the commands that query the service.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anstyle::Style;
use anyhow::anyhow;
use serde::de::DeserializeOwned;

use super::{Failure, ServiceArgs, user};
use crate::api::client::{Client, ClientError, ServiceResponse};
use crate::api::server::ServerError;
use crate::api::{self, Reloaded};
use crate::export::{self, printable};
use reaper_host::sys::paths;

pub(super) const BOLD: Style = Style::new().bold();
pub(super) const DIM: Style = Style::new().dimmed();

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let message = printable(&error.to_string(), 1000);
        match error {
            ClientError::NoService { path, source } if source.kind() == ErrorKind::NotFound => {
                Failure::NoService(message + &other_sockets(&path))
            }
            ClientError::NoService { .. }
            | ClientError::UnexpectedResponse { .. }
            | ClientError::TimedOut { .. }
            | ClientError::ConnectionClosed(_) => Failure::NoService(message),
            ClientError::Refused(_) => Failure::Refused(message),
            ClientError::Io(_) => Failure::Other(anyhow!(message)),
        }
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Failure {
        match error {
            ServerError::Alive(_) => Failure::Locked(error.to_string()),
            other => Failure::Other(other.into()),
        }
    }
}

/// Returns the socket of the host's service, or of the user's own service if only that exists.
pub(super) fn default_socket() -> PathBuf {
    let host = Path::new(paths::RUNTIME).join(api::SOCKET);
    let own = user::runtime_dir().map(|directory| directory.join(api::SOCKET));
    match own {
        Some(own) if !host.exists() && own.exists() => own,
        _ => host,
    }
}

/// Returns text that names the sockets of services with a scope in the directory of `path`; empty if none exist.
fn other_sockets(path: &Path) -> String {
    let entries = path
        .parent()
        .and_then(|directory| directory.read_dir().ok());
    let paths = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let is_socket = |path: &PathBuf| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        name.starts_with("reaper-") && name.ends_with(".sock")
    };
    let mut sockets: Vec<_> = paths.filter(is_socket).collect();
    sockets.sort_unstable();
    let mut text = String::new();
    for socket in sockets {
        let _ = write!(text, "; another service uses {}", socket.display());
    }
    text
}

/// Returns a client for the service that the arguments select.
pub(super) fn client(service: &ServiceArgs) -> Client {
    let socket = service.socket.clone();
    Client::new(socket.unwrap_or_else(default_socket))
}

/// Prints the service's answer: as it is with `--json`, otherwise as formatted by `table`.
pub(super) fn print<T: DeserializeOwned>(
    service: &ServiceArgs,
    response: &ServiceResponse,
    table: impl FnOnce(T) -> String,
) -> Result<(), Failure> {
    let written = if service.json {
        export::print(&response.body)
    } else {
        export::print(table(response.read()?))
    };
    written.map_err(Failure::stdout)
}

/// Runs `reaper config reload`.
pub(super) fn reload(service: &ServiceArgs) -> Result<(), Failure> {
    let response = client(service).post("/v1/config/reload", &())?;
    print(service, &response, |reloaded: Reloaded| {
        let lines = reloaded.message.lines();
        lines
            .map(|line| printable(line, 1000) + "\n")
            .collect::<String>()
    })
}

/// Formats a time as in the config, such as `1h 30m`.
pub(super) fn span(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}
