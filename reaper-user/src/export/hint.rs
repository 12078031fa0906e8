//! Hint in the stream for people: how to keep what an agent leaves behind.

use std::io::{self, Write};

use anstyle::Style;
use hashbrown::HashSet;

use super::clock::time_of_day_in_seconds;
use super::record::{EventBody, EventRecord};
use super::terminal::wrap;
use super::text::printable;
use crate::reap::ReapOutcome;
use reaper_model::event::ProcessKey;

const DIM: Style = Style::new().dimmed();

/// Number of remembered sessions. All are forgotten at the limit.
const SESSIONS_MAX: usize = 1024;

/// Writer of at most one hint for each session.
#[derive(Default)]
pub struct Hints {
    /// Whether the service only observes.
    observes: bool,
    /// Option that names the socket of the service, with a space before it; empty if commands find it without.
    socket: String,
    /// Whether the systemd journal gets the hints. It adds the time itself.
    for_journal: bool,
    /// First roots of the sessions with a hint.
    given: HashSet<ProcessKey>,
}

impl Hints {
    pub fn new(for_journal: bool) -> Hints {
        Hints {
            for_journal,
            ..Hints::default()
        }
    }

    /// Writes a hint after the line of a record, if it is the first in its session about a process that was reaped. In
    /// observe mode: about one that would be. Wraps it to `width` columns, if that is given.
    pub fn write_after(
        &mut self,
        out: &mut impl Write,
        record: &EventRecord,
        width: Option<usize>,
    ) -> io::Result<()> {
        let process = match &record.body {
            EventBody::Ready {
                mode, next_command, ..
            } => {
                self.observes = *mode == "observe";
                let next = next_command.as_deref().unwrap_or_default();
                let option = next.find(" --socket").map_or("", |at| &next[at..]);
                self.socket = option.to_owned();
                return Ok(());
            }
            EventBody::Decision { process, decision }
                if self.observes && decision.verdict == "reap" =>
            {
                process
            }
            EventBody::Outcome {
                process,
                outcome: ReapOutcome::Exited(_),
                signal: Some(_),
                ..
            } => process,
            _ => return Ok(()),
        };
        let Some(session) = &process.session else {
            return Ok(());
        };
        if self.given.len() == SESSIONS_MAX {
            self.given.clear();
        }
        if !self.given.insert(session.first_root) {
            return Ok(());
        }
        let pid = process.key.pid;
        let time = match self.for_journal {
            true => String::new(),
            false => time_of_day_in_seconds(record.boot_ns) + "  ",
        };
        let socket = printable(&self.socket, usize::MAX);
        let text =
            format!("hint  to keep one: REAPER_KEEP=1; more ways: reaper explain {pid}{socket}");
        let text = wrap(&text, time.len(), width);
        writeln!(out, "{DIM}{time}{}{DIM:#}", text.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::samples;
    use super::*;

    #[test]
    fn each_session_has_at_most_one_hint() {
        let lines = |observes: bool, socket: &str| {
            let (mut out, mut hints) = (Vec::new(), Hints::default());
            for record in samples::records() {
                let is_ready = matches!(record.body, EventBody::Ready { .. });
                hints.write_after(&mut out, &record, Some(80)).unwrap();
                if is_ready {
                    hints.observes = observes;
                    hints.socket = socket.to_owned();
                }
            }
            let mut plain = anstream::StripStream::new(Vec::new());
            plain.write_all(&out).unwrap();
            String::from_utf8(plain.into_inner()).unwrap()
        };
        for observes in [false, true] {
            let plain = lines(observes, "");
            assert_eq!(plain.lines().count(), 1, "{plain}");
            let expected = "  hint  to keep one: REAPER_KEEP=1; more ways: reaper explain 42\n";
            assert!(plain.ends_with(expected), "{plain}");
            assert!(plain.len() < 80, "{plain}");
            let named = lines(observes, " --socket /run/reaper-7.sock");
            let rows: Vec<&str> = named.lines().map(str::trim).collect();
            assert_eq!(rows[1..], ["--socket /run/reaper-7.sock"], "{named}");
            assert!(rows[0].ends_with("reaper explain 42"), "{named}");
        }
    }
}
