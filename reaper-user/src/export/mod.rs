//! What is seen and done, told to whoever listens: readable lines and JSON lines.
//!
//! The engine gathers [`Record`]s and hands them over in batches, after the signals have been sent; a
//! thread of its own formats and writes them. It may fall behind, and then loses records and says how
//! many, but it never holds the engine up.

mod json;
mod line;
mod record;
mod redact;
mod sink;

pub use record::{Body, Count, Lifecycle, Names, Record, SessionRef, Who};
pub use sink::{Clock, Format, Output, Sink, Writer};
