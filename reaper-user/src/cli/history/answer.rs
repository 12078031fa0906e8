//! Answers for the processes that a history was requested for: what became of each.

use std::io::{self, Write};

use jiff::Timestamp;

use super::process::{COMMAND_MAX, request_text, room, write_pid};
use super::session::sum;
use crate::api::end_in_history;
use crate::cli::client::BOLD;
use crate::cli::show::{time, wrap};
use crate::export::{Judgement, capitalized, printable};
use crate::journal::history::{HistoryProcess, HistorySession};

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

fn ago(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs();
    format!("{} ago", time(u64::try_from(seconds).unwrap_or(0)))
}
