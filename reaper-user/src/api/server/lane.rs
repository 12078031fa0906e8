//! Answers that may take long, apart from the others.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::route::ApiResult;
use crate::api::ErrorResponse;

/// Work of one kind, on threads of its own: so many at a time.
pub(super) struct Lane {
    /// What is done in it, as a thread's name.
    name: &'static str,
    places: Arc<Semaphore>,
}

impl Lane {
    pub(super) fn new(name: &'static str, most: usize) -> Lane {
        let places = Arc::new(Semaphore::new(most));
        Lane { name, places }
    }

    /// Does it, when others have made room; all within `patience`. Nobody else has the place before the work has
    /// ended, even if nobody waits for that any more.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let name = self.name;
        let mut begun = false;
        let done = async {
            let place = Arc::clone(&self.places).acquire_owned().await;
            begun = true;
            let (tell, told) = oneshot::channel();
            let work = move || {
                let _place = place;
                let _ = tell.send(work());
            };
            let thread = std::thread::Builder::new().name(name.into()).spawn(work);
            let failed =
                |error| ErrorResponse::new("failed", format!("cannot start a thread: {error}"));
            thread.map_err(failed)?;
            let bug =
                |_| ErrorResponse::new("failed", format!("the {name} has failed; this is a bug"));
            told.await.map_err(bug)?
        };
        match timeout(patience, done).await {
            Ok(done) => done,
            Err(_) if begun => Err(ErrorResponse::new(
                "timeout",
                format!(
                    "the {name} takes longer than {} s; try again",
                    patience.as_secs_f32()
                ),
            )),
            Err(_) => Err(ErrorResponse::new(
                "busy",
                format!("the service is busy with another {name}: try again in a few seconds"),
            )),
        }
    }
}
