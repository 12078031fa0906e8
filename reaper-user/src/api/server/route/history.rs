//! `GET /v1/history`: sessions from the journal.

use std::collections::VecDeque;
use std::path::Path;

use jiff::Timestamp;

use super::ApiResult;
use super::parse::Query;
use crate::api::peer::Peer;
use crate::api::{History, ProblemDetails, StatusCode};
use crate::export::to_json;
use crate::journal::history::{self, HistoryError};

/// Largest history in a response, in bytes of JSON. The oldest sessions are left out.
const HISTORY_MAX: usize = 8 << 20;

/// Parses the query. Limits users other than root to their own sessions.
pub(super) fn query(query: &mut Query, peer: Peer) -> ApiResult<history::HistoryQuery> {
    // Without a limit if the time is before the first that there can be.
    let since = query.seconds("since_s")?;
    let since = since.and_then(|since| Timestamp::now().checked_sub(since).ok());
    Ok(history::HistoryQuery {
        since,
        agent: query.take("agent"),
        session: query.take("session"),
        uid: (!peer.is_root()).then_some(peer.uid),
        pids: query.pids()?,
        limit: query.number("limit")?.map(|limit| limit as usize),
    })
}

/// Returns a function that reads the matching sessions from the journal, and returns a [`History`] as JSON.
///
/// Keeps the newest sessions that fit into [`HISTORY_MAX`], and counts the others.
pub(super) fn read_history(
    journal: Option<&Path>,
    query: history::HistoryQuery,
) -> impl FnOnce() -> ApiResult<Vec<u8>> + Send + 'static {
    let journal = journal.map(Path::to_owned);
    move || {
        let none = || {
            ProblemDetails::new(
                StatusCode::NOT_FOUND,
                "this service has no journal: see its log, or start it with `journal = true` and without --no-journal",
            )
        };
        let journal = journal.ok_or_else(none)?;
        let mut kept = VecDeque::new();
        let (mut bytes, mut left_out) = (0, 0);
        let read = history::read(&journal, &query, |session| {
            let size = to_json(&session).len();
            bytes += size;
            kept.push_back((size, session));
            while bytes > HISTORY_MAX
                && let Some((size, _)) = kept.pop_front()
            {
                bytes -= size;
                left_out += 1;
            }
            Ok(())
        });
        read.map_err(|error| {
            let status = match error {
                HistoryError::Missing(_) => StatusCode::NOT_FOUND,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            ProblemDetails::new(status, error.to_string())
        })?;
        let sessions = kept.into_iter().map(|(_, session)| session).collect();
        Ok(to_json(&History {
            sessions,
            omitted: left_out,
        }))
    }
}
