//! Messages to the journal's thread.

use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::mpsc::Sender;

use super::JournalError;
use super::keeps::KeepUpdate;
use crate::export::EventRecord;

pub(super) enum Message {
    Records(Vec<EventRecord>),
    /// A change of the keeps is queued.
    KeepUpdateQueued,
    Stop,
}

/// A change of the keeps, and the channel for its result. It has its own queue, so that it does not wait for records.
pub(super) type KeepChange = (KeepUpdate, Sender<Result<(), JournalError>>);

/// Counters that the feed and the journal's thread share.
#[derive(Default)]
pub(super) struct JournalCounters {
    /// Number of records that are queued and not yet written.
    pub(super) waiting: AtomicUsize,
    /// Number of dropped records that the database does not list yet.
    pub(super) dropped: AtomicU64,
}
