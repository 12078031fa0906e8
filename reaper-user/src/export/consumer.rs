//! A receiver of records beside the stream.

use super::record::EventRecord;

/// Receives the records of the stream before any is dropped.
pub trait Consumer: Send {
    /// Takes what it needs from a batch. Runs on the engine's thread, so it must not block.
    ///
    /// Returns a record to add to the stream, if there is something to report.
    fn on_records(&mut self, records: &[EventRecord]) -> Option<EventRecord>;
}
