//! Threads for slow requests, so that they do not delay others.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::route::ApiResult;
use crate::api::peer::Peer;
use crate::api::{ProblemDetails, StatusCode};
use reaper_host::advice::Advised as _;
use reaper_host::workers::{Job, Size, Workers};

/// Worker threads for one kind of request.
pub(super) struct Lane {
    /// Kind of request; also the name of the threads.
    name: &'static str,
    workers: Workers,
}

impl Lane {
    /// Creates a lane with at most `threads` threads.
    pub(super) fn new(name: &'static str, threads: usize) -> Lane {
        let workers = Workers::new(name, Size::fixed(threads));
        Lane { name, workers }
    }

    /// Runs `work` for a peer and waits for its result. `limit` includes the time in the queue.
    ///
    /// # Errors
    /// `work` fails, or the limit expires. Work that has not started when it expires is dropped (`busy`). Work that has
    /// started continues, but its result is lost (`timeout`).
    pub(super) async fn run<T: Send + 'static>(
        &self,
        peer: Peer,
        limit: Duration,
        work: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let name = self.name;
        let (wanted, is_begun) = (Arc::new(()), Arc::new(AtomicBool::new(false)));
        let begun = Arc::clone(&is_begun);
        let (send, done) = oneshot::channel();
        let job = Job {
            owner: peer.uid,
            id: 0,
            is_urgent: false,
            wanted: Arc::downgrade(&wanted),
            work: Box::new(move |_| {
                begun.store(true, Ordering::Relaxed);
                let _ = send.send(work());
            }),
        };
        let failed = |error: io::Error| {
            let error = error.advised_or("try again");
            let what = format!("the service cannot start a thread for the {name}: {error}");
            ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, what)
        };
        self.workers.submit(job).map_err(failed)?;
        let bug = |_| {
            ProblemDetails::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the {name} has panicked, and the service continues; report this as a bug"),
            )
        };
        match timeout(limit, done).await {
            Ok(done) => done.map_err(bug)?,
            Err(_) if is_begun.load(Ordering::Relaxed) => Err(ProblemDetails::new(
                StatusCode::GATEWAY_TIMEOUT,
                format!(
                    "the {name} took longer than {}s; it continues, but its result will not be shown; try again later",
                    limit.as_secs_f32()
                ),
            )),
            Err(_) => Err(ProblemDetails::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("the service is busy with another {name}; try again in a few seconds"),
            )),
        }
    }
}
