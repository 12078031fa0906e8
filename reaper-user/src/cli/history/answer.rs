//! Answers for the processes that a history was requested for: what became of each, and its ancestors.

use std::io::{self, Write};

use jiff::Timestamp;

use super::process::{COMMAND_MAX, room, write_pid};
use super::session::sum;
use crate::api::end_in_history;
use crate::cli::client::BOLD;
use crate::cli::show::{time, wrap};
use crate::export::{Judgement, capitalized, printable};
use crate::journal::history::{HistoryProcess, HistoryRequest, HistorySession};

/// Writes what became of the processes and the agent with these pids, one sentence for each. `at` formats a time.
pub(super) fn write_answers(
    out: &mut impl Write,
    session: &HistorySession,
    pids: &[u32],
    (at, now): (&impl Fn(Timestamp) -> String, Timestamp),
    width: Option<usize>,
) -> io::Result<()> {
    for pid in pids {
        let named = session.processes.iter().filter(|own| own.pid == *pid);
        let mut answers: Vec<String> = named
            .map(|process| of_process(session, process, (at, now)))
            .collect();
        if answers.is_empty() && session.is_of_agent(*pid) {
            answers.push(of_agent(session, now));
        }
        for answer in answers {
            for line in wrap(&printable(&answer, 4 * COMMAND_MAX), 0, room(width)).lines() {
                write_pid(out, *pid)?;
                writeln!(out, "{BOLD}{line}{BOLD:#}")?;
            }
        }
    }
    Ok(())
}

/// Returns how and when a process ended and why. If no end is recorded, returns the last decision or request.
fn of_process(
    session: &HistorySession,
    process: &HistoryProcess,
    (at, now): (&impl Fn(Timestamp) -> String, Timestamp),
) -> String {
    if let Some(end) = end_in_history(session, process, now) {
        return end;
    }
    let decision = process.decisions.last();
    // A decision that follows from a request says less than the request.
    let request = process.requests.last().filter(|request| {
        decision.is_none_or(|decision| {
            decision.time < request.time || decision.reason == "kept_by_user"
        })
    });
    let last = match (request, decision) {
        (Some(request), _) => Some((request_text(request, at), "Requested", request.time)),
        (None, Some(decision)) => {
            let judgement = Judgement {
                decision: &decision.decision,
                reason: &decision.reason,
                rule: decision.rule.as_deref(),
                remaining_s: None,
                observes: decision.would_reap(),
            };
            Some((judgement.text(), "Decided", decision.time))
        }
        (None, None) => None,
    };
    match last {
        Some((text, done, time)) => {
            let (text, ago) = (capitalized(&text), ago(time, now));
            format!("{text}. {done} {ago}; no exit is recorded.")
        }
        None => "No exit is recorded.".into(),
    }
}

/// Returns how and when the agent of a session ended, and the counts of the session.
fn of_agent(session: &HistorySession, now: Timestamp) -> String {
    let (agent, pid) = (&session.agent, session.root_pid.unwrap_or(session.pid));
    let sum = sum(session);
    match session.root_exited_at {
        Some(exited) => {
            let (how, ago) = (session.exit.predicate(), ago(exited, now));
            format!("{agent} ({pid}) {how} {ago}: {sum}.")
        }
        None => format!("No exit of {agent} ({pid}) is recorded: {sum}."),
    }
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

fn ago(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs();
    format!("{} ago", time(u64::try_from(seconds).unwrap_or(0)))
}
