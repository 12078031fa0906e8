//! One question to the service, from a command: asks, waits, gives what was said.

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

use super::ErrorResponse;
use crate::export::to_json;

/// How long the service may take: longer than it gives itself.
const PATIENCE: Duration = Duration::from_secs(40);
/// Bytes of an answer: what a service says of a host with very many processes.
const ANSWER_MAX: usize = 256 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no service answers on {}: {}", path.display(), why(path, source))]
    NoService { path: PathBuf, source: io::Error },
    #[error("{}", .0.message)]
    Refused(ErrorResponse),
    #[error("what answers on {} is no reaper service, or of another version: {what}", path.display())]
    UnexpectedResponse { path: PathBuf, what: String },
    #[error("the service on {} does not answer within {} s", path.display(), PATIENCE.as_secs())]
    TimedOut { path: PathBuf },
    /// It may have been asked to do something, and may have done it.
    #[error("the service on {} ended before it had answered", .0.display())]
    ConnectionClosed(PathBuf),
    #[error("cannot ask: {0}")]
    Io(#[from] io::Error),
}

fn why(path: &Path, source: &io::Error) -> String {
    let is_socket = |meta: Metadata| meta.file_type().is_socket();
    match source.kind() {
        io::ErrorKind::ConnectionRefused if !path.metadata().is_ok_and(is_socket) => {
            "it is not a socket; name the service's with --socket".into()
        }
        io::ErrorKind::NotFound => {
            "there is no such socket; start one with `sudo reaper daemon`, or name another with --socket".into()
        }
        io::ErrorKind::ConnectionRefused => {
            "nobody listens there any more; start one with `sudo reaper daemon`".into()
        }
        io::ErrorKind::PermissionDenied => "permission denied; try it with sudo".into(),
        _ => source.to_string(),
    }
}

/// The service behind a socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// What the service has said, as it was said.
#[derive(Clone, Debug)]
pub struct ServiceResponse {
    pub body: Bytes,
    socket: PathBuf,
}

impl ServiceResponse {
    /// # Errors
    /// It is something else: the service is of another version.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        serde_json::from_slice(&self.body).map_err(|error| ClientError::UnexpectedResponse {
            path: self.socket.clone(),
            what: error.to_string(),
        })
    }
}

impl Client {
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client {
            socket: socket.into(),
        }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// # Errors
    /// No service answers, or it refuses; see [`ClientError`].
    pub fn get(&self, path: &str) -> Result<ServiceResponse, ClientError> {
        self.ask(Method::GET, path, Vec::new())
    }

    /// # Errors
    /// As [`Client::get`].
    pub fn post(&self, path: &str, body: &impl Serialize) -> Result<ServiceResponse, ClientError> {
        self.ask(Method::POST, path, to_json(body))
    }

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
        let foreign = |error: &dyn std::fmt::Display| ClientError::UnexpectedResponse {
            path: self.socket.clone(),
            what: error.to_string(),
        };
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| foreign(&e))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "reaper")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|e| foreign(&e))?;
        let answered = async {
            let broken = |error: &hyper::Error| match error.is_parse() {
                true => foreign(error),
                false => ClientError::ConnectionClosed(self.socket.clone()),
            };
            let response = sender.send_request(request).await.map_err(|e| broken(&e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_MAX)
                .collect()
                .await;
            let body = body.map_err(|e| e.downcast_ref().map_or_else(|| foreign(&*e), broken))?;
            let body = body.to_bytes();
            let socket = self.socket.clone();
            let said = ServiceResponse { body, socket };
            if status == StatusCode::OK {
                return Ok(said);
            }
            let refusal: ErrorResponse = said.read().map_err(|_| foreign(&status))?;
            Err(ClientError::Refused(refusal))
        };
        tokio::pin!(answered);
        tokio::select! {
            answer = &mut answered => answer,
            // What it has read before it ended may still hold the answer.
            _ = connection => answered.await,
        }
    }
}
