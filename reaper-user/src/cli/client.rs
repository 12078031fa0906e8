//! Helpers for the commands that query the service.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde::de::DeserializeOwned;

pub(super) use super::show::{BOLD, DIM};
use super::show::{width, wrap};
use super::{Failure, ServiceArgs, hint, sockets};
use crate::api::Reloaded;
use crate::api::client::{Client, ClientError, ServiceResponse};
use crate::api::server::ServerError;
use crate::export::{self, printable};

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let message = printable(&error.to_string(), 1000);
        match error {
            ClientError::NoService { path, .. } => {
                Failure::NoService(message + &other_services(&path))
            }
            ClientError::UnexpectedResponse { .. }
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

/// Returns lines that list the running services that this user may query instead of one on `path`, with a line break
/// before each. Empty if there are none.
pub(super) fn other_services(path: &Path) -> String {
    let line = |socket: &PathBuf| {
        let socket = printable(&socket.to_string_lossy(), usize::MAX);
        format!("\n  {socket}")
    };
    let list: String = sockets::live(path).iter().map(line).collect();
    match list.is_empty() {
        true => list,
        false => format!("\nthese services answer; name one with --socket or REAPER_SOCKET:{list}"),
    }
}

/// Returns a client for the service that the arguments select.
pub(super) fn client(service: &ServiceArgs) -> Client {
    let socket = sockets::selected(service);
    if socket != sockets::default() {
        hint::use_socket(&socket);
    }
    Client::new(socket)
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

/// Runs a request for each of several processes, and returns the exit status.
///
/// If one of several fails, its error is printed, and the others still run. The highest status counts.
///
/// # Errors
/// The request for a single process fails, or no service answers.
pub(super) fn for_each(
    pids: &[u32],
    mut request: impl FnMut(u32) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let mut status = 0;
    for pid in pids {
        match request(*pid) {
            Ok(()) => {}
            Err(failure) if pids.len() == 1 => return Err(failure),
            Err(failure @ (Failure::NoService(_) | Failure::Other(_))) => return Err(failure),
            Err(failure) => {
                failure.print();
                status = status.max(failure.status());
            }
        }
    }
    Ok(status)
}

/// Runs `reaper config reload`.
pub(super) fn reload(service: &ServiceArgs) -> Result<(), Failure> {
    let response = client(service).post("/v1/config/reload", &())?;
    print(service, &response, |reloaded: Reloaded| {
        let lines = reloaded.message.lines();
        lines
            .map(|line| wrap(&printable(line, 1000), 0, width()))
            .collect::<String>()
    })
}
