//! The stream for people. The columns of a line are time, agent, event, pid, command and detail.

mod layout;
mod memory;
mod observed;
mod process;
mod service;
mod session;
#[cfg(test)]
mod tests;

use std::io::{self, Write};

use super::clock::{time_of_day, time_of_day_in_seconds};
use super::record::{EventBody, EventRecord, ProcessRef};
use layout::{Line, LineStart, Subject};
use memory::Memory;
use reaper_host::source::procfs::{ProcessReading, Procfs};
use reaper_model::event::ProcessKey;

/// Time for which a boundary must live to be shown, in nanoseconds: `tmux show` exits at once.
const BOUNDARY_NS: u64 = 1_000_000_000;

/// Extent of the stream for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Detail {
    /// One line for each process that has ended, waits or is reported, and the start and end of each session.
    Summary,
    /// Also each step: orphans, decisions and signals.
    Steps,
    /// Also each fork, exec and exit.
    Lifecycle,
}

/// Writer of lines for people.
pub struct LineWriter {
    detail: Detail,
    /// Whether the systemd journal gets the lines. Then they have a priority instead of a time.
    pub(super) for_journal: bool,
    memory: Memory,
    /// Boundaries that are shown once they have lived for [`BOUNDARY_NS`], with that time in ns since boot.
    boundaries: Vec<(u64, ProcessKey, Line)>,
    /// Returns the name of a living process.
    comm_of: fn(ProcessKey) -> Option<Vec<u8>>,
}

impl LineWriter {
    pub fn new(detail: Detail) -> LineWriter {
        LineWriter {
            detail,
            for_journal: false,
            memory: Memory::default(),
            boundaries: Vec::new(),
            comm_of: |key| match Procfs::default().read(key.pid) {
                Ok(ProcessReading::Alive(seen)) if seen.key.has_same_tick(key) => {
                    Some(seen.image.comm.clone())
                }
                _ => None,
            },
        }
    }

    /// Writes the lines of a record with colours, which `out` may remove. Fits them into `width` columns, if it is given.
    ///
    /// A record without a line at this level of detail writes nothing. The line of a boundary is kept for
    /// [`Self::write_due`].
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(
        &mut self,
        out: &mut impl Write,
        record: &EventRecord,
        width: Option<usize>,
    ) -> io::Result<()> {
        let at = record.boot_ns;
        if let EventBody::Boundary { process, .. } = &record.body {
            if self.detail >= Detail::Steps {
                let line = session::boundary(&record.body, process);
                let due = at.saturating_add(BOUNDARY_NS);
                self.boundaries.push((due, process.key, line));
            }
            return Ok(());
        }
        for line in self.lines(record) {
            line.write(out, &self.start(at), width)?;
        }
        Ok(())
    }

    /// Writes the boundaries that are due at `now` (ns since boot) and still alive.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_due(
        &mut self,
        out: &mut impl Write,
        now: u64,
        width: Option<usize>,
    ) -> io::Result<()> {
        let due = self.boundaries.extract_if(.., |(due, ..)| *due <= now);
        for (due, key, line) in due.collect::<Vec<_>>() {
            if (self.comm_of)(key).is_some() {
                line.write(out, &self.start(due), width)?;
            }
        }
        Ok(())
    }

    /// Returns when to call [`LineWriter::write_due`] next, in ns since boot.
    pub fn next_due(&self) -> Option<u64> {
        self.boundaries.iter().map(|(due, ..)| *due).min()
    }

    /// Returns the start of a line with this time in ns since boot.
    fn start(&self, boot_ns: u64) -> LineStart {
        match self.detail {
            _ if self.for_journal => LineStart::Priority,
            Detail::Summary => LineStart::Time(time_of_day_in_seconds(boot_ns)),
            Detail::Steps | Detail::Lifecycle => LineStart::Time(time_of_day(boot_ns)),
        }
    }

    /// Returns the lines of a record: usually one, or none if the record is not shown.
    fn lines(&mut self, record: &EventRecord) -> Vec<Line> {
        self.memory.on_record(&record.body);
        // The shell that started an agent is no member, so its name is unknown once it has exited.
        if let EventBody::SessionOpen { process, .. } = &record.body
            && self.detail >= Detail::Steps
            && let Some(parent) = process.parent
            && let Some(comm) = (self.comm_of)(parent)
        {
            self.memory.name_parent(process, parent, comm);
        }
        let (body, detail) = (&record.body, self.detail);
        if let EventBody::Summary { .. } = body {
            let observed = self.memory.observed.lines();
            return observed
                .into_iter()
                .chain(service::line(body, detail))
                .collect();
        }
        let line = process::line(record, detail, &mut self.memory)
            .or_else(|| session::line(body, detail, &mut self.memory))
            .or_else(|| service::line(body, detail));
        line.into_iter().collect()
    }
}

/// Returns the columns of a process: agent, pid and command.
fn subject(process: &ProcessRef, memory: &Memory) -> Subject {
    let session = process.session.as_ref();
    let agent = session.map(|session| &*session.agent);
    Subject {
        agent: agent
            .or(memory.agent_of(process.key))
            .unwrap_or("-")
            .to_owned(),
        pid: process.key.pid,
        command: super::command::short_command(&process.image),
    }
}
