//! HTTP server on the service's socket.
//!
//! It runs on its own thread. Limits on time, size and connections keep one client from delaying the engine or
//! other clients.

mod lane;
mod route;
#[cfg(test)]
mod tests;
mod wire;

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as Listener;
use std::os::unix::net::UnixStream as Stream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::leftovers::Leftovers;
use super::messages::EngineRequest;
use super::peer::Peer;
use lane::Lane;
use reaper_host::advice::Advised as _;
use wire::Wire;

/// Capacity of the queue of requests to the engine. Further requests wait until it has room.
pub const QUEUE: usize = 16;

/// Limits on open connections: of all clients; of all unprivileged users together, which leaves room for a
/// privileged one; of one unprivileged user.
const CONNECTIONS_MAX: usize = 64;
const USERS_MAX: usize = 48;
const PER_USER_MAX: usize = 8;
/// Largest size of the request line and headers, in bytes.
const HEADERS_MAX: usize = 8 << 10;
/// Largest size of a request's body, in bytes.
const BODY_MAX: usize = 64 << 10;

/// Time limits of a connection.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// For the headers, and again for the body.
    request: Duration,
    /// For the engine's reply, for a scan, for a history and for the inspection of a process.
    answer: Duration,
    /// For reaping. After that the answer lists the leftovers without outcomes, and reaping continues.
    reaping: Duration,
    /// For the connection as a whole.
    whole: Duration,
}

const TIMEOUTS: Timeouts = Timeouts {
    request: Duration::from_secs(5),
    answer: Duration::from_secs(10),
    reaping: Duration::from_secs(15),
    whole: Duration::from_secs(30),
};

/// Reason why the service has no socket.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("another service already answers on {}; stop it first, or set another --runtime-dir", .0.display())]
    Alive(PathBuf),
    #[error(
        "cannot listen on {}: it exists, and is not a socket; remove it, or set another --runtime-dir",
        .0.display()
    )]
    NotASocket(PathBuf),
    #[error(
        "cannot listen on {}: {}; to run without a socket, set `socket = false` in the config",
        path.display(), source.advised_or("set another --runtime-dir")
    )]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot start the thread that answers on the socket: {}", .0.advised())]
    Thread(#[source] io::Error),
}

/// Listening socket. Its file is removed on drop.
pub struct Socket {
    listener: Option<Listener>,
    path: PathBuf,
    /// Inode of the file. A file of another service at the same path is left alone.
    inode: u64,
}

/// Connections of the server to the rest of the service.
pub struct Backend {
    /// Sends requests to the engine.
    pub engine: mpsc::Sender<EngineRequest>,
    /// Path of the journal's database, if the service has a journal.
    pub journal: Option<PathBuf>,
    pub leftovers: Arc<dyn Leftovers>,
}

/// Server thread. It stops on drop.
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _socket: Arc<Socket>,
}

