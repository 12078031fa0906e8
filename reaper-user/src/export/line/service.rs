//! Lines about the service itself.

use std::fmt::Write as _;

use super::Detail;
use super::layout::{BAD, GOOD, Line, NOTE, cut};
use super::session::shown_memory;
use crate::export::command::short_command;
use crate::export::record::{EventBody, ProcessRef, Resumed, Totals};
use crate::export::text::{ProcessCounts, counted, duration, freed, printable, size};
use crate::export::words::scope_text;

/// Maximum number of characters of a directory.
const PATH_MAX: usize = 128;
/// Maximum number of characters of a command.
const COMMAND_MAX: usize = 32;
/// Maximum number of characters of the reason for a mode.
const REASON_MAX: usize = 512;

/// Returns the line of a record about the service, `None` for any other record.
pub(super) fn line(body: &EventBody, detail: Detail) -> Option<Line> {
    let mut more = Vec::new();
    let (style, event, detail) = match body {
        EventBody::Ready { .. } => return Some(ready(body)),
        EventBody::GapOpen { reason, total, .. } => {
            let is_bad = *reason == "source_failed" || *total > 0;
            (if is_bad { BAD } else { NOTE }, "gap", gap(body))
        }
        EventBody::GapClose {
            processes_recovered: processes,
            exits_recovered: exits,
            duration: took,
            ..
        } => {
            let processes = counted(*processes, "process", "processes");
            let exits = counted(*exits, "exit", "exits");
            let took = duration(*took);
            (
                GOOD,
                "gap closed",
                format!("after {took}: {processes} and {exits} recovered"),
            )
        }
        EventBody::MemberMapFull { count, capacity } => (
            BAD,
            "map full",
            format!(
                "{count} processes exceed max_members ({capacity}); they are tracked only while this service runs"
            ),
        ),
        EventBody::CaughtUp {
            records,
            duration: took,
        } => (
            GOOD,
            "caught up",
            format!("{records} events in {}", duration(*took)),
        ),
        EventBody::Dropped { by, count } => {
            let cause = match *by {
                "journal" => "journal records: writing the journal is too slow",
                "file" => "lines of the file of --events: it could not be written",
                _ => "lines of this stream: its reader is too slow",
            };
            (BAD, "dropped", format!("{count} {cause}"))
        }
        EventBody::ConfigReload { applied, message } => {
            let (style, event) = if *applied {
                (GOOD, "config")
            } else {
                (BAD, "config rejected")
            };
            (style, event, message.replace('\n', "; "))
        }
        EventBody::Malformed { count, reason } => {
            (BAD, "malformed", format!("{count} skipped: {reason}"))
        }
        EventBody::Summary {
            count,
            reason,
            pin_dir,
            first_waiting,
        } => {
            let mut text = format!("{reason}: {}", totals(count, detail));
            if let Some(directory) = pin_dir {
                let directory = printable(directory, PATH_MAX);
                let _ = write!(text, "; the probes stay pinned in {directory}");
            }
            more.extend(waiting(count.waiting, first_waiting, pin_dir.is_some()));
            (GOOD, "stopped", text)
        }
        _ => return None,
    };
    Some(Line {
        style,
        event,
        subject: None,
        detail,
        more,
    })
}

/// Returns the line of a service that is ready, with one row for each of its facts.
fn ready(body: &EventBody) -> Line {
    let mut rows = ready_rows(body).into_iter();
    Line {
        style: GOOD,
        event: "ready",
        subject: None,
        detail: rows.next().unwrap_or_default(),
        more: rows.collect(),
    }
}

fn ready_rows(body: &EventBody) -> Vec<String> {
    let EventBody::Ready {
        mode,
        mode_reason,
        source,
        processes,
        config,
        socket,
        next_command,
        scope,
        resumed,
        pin_dir,
        ..
    } = body
    else {
        return Vec::new();
    };
    let mut rows = vec![format!("mode {mode}, config {config}")];
    // With a scope, the number would be misleading: it also counts processes outside the scope.
    rows.push(match scope.as_slice() {
        [] => format!("watching the whole host through {source}, {processes} processes found"),
        names => format!("watching {} through {source}", scope_text(names)),
    });
    let reason = mode_reason.as_ref();
    let reason = reason.map(|reason| printable(reason, REASON_MAX));
    rows.extend(reason.map(|reason| format!("only observes: {reason}")));
    rows.push(match pin_dir {
        Some(directory) => format!("pinned in {}", printable(directory, PATH_MAX)),
        None => "tracking ends with this program".into(),
    });
    if let Some(Resumed {
        sessions,
        backlog,
        lost,
    }) = *resumed
    {
        let sessions = counted(sessions as u64, "session", "sessions");
        let backlog = size(backlog);
        rows.push(format!(
            "resumed {sessions} and {backlog} of queued events, {lost} events lost"
        ));
    }
    rows.extend(socket.iter().map(|socket| format!("socket {socket}")));
    rows.extend(next_command.iter().map(|next| format!("next: {next}")));
    rows
}

fn gap(body: &EventBody) -> String {
    let EventBody::GapOpen {
        reason,
        source,
        total,
        ..
    } = body
    else {
        return String::new();
    };
    let cause = match *reason {
        "restart" => format!("no service was running, {total} events lost"),
        "member_map_full" => format!("{total} processes exceed the kernel map of members"),
        "record_malformed" => format!("{total} events unreadable"),
        "source_failed" => format!("the event source failed; the source is now {source}"),
        _ => format!("{total} events lost"),
    };
    format!("{cause}; new decisions wait until a scan has recovered what is missing")
}

/// Returns the row about processes that wait when the service stops, of which `first` are named. `None` without any.
fn waiting(count: u64, first: &[ProcessRef], hands_over: bool) -> Option<String> {
    let others = count.saturating_sub(first.len() as u64);
    let mut names: Vec<String> = first
        .iter()
        .map(|process| {
            let command = cut(&short_command(&process.image), COMMAND_MAX);
            format!("{command} ({})", process.key.pid)
        })
        .collect();
    names.extend((others > 0).then(|| counted(others, "other", "others")));
    let processes = counted(count, "process", "processes");
    let what = match hands_over {
        true => "still waiting, and left to the next service",
        false => "still waiting, and left running",
    };
    (count > 0).then(|| format!("{processes} {what}: {}", names.join(", ")))
}

/// Returns what the service has done, or would have done.
fn totals(count: &Totals, detail: Detail) -> String {
    let sessions = counted(count.sessions, "session", "sessions");
    let signals = counted(count.signals, "signal", "signals");
    let processes = ProcessCounts {
        reaped: count.reaped,
        would_have_reaped: count.would_have_reaped,
        kept: count.kept,
        failed: count.failed,
    };
    let mut text = format!(
        "{sessions}, {}; {signals} sent, {} events read, {} lost",
        processes.text(""),
        count.events,
        count.lost
    );
    text += &freed(&shown_memory(&count.memory, detail));
    text
}
