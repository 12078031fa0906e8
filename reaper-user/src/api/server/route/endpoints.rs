//! Table of the endpoints, from which requests are routed and the document of the API is made.

use hyper::Method;

use super::parse::{Query, keep, only_root, pid, target};
use super::{ApiResult, history};
use crate::api::messages::RequestKind;
use crate::api::peer::Peer;
use crate::api::{ProblemDetails, StatusCode};
use crate::journal::history::HistoryQuery;

/// Requests with one method to one path.
pub(super) struct Endpoint {
    pub(super) method: &'static str,
    /// Path; `{pid}` at its end stands for one segment.
    pub(super) path: &'static str,
    /// Reads a request, and checks that the peer may make it.
    read: fn(&mut Call<'_>) -> ApiResult<Work>,
}

/// Request to an endpoint.
struct Call<'a> {
    /// Segment in place of `{pid}`; empty if the path has none.
    pid: &'a str,
    query: Query,
    body: &'a [u8],
    peer: Peer,
}

/// What answers a request.
pub(super) enum Work {
    Engine(RequestKind),
    History(HistoryQuery),
    /// The document of the API.
    Document,
}

/// All endpoints.
pub(super) const ENDPOINTS: &[Endpoint] = &[
    Endpoint {
        method: "GET",
        path: "/v1/openapi.json",
        read: |_| Ok(Work::Document),
    },
    Endpoint {
        method: "GET",
        path: "/v1/status",
        read: |_| Ok(Work::Engine(RequestKind::Status)),
    },
    Endpoint {
        method: "GET",
        path: "/v1/tree",
        read: |call| {
            let agent = call.query.take("agent");
            let all = call.query.flag("all")?;
            Ok(Work::Engine(RequestKind::Tree { agent, all }))
        },
    },
    Endpoint {
        method: "GET",
        path: "/v1/explain/{pid}",
        read: |call| {
            let pid = pid(call.pid)?;
            Ok(Work::Engine(RequestKind::Explain { pid }))
        },
    },
    Endpoint {
        method: "GET",
        path: "/v1/agents",
        read: |call| {
            Ok(Work::Engine(match call.query.take("test") {
                Some(word) => RequestKind::TestRules { pid: pid(&word)? },
                None => RequestKind::Agents,
            }))
        },
    },
    Endpoint {
        method: "GET",
        path: "/v1/keeps",
        read: |_| Ok(Work::Engine(RequestKind::Keeps)),
    },
    Endpoint {
        method: "POST",
        path: "/v1/keeps",
        read: |call| Ok(Work::Engine(keep(call.body, call.peer)?)),
    },
    Endpoint {
        method: "DELETE",
        path: "/v1/keeps/{pid}",
        read: |call| {
            let others = "`reaper keep --list` lists what is kept";
            let target = target(pid(call.pid)?, call.peer, others)?;
            Ok(Work::Engine(RequestKind::Unkeep { target }))
        },
    },
    Endpoint {
        method: "GET",
        path: "/v1/scan",
        read: |call| scan(call, false),
    },
    Endpoint {
        method: "POST",
        path: "/v1/scan",
        read: |call| {
            only_root(call.peer, "reap what a scan has found")?;
            scan(call, true)
        },
    },
    Endpoint {
        method: "GET",
        path: "/v1/history",
        read: |call| Ok(Work::History(history::query(&mut call.query, call.peer)?)),
    },
    Endpoint {
        method: "GET",
        path: "/v1/config",
        read: |call| {
            // The file may be readable for root alone.
            only_root(call.peer, "see the config")?;
            Ok(Work::Engine(RequestKind::Config))
        },
    },
    Endpoint {
        method: "POST",
        path: "/v1/config/reload",
        read: |call| {
            only_root(call.peer, "reload the config")?;
            Ok(Work::Engine(RequestKind::Reload))
        },
    },
];

fn scan(call: &mut Call<'_>, reap: bool) -> ApiResult<Work> {
    let min_age = call.query.seconds("min_age_s")?;
    Ok(Work::Engine(RequestKind::Scan { min_age, reap }))
}

/// Returns the endpoints at a path, each with the segment in place of `{pid}`.
fn at(path: &str) -> impl Iterator<Item = (&'static Endpoint, &str)> {
    ENDPOINTS.iter().filter_map(move |endpoint| {
        let Some(before) = endpoint.path.strip_suffix("{pid}") else {
            return (endpoint.path == path).then_some((endpoint, ""));
        };
        let pid = path.strip_prefix(before)?;
        (!pid.contains('/')).then_some((endpoint, pid))
    })
}

/// Returns the methods that a path accepts, as for the `Allow` header. Empty for an unknown path.
pub(super) fn methods(path: &str) -> String {
    let methods: Vec<_> = at(path).map(|(endpoint, _)| endpoint.method).collect();
    methods.join(", ")
}

/// Reads a request and checks that the peer may make it.
pub(super) fn read_request(
    method: &Method,
    path: &str,
    query: Option<&str>,
    body: &[u8],
    peer: Peer,
) -> ApiResult<Work> {
    let query = Query::read(query)?;
    let Some((endpoint, pid)) = at(path).find(|(endpoint, _)| endpoint.method == method.as_str())
    else {
        return Err(unknown(method, path));
    };
    let mut call = Call {
        pid,
        query,
        body,
        peer,
    };
    let work = (endpoint.read)(&mut call)?;
    call.query.finish()?;
    Ok(work)
}

fn unknown(method: &Method, path: &str) -> ProblemDetails {
    let methods = methods(path);
    if methods.is_empty() {
        let what = "the service knows no such path; try /v1/status";
        return ProblemDetails::new(StatusCode::NOT_FOUND, what);
    }
    let what = format!("{method} is not possible on this path; use {methods}");
    ProblemDetails::new(StatusCode::METHOD_NOT_ALLOWED, what)
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
        let refusal = |method, path, body: &str, peer| {
            let read = read_request(&method, path, None, body.as_bytes(), peer);
            read.err().map(|refusal| refusal.status)
        };
        for (method, path, body) in [
            (Method::POST, "/v1/keeps", &*body),
            (Method::DELETE, &*path, ""),
            (Method::POST, "/v1/scan", ""),
            (Method::GET, "/v1/config", ""),
            (Method::POST, "/v1/config/reload", ""),
        ] {
            let refused = refusal(method.clone(), path, body, unprivileged);
            assert_eq!(refused, Some(403), "{method} {path}");
            assert_eq!(
                refusal(method, path, body, Peer { uid: own }),
                None,
                "{path}"
            );
        }
    }
}