impl Socket {
    /// Listens on `path`. Replaces a socket file on which no process listens.
    ///
    /// Every user may connect. The peer credentials decide what each may see and do.
    ///
    /// # Errors
    /// Another process listens on the socket, the file is not a socket, or it cannot be created.
    pub fn bind(path: &Path) -> Result<Socket, ServerError> {
        let failed = |source| ServerError::Listen {
            path: path.into(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(meta) if !meta.file_type().is_socket() => {
                return Err(ServerError::NotASocket(path.into()));
            }
            Ok(_) => match Stream::connect(path) {
                Ok(_) => return Err(ServerError::Alive(path.into())),
                // Nothing listens: the service that created it was killed.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                Err(error) => return Err(failed(error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let listener = Listener::bind(path).map_err(failed)?;
        let prepare = || {
            listener.set_nonblocking(true)?;
            fs::set_permissions(path, Permissions::from_mode(0o666))?;
            Ok(fs::symlink_metadata(path)?.ino())
        };
        let inode = prepare().map_err(failed)?;
        Ok(Socket {
            listener: Some(listener),
            path: path.into(),
            inode,
        })
    }

    /// Returns the path that was bound.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves requests on a new thread.
    ///
    /// # Errors
    /// The thread or its runtime cannot be started.
    pub fn serve(self, backend: Backend) -> Result<Server, ServerError> {
        self.serve_within(backend, TIMEOUTS)
    }

    fn serve_within(mut self, backend: Backend, timeouts: Timeouts) -> Result<Server, ServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .build()
            .map_err(ServerError::Thread)?;
        let listener = self.listener.take();
        let path = self.path.clone();
        let socket = Arc::new(self);
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            let local = tokio::task::LocalSet::new();
            let listen = async {
                // Must be registered with the runtime that uses it.
                match listener.map(UnixListener::from_std) {
                    Some(Ok(listener)) => accept(listener, backend, timeouts).await,
                    Some(Err(error)) => {
                        tracing::error!(
                            "cannot answer requests on {}: {}; the service continues without them until it is restarted",
                            path.display(),
                            error.advised()
                        );
                    }
                    None => {}
                }
            };
            local.block_on(&runtime, async {
                tokio::select! {
                    () = listen => {}
                    _ = stopped => {}
                }
            });
            // Does not wait for reads of /proc that hang.
            drop(local);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("api".into()).spawn(run);
        Ok(Server {
            stop: Some(stop),
            thread: Some(thread.map_err(ServerError::Thread)?),
            _socket: socket,
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let own = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| meta.file_type().is_socket() && meta.ino() == self.inode);
        if own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(
                "cannot remove the socket {}: {error}; the next service tries to replace it",
                self.path.display()
            );
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(
                "the thread that answers on the socket has panicked, so requests got no answer; report this as a bug"
            );
        }
    }
}

/// State shared by all connections.
struct Shared {
    backend: Backend,
    /// Scans of all processes.
    scans: Lane,
    /// Scans that reap. [`Leftovers`] runs one at a time and refuses others at once.
    reapings: Lane,
    histories: Lane,
    /// Reads of single processes from /proc, which can block for seconds.
    inspections: Lane,
    timeouts: Timeouts,
    /// Number of connections of each user.
    open: std::cell::RefCell<HashMap<Peer, usize>>,
}

/// Slot of a connection, released on drop.
struct ConnectionSlot {
    shared: Rc<Shared>,
    peer: Peer,
}

/// Returns whether `peer` may open one more connection.
fn has_room(open: &HashMap<Peer, usize>, peer: Peer) -> bool {
    let all: usize = open.values().sum();
    let users = open.iter().filter(|(peer, _)| !peer.is_privileged());
    let users: usize = users.map(|(_, own)| own).sum();
    let own = open.get(&peer).copied().unwrap_or(0);
    all < CONNECTIONS_MAX && (peer.is_privileged() || users < USERS_MAX && own < PER_USER_MAX)
}

impl ConnectionSlot {
    /// Counts a connection of `peer`. Returns `None` if it may not open one more.
    fn take(shared: &Rc<Shared>, peer: Peer) -> Option<ConnectionSlot> {
        let mut open = shared.open.borrow_mut();
        has_room(&open, peer).then(|| {
            *open.entry(peer).or_default() += 1;
            ConnectionSlot {
                shared: Rc::clone(shared),
                peer,
            }
        })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut open = self.shared.open.borrow_mut();
        if let Some(own) = open.get_mut(&self.peer) {
            *own -= 1;
            if *own == 0 {
                open.remove(&self.peer);
            }
        }
    }
}

/// Accepts connections and serves each in its own task. Answers those above the limits with `busy`. Never returns.
async fn accept(listener: UnixListener, backend: Backend, timeouts: Timeouts) {
    let shared = Rc::new(Shared {
        backend,
        scans: Lane::new("scan", 1),
        reapings: Lane::new("reaping", 2),
        histories: Lane::new("history", 2),
        inspections: Lane::new("explanation", 2),
        timeouts,
        open: Default::default(),
    });
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The likely cause is a lack of file descriptors. Clients stay queued until the next try.
                tracing::warn!(
                    "cannot accept a connection on the socket: {}; trying again, while clients wait",
                    error.advised()
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = Peer::of(&stream) else {
            continue;
        };
        match ConnectionSlot::take(&shared, peer) {
            Some(slot) => {
                tokio::task::spawn_local(serve_connection(stream, peer, slot));
            }
            // Sent without reading the request. Dropped if the socket's buffer has no room for it.
            None => drop(stream.try_write(&route::busy())),
        }
    }
}

/// Serves one connection: one request, one response.
async fn serve_connection(stream: UnixStream, peer: Peer, slot: ConnectionSlot) {
    let shared = &slot.shared;
    let namespace = Peer::check_pid_namespace(&stream);
    let has_request = Rc::new(Cell::new(false));
    let service = service_fn(|request| {
        has_request.set(true);
        route::answer(request, peer, namespace, shared)
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(shared.timeouts.request)
        .max_buf_size(HEADERS_MAX)
        .keep_alive(false)
        // A client may close its sending half and then read the response.
        .half_close(true)
        .serve_connection(Wire::new(stream, Rc::clone(&has_request)), service);
    match timeout(shared.timeouts.whole, &mut connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!("connection on the socket failed: {error}");
            if !has_request.get() {
                connection.into_parts().io.refuse(&error);
            }
        }
        Err(_) => tracing::debug!("connection on the socket timed out"),
    }
}
