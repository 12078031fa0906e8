//! Judges processes that belong to no session, with the same words in `explain`, `keep` and `tree`.

use std::sync::Arc;

use super::{ApiResult, Shared, ask};
use crate::api::messages::{EngineReply, ExplainSnapshot, RequestKind, UntrackedReason};
use crate::api::peer::{Peer, SignalTarget};
use crate::api::{ProblemDetails, ScanReport, StatusCode, show};
use crate::export::to_json;

/// Explains a living process that the engine does not know, from /proc. Returns the engine's refusal if there is no such
/// process.
pub(super) async fn explain(
    pid: u32,
    peer: Peer,
    refusal: ProblemDetails,
    shared: &Shared,
) -> ApiResult<Vec<u8>> {
    match snapshot(pid, peer, shared).await {
        Ok(snapshot) => respond(snapshot, peer, shared).await,
        Err(error) if error.status == StatusCode::NOT_FOUND => Err(refusal),
        Err(error) => Err(error),
    }
}

/// Returns the explanation of a living process, with the result of a scan if only that knows more.
pub(super) async fn respond(
    mut snapshot: ExplainSnapshot,
    peer: Peer,
    shared: &Shared,
) -> ApiResult<Vec<u8>> {
    add_leftover(&mut snapshot, peer, shared).await;
    let explain = move || Ok(to_json(&show::explanation(snapshot, peer.script_paths())));
    let limit = shared.timeouts.answer;
    shared.inspections.run(peer, limit, explain).await
}

/// Reads a process that the engine does not know from /proc.
async fn snapshot(pid: u32, peer: Peer, shared: &Shared) -> ApiResult<ExplainSnapshot> {
    let EngineReply::ScanContext(context) = ask(RequestKind::ScanContext, peer, shared).await?
    else {
        let what = format!("there is no process {pid}");
        return Err(ProblemDetails::new(StatusCode::NOT_FOUND, what));
    };
    let read = move || show::untracked::snapshot(pid, peer, &context);
    let limit = shared.timeouts.answer;
    shared.inspections.run(peer, limit, read).await
}

/// Adds the result of a scan for leftovers to a process that is older than the service and descends from no agent.
///
/// Without a scan, the explanation says that the process may be a leftover.
pub(super) async fn add_leftover(snapshot: &mut ExplainSnapshot, peer: Peer, shared: &Shared) {
    let may_be_left = snapshot.predates_service
        && !snapshot.gap
        && matches!(snapshot.untracked_reason, Some(UntrackedReason::NoAgent(_)));
    if may_be_left && let Ok(report) = leftovers(peer, shared).await {
        snapshot.leftover = report.finding(snapshot.row.key.pid).cloned();
        snapshot.predates_service = false;
    }
}

/// Scans for leftovers of the peer, without the members of sessions.
///
/// # Errors
/// The scan fails, or does not finish in time.
pub(super) async fn leftovers(peer: Peer, shared: &Shared) -> ApiResult<ScanReport> {
    let EngineReply::ScanContext(context) = ask(RequestKind::ScanContext, peer, shared).await?
    else {
        return Ok(ScanReport::default());
    };
    let leftovers = Arc::clone(&shared.backend.leftovers);
    let scan = move || {
        let mut report = ScanReport::new("service");
        leftovers.report(&mut report, &context, peer, None)?;
        Ok(report)
    };
    shared.scans.run(peer, shared.timeouts.answer, scan).await
}

/// Returns the refusal to keep a process that belongs to no session, with the judgement on it.
pub(super) async fn not_kept(target: &SignalTarget, peer: Peer, shared: &Shared) -> ProblemDetails {
    let pid = target.key.pid;
    let known = ask(RequestKind::Explain { pid }, peer, shared).await;
    let snapshot = match known {
        Ok(EngineReply::Explain(snapshot)) => Ok(*snapshot),
        _ => snapshot(pid, peer, shared).await,
    };
    let mut snapshot = match snapshot {
        Ok(snapshot) => snapshot,
        Err(refusal) => return refusal,
    };
    add_leftover(&mut snapshot, peer, shared).await;
    let judgement = show::untracked_judgement(&snapshot);
    let advice = match &snapshot.leftover {
        Some(found) if found.decision == "reap" => {
            "; to keep a leftover, set `reap_leftovers = false` and restart the service"
        }
        _ if snapshot.gap => "; try again in a few seconds",
        _ => "; only members of an agent's session can be kept",
    };
    let what = format!(
        "cannot keep process {pid} ({}): {judgement}{advice}",
        target.comm
    );
    ProblemDetails::new(StatusCode::CONFLICT, what)
}
