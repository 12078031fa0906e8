//! The event stream: what the service observes and does, as lines for people and as JSON lines.
//!
//! The engine collects [`EventRecord`]s and passes them on in batches, after the signals are sent. The writer thread
//! formats and writes them. If it falls behind it drops records and reports their number, but it never blocks the engine.

mod clock;
mod command;
mod config_file;
mod consumer;
mod encode;
mod hint;
pub(crate) mod journald;
mod json;
mod keep_advice;
mod leftover;
mod line;
mod line_file;
pub(crate) mod names;
mod recent;
mod record;
pub(crate) mod redact;
mod sink;
mod terminal;
#[cfg(test)]
mod tests;
mod text;
mod words;

pub use clock::{EntityId, time_of_day_in_seconds, wall_time};
pub use config_file::ConfigFile;
pub use consumer::Consumer;
pub use encode::{ExitInfo, command_args};
pub use json::{to_json, write_object};
pub use keep_advice::{KeepAdvice, keep_rule};
pub use leftover::{leftover_judgement, leftover_text};
pub use line::Detail;
#[cfg(test)]
pub use recent::RecentOutcome;
pub use recent::{RecentProcess, RecentSession, RootExit};
pub use record::{
    Adopter, Ancestor, DecisionNames, EventBody, EventRecord, EvidenceRef, FreedMemory,
    KeepDuration, Lifecycle, Listener, NestedSummary, ProcessRef, Resumed, ResumedRoot,
    SessionIdText, SessionRef, Totals, WaitInfo,
};
pub use sink::{Format, Sink, StreamOutput, Writer};
#[cfg(target_os = "linux")]
pub use terminal::for_terminal;
pub(crate) use terminal::message;
pub use terminal::{
    LEAST, MakeLog, colors_on_stderr, print, print_error, set_colors, stdout, width,
    without_error_codes, wrap, write_message,
};
pub use text::{
    ProcessCounts, capitalized, command_line, counted, duration, exit_code_text, exit_status_text,
    freed, memory_text, printable, size, time, unmeasured_count,
};
pub use words::{
    Judgement, LEFT_RUNNING, evidence_ref_text, evidence_text, gap_text, outcome_reason_text,
    reason_text, scope_text,
};
