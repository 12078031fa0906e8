//! Prints the sessions of the history as JSON or text, with a summary at the end.

use std::collections::HashSet;
use std::io::{self, Write};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::answer::write_answers;
use super::session::{clock, would_have_reaped, write_session};
use crate::cli::client::BOLD;
use crate::cli::hint::hints;
use crate::cli::keep_advice::keep_advice;
use crate::cli::show::{count, time, wrap};
use crate::export::{FreedMemory, KeepAdvice, ProcessCounts, freed, write_object};
use crate::journal::history::{HistoryOutcome, HistoryProcess, HistorySession};

/// Sums over all printed sessions.
#[derive(Default)]
pub(super) struct Total {
    pub(super) sessions: u64,
    /// Number of processes that were requested and counted alone. The other counts then are theirs.
    processes: u64,
    reaped: u64,
    kept: u64,
    failed: u64,
    memory: FreedMemory,
    would_have_reaped: u64,
}

impl Total {
    /// Adds the counts of a whole session.
    fn add_session(&mut self, session: &HistorySession) {
        self.sessions += 1;
        self.reaped += u64::from(session.reaped);
        self.kept += u64::from(session.kept);
        self.failed += u64::from(session.failed);
        self.add_memory(session.memory.rss, session.memory.swap);
        self.would_have_reaped += would_have_reaped(&session.processes);
    }

    /// Adds single processes of a session.
    fn add_processes(&mut self, processes: &[HistoryProcess]) {
        self.sessions += 1;
        self.processes += processes.len() as u64;
        self.would_have_reaped += would_have_reaped(processes);
        for process in processes {
            self.kept += u64::from(process.is_kept());
            let Some(last) = process.outcomes.last() else {
                continue;
            };
            let is_reaped = last.outcome == "ended" && last.signal.is_some();
            self.reaped += u64::from(is_reaped);
            self.failed += u64::from(last.outcome == "failed");
            self.add_memory(last.rss.unwrap_or(0), last.swap.unwrap_or(0));
        }
    }

    fn add_memory(&mut self, rss: u64, swap: u64) {
        self.memory.rss = self.memory.rss.saturating_add(rss);
        self.memory.swap = self.memory.swap.saturating_add(swap);
    }
}

/// Prints sessions as JSON at once, or collects them as text.
pub(super) struct Printer<W> {
    out: W,
    zone: TimeZone,
    json: bool,
    width: Option<usize>,
    /// Option for the journal that is read, which the suggested command gets too. Begins with a space unless empty.
    pub(super) journal: String,
    /// Requested processes. The text of a single one has the advice that keeps the next such process.
    pids: Vec<u32>,
    /// Time to which the age of events is calculated.
    pub(super) now: Timestamp,
    /// Pids of the processes and agents in the printed sessions.
    pub(super) seen: HashSet<u32>,
    /// Text of the sessions so far.
    text: Vec<u8>,
    pub(super) total: Total,
    /// Pid of a reaped process of the newest session with one, unless its advice is in the text.
    example: Option<u32>,
}

impl<W: Write> Printer<W> {
    pub(super) fn new(
        out: W,
        zone: TimeZone,
        json: bool,
        width: Option<usize>,
        pids: &[u32],
    ) -> Printer<W> {
        Printer {
            out,
            zone,
            json,
            width,
            journal: String::new(),
            pids: pids.to_vec(),
            now: Timestamp::now(),
            seen: HashSet::new(),
            text: Vec::new(),
            total: Total::default(),
            example: None,
        }
    }

    /// Adds a session to the total. Writes it at once as JSON, or adds it to the text.
    pub(super) fn session(&mut self, session: &HistorySession) -> io::Result<()> {
        let is_whole =
            self.pids.is_empty() || self.pids.iter().any(|pid| session.is_of_agent(*pid));
        match is_whole {
            true => self.total.add_session(session),
            false => self.total.add_processes(&session.processes),
        }
        self.seen.insert(session.pid);
        self.seen.extend(session.root_pid);
        self.seen
            .extend(session.processes.iter().map(|process| process.pid));
        if self.json {
            return write_object(&mut self.out, session);
        }
        let (text, pids, width) = (&mut self.text, &self.pids, self.width);
        let at = clock(session, &self.zone);
        write_answers(text, session, pids, (&at, self.now), width)?;
        write_session(text, session, pids, &self.zone, width)?;
        let reaped = session.processes.iter();
        let mut reaped = reaped.filter(|process| process.is_reaped());
        if let Some(process) = reaped.clone().find(|process| self.pids == [process.pid]) {
            let advice = KeepAdvice::new(None, true, process.keep_rule.clone());
            write!(self.text, "\n{}", keep_advice(&advice, self.width))?;
        } else {
            let was_sent = |end: &HistoryOutcome| end.outcome != "not_sent";
            let example = reaped.find(|process| process.outcomes.iter().all(was_sent));
            self.example = example.map(|process| process.pid).or(self.example);
        }
        writeln!(self.text)
    }

    /// Returns the text with a summary at its end; empty for JSON and without sessions. `since` is the time span in the
    /// summary. Flushes JSON.
    pub(super) fn finish(mut self, since: Option<Duration>) -> io::Result<Vec<u8>> {
        self.out.flush()?;
        if self.text.is_empty() {
            return Ok(self.text);
        }
        let Total {
            sessions,
            processes,
            reaped,
            kept,
            failed,
            memory,
            would_have_reaped,
        } = self.total;
        let sessions = count(sessions, "session", "sessions");
        let requested = match processes {
            0 => String::new(),
            _ => count(processes, "process", "processes") + " in ",
        };
        let since = since.map(|since| format!(" in the last {}", time(since.as_secs())));
        let since = since.unwrap_or_default();
        let counts = ProcessCounts {
            reaped,
            would_have_reaped,
            kept,
            failed,
        };
        let sum = format!(
            "{requested}{sessions}{since}: {}{}",
            counts.text(""),
            freed(&memory)
        );
        for line in wrap(&sum, 0, self.width).lines() {
            writeln!(self.text, "{BOLD}{line}{BOLD:#}")?;
        }
        if let Some(pid) = self.example {
            let journal = &self.journal;
            let hint = format!(
                "To keep such a process: REAPER_KEEP=1, `reaper keep PID`, or the rule from `reaper history {pid}{journal}`"
            );
            write!(self.text, "{}", wrap(&hints(&hint), 0, self.width))?;
        }
        Ok(self.text)
    }
}
