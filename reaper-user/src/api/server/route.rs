//! Routes a request to the engine, the journal or a scan, and builds the response.

mod endpoints;
mod explain;
mod history;
#[cfg(test)]
mod openapi;
mod parse;
mod scan;
mod untracked;

use std::convert::Infallible;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Request, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{BODY_MAX, Shared};
use crate::api::messages::{EngineReply, EngineRequest, RequestKind};
use crate::api::peer::Peer;
use crate::api::{ProblemDetails, ScanReport, ShownConfig, recognition, show};
use crate::export::to_json;
use endpoints::{Work, methods, read_request};
use scan::{ScanParams, scanned};

/// Description of the API, which the module `openapi` makes in a test.
const DOCUMENT: &[u8] = include_bytes!("../../../docs/openapi.json");
/// Media types of responses.
const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";
/// Value of `Retry-After` in a `busy` response, in seconds.
const RETRY_AFTER_S: u32 = 2;

/// Returns the whole response to a connection above the limit.
pub(super) fn busy() -> Vec<u8> {
    let what = "the service has too many open connections, of this user or in all; close some, then try again";
    unread(StatusCode::SERVICE_UNAVAILABLE, what)
}

/// Returns the whole response to a connection whose request was not read.
pub(super) fn unread(status: StatusCode, what: impl Into<String>) -> Vec<u8> {
    let body = to_json(&ProblemDetails::new(status, what));
    let length = body.len();
    let retry = match status {
        StatusCode::SERVICE_UNAVAILABLE => format!("retry-after: {RETRY_AFTER_S}\r\n"),
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {PROBLEM}\r\ncontent-length: {length}\r\n{retry}connection: close\r\n\r\n"
    );
    [head.into_bytes(), body].concat()
}

/// Result of a request.
pub(super) type ApiResult<T> = Result<T, ProblemDetails>;

/// Handles one request. Errors become responses too. Each answer contains pids, so a client for which they would mean
/// other processes gets none: `namespace` is the result of [`Peer::check_pid_namespace`].
pub(super) async fn answer(
    request: Request<Incoming>,
    peer: Peer,
    namespace: Result<(), &str>,
    shared: &Shared,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let uri = request.uri().clone();
    let answered = match namespace {
        Ok(()) => handle(request, peer, shared).await,
        Err(why) => Err(ProblemDetails::new(StatusCode::FORBIDDEN, why)),
    };
    let (mut response, media_type) = match answered {
        Ok(body) => (Response::new(Full::from(body)), JSON),
        Err(problem) => {
            let mut response = Response::new(Full::from(to_json(&problem)));
            let status = StatusCode::from_u16(problem.status);
            *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (response, PROBLEM)
        }
    };
    let status = response.status();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    if status == StatusCode::METHOD_NOT_ALLOWED
        && let Ok(methods) = methods(uri.path()).try_into()
    {
        headers.insert(ALLOW, methods);
    }
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(RETRY_AFTER, RETRY_AFTER_S.into());
    }
    Ok(response)
}

/// Reads the body of a request, and answers it from the engine, the journal or a scan. Returns JSON.
async fn handle(request: Request<Incoming>, peer: Peer, shared: &Shared) -> ApiResult<Vec<u8>> {
    let (head, body) = request.into_parts();
    let too_large = || {
        let what =
            format!("the body of the request is larger than {BODY_MAX} bytes; send a smaller one");
        ProblemDetails::new(StatusCode::PAYLOAD_TOO_LARGE, what)
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
            return Err(ProblemDetails::new(
                StatusCode::BAD_REQUEST,
                format!("cannot read the body of the request: {error}; send it again"),
            ));
        }
        Err(_) => {
            return Err(ProblemDetails::new(
                StatusCode::REQUEST_TIMEOUT,
                "the body of the request did not arrive in time; send as many bytes as its content-length says",
            ));
        }
    };
    let (path, query) = (head.uri.path(), head.uri.query());
    match read_request(&head.method, path, query, &body, peer)? {
        Work::Engine(kind) => carry_out(kind, peer, shared).await,
        Work::History(query) => {
            let read = history::read_history(shared.backend.journal.as_deref(), query);
            let limit = shared.timeouts.answer;
            shared.histories.run(peer, limit, read).await
        }
        Work::Document => Ok(DOCUMENT.to_vec()),
    }
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
        (Err(refusal), Some(target)) if refusal.status == StatusCode::CONFLICT => {
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
        Err(ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, what))
    })
}

/// Sends a request to the engine and waits for the reply.
///
/// # Errors
/// The engine refuses the request, does not reply in time (`timeout`), or stops (`busy`).
async fn ask(kind: RequestKind, peer: Peer, shared: &Shared) -> ApiResult<EngineReply> {
    let stopping = || {
        ProblemDetails::new(
            StatusCode::SERVICE_UNAVAILABLE,
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
            Err(ProblemDetails::new(StatusCode::GATEWAY_TIMEOUT, what))
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
            Err(ProblemDetails::new(StatusCode::CONFLICT, message))
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
            Err(ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, what))
        }
    };
    off_thread(convert).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_response_has_the_right_length() {
        let said = String::from_utf8(busy()).unwrap();
        let (head, body) = said.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}", body.len())),
            "{head}"
        );
    }
}
