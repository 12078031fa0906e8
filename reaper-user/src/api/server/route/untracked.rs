//! `GET /v1/explain/PID` for a living process that the engine does not know.

use super::{ApiResult, Shared, ask, off_thread};
use crate::api::ErrorResponse;
use crate::api::messages::{EngineReply, RequestKind};
use crate::api::peer::Peer;
use crate::api::show;
use crate::export::to_json;

/// Explains a process from /proc. Returns the engine's refusal if there is no such process.
pub(super) async fn explain(
    pid: u32,
    peer: Peer,
    refusal: ErrorResponse,
    shared: &Shared,
) -> ApiResult<Vec<u8>> {
    let reply = ask(RequestKind::ScanContext, peer, shared).await?;
    let EngineReply::ScanContext(context) = reply else {
        return Err(refusal);
    };
    let answer = move || match show::untracked::snapshot(pid, peer, &context) {
        Ok(snapshot) => Ok(to_json(&show::explanation(snapshot))),
        Err(error) if error.error == "not_found" => Err(refusal),
        Err(error) => Err(error),
    };
    off_thread(answer).await
}
