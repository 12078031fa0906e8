//! Parses requests.

use std::time::Duration;

use hyper::Method;

use super::ApiResult;
use crate::api::messages::RequestKind;
use crate::api::peer::{Peer, SignalTarget};
use crate::api::{ErrorResponse, KEEP_MAX_S, KeepParams};
use crate::export::printable;
use reaper_host::advice::Advised as _;
use reaper_model::value::parse_pid;

/// Longest shown name of a query parameter, in characters.
const NAME_MAX: usize = 64;

/// Returns the methods that a path accepts, as for the `Allow` header. Empty for an unknown path.
pub(super) fn methods(path: &str) -> &'static str {
    match segments(path).as_slice() {
        ["v1", "status" | "tree" | "agents" | "history" | "config"] | ["v1", "explain", _] => "GET",
        ["v1", "keeps" | "scan"] => "GET, POST",
        ["v1", "keeps", _] => "DELETE",
        ["v1", "config", "reload"] => "POST",
        _ => "",
    }
}

/// Returns the segments of a path.
pub(super) fn segments(path: &str) -> Vec<&str> {
    path.strip_prefix('/').unwrap_or(path).split('/').collect()
}

/// Parses a request and checks that the peer may make it. Does not know `/v1/history`.
pub(super) fn parse_request(
    method: &Method,
    path: &str,
    query: Option<&str>,
    body: &[u8],
    peer: Peer,
) -> ApiResult<RequestKind> {
    let mut query = Query::read(query)?;
    let kind = match (method.as_str(), segments(path).as_slice()) {
        ("GET", ["v1", "status"]) => RequestKind::Status,
        ("GET", ["v1", "tree"]) => RequestKind::Tree {
            agent: query.take("agent"),
            all: query.flag("all")?,
        },
        ("GET", ["v1", "explain", word]) => RequestKind::Explain { pid: pid(word)? },
        ("GET", ["v1", "agents"]) => match query.take("test") {
            Some(word) => RequestKind::TestRules { pid: pid(&word)? },
            None => RequestKind::Agents,
        },
        ("GET", ["v1", "keeps"]) => RequestKind::Keeps,
        ("POST", ["v1", "keeps"]) => keep(body, peer)?,
        ("DELETE", ["v1", "keeps", word]) => RequestKind::Unkeep {
            target: target(pid(word)?, peer, "`reaper keep --list` lists what is kept")?,
        },
        (method @ ("GET" | "POST"), ["v1", "scan"]) => {
            let reap = method == "POST";
            if reap {
                only_root(peer, "reap what a scan has found")?;
            }
            RequestKind::Scan {
                min_age: query.seconds("min_age_s")?,
                reap,
            }
        }
        ("GET", ["v1", "config"]) => {
            // The file may be readable for root alone.
            only_root(peer, "see the config")?;
            RequestKind::Config
        }
        ("POST", ["v1", "config", "reload"]) => {
            only_root(peer, "reload the config")?;
            RequestKind::Reload
        }
        _ => return Err(unknown(method, path)),
    };
    query.finish()?;
    Ok(kind)
}

fn unknown(method: &Method, path: &str) -> ErrorResponse {
    match methods(path) {
        "" => ErrorResponse::new(
            "not_found",
            "the service knows no such path; try /v1/status",
        ),
        methods => {
            let what = format!("{method} is not possible on this path; use {methods}");
            ErrorResponse::new("wrong_method", what)
        }
    }
}

fn only_root(peer: Peer, what: &str) -> ApiResult<()> {
    if peer.is_privileged() {
        return Ok(());
    }
    let what = format!("only root or the user of the service may {what}; run it with sudo");
    Err(ErrorResponse::new("eperm", what))
}

fn keep(body: &[u8], peer: Peer) -> ApiResult<RequestKind> {
    let order: KeepParams = serde_json::from_slice(body).map_err(|error| {
        let what = format!(
            r#"the body of the request is not like {{"pid":42,"for_s":7200,"tree":true}}: {error}"#
        );
        ErrorResponse::new("bad_request", what)
    })?;
    if order.for_s.is_some_and(|s| s == 0 || s > KEEP_MAX_S) {
        let what = format!(
            "for_s must be from 1 to {KEEP_MAX_S}; omit it to keep the process until it exits"
        );
        return Err(ErrorResponse::new("bad_request", what));
    }
    Ok(RequestKind::Keep {
        target: target(order.pid, peer, "`reaper tree` lists what can be kept")?,
        lasts: order.for_s.map(Duration::from_secs),
        tree: order.tree,
    })
}

/// Reads a process and checks that the peer may signal it. `others` says how to find others.
fn target(pid: u32, peer: Peer, others: &str) -> ApiResult<SignalTarget> {
    match SignalTarget::read(pid) {
        Ok(Some(target)) if peer.may_signal(&target) => Ok(target),
        Ok(Some(_)) => {
            let what = format!(
                "process {pid} belongs to another user, and only its owner or root may keep or release it; run this with sudo"
            );
            Err(ErrorResponse::new("eperm", what))
        }
        Ok(None) => Err(ErrorResponse::new(
            "not_found",
            format!("there is no process {pid}: it has exited, or the pid is wrong; {others}"),
        )),
        Err(error) => {
            let error = error.advised_or("try again");
            let what = format!("cannot read the owner of process {pid}: {error}");
            Err(ErrorResponse::new("failed", what))
        }
    }
}

fn pid(word: &str) -> ApiResult<u32> {
    parse_pid(word).map_err(|what| ErrorResponse::new("bad_request", what))
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
            return Err(ErrorResponse::new("bad_request", what));
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
            None | Some("false" | "0") => Ok(false),
            Some("" | "true" | "1") => Ok(true),
            Some(_) => Err(ErrorResponse::new(
                "bad_request",
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
            ErrorResponse::new("bad_request", what)
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
            .map_err(|what| ErrorResponse::new("bad_request", what))
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
                Err(ErrorResponse::new("bad_request", what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unprivileged_peer_is_refused() {
        // The user that runs the tests is privileged.
        let own = nix::unistd::geteuid().as_raw();
        let unprivileged = Peer { uid: own + 4242 };
        let pid = std::process::id();
        let path = format!("/v1/keeps/{pid}");
        let body = format!(r#"{{"pid":{pid}}}"#);
        let parse = |method, path, body: &str, peer| {
            let parse = parse_request(&method, path, None, body.as_bytes(), peer);
            parse.map_err(|refusal| refusal.error)
        };
        for (method, path, body) in [
            (Method::POST, "/v1/keeps", &*body),
            (Method::DELETE, &*path, ""),
            (Method::POST, "/v1/scan", ""),
            (Method::GET, "/v1/config", ""),
            (Method::POST, "/v1/config/reload", ""),
        ] {
            let refused = parse(method.clone(), path, body, unprivileged);
            assert_eq!(refused, Err("eperm".into()), "{method} {path}");
            assert!(
                parse(method, path, body, Peer { uid: own }).is_ok(),
                "{path}"
            );
        }
    }
}
