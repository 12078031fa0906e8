//! The socket's server: a thread of its own, which holds nobody up and lets nobody hold it up.

mod lane;
mod route;
#[cfg(test)]
mod tests;

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
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::leftovers::Leftovers;
use super::messages::EngineRequest;
use super::peer::Peer;
use lane::Lane;

/// Questions that wait for the engine at most.
pub const QUEUE: usize = 16;

/// Connections at one time; how many of them users who may not do all can have together, so that there is always
/// room for one who may; and how many one such user can have.
const CONNECTIONS_MAX: usize = 64;
const USERS_MAX: usize = 48;
const PER_USER_MAX: usize = 8;
/// Bytes of a request's line and headers.
const HEADERS_MAX: usize = 8 << 10;
/// Bytes of a request's body.
const BODY_MAX: usize = 64 << 10;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// A request's headers; then, as long again, its body.
    request: Duration,
    /// The engine's answer; a scan or a history.
    answer: Duration,
    /// The end of what was to be reaped: after that the answer does without.
    reaping: Duration,
    /// All of a connection.
    whole: Duration,
}

const PATIENCE: Timeouts = Timeouts {
    request: Duration::from_secs(5),
    answer: Duration::from_secs(10),
    reaping: Duration::from_secs(15),
    whole: Duration::from_secs(30),
};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("another service answers on {} already: stop it first, or give another --runtime-dir", .0.display())]
    Alive(PathBuf),
    #[error("{} is no socket: remove it, or give another --runtime-dir", .0.display())]
    NotASocket(PathBuf),
    #[error("cannot listen on {}: {source}; `socket = false` in the config does without", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot start the socket's thread: {0}")]
    Thread(#[source] io::Error),
}

/// A socket that somebody may connect to already; removed when this is dropped.
pub struct Socket {
    listener: Option<Listener>,
    path: PathBuf,
    /// Inode of its file: one that another has put there is left alone.
    inode: u64,
}

/// Where the server gets its answers.
pub struct Backend {
    /// Questions to the engine.
    pub engine: mpsc::Sender<EngineRequest>,
    /// Path of the journal's database, if the service has a journal.
    pub journal: Option<PathBuf>,
    pub leftovers: Arc<dyn Leftovers>,
}

/// The thread that answers; ends when this is dropped.
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _socket: Arc<Socket>,
}

impl Socket {
    /// Listens; takes the place of a socket that nobody answers on any more. Everybody may connect: who asks
    /// is known, and what they may see and do is decided by that.
    ///
    /// # Errors
    /// Somebody answers there, something else is there, or the file cannot be made.
    pub fn bind(path: &Path) -> Result<Socket, ServerError> {
        let failed = |source| ServerError::Listen {
            path: path.into(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => {
                return Err(ServerError::NotASocket(path.into()));
            }
            Ok(_) => match Stream::connect(path) {
                Ok(_) => return Err(ServerError::Alive(path.into())),
                // Nobody listens: whoever made it was killed.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                Err(error) => return Err(failed(error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let listener = Listener::bind(path).map_err(failed)?;
        let made = || {
            listener.set_nonblocking(true)?;
            fs::set_permissions(path, Permissions::from_mode(0o666))?;
            Ok(fs::symlink_metadata(path)?.ino())
        };
        let inode = made().map_err(failed)?;
        Ok(Socket {
            listener: Some(listener),
            path: path.into(),
            inode,
        })
    }

    /// Answers requests on a thread of its own.
    ///
    /// # Errors
    /// No thread, or no runtime for it, can be started.
    pub fn serve(self, backend: Backend) -> Result<Server, ServerError> {
        self.serve_within(backend, PATIENCE)
    }

    fn serve_within(mut self, backend: Backend, patience: Timeouts) -> Result<Server, ServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .build()
            .map_err(ServerError::Thread)?;
        let listener = self.listener.take();
        let socket = Arc::new(self);
        let (stop, stopped) = oneshot::channel::<()>();
        let work = move || {
            let local = tokio::task::LocalSet::new();
            let listen = async {
                // Registered with the runtime that it is used in.
                match listener.map(UnixListener::from_std) {
                    Some(Ok(listener)) => accept(listener, backend, patience).await,
                    Some(Err(error)) => tracing::error!("the socket is not served: {error}"),
                    None => {}
                }
            };
            local.block_on(&runtime, async {
                tokio::select! {
                    () = listen => {}
                    _ = stopped => {}
                }
            });
            // A look at /proc that hangs is not waited for.
            drop(local);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("api".into()).spawn(work);
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
            .is_ok_and(|there| there.file_type().is_socket() && there.ino() == self.inode);
        if own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the socket's thread has panicked; this is a bug");
        }
    }
}

/// What all connections share.
struct Shared {
    backend: Backend,
    /// Looks at all processes.
    scans: Lane,
    /// Scans that reap. [`Leftovers`] does one at a time and refuses others at once.
    reapings: Lane,
    histories: Lane,
    patience: Timeouts,
    /// Connections by who has them.
    open: std::cell::RefCell<HashMap<Peer, usize>>,
}

/// A place among the connections, given back when this is dropped.
struct ConnectionSlot {
    shared: Rc<Shared>,
    peer: Peer,
}

/// Whether there is room for one more of `peer` among those who are there.
fn has_room(open: &HashMap<Peer, usize>, peer: Peer) -> bool {
    let all: usize = open.values().sum();
    let users = open.iter().filter(|(peer, _)| !peer.is_privileged());
    let users: usize = users.map(|(_, own)| own).sum();
    let own = open.get(&peer).copied().unwrap_or(0);
    all < CONNECTIONS_MAX && (peer.is_privileged() || users < USERS_MAX && own < PER_USER_MAX)
}

impl ConnectionSlot {
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

async fn accept(listener: UnixListener, backend: Backend, patience: Timeouts) {
    let shared = Rc::new(Shared {
        backend,
        scans: Lane::new("scan", 1),
        reapings: Lane::new("reaping", 2),
        histories: Lane::new("history", 2),
        patience,
        open: Default::default(),
    });
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: whoever waits goes on waiting.
                tracing::warn!("cannot take a connection on the socket: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = Peer::of(&stream) else {
            continue;
        };
        match ConnectionSlot::take(&shared, peer) {
            Some(place) => {
                tokio::task::spawn_local(converse(stream, peer, place));
            }
            // Said without waiting for what it wants, and as far as its buffer takes it.
            None => drop(stream.try_write(route::busy().as_bytes())),
        }
    }
}

/// One connection: one request, one answer.
async fn converse(stream: UnixStream, peer: Peer, place: ConnectionSlot) {
    let shared = &place.shared;
    let service = service_fn(|request| route::answer(request, peer, shared));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(shared.patience.request)
        .max_buf_size(HEADERS_MAX)
        .keep_alive(false)
        // Who has said all and closes that half still waits for the answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(shared.patience.whole, connection).await {
        Ok(Ok(())) => {}
        // It is the other end that has gone, or that speaks another language.
        Ok(Err(error)) => tracing::debug!("a connection on the socket: {error}"),
        Err(_) => tracing::debug!("a connection on the socket took too long"),
    }
}
