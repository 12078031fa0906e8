//! What users ask to be kept, beyond this program's life: it is written down before it is answered, and the
//! service that comes next begins with it.

use hashbrown::HashSet;
use tokio::sync::oneshot;

use super::Engine;
use crate::api::KeepDone;
use crate::api::messages::EngineReply;
use crate::journal::{JournalError, JournalKeep, KeepExpiry, KeepWriter};
use reaper_host::source::procfs::Liveness;
use reaper_model::event::ProcessKey;
use reaper_model::user_keep::{StoredKeep, UserKeep};

/// Stores keeps so that the next service has them.
pub trait KeepStore: Send + Sync {
    /// Stores keeps, all or none, and replaces earlier ones for the same processes. They outlive this program when this
    /// returns. Blocks for up to two seconds.
    ///
    /// # Errors
    /// They could not be stored, or not in time.
    fn keep(&self, keeps: &[JournalKeep]) -> Result<(), JournalError>;

    /// Removes all keeps that the user `by` requested at the time `made`, as in [`JournalKeep`]. There may be none.
    ///
    /// # Errors
    /// As [`KeepStore::keep`].
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

/// What is to be written down.
pub enum UnsavedKeep {
    Keep(Vec<JournalKeep>),
    Unkeep { by: u32, made: u64 },
}

impl UnsavedKeep {
    /// Returns once it is on disk; false if it is not.
    fn write(&self, keeper: &dyn KeepStore) -> bool {
        let written = match self {
            UnsavedKeep::Keep(keeps) => keeper.keep(keeps),
            UnsavedKeep::Unkeep { by, made } => keeper.unkeep(*by, *made),
        };
        written
            .inspect_err(|error| {
                tracing::error!("what a user wants kept is not written down: {error}")
            })
            .is_ok()
    }
}

impl Engine {
    /// Answers; what is kept, or is not any more, only once it is written down, by a thread that may wait.
    pub(super) fn send_reply(&mut self, said: EngineReply, answer: oneshot::Sender<EngineReply>) {
        // Whoever has asked may have gone, in all cases.
        match (
            said,
            self.unsaved_keep.take(),
            self.settings.keep_store.clone(),
        ) {
            (EngineReply::Keep(done), Some(note), Some(keeper)) => {
                tokio::task::spawn_blocking(move || {
                    let durable = note.write(&*keeper);
                    answer.send(EngineReply::Keep(KeepDone { durable, ..done }))
                });
            }
            (said, _, _) => drop(answer.send(said)),
        }
    }

    /// Has it written down, with the answer, for whom a wish holds that was asked for this process.
    pub(super) fn save_keep(&mut self, asked: ProcessKey, wish: UserKeep) {
        let until = wish.until_monotonic_ns.map(|awake| KeepExpiry {
            awake,
            wall: wish
                .made_at
                .saturating_add(awake.saturating_sub(self.kernel.clock.monotonic())),
        });
        let kept = self.model.kept_by(&wish);
        let keeps = kept.filter_map(|node| {
            let session = self.model.sessions.get(node.state.member.session?)?;
            Some(JournalKeep {
                key: node.key,
                session: session.first_root,
                is_explicit: node.key == asked,
                tree: wish.with_descendants,
                by_uid: wish.by_uid,
                made_at: wish.made_at,
                until,
            })
        });
        self.unsaved_keep = Some(UnsavedKeep::Keep(keeps.collect()));
    }

    /// Keeps what the service before this one was asked to keep.
    pub(super) fn restore_keeps(&mut self) {
        let keeps = std::mem::take(&mut self.settings.keeps);
        // Of a wish that is for nobody who lives, nor for a session that may, nothing can turn up any more.
        let lives = |key| !matches!(self.kernel.processes.probe(key), Ok(Liveness::Gone));
        let matters = |keep: &&JournalKeep| {
            let open = self.model.sessions.by_first_root(keep.session).is_some();
            open || lives(keep.key) || lives(keep.session)
        };
        let name = |keep: &JournalKeep| (keep.by_uid, keep.made_at);
        let matter: HashSet<_> = keeps.iter().filter(matters).map(name).collect();
        let keeps = keeps.iter().filter(|keep| matter.contains(&name(keep)));
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
