//! Parts of requests: query, body, and the process that a request names.

use std::time::Duration;

use super::ApiResult;
use crate::api::messages::RequestKind;
use crate::api::peer::{Peer, SignalTarget};
use crate::api::{KEEP_MAX_S, KeepParams, ProblemDetails, StatusCode};
use crate::export::printable;
use reaper_host::advice::Advised as _;
use reaper_model::value::parse_pid;

/// Longest shown name of a query parameter, in characters.
const NAME_MAX: usize = 64;

/// Refuses the request of a peer that may not control the service.
pub(super) fn only_root(peer: Peer, what: &str) -> ApiResult<()> {
    if peer.is_privileged() {
        return Ok(());
    }
    let what = format!("only root or the user of the service may {what}; run it with sudo");
    Err(ProblemDetails::new(StatusCode::FORBIDDEN, what))
}

/// Reads the body of a request to keep a process.
pub(super) fn keep(body: &[u8], peer: Peer) -> ApiResult<RequestKind> {
    let order: KeepParams = serde_json::from_slice(body).map_err(|error| {
        let what = format!(
            r#"the body of the request is not like {{"pid":42,"for_s":7200,"tree":true}}: {error}"#
        );
        ProblemDetails::new(StatusCode::BAD_REQUEST, what)
    })?;
    if order.for_s.is_some_and(|s| s == 0 || s > KEEP_MAX_S) {
        let what = format!(
            "for_s must be from 1 to {KEEP_MAX_S}; omit it to keep the process until it exits"
        );
        return Err(ProblemDetails::new(StatusCode::BAD_REQUEST, what));
    }
    Ok(RequestKind::Keep {
        target: target(order.pid, peer, "`reaper tree` lists what can be kept")?,
        lasts: order.for_s.map(Duration::from_secs),
        tree: order.tree,
    })
}

/// Reads a process and checks that the peer may signal it. `others` says how to find others.
pub(super) fn target(pid: u32, peer: Peer, others: &str) -> ApiResult<SignalTarget> {
    match SignalTarget::read(pid) {
        Ok(Some(target)) if peer.may_signal(&target) => Ok(target),
        Ok(Some(_)) => {
            let what = format!(
                "process {pid} belongs to another user, and only its owner or root may keep or release it; run this with sudo"
            );
            Err(ProblemDetails::new(StatusCode::FORBIDDEN, what))
        }
        Ok(None) => Err(ProblemDetails::new(
            StatusCode::NOT_FOUND,
            format!("there is no process {pid}: it has exited, or the pid is wrong; {others}"),
        )),
        Err(error) => {
            let error = error.advised_or("try again");
            let what = format!("cannot read the owner of process {pid}: {error}");
            Err(ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, what))
        }
    }
}

/// Parses a pid.
pub(super) fn pid(word: &str) -> ApiResult<u32> {
    parse_pid(word).map_err(|what| ProblemDetails::new(StatusCode::BAD_REQUEST, what))
}

/// Parameters of the query that have not been used yet, and the names of those that the request knows.
pub(super) struct Query(Vec<(String, String)>, Vec<String>);

impl Query {
    /// Parses the query of a URL. Refuses a parameter that occurs twice.
    pub(super) fn read(text: Option<&str>) -> ApiResult<Query> {
        let pairs = form_urlencoded::parse(text.unwrap_or_default().as_bytes());
        let pairs: Vec<_> = pairs.into_owned().collect();
        let mut names: Vec<_> = pairs.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            let name = printable(twice[0], NAME_MAX);
            let what = format!("the query contains `{name}` twice; give it once");
            return Err(ProblemDetails::new(StatusCode::BAD_REQUEST, what));
        }
        Ok(Query(pairs, Vec::new()))
    }

    /// Removes a parameter and returns its value; `None` if the query does not have it. Notes the name as known.
    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        self.1.push(format!("`{name}`"));
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Removes a parameter that is true or false; false if it is absent.
    pub(super) fn flag(&mut self, name: &str) -> ApiResult<bool> {
        match self.take(name).as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ProblemDetails::new(
                StatusCode::BAD_REQUEST,
                format!("{name} must be true or false"),
            )),
        }
    }

    /// Removes a parameter that is a number; `None` if it is absent.
    pub(super) fn number(&mut self, name: &str) -> ApiResult<Option<u32>> {
        let Some(word) = self.take(name) else {
            return Ok(None);
        };
        word.parse().map(Some).map_err(|_| {
            let what = format!("{name} must be a number from 0 to 4294967295");
            ProblemDetails::new(StatusCode::BAD_REQUEST, what)
        })
    }

    /// Removes the parameter `pid`, which has one or more pids with commas between them; empty if it is absent.
    pub(super) fn pids(&mut self) -> ApiResult<Vec<u32>> {
        let words = self.take("pid");
        words
            .iter()
            .flat_map(|words| words.split(','))
            .map(pid)
            .collect()
    }

    /// Removes a parameter in whole seconds; `None` if it is absent.
    pub(super) fn seconds(&mut self, name: &str) -> ApiResult<Option<Duration>> {
        let Some(word) = self.take(name) else {
            return Ok(None);
        };
        let seconds = word.parse().map(Duration::from_secs);
        let seconds =
            seconds.map_err(|_| format!("{name} must be a whole number of seconds, such as 60"));
        seconds
            .map(Some)
            .map_err(|what| ProblemDetails::new(StatusCode::BAD_REQUEST, what))
    }

    /// Refuses the query if it contains parameters that no earlier call has taken.
    pub(super) fn finish(self) -> ApiResult<()> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                let name = printable(name, NAME_MAX);
                let known = match self.1.is_empty() {
                    true => "this request has none".into(),
                    false => format!("known are {}", self.1.join(", ")),
                };
                let what = format!("unknown parameter `{name}` in the query: {known}");
                Err(ProblemDetails::new(StatusCode::BAD_REQUEST, what))
            }
        }
    }
}
