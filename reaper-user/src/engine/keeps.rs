//! What users ask to be kept, beyond this program's life: it is written down before it is answered, and the
//! service that comes next begins with it.

use std::time::{SystemTime, UNIX_EPOCH};

use hashbrown::HashSet;
use tokio::sync::oneshot;

use super::Engine;
use crate::api::KeepDone;
use crate::api::ask::Answer;
use crate::journal::{Keep, Keeper, Until};
use crate::source::procfs::Glance;
use crate::sys;
use reaper_model::event::ProcessKey;
use reaper_model::user_keep::{StoredKeep, UserKeep};

/// What is to be written down.
pub enum Note {
    Keep(Vec<Keep>),
    Unkeep { by: u32, made: u64 },
}

impl Note {
    /// Returns once it is on disk; false if it is not.
    fn write(&self, keeper: &Keeper) -> bool {
        let written = match self {
            Note::Keep(keeps) => keeper.keep(keeps),
            Note::Unkeep { by, made } => keeper.unkeep(*by, *made),
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
    pub(super) fn send(&mut self, said: Answer, answer: oneshot::Sender<Answer>) {
        // Whoever has asked may have gone, in all cases.
        match (said, self.note.take(), self.settings.keeper.clone()) {
            (Answer::Keep(done), Some(note), Some(keeper)) => {
                tokio::task::spawn_blocking(move || {
                    let durable = note.write(&keeper);
                    answer.send(Answer::Keep(KeepDone { durable, ..done }))
                });
            }
            (said, _, _) => drop(answer.send(said)),
        }
    }

    /// Has it written down, with the answer, for whom a wish holds that was asked for this process.
    pub(super) fn note_keep(&mut self, asked: ProcessKey, wish: UserKeep) {
        let until = wish.until_awake.map(|awake| Until {
            awake,
            wall: wish
                .made_at
                .saturating_add(awake.saturating_sub(sys::monotonic())),
        });
        let kept = self.model.kept_by(&wish);
        let keeps = kept.filter_map(|node| {
            let session = self.model.sessions.get(node.state.member.session?)?;
            Some(Keep {
                key: node.key,
                session: session.first_root,
                asked: node.key == asked,
                tree: wish.tree,
                by: wish.by_uid,
                made: wish.made_at,
                until,
            })
        });
        self.note = Some(Note::Keep(keeps.collect()));
    }

    /// Keeps what the service before this one was asked to keep.
    pub(super) fn keep_again(&mut self) {
        let keeps = std::mem::take(&mut self.settings.keeps);
        // Of a wish that is for nobody who lives, nor for a session that may, nothing can turn up any more.
        let lives = |key| !matches!(self.procfs.glance(key), Ok(Glance::Gone));
        let matters = |keep: &&Keep| {
            let open = self.model.sessions.by_first_root(keep.session).is_some();
            open || lives(keep.key) || lives(keep.session)
        };
        let name = |keep: &Keep| (keep.by, keep.made);
        let matter: HashSet<_> = keeps.iter().filter(matters).map(name).collect();
        let keeps = keeps.iter().filter(|keep| matter.contains(&name(keep)));
        let keeps = keeps.map(|keep| StoredKeep {
            key: keep.key,
            session: keep.session,
            asked: keep.asked,
            keep: UserKeep {
                until_awake: keep.until.map(|until| until.awake),
                tree: keep.tree,
                by_uid: keep.by,
                made_at: keep.made,
            },
        });
        self.model.restore_keeps(keeps.collect());
    }
}

/// The time of day, in ns since the epoch.
pub(super) fn wall_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}
