//! Routes a request to the engine, the journal or a scan, and builds the response.

mod explain;
mod history;
mod parse;
mod scan;
mod untracked;

use std::convert::Infallible;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{BODY_MAX, Shared};
use crate::api::messages::{EngineReply, EngineRequest, RequestKind};
use crate::api::peer::Peer;
use crate::api::{ErrorResponse, ScanReport, ShownConfig, recognition, show};
use crate::export::to_json;
use parse::{methods, parse_request, segments};
use scan::{ScanParams, scanned};

/// Value of `Retry-After` in a `busy` response, in seconds.
const RETRY_AFTER_S: u32 = 2;

/// Returns the whole response to a connection above the limit.
pub(super) fn busy() -> String {
    let what = "the service has too many open connections, of this user or in all; close some, then try again";
    let body = to_json(&ErrorResponse::new("busy", what));
    let body = String::from_utf8_lossy(&body);
    let (length, status) = (body.len(), StatusCode::SERVICE_UNAVAILABLE);
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         retry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// Result of a request.
pub(super) type ApiResult<T> = Result<T, ErrorResponse>;

impl ErrorResponse {
    /// Creates a refusal. `error` is one of the words that [`ErrorResponse::error`] lists.
    pub fn new(error: &str, message: impl Into<String>) -> ErrorResponse {
        ErrorResponse {
            error: error.into(),
            message: message.into(),
        }
    }

    /// Returns the HTTP status for the error; 500 for `failed`.
    fn status(&self) -> StatusCode {
        match &*self.error {
            "eperm" => StatusCode::FORBIDDEN,
            "not_found" => StatusCode::NOT_FOUND,
            "bad_request" => StatusCode::BAD_REQUEST,
            "conflict" => StatusCode::CONFLICT,
            "too_large" => StatusCode::PAYLOAD_TOO_LARGE,
            "wrong_method" => StatusCode::METHOD_NOT_ALLOWED,
            "timeout" => StatusCode::GATEWAY_TIMEOUT,
            "busy" => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Handles one request. Errors become responses too. Each answer contains pids, so a client for which they would mean
/// other processes gets none: `namespace` is the result of [`Peer::check_pid_namespace`].
pub(super) async fn answer(
    request: Request<Incoming>,
    peer: Peer,
    namespace: Result<(), &str>,
    shared: &Shared,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let allowed = methods(request.uri().path());
    let answered = match namespace {
        Ok(()) => handle(request, peer, shared).await,
        Err(why) => Err(ErrorResponse::new("eperm", why)),
    };
    Ok(match answered {
        Ok(body) => response(StatusCode::OK, body),
        Err(refusal) => {
            let mut response = response(refusal.status(), to_json(&refusal));
            let headers = response.headers_mut();
            match &*refusal.error {
                "wrong_method" => drop(headers.insert(ALLOW, HeaderValue::from_static(allowed))),
                "busy" => drop(headers.insert(RETRY_AFTER, RETRY_AFTER_S.into())),
                _ => {}
            }
            response
        }
    })
}

fn response(status: StatusCode, body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// Reads the body of a request, and answers it from the engine, the journal or a scan. Returns JSON.
async fn handle(request: Request<Incoming>, peer: Peer, shared: &Shared) -> ApiResult<Vec<u8>> {
    let (head, body) = request.into_parts();
    let too_large = || {
        let what =
            format!("the body of the request is larger than {BODY_MAX} bytes; send a smaller one");
        ErrorResponse::new("too_large", what)
    };
    if body.size_hint().lower() > BODY_MAX as u64 {
        return Err(too_large());
    }
    let limited = Limited::new(body, BODY_MAX).collect();
    // The body is also read if the request needs none. A client that sends one can then read the response.
    let body = match timeout(shared.timeouts.request, limited).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(too_large()),
        Ok(Err(error)) => {
            return Err(ErrorResponse::new(
                "bad_request",
                format!("cannot read the body of the request: {error}; send it again"),
            ));
        }
        Err(_) => {
            return Err(ErrorResponse::new(
                "timeout",
                "the body of the request did not arrive in time; send as many bytes as its content-length says",
            ));
        }
    };
    let (path, query) = (head.uri.path(), head.uri.query());
    if segments(path) == ["v1", "history"] && head.method == Method::GET {
        let query = history::query(query, peer)?;
        let read = history::read_history(shared.backend.journal.as_deref(), query);
        return shared
            .histories
            .run(peer, shared.timeouts.answer, read)
            .await;
    }
    let kind = parse_request(&head.method, path, query, &body, peer)?;
    carry_out(kind, peer, shared).await
}

/// Carries out a request by the engine, and adds what only a scan knows. Returns JSON.
async fn carry_out(kind: RequestKind, peer: Peer, shared: &Shared) -> ApiResult<Vec<u8>> {
    let scan = match kind {
        RequestKind::Scan { min_age, reap } => Some((min_age, reap)),
        _ => None,
    };
    if let RequestKind::Explain { pid } = kind {
        return explain::explain(pid, peer, shared).await;
    }
    let kept = match &kind {
        RequestKind::Keep { target, .. } => Some(target.clone()),
        _ => None,
    };
    let lists_all = matches!(kind, RequestKind::Tree { all: true, .. });
    let reply = match (ask(kind, peer, shared).await, kept) {
        (Err(refusal), Some(target)) if refusal.error == "conflict" => {
            return Err(untracked::not_kept(&target, peer, shared).await);
        }
        (reply, _) => reply?,
    };
    match (reply, scan) {
        (EngineReply::Scan(rows, context), Some((min_age, reap))) => {
            let params = ScanParams {
                leftovers: Arc::clone(&shared.backend.leftovers),
                context,
                peer,
                min_age,
            };
            scanned(rows, params, reap, shared).await
        }
        (EngineReply::Tree(snapshot), _) => {
            let leftovers = match lists_all {
                // The tree is useful without the leftovers too.
                true => untracked::leftovers(peer, shared).await.unwrap_or_default(),
                false => ScanReport::default(),
            };
            off_thread(move || Ok(to_json(&show::tree(snapshot, &leftovers)))).await
        }
        (EngineReply::TestRules(pid, peer, rules), _) => {
            let test = move || {
                let test = recognition::test(pid, &rules, Some(peer))?;
                Ok(to_json(&test))
            };
            let limit = shared.timeouts.answer;
            shared.inspections.run(peer, limit, test).await
        }
        (EngineReply::Unkeep(done, Some(released)), _) => {
            let released = explain::with_sockets(*released, peer, shared).await;
            off_thread(move || Ok(to_json(&show::released(done, &released)))).await
        }
        (reply, _) => to_response(reply).await,
    }
}

/// Runs quick work away from the thread that accepts connections. Work that can block needs a [`Lane`](super::lane::Lane),
/// because all users share the threads of this one, without a time limit.
async fn off_thread(
    work: impl FnOnce() -> ApiResult<Vec<u8>> + Send + 'static,
) -> ApiResult<Vec<u8>> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        let what = "the request was carried out, but its response could not be created; report this as a bug";
        Err(ErrorResponse::new("failed", what))
    })
}

/// Sends a request to the engine and waits for the reply.
///
/// # Errors
/// The engine refuses the request, does not reply in time (`timeout`), or stops (`busy`).
async fn ask(kind: RequestKind, peer: Peer, shared: &Shared) -> ApiResult<EngineReply> {
    let stopping = || {
        ErrorResponse::new(
            "busy",
            "the service is stopping; try again after it has restarted",
        )
    };
    let exchange = async {
        let (reply, answered) = oneshot::channel();
        let ask = EngineRequest { peer, kind, reply };
        shared
            .backend
            .engine
            .send(ask)
            .await
            .map_err(|_| stopping())?;
        answered.await.map_err(|_| stopping())
    };
    match timeout(shared.timeouts.answer, exchange).await {
        Ok(Ok(EngineReply::Refused(refusal))) => Err(refusal),
        Ok(answered) => answered,
        Err(_) => {
            let seconds = shared.timeouts.answer.as_secs_f32();
            let what = format!(
                "the engine of the service gave no answer within {seconds}s, and may still carry out the request; try again"
            );
            Err(ErrorResponse::new("timeout", what))
        }
    }
}

/// Turns a reply of the engine into JSON. Reads /proc, so it runs on another thread.
async fn to_response(reply: EngineReply) -> ApiResult<Vec<u8>> {
    let convert = move || match reply {
        EngineReply::Status {
            status,
            began,
            members,
            refused,
        } => Ok(to_json(&show::status(*status, began, &members, refused))),
        EngineReply::Agents(agents) => Ok(to_json(&show::agents(agents))),
        EngineReply::Keeps(keeps) => Ok(to_json(&show::keeps(keeps))),
        EngineReply::Keep(done) | EngineReply::Unkeep(done, _) => Ok(to_json(&done)),
        EngineReply::Config(config) => Ok(to_json(&ShownConfig::new(&config))),
        EngineReply::Reload(Ok(message)) => Ok(to_json(&crate::api::Reloaded { message })),
        EngineReply::Reload(Err(problems)) => {
            let mut message = problems.replace('\n', "; ");
            if !message.contains("in force") {
                message += "; the old config stays in force";
            }
            Err(ErrorResponse::new("conflict", message))
        }
        EngineReply::Refused(refusal) => Err(refusal),
        EngineReply::Tree(_)
        | EngineReply::TestRules(..)
        | EngineReply::Explain(_)
        | EngineReply::ExplainExited(_)
        | EngineReply::Scan(..)
        | EngineReply::ScanContext(_)
        | EngineReply::Emitted => {
            let what = "the engine of the service gave an unexpected reply; report this as a bug";
            Err(ErrorResponse::new("failed", what))
        }
    };
    off_thread(convert).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_response_has_the_right_length() {
        let said = busy();
        let (head, body) = said.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}", body.len())),
            "{head}"
        );
    }
}
