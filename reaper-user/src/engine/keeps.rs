//! Stores users' keeps, and restores those of an earlier service.
//!
//! A request is answered only after its keep is stored, so a confirmed keep survives a crash of the service.

use hashbrown::HashSet;
use tokio::sync::oneshot;

use super::Engine;
use crate::api::messages::EngineReply;
use crate::journal::{JournalError, JournalKeep, KeepExpiry, KeepWriter};
use reaper_host::source::procfs::Liveness;
use reaper_model::event::ProcessKey;
use reaper_model::user_keep::{StoredKeep, UserKeep};

/// Storage that preserves keeps for the next service.
pub trait KeepStore: Send + Sync {
    /// Stores keeps, all or none. When this returns, they survive the end of this service. Blocks for up to two
    /// seconds.
    ///
    /// Removes earlier requests for a process that the user named ([`JournalKeep::is_explicit`]), with all of their
    /// keeps.
    ///
    /// # Errors
    /// The keeps cannot be stored, or not in time. Keeps that are late may still be stored afterwards.
    fn keep(&self, keeps: &[JournalKeep]) -> Result<(), JournalError>;

    /// Removes all keeps that the user `by` requested at the time `made`, as in [`JournalKeep`]. There may be none.
    ///
    /// # Errors
    /// The keeps cannot be removed, or not in time.
    fn unkeep(&self, by: u32, made: u64) -> Result<(), JournalError>;
}

impl KeepStore for KeepWriter {
    fn keep(&self, keeps: &[JournalKeep]) -> Result<(), JournalError> {
        KeepWriter::keep(self, keeps)
    }

    fn unkeep(&self, by: u32, made: u64) -> Result<(), JournalError> {
        KeepWriter::unkeep(self, by, made)
    }
}

/// Change of users' keeps that is not stored yet.
pub enum UnsavedKeep {
    Keep(Vec<JournalKeep>),
    Unkeep { by: u32, made: u64 },
}

impl UnsavedKeep {
    /// Stores the change. Returns whether it is on disk. An error is logged.
    fn write(&self, store: &dyn KeepStore) -> bool {
        let written = match self {
            UnsavedKeep::Keep(keeps) => store.keep(keeps),
            UnsavedKeep::Unkeep { by, made } => store.unkeep(*by, *made),
        };
        written
            .inspect_err(|error| {
                tracing::error!("cannot save a `reaper keep` or `reaper unkeep`: {error}; it is in force, but lost if the service restarts")
            })
            .is_ok()
    }
}

impl Engine {
    /// Answers a request. If a keep has changed, a worker thread stores the change before it answers, and sets whether
    /// it is durable. Without a store, the answer is sent at once.
    pub(super) fn send_reply(&mut self, reply: EngineReply, sender: oneshot::Sender<EngineReply>) {
        // The client may have disconnected.
        match (
            reply,
            self.unsaved_keep.take(),
            self.settings.keep_store.clone(),
        ) {
            (mut reply, Some(change), Some(store)) => {
                tokio::task::spawn_blocking(move || {
                    let durable = change.write(&*store);
                    if let EngineReply::Keep(done) | EngineReply::Unkeep(done, _) = &mut reply {
                        done.durable = durable;
                    }
                    sender.send(reply)
                });
            }
            (reply, _, _) => drop(sender.send(reply)),
        }
    }

    /// Notes a keep, for each process that it covers, as the change that [`Engine::send_reply`] stores. `target` is the
    /// process in the request.
    pub(super) fn save_keep(&mut self, target: ProcessKey, keep: UserKeep) {
        let until = keep.until_monotonic_ns.map(|awake| KeepExpiry {
            awake,
            wall: keep
                .made_at
                .saturating_add(awake.saturating_sub(self.kernel.clock.monotonic())),
        });
        let nodes = self.model.kept_by(&keep);
        let keeps = nodes.filter_map(|node| {
            let session = self.model.sessions.get(node.state.member.session?)?;
            Some(JournalKeep {
                key: node.key,
                session: session.first_root,
                is_explicit: node.key == target,
                tree: keep.with_descendants,
                by_uid: keep.by_uid,
                made_at: keep.made_at,
                until,
            })
        });
        self.unsaved_keep = Some(UnsavedKeep::Keep(keeps.collect()));
    }

    /// Restores the keeps that users requested from an earlier service, except those that can never apply again.
    pub(super) fn restore_keeps(&mut self) {
        let keeps = std::mem::take(&mut self.settings.keeps);
        // A keep without any living process, whose session is closed, can never apply again.
        let is_alive = |key| !matches!(self.kernel.processes.probe(key), Ok(Liveness::Gone));
        let is_relevant = |keep: &&JournalKeep| {
            let open = self.model.sessions.by_first_root(keep.session).is_some();
            open || is_alive(keep.key) || is_alive(keep.session)
        };
        let name = |keep: &JournalKeep| (keep.by_uid, keep.made_at);
        let relevant: HashSet<_> = keeps.iter().filter(is_relevant).map(name).collect();
        let keeps = keeps.iter().filter(|keep| relevant.contains(&name(keep)));
        let keeps = keeps.map(|keep| StoredKeep {
            key: keep.key,
            session: keep.session,
            is_direct: keep.is_explicit,
            keep: UserKeep {
                until_monotonic_ns: keep.until.map(|until| until.awake),
                with_descendants: keep.tree,
                by_uid: keep.by_uid,
                made_at: keep.made_at,
            },
        });
        self.model.restore_keeps(keeps.collect());
    }
}
