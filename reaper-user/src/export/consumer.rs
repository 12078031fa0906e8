//! The trait of the journal as a second receiver of records.

use super::record::EventRecord;

/// Receives the records of the stream before any is dropped.
pub trait Consumer: Send {
    /// Receives a batch. Runs on the engine's thread, so it must not block.
    ///
    /// Returns a record to add to the stream, for example about records that the consumer has dropped.
    fn on_records(&mut self, records: &[EventRecord]) -> Option<EventRecord>;
}
