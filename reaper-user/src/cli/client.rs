//! What all commands that ask the service have in common.

use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anstyle::Style;
use bytesize::ByteSize;
use serde::de::DeserializeOwned;

use super::{Failure, ServiceArgs, user};
use crate::api::client::{Client, ClientError, ServiceResponse};
use crate::api::server::ServerError;
use crate::api::{self, Reloaded};
use crate::export::{self, printable};
use reaper_host::sys::paths;

pub(super) const BOLD: Style = Style::new().bold();
pub(super) const DIM: Style = Style::new().dimmed();

/// Characters of a command line in a table.
pub(super) const COMMAND_MAX: usize = 72;

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let said = printable(&error.to_string(), 1000);
        match error {
            ClientError::NoService { path, source } if source.kind() == ErrorKind::NotFound => {
                Failure::NoService(said + &others(&path))
            }
            ClientError::NoService { .. }
            | ClientError::UnexpectedResponse { .. }
            | ClientError::TimedOut { .. }
            | ClientError::ConnectionClosed(_) => Failure::NoService(said),
            ClientError::Refused(_) => Failure::Refused(said),
            ClientError::Io(error) => Failure::Other(error.into()),
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

/// The socket of the host's service or, where there is none, that of the user's own.
pub(super) fn default_socket() -> PathBuf {
    let host = Path::new(paths::RUNTIME).join(api::SOCKET);
    let own = user::runtime_dir().map(|directory| directory.join(api::SOCKET));
    match own {
        Some(own) if !host.exists() && own.exists() => own,
        _ => host,
    }
}

/// The sockets of services with a scope, where there is none of the whole host.
fn others(path: &Path) -> String {
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
    let mut said = String::new();
    for socket in sockets {
        let _ = write!(said, "; there is {}", socket.display());
    }
    said
}

/// The service that is to be asked.
pub(super) fn client(asking: &ServiceArgs) -> Client {
    let socket = asking.socket.clone();
    Client::new(socket.unwrap_or_else(default_socket))
}

/// Prints what the service has said: as it is, or in the words of `table`.
pub(super) fn print<T: DeserializeOwned>(
    asking: &ServiceArgs,
    said: &ServiceResponse,
    table: impl FnOnce(T) -> String,
) -> Result<(), Failure> {
    let written = if asking.json {
        export::print(&said.body)
    } else {
        export::print(table(said.read()?))
    };
    written.map_err(failed)
}

fn failed(error: io::Error) -> Failure {
    Failure::Other(anyhow::Error::new(error).context("cannot write"))
}

/// `reaper config reload`
pub(super) fn reload(asking: &ServiceArgs) -> Result<(), Failure> {
    let said = client(asking).post("/v1/config/reload", &())?;
    print(asking, &said, |reloaded: Reloaded| {
        let lines = reloaded.message.lines();
        lines
            .map(|line| printable(line, 1000) + "\n")
            .collect::<String>()
    })
}

pub(super) fn memory(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".into(), |bytes| ByteSize::b(bytes).to_string())
}

/// A time in its largest unit.
pub(super) fn age(seconds: u64) -> String {
    match seconds {
        s if s < 120 => format!("{s}s"),
        s if s < 7200 => format!("{}m", s / 60),
        s if s < 172_800 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

/// A time in words.
pub(super) fn span(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}
