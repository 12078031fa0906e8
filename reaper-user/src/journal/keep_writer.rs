//! Requests from other threads to store or remove keeps.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::JournalError;
use super::keeps::{JournalKeep, KeepUpdate};
use super::message::{KeepChange, Message};

/// Time limit for answers of the journal's thread, and for its last writes when the journal is closed.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Handle to store keeps from any thread. Cheap to clone.
#[derive(Clone)]
pub struct KeepWriter {
    pub(super) sender: Sender<Message>,
    pub(super) changes: Sender<KeepChange>,
    pub(super) path: PathBuf,
}

impl KeepWriter {
    /// Stores keeps, all or none. When this returns, they are in the database and survive a crash. Blocks for up to two
    /// seconds, so the engine's thread must not call it.
    ///
    /// Removes earlier requests for a process that the user named ([`JournalKeep::is_explicit`]), with all of their
    /// keeps.
    ///
    /// # Errors
    /// The keeps cannot be stored, or not in time. Keeps that are late may still be stored afterwards.
    pub fn keep(&self, keeps: &[JournalKeep]) -> Result<(), JournalError> {
        self.change(KeepUpdate::Keep(keeps.to_vec()))
    }

    /// Removes all keeps that the user `by` requested at the time `made`, as in [`JournalKeep`]. There may be none.
    ///
    /// # Errors
    /// The keeps cannot be removed, or not in time.
    pub fn unkeep(&self, by: u32, made: u64) -> Result<(), JournalError> {
        self.change(KeepUpdate::Unkeep { by, made })
    }

    /// Queues a change for the journal's thread, and waits for the result for up to [`ANSWER_TIMEOUT`].
    fn change(&self, change: KeepUpdate) -> Result<(), JournalError> {
        let (reply, answer) = channel();
        let path = || self.path.clone();
        let given_up = || JournalError::GivenUp { path: path() };
        self.changes.send((change, reply)).map_err(|_| given_up())?;
        self.sender
            .send(Message::KeepUpdateQueued)
            .map_err(|_| given_up())?;
        match answer.recv_timeout(ANSWER_TIMEOUT) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(JournalError::TimedOut {
                path: path(),
                limit: ANSWER_TIMEOUT,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(given_up()),
        }
    }
}
