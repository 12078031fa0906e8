//! Formats one session of the history.

use std::fmt::Write as _;
use std::io::{self, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::process::{
    BAD, COLUMN, COMMAND_MAX, GOOD, PLAIN, command, how, lineage_text, room, write_pid,
    write_process,
};
use crate::cli::client::{BOLD, DIM};
use crate::cli::show::{fit, wrap};
use crate::export::{ProcessCounts, duration, freed, printable};
use crate::journal::history::{HistoryProcess, HistorySession};

/// Format of a time on another day than that of the session.
const DATE: &str = "%Y-%m-%d %H:%M:%S";

/// Returns a function that formats a time: with the date unless it is the day on which the session opened.
pub(super) fn clock(session: &HistorySession, zone: &TimeZone) -> impl Fn(Timestamp) -> String {
    let zoned = |time: Timestamp| time.to_zoned(zone.clone());
    let opened = zoned(session.opened_at).date();
    move |time| {
        let time = zoned(time);
        let format = match time.date() == opened {
            true => "%H:%M:%S",
            false => DATE,
        };
        time.strftime(format).to_string()
    }
}

/// Writes one session as text, with times in `zone`. Fits command lines into `width` columns, if it is given. Adds the
/// ancestors of the processes with these `pids`.
pub(super) fn write_session(
    out: &mut impl Write,
    session: &HistorySession,
    pids: &[u32],
    zone: &TimeZone,
    width: Option<usize>,
) -> io::Result<()> {
    let at = clock(session, zone);
    let opened = session.opened_at.to_zoned(zone.clone());
    let user = session.uid.map(|uid| format!(", uid {uid}"));
    let outer = session.outer_session_id.as_ref();
    let outer = outer.map(|outer| format!(", inside {}", printable(outer, COMMAND_MAX)));
    writeln!(
        out,
        "{DIM}{}{DIM:#}  {BOLD}{}{BOLD:#}  {}{}{}",
        opened.strftime(DATE),
        printable(&session.agent, 32),
        printable(&session.name, COMMAND_MAX),
        user.unwrap_or_default(),
        outer.unwrap_or_default(),
    )?;
    let root = |out: &mut _| write_pid(out, session.pid);
    if !session.args.is_empty() {
        let command = command(&session.args, "");
        let command = fit(&command, COLUMN, COMMAND_MAX, width);
        root(out)?;
        writeln!(out, "{command}")?;
    }
    root(out)?;
    match session.root_exited_at {
        Some(exited) => {
            let lasted = exited.duration_since(session.opened_at);
            let lasted = lasted.try_into().map_or(0, reaper_host::sys::nanoseconds);
            let lasted = duration(lasted);
            let how = how(&session.exit);
            write!(out, "exited at {} after {lasted}: {how}", at(exited))?;
        }
        None => write!(out, "still running, or its exit was not observed")?,
    }
    match session.closed_at {
        Some(closed) => writeln!(out, "; closed at {}", at(closed))?,
        None if session.root_exited_at.is_some() => writeln!(out, "; the session has not closed")?,
        None => writeln!(out)?,
    }
    let style = match (session.failed, session.lost_before) {
        (0, 0) if session.closed_at.is_some() => GOOD,
        (0, 0) => PLAIN,
        _ => BAD,
    };
    if session.closed_at.is_some() || would_have_reaped(&session.processes) > 0 {
        for line in wrap(&sum(session), 0, room(width)).lines() {
            root(out)?;
            writeln!(out, "{style}{line}{style:#}")?;
        }
    }
    session.processes.iter().try_for_each(|process| {
        let is_named = pids.contains(&process.pid);
        let lineage = is_named.then(|| lineage_text(session, process)).flatten();
        write_process(out, process, lineage.as_deref(), &at, width)
    })
}

/// Returns how many of the processes would have been reaped. The service only observed them.
pub(super) fn would_have_reaped(processes: &[HistoryProcess]) -> u64 {
    let processes = processes.iter();
    let would = |process: &&HistoryProcess| process.decisions.iter().any(|d| d.would_reap());
    processes.filter(would).count() as u64
}

/// Returns the counters of a session.
pub(super) fn sum(session: &HistorySession) -> String {
    let HistorySession {
        reaped,
        kept,
        failed,
        memory,
        lost_before,
        ..
    } = session;
    let processes = ProcessCounts {
        reaped: u64::from(*reaped),
        would_have_reaped: would_have_reaped(&session.processes),
        kept: u64::from(*kept),
        failed: u64::from(*failed),
    };
    let mut text = processes.text("") + &freed(memory);
    if *lost_before > 0 {
        let _ = write!(text, "; {lost_before} events were lost in this time");
    }
    text
}
