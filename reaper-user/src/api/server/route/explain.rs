//! `GET /v1/explain/PID`: a process that is alive, or what was done to one that has exited.

use std::path::Path;

use super::super::Shared;
use super::{ApiResult, ask, to_response, untracked};
use crate::api::messages::{DecisionSnapshot, EngineReply, ExplainSnapshot, RequestKind};
use crate::api::peer::{Peer, SignalTarget};
use crate::api::show::exited::Exited;
use crate::api::{ProblemDetails, StatusCode};
use crate::export::to_json;
use crate::journal::history;
use reaper_host::facts::read_sockets;
use reaper_host::source::procfs::{Procfs, Zombie};
use reaper_host::sys;
use reaper_host::sys::host::Host;
use reaper_model::event::ProcessKey;
use reaper_model::facts::FactSet;

/// Facts that are read for a prediction.
const SOCKETS: FactSet = FactSet::LISTENING.union(FactSet::LOCAL_SOCKETS);

/// Answers from the engine or, for a process that it does not know, from the journal.
pub(super) async fn explain(pid: u32, peer: Peer, shared: &Shared) -> ApiResult<Vec<u8>> {
    let reply = ask(RequestKind::Explain { pid }, peer, shared).await;
    let (recent, refusal) = match reply {
        Ok(EngineReply::ExplainExited(exited)) => (Some(Exited::recent(*exited)), None),
        Ok(EngineReply::Explain(snapshot)) => {
            let snapshot = with_sockets(*snapshot, peer, shared).await;
            return untracked::respond(snapshot, peer, shared).await;
        }
        Ok(reply) => return to_response(reply).await,
        Err(refusal) if refusal.status == StatusCode::NOT_FOUND => (None, Some(refusal)),
        Err(refusal) => return Err(refusal),
    };
    let journal = shared.backend.journal.clone();
    let answer = move || {
        let zombie = match SignalTarget::read(pid).ok().flatten() {
            Some(target) => match zombie(target.key) {
                Some(zombie) => Some(zombie),
                None => return Ok(None),
            },
            None => None,
        };
        let journaled = || find_in_journal(journal.as_deref()?, pid, peer);
        let exited = recent.or_else(journaled);
        let exited = exited.filter(|exited| {
            let start = exited.start_ns();
            let key = ProcessKey { pid, start };
            zombie
                .as_ref()
                .is_none_or(|zombie| zombie.key.has_same_tick(key))
        });
        match (exited, &zombie) {
            (Some(exited), zombie) => Ok(Some(to_json(&exited.explanation(zombie.as_ref())))),
            (None, Some(zombie)) => Err(unknown_zombie(zombie)),
            (None, None) => Err(refusal.unwrap_or_else(|| refused(pid))),
        }
    };
    let limit = shared.timeouts.answer;
    match shared.histories.run(peer, limit, answer).await? {
        Some(answer) => Ok(answer),
        None => untracked::explain(pid, peer, refused(pid), shared).await,
    }
}

/// Returns the snapshot with a prediction that knows the sockets of the process, if it depends on them. Returns it unchanged
/// if they cannot be read.
pub(super) async fn with_sockets(
    snapshot: ExplainSnapshot,
    peer: Peer,
    shared: &Shared,
) -> ExplainSnapshot {
    let predicted = [&snapshot.if_killed, &snapshot.if_succeeded];
    let needs = |one: &DecisionSnapshot| one.needs.intersects(SOCKETS);
    if !predicted.into_iter().flatten().any(needs) {
        return snapshot;
    }
    let key = snapshot.row.key;
    let read = move || Ok((sys::boot_time(), read_sockets(&Procfs::default(), key)));
    let read = shared.inspections.run(peer, shared.timeouts.answer, read);
    let Ok((at, sockets)) = read.await else {
        return snapshot;
    };
    let sockets = Box::new(sockets);
    match ask(RequestKind::ExplainWith { key, sockets, at }, peer, shared).await {
        Ok(EngineReply::Explain(known)) if known.row.key == key => *known,
        _ => snapshot,
    }
}

/// Returns the process if it is a zombie.
fn zombie(key: ProcessKey) -> Option<Zombie> {
    let zombies = Procfs::default().zombies().ok()?;
    zombies
        .into_iter()
        .find(|zombie| zombie.key.has_same_tick(key))
}

/// Returns the latest process with this pid since boot that the peer may see. A journal that cannot be read has none.
fn find_in_journal(journal: &Path, pid: u32, peer: Peer) -> Option<Exited> {
    let boot_id = Host::read().boot_id;
    let uid = (!peer.is_root()).then_some(peer.uid);
    let found = history::last_with_pid(journal, &boot_id, pid, uid).ok()?;
    let (session, process) = found?;
    let start_ns = process.start_in(&boot_id)?;
    Some(Exited::journaled(session, process, start_ns))
}

/// Returns the error for a living process that the engine does not know.
fn refused(pid: u32) -> ProblemDetails {
    let what = format!(
        "process {pid} is not tracked: it belongs to no agent, is a kernel thread, or is outside of the scope of this service; \
         `reaper scan` lists leftovers from before the service started"
    );
    ProblemDetails::new(StatusCode::NOT_FOUND, what)
}

/// Returns the error for a zombie without a record.
fn unknown_zombie(zombie: &Zombie) -> ProblemDetails {
    let (pid, parent) = (zombie.key.pid, zombie.parent);
    let what = format!(
        "process {pid} has exited and is a zombie until its parent {parent} waits for it; this service did nothing to it"
    );
    ProblemDetails::new(StatusCode::NOT_FOUND, what)
}
