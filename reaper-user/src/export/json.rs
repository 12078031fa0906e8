//! The JSON form of the stream: one flat object per line, with OpenTelemetry names for process attributes.

use std::io::{self, Write};

use jiff::Timestamp;
use serde::Serialize;
use serde_json::ser::Formatter;

use super::clock::wall_time;
use super::record::{EventBody, EventRecord};
use super::text::is_unprintable;

/// Version of the stream. It increases when a key is removed or changes its meaning.
pub const SCHEMA: u32 = 2;

#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
    seq: u64,
    time: Timestamp,
    time_boot_ns: u64,
    event: &'static str,
    #[serde(flatten)]
    body: &'a EventBody,
}

/// Writes a record as one line.
pub fn write(out: &mut impl Write, record: &EventRecord, seq: u64) -> io::Result<()> {
    let line = Line {
        schema: SCHEMA,
        seq,
        time: wall_time(record.boot_ns),
        time_boot_ns: record.boot_ns,
        event: record.body.name(),
        body: &record.body,
    };
    write_object(out, &line)
}

/// Returns a value as one line of JSON with a line break, escaped like the stream. If the value cannot be serialized,
/// logs an error and returns what was written before it.
pub fn to_json(value: &impl Serialize) -> Vec<u8> {
    let mut out = Vec::new();
    // Fails only for a map with keys that are not strings.
    if let Err(error) = write_object(&mut out, value) {
        tracing::error!(
            "cannot write a value as JSON, and the output is incomplete: {error}; report this as a bug"
        );
    }
    out
}

/// Writes a value as one line of JSON with a line break, escaped like the stream.
///
/// # Errors
/// Those of the writer.
pub fn write_object(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, EscapingFormatter);
    value.serialize(&mut serializer)?;
    out.write_all(b"\n")
}

/// Escapes more characters than JSON requires: DEL and C1, which control some terminals, line separators, and
/// characters that hide or reorder text. A parser reads the original text.
struct EscapingFormatter;

impl Formatter for EscapingFormatter {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        let mut rest = text;
        while let Some(at) = rest.find(is_unprintable) {
            let (plain, tail) = rest.split_at(at);
            let mut tail = tail.chars();
            out.write_all(plain.as_bytes())?;
            if let Some(c) = tail.next() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
            rest = tail.as_str();
        }
        out.write_all(rest.as_bytes())
    }
}
