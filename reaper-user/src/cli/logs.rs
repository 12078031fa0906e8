//! `reaper logs`: prints the output of a detached run.

use std::io::{self, Write};

use serde::Serialize;

use super::Failure;
use super::runs::open;
use crate::export::write_object;

pub(super) const HELP: &str = "\
A log is kept as long as the record of its run: for the last 100 finished runs, up to 30 days. Its size has no limit. \
    A run with much output should write to a file of its own.

Examples:
  # Print the output so far
  reaper logs web

  # Follow the output until the run ends
  reaper logs -f web

Exit status:
  0    the output was printed
  125  there is no such run, or it has no log";

pub(super) fn run(name: &str, follow: bool, json: bool) -> Result<u8, Failure> {
    let runs = open()?;
    let recorded = runs.find(name)?;
    let mut out = io::stdout().lock();
    let copied = match json {
        false => runs.logs(&recorded, &mut out, follow),
        true => {
            let mut lines = JsonLines::new(&mut out, recorded.id());
            let copied = runs.logs(&recorded, &mut lines, follow);
            copied.and_then(|()| lines.finish())
        }
    };
    copied.map(|()| 0).map_err(|error| match error.kind() {
        io::ErrorKind::Other => {
            Failure::Refused(format!("run {} has no log: {error}", recorded.id()))
        }
        io::ErrorKind::NotFound => Failure::Refused(format!(
            "run {} has no log: the file {} was removed",
            recorded.id(),
            recorded.log().display()
        )),
        _ => Failure::Other(anyhow::Error::new(error).context(format!(
            "cannot copy the log {} of run {} to stdout",
            recorded.log().display(),
            recorded.id()
        ))),
    })
}

/// Line of a log, as JSON.
#[derive(Serialize)]
struct LogLine<'a> {
    /// Id of the run.
    id: &'a str,
    line: &'a str,
}

/// Writer that turns each line of a text into a JSON object. Invalid UTF-8 is replaced.
struct JsonLines<'a, W> {
    out: W,
    id: &'a str,
    /// Line that has not ended yet.
    partial: Vec<u8>,
}

impl<'a, W: Write> JsonLines<'a, W> {
    fn new(out: W, id: &'a str) -> JsonLines<'a, W> {
        let partial = Vec::new();
        JsonLines { out, id, partial }
    }

    fn write_line(&mut self) -> io::Result<()> {
        let line = String::from_utf8_lossy(&self.partial).into_owned();
        self.partial.clear();
        let (id, line) = (self.id, line.strip_suffix('\r').unwrap_or(&line));
        write_object(&mut self.out, &LogLine { id, line })
    }

    /// Writes a last line that has no line break.
    fn finish(mut self) -> io::Result<()> {
        if !self.partial.is_empty() {
            self.write_line()?;
        }
        self.out.flush()
    }
}

impl<W: Write> Write for JsonLines<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            match part.strip_suffix(b"\n") {
                None => self.partial.extend(part),
                Some(part) => {
                    self.partial.extend(part);
                    self.write_line()?;
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_of_a_log_becomes_an_object() {
        let mut out = Vec::new();
        let mut lines = JsonLines::new(&mut out, "k4");
        for part in ["a\nb", "c\n\nend"] {
            lines.write_all(part.as_bytes()).unwrap();
        }
        lines.finish().unwrap();
        let line = |text: &str| format!("{{\"id\":\"k4\",\"line\":\"{text}\"}}\n");
        let expected: String = ["a", "bc", "", "end"].map(line).concat();
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
