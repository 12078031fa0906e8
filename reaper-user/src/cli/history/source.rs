//! Reads the sessions of the history, from the journal file or from the service.

use std::io::Write;

use jiff::Timestamp;
use nix::unistd::geteuid;

use super::HistoryArgs;
use super::printer::Printer;
use crate::api::History;
use crate::cli::client::client;
use crate::cli::{Failure, ServiceArgs};
use crate::export::message;
use crate::journal::history::{HistoryError, HistoryQuery, read};
use crate::journal::{DIRECTORY, path};

/// Prints the sessions from the journal file.
pub(super) fn read_journal(
    args: &HistoryArgs,
    printer: &mut Printer<impl Write>,
) -> Result<(), HistoryError> {
    let file = args.file.clone();
    let file = file.unwrap_or_else(|| path(DIRECTORY.as_ref(), None));
    // A time before the range of timestamps means no limit.
    let since = args.since.map(|since| Timestamp::now().checked_sub(since));
    let uid = geteuid();
    let query = HistoryQuery {
        since: since.and_then(Result::ok),
        agent: args.agent.clone(),
        session: args.session.clone(),
        uid: (!uid.is_root()).then_some(uid.as_raw()),
        pids: args.pids.clone(),
        limit: args.limit.map(|limit| limit as usize),
    };
    read(&file, &query, |session| printer.session(&session))
}

/// Prints the sessions that the service reads from its journal.
pub(super) fn query_service(
    args: &HistoryArgs,
    printer: &mut Printer<impl Write>,
) -> Result<(), Failure> {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if let Some(since) = args.since {
        query.append_pair("since_s", &since.as_secs().to_string());
    }
    for (name, value) in [("agent", &args.agent), ("session", &args.session)] {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    let pids: Vec<String> = args.pids.iter().map(u32::to_string).collect();
    let limit = args.limit.map(|limit| limit.to_string());
    for (name, value) in [
        ("pid", pids.join(",")),
        ("limit", limit.unwrap_or_default()),
    ] {
        if !value.is_empty() {
            query.append_pair(name, &value);
        }
    }
    let service = ServiceArgs {
        socket: args.socket.clone(),
        json: args.json,
    };
    let response = client(&service).get(&format!("/v1/history?{}", query.finish()))?;
    let history: History = response.read()?;
    for session in &history.sessions {
        printer.session(session).map_err(Failure::stdout)?;
    }
    if history.omitted > 0 {
        let n = history.omitted;
        message!(
            "reaper: {n} older sessions are left out, as the answer of the service is limited; narrow it with --since, or \
             read the journal with sudo"
        );
    }
    Ok(())
}
