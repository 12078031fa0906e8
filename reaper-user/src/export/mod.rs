//! What is seen and done, told to whoever listens: readable lines and JSON lines.
//!
//! The engine gathers [`EventRecord`]s and hands them over in batches, after the signals have been sent; a
//! thread of its own formats and writes them. It may fall behind, and then loses records and says how
//! many, but it never holds the engine up.

mod clock;
mod consumer;
mod encode;
mod json;
mod leftover;
mod line;
pub(crate) mod names;
mod record;
pub(crate) mod redact;
mod sink;
mod terminal;
#[cfg(test)]
mod tests;
mod text;
mod words;

pub use clock::wall_time;
pub use consumer::Consumer;
pub use encode::{ExitInfo, command_args};
pub use json::{to_json, write_object};
pub use leftover::leftover_text;
pub use record::{
    Adopter, DecisionNames, EventBody, EventRecord, EvidenceRef, FreedMemory, KeepDuration,
    Lifecycle, NestedSummary, ProcessRef, Resumed, ResumedRoot, SessionIdText, SessionRef, Totals,
};
pub use sink::{Format, Sink, StreamOutput, Writer};
pub(crate) use terminal::message;
pub use terminal::{Log, print, stderr, stdout, write_message};
pub use text::{command_line, duration, exit_status_text, printable};
pub use words::{evidence_ref_text, evidence_text, reason_text};
