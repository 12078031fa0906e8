//! HTTP client for the service's socket. Each request uses its own connection.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::ProblemDetails;
use crate::export::to_json;
use reaper_host::advice::Advised as _;

/// Time limit for a request. Longer than the service's own limits.
const PATIENCE: Duration = Duration::from_secs(40);
/// Largest response body, in bytes. The tree of a host with very many processes must fit.
const ANSWER_MAX: usize = 256 << 20;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection: no service runs on this socket, or the user may not use it.
    #[error("no service answers on {}: {}", path.display(), cause(path, source))]
    NoService {
        /// Path of the socket.
        path: PathBuf,
        /// Error of connect(2).
        source: io::Error,
    },
    /// The service has refused the request.
    #[error("{}", .0.detail)]
    Refused(ProblemDetails),
    /// The response is no HTTP, or its JSON has another format.
    #[error(
        "the program that answers on {} is not a reaper service, or one of another version ({what}); restart the service \
         after an upgrade, or name another socket with --socket", path.display()
    )]
    UnexpectedResponse {
        /// Path of the socket.
        path: PathBuf,
        /// Description of the first deviation.
        what: String,
    },
    /// No complete response within 40 s. The service may have carried out the request.
    #[error(
        "the service on {} did not answer within {}s: it may be busy or stopped (SIGSTOP), and may still carry out the \
         request; try again, then restart it",
        path.display(), PATIENCE.as_secs()
    )]
    TimedOut {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The service may have carried out the request.
    #[error(
        "the service on {} closed the connection before it answered: it may have stopped, and may have carried out the \
         request; check with `reaper status`",
        .0.display()
    )]
    ConnectionClosed(PathBuf),
    /// The runtime of the client cannot be started.
    #[error("cannot prepare a connection to the service: {}", .0.advised())]
    Io(#[from] io::Error),
}

/// Returns why the connection to `path` failed, and what to do.
fn cause(path: &Path, source: &io::Error) -> String {
    let is_socket = |meta: Metadata| meta.file_type().is_socket();
    match source.kind() {
        io::ErrorKind::ConnectionRefused if !path.metadata().is_ok_and(is_socket) => {
            "it is not a socket; name the service's socket with --socket".into()
        }
        io::ErrorKind::NotFound => {
            "no such socket; start a service with `sudo reaper daemon` (--observe only watches), or name another socket with --socket".into()
        }
        io::ErrorKind::ConnectionRefused => {
            "the service has stopped; start one with `sudo reaper daemon` (--observe only watches)".into()
        }
        io::ErrorKind::PermissionDenied => "permission denied; run with sudo".into(),
        _ => source.advised_or("check this path, or name another socket with --socket"),
    }
}

/// Client of the service on one socket. Each request opens a new connection.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// Successful response, not yet parsed.
#[derive(Clone, Debug)]
pub struct ServiceResponse {
    /// JSON text, at most 256 MiB.
    pub body: Bytes,
    socket: PathBuf,
}

impl ServiceResponse {
    /// Parses the body.
    ///
    /// # Errors
    /// The body has another format: the service has another version.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        serde_json::from_slice(&self.body).map_err(|error| ClientError::UnexpectedResponse {
            path: self.socket.clone(),
            what: error.to_string(),
        })
    }
}

impl Client {
    /// Creates a client for the service on this socket. Does not connect.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client {
            socket: socket.into(),
        }
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a GET request and waits for the response, at most 40 s. `path` includes the query.
    ///
    /// # Errors
    /// No service answers, or it refuses; see [`ClientError`].
    pub fn get(&self, path: &str) -> Result<ServiceResponse, ClientError> {
        self.ask(Method::GET, path, Vec::new())
    }

    /// Sends a POST request with a JSON body and waits for the response, at most 40 s.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn post(&self, path: &str, body: &impl Serialize) -> Result<ServiceResponse, ClientError> {
        self.ask(Method::POST, path, to_json(body))
    }

    /// Sends a DELETE request and waits for the response, at most 40 s.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn delete(&self, path: &str) -> Result<ServiceResponse, ClientError> {
        self.ask(Method::DELETE, path, Vec::new())
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<ServiceResponse, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let exchange = timeout(PATIENCE, self.exchange(method, path, body)).await;
            exchange.unwrap_or_else(|_| {
                Err(ClientError::TimedOut {
                    path: self.socket.clone(),
                })
            })
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<ServiceResponse, ClientError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|source| ClientError::NoService {
            path: self.socket.clone(),
            source,
        })?;
        let unexpected = |error: &dyn std::fmt::Display| ClientError::UnexpectedResponse {
            path: self.socket.clone(),
            what: error.to_string(),
        };
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| unexpected(&e))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "reaper")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|e| unexpected(&e))?;
        let reply = async {
            let on_error = |error: &hyper::Error| match error.is_parse() {
                true => unexpected(error),
                false => ClientError::ConnectionClosed(self.socket.clone()),
            };
            let response = sender
                .send_request(request)
                .await
                .map_err(|e| on_error(&e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_MAX)
                .collect()
                .await;
            let body =
                body.map_err(|e| e.downcast_ref().map_or_else(|| unexpected(&*e), on_error))?;
            let body = body.to_bytes();
            let socket = self.socket.clone();
            let received = ServiceResponse { body, socket };
            if status == StatusCode::OK {
                return Ok(received);
            }
            let refusal: ProblemDetails = received.read().map_err(|_| unexpected(&status))?;
            Err(ClientError::Refused(refusal))
        };
        tokio::pin!(reply);
        tokio::select! {
            answer = &mut reply => answer,
            // The connection may have buffered the response before it closed.
            _ = connection => reply.await,
        }
    }
}
