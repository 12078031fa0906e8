//! `GET` and `POST /v1/scan`: members and leftovers.

use std::sync::Arc;
use std::time::Duration;

use super::{ApiResult, Shared};
use crate::api::leftovers::Leftovers;
use crate::api::messages::{ProcessSnapshot, ScanContext};
use crate::api::peer::Peer;
use crate::api::{StatusCode, show};
use crate::export::to_json;

/// Parameters of a scan.
pub(super) struct ScanParams {
    pub(super) leftovers: Arc<dyn Leftovers>,
    pub(super) context: Box<ScanContext>,
    pub(super) peer: Peer,
    pub(super) min_age: Option<Duration>,
}

/// Scans for leftovers, adds them to the members in `rows`, and returns the [`ScanReport`](crate::api::ScanReport) as
/// JSON.
///
/// With `reap` it reaps the leftovers, and the report has the outcomes. If that takes longer than the time limit,
/// reaping continues, and the report of a new scan is returned.
pub(super) async fn scanned(
    rows: Vec<ProcessSnapshot>,
    params: ScanParams,
    reap: bool,
    shared: &Shared,
) -> ApiResult<Vec<u8>> {
    let ScanParams {
        leftovers,
        context,
        peer,
        min_age,
    } = params;
    let (reaping_leftovers, reaping_watched, reaping_rows) =
        (Arc::clone(&leftovers), context.clone(), rows.clone());
    let scan = move || {
        let mut report = show::scan(rows);
        leftovers.report(&mut report, &context, peer, min_age)?;
        Ok(to_json(&report))
    };
    if reap {
        let reap = move || {
            let mut report = show::scan(reaping_rows);
            reaping_leftovers.reap(&mut report, &reaping_watched, peer, min_age)?;
            Ok(to_json(&report))
        };
        match shared
            .reapings
            .run(peer, shared.timeouts.reaping, reap)
            .await
        {
            // Reaping continues. The scan below shows its progress.
            Err(late) if late.status == StatusCode::GATEWAY_TIMEOUT => {}
            done => return done,
        }
    }
    shared.scans.run(peer, shared.timeouts.answer, scan).await
}
