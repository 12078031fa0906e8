//! `GET` and `POST /v1/scan`: members, and what nobody watched.

use std::time::Duration;

use super::{Answered, Shared};
use crate::api::ask::{Row, Watched};
use crate::api::peer::Peer;
use crate::api::show;
use crate::export::to_json;
use crate::strays::Scanner;

/// A look at all processes on behalf of somebody.
pub(super) struct Look {
    pub(super) scanner: Scanner,
    pub(super) watched: Box<Watched>,
    pub(super) peer: Peer,
    pub(super) max_age: Option<Duration>,
}

/// Members, and what nobody watched.
pub(super) async fn scanned(
    rows: Vec<Row>,
    look: Look,
    reap: bool,
    shared: &Shared,
) -> Answered<Vec<u8>> {
    let Look {
        scanner,
        watched,
        peer,
        max_age,
    } = look;
    let (of_reaping, also, listed) = (scanner.clone(), watched.clone(), rows.clone());
    let look = move || {
        let mut report = show::scan(rows);
        scanner.report(&mut report, &watched, peer, max_age)?;
        Ok(to_json(&report))
    };
    if reap {
        let reap = move || {
            let mut report = show::scan(listed);
            of_reaping.reap(&mut report, &also, peer, max_age)?;
            Ok(to_json(&report))
        };
        match shared.reapings.run(shared.patience.reaping, reap).await {
            // It goes on; what is there by now is told.
            Err(late) if late.error == "timeout" => {}
            done => return done,
        }
    }
    shared.scans.run(shared.patience.answer, look).await
}
