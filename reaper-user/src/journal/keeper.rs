//! Requests to the journal to write or remove keeps.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::JournalError;
use super::keeps::{JournalKeep, KeepUpdate};
use super::message::{KeepChange, Message};

/// Time limit for an answer of the journal's thread, and for its last writes when it is closed.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Writes keeps from any thread. Cheap to clone.
#[derive(Clone)]
pub struct KeepWriter {
    pub(super) sender: Sender<Message>,
    pub(super) asking: Sender<KeepChange>,
    pub(super) path: PathBuf,
}

impl KeepWriter {
    /// Writes keeps, all or none, and replaces earlier requests for the same processes. They are in the file when this
    /// returns, so they outlive this program. Blocks for up to two seconds: not for the engine's thread.
    ///
    /// # Errors
    /// They could not be written, or not in time.
    pub fn keep(&self, keeps: &[JournalKeep]) -> Result<(), JournalError> {
        self.change(KeepUpdate::Keep(keeps.to_vec()))
    }

    /// Removes all that the user `by` asked for at the time `made`, as in [`JournalKeep`]. There may be none.
    ///
    /// # Errors
    /// As [`KeepWriter::keep`].
    pub fn unkeep(&self, by: u32, made: u64) -> Result<(), JournalError> {
        self.change(KeepUpdate::Unkeep { by, made })
    }

    fn change(&self, change: KeepUpdate) -> Result<(), JournalError> {
        let (reply, answer) = channel();
        let silent = || JournalError::TimedOut {
            path: self.path.clone(),
        };
        self.asking.send((change, reply)).map_err(|_| silent())?;
        self.sender
            .send(Message::KeepUpdateQueued)
            .map_err(|_| silent())?;
        match answer.recv_timeout(PATIENCE) {
            Ok(result) => result,
            Err(_) => Err(silent()),
        }
    }
}
