//! Formats one process of the history, with what was decided and done.

use std::fmt::Write as _;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use jiff::Timestamp;

use crate::cli::client::DIM;
use crate::cli::show::{fit, wrap};
use crate::export::{
    ExitInfo, FreedMemory, duration, exit_code_text, freed, outcome_reason_text, printable,
    reason_text,
};
use crate::journal::history::{HistoryOutcome, HistoryProcess, HistoryRequest, HistorySession};

/// Longest command line or name, in characters.
pub(super) const COMMAND_MAX: usize = 256;
/// Longest text with the ancestors of a process, in characters.
const LINEAGE_MAX: usize = 1024;
/// Indentation of the lines about a session, in characters.
const INDENT: usize = 2;
/// Column behind the pid, which begins each line.
pub(super) const COLUMN: usize = INDENT + 7 + 2;

pub(super) const GOOD: Style = AnsiColor::Green.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(super) const PLAIN: Style = Style::new();

/// Writes a process with its ancestors, if they are given, and its decisions, requests and outcomes, ordered by time.
pub(super) fn write_process(
    out: &mut impl Write,
    process: &HistoryProcess,
    lineage: Option<&str>,
    at: &impl Fn(Timestamp) -> String,
    width: Option<usize>,
) -> io::Result<()> {
    let command = command(&process.args, &process.comm);
    let command = fit(&command, COLUMN, COMMAND_MAX, width);
    write_pid(out, process.pid)?;
    writeln!(out, "{command}")?;
    if let Some(lineage) = lineage {
        let lineage = printable(&format!("lineage: {lineage}"), LINEAGE_MAX);
        for line in wrap(&lineage, 0, room(width)).lines() {
            write_pid(out, process.pid)?;
            writeln!(out, "{line}")?;
        }
    }
    let decisions = process.decisions.iter().map(|decision| {
        let style = match decision.decision.as_str() {
            "reap" => WARN,
            _ => PLAIN,
        };
        let rule = decision.rule.as_ref().map(|rule| format!(" ({rule})"));
        let why = reason_text(&decision.reason).to_owned() + &rule.unwrap_or_default();
        let word = match decision.would_reap() {
            true => "would reap".to_owned(),
            false => decision.decision.clone(),
        };
        (decision.time, style, word, why)
    });
    let outcomes = process.outcomes.iter().map(|outcome| {
        let style = match outcome.outcome.as_str() {
            "ended" => GOOD,
            "failed" => BAD,
            _ => PLAIN,
        };
        let details = outcome_details(outcome);
        (
            outcome.time,
            style,
            outcome.outcome.replace('_', " "),
            details,
        )
    });
    let exit = process.own_exit().map(|(time, exit)| {
        let how = match &exit.signal {
            Some(_) => format!("{}, which the service did not send", how(exit)),
            None => format!("by itself: {}", how(exit)),
        };
        (time, PLAIN, "exited".to_owned(), how)
    });
    let requests = process.requests.iter().map(|request| {
        let text = request_text(request, at);
        (request.time, PLAIN, "request".to_owned(), text)
    });
    let mut lines: Vec<_> = requests
        .chain(decisions)
        .chain(outcomes)
        .chain(exit)
        .collect();
    // The sort is stable: with the same time, a decision stays behind a request, and an outcome behind a decision.
    lines.sort_by_key(|(time, ..)| *time);
    for (time, style, word, why) in &lines {
        let time = at(*time);
        let word = printable(word, 10);
        // The columns of time and word, with two spaces behind each.
        let before = time.len() + 2 + 10 + 2;
        let why = wrap(
            &printable(why, COMMAND_MAX),
            0,
            room(width).map(|room| room - before),
        );
        for (n, why) in why.lines().enumerate() {
            write_pid(out, process.pid)?;
            match n {
                0 => writeln!(out, "{DIM}{time}{DIM:#}  {style}{word:<10}{style:#}  {why}")?,
                _ => writeln!(out, "{:before$}{why}", "")?,
            }
        }
    }
    Ok(())
}

/// Returns a request in words, such as `kept by uid 1000 until 14:30:00`.
pub(super) fn request_text(request: &HistoryRequest, at: &impl Fn(Timestamp) -> String) -> String {
    let uid = request.by_uid;
    if request.request != "keep" {
        return format!("no longer kept, by uid {uid}");
    }
    let tree = match request.tree {
        Some(true) => " with its descendants",
        _ => "",
    };
    let until = request.until.map(|until| format!(" until {}", at(until)));
    format!("kept{tree} by uid {uid}{}", until.unwrap_or_default())
}

/// Returns the ancestors of a process from its agent on, such as
/// `my-agent (7336, exited) > bash (7340, exited) > npm (7350)`. An ellipsis stands for unknown ones. `None` if none is
/// known.
pub(super) fn lineage_text(session: &HistorySession, process: &HistoryProcess) -> Option<String> {
    let oldest = process.lineage.last()?;
    let agent = &session.agent;
    let mut names = Vec::new();
    if !session.is_of_agent(oldest.pid) && !session.is_of_agent(process.pid) {
        let root = session.root_pid.unwrap_or(session.pid);
        names.extend([format!("{agent} ({root})"), "…".into()]);
    }
    names.extend(process.lineage.iter().rev().map(|ancestor| {
        let name = match session.is_of_agent(ancestor.pid) {
            true => agent.as_str(),
            // The service did not see what a process executed that exited before it started.
            false if ancestor.comm.is_empty() => "unknown",
            false => &ancestor.comm,
        };
        let exited = if ancestor.exited { ", exited" } else { "" };
        format!("{name} ({}{exited})", ancestor.pid)
    }));
    names.push(format!("{} ({})", process.comm, process.pid));
    Some(names.join(" > "))
}

/// Writes the pid at the beginning of a line, in [`COLUMN`] characters.
pub(super) fn write_pid(out: &mut impl Write, pid: u32) -> io::Result<()> {
    write!(out, "{:INDENT$}{pid:>7}  ", "")
}

/// Returns the width behind the pid, at least 60 characters.
pub(super) fn room(width: Option<usize>) -> Option<usize> {
    width.map(|width| width.saturating_sub(COLUMN).max(60))
}

/// Returns how a process exited, or why it was not ended or not signalled. If known, the time since the first signal
/// and the freed memory follow.
fn outcome_details(outcome: &HistoryOutcome) -> String {
    let mut text = match (outcome.outcome.as_str(), &outcome.reason) {
        (_, Some(reason)) => outcome_reason_text(reason),
        _ => how(&outcome.exit),
    };
    if let Some(ns) = outcome.duration_ns {
        let _ = write!(text, ", {} after the first signal", duration(ns));
    }
    text + &freed(&FreedMemory {
        rss: outcome.rss.unwrap_or(0),
        swap: outcome.swap.unwrap_or(0),
        ..FreedMemory::default()
    })
}

pub(super) fn how(exit: &ExitInfo) -> String {
    match exit {
        ExitInfo {
            signal: Some(signal),
            ..
        } => printable(signal, 16),
        ExitInfo {
            code: Some(code), ..
        } => exit_code_text(*code),
        _ => "unknown exit status".into(),
    }
}

pub(super) fn command(args: &[String], comm: &str) -> String {
    let line = args.join(" ");
    if line.is_empty() && !comm.is_empty() {
        format!("[{comm}]")
    } else {
        line
    }
}
