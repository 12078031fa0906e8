//! `GET` and `POST /v1/scan`: members, and what nobody watched.

use std::sync::Arc;
use std::time::Duration;

use super::{ApiResult, Shared};
use crate::api::leftovers::Leftovers;
use crate::api::messages::{ProcessSnapshot, ScanContext};
use crate::api::peer::Peer;
use crate::api::show;
use crate::export::to_json;

/// A scan of all processes for a client.
pub(super) struct ScanParams {
    pub(super) leftovers: Arc<dyn Leftovers>,
    pub(super) watched: Box<ScanContext>,
    pub(super) peer: Peer,
    pub(super) min_age: Option<Duration>,
}

/// Members, and what nobody watched.
pub(super) async fn scanned(
    rows: Vec<ProcessSnapshot>,
    look: ScanParams,
    reap: bool,
    shared: &Shared,
) -> ApiResult<Vec<u8>> {
    let ScanParams {
        leftovers,
        watched,
        peer,
        min_age,
    } = look;
    let (of_reaping, also, listed) = (Arc::clone(&leftovers), watched.clone(), rows.clone());
    let look = move || {
        let mut report = show::scan(rows);
        leftovers.report(&mut report, &watched, peer, min_age)?;
        Ok(to_json(&report))
    };
    if reap {
        let reap = move || {
            let mut report = show::scan(listed);
            of_reaping.reap(&mut report, &also, peer, min_age)?;
            Ok(to_json(&report))
        };
        match shared
            .reapings
            .run(peer, shared.patience.reaping, reap)
            .await
        {
            // It goes on; what is there by now is told.
            Err(late) if late.error == "timeout" => {}
            done => return done,
        }
    }
    shared.scans.run(peer, shared.patience.answer, look).await
}
