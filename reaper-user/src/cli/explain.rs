//! `reaper explain`: shows why a process is kept or reaped.

use std::fmt::Write;

use serde_json::Value;

use super::client::{BOLD, DIM, client, for_each, print};
use super::hint::hints;
use super::keep_advice::keep_advice;
use super::show::{NAME_MAX, ProcessTags, fit, memory_text, row, time, user, width, wrap};
use super::{Failure, ServiceArgs};
use crate::api::{AncestorInfo, Explanation, NamedProcess, SessionInfo};
use crate::export::{evidence_text, printable};

/// Longest command line of the process, in characters.
const LONG: usize = 400;
/// Longest command line of an ancestor, in characters.
const SHORT: usize = 120;
/// Width of the column with the names, in characters.
const NAMES: usize = 10;

pub(super) fn run(pids: &[u32], service: &ServiceArgs) -> Result<u8, Failure> {
    let mut between = "";
    for_each(pids, |pid| {
        let response = client(service).get(&format!("/v1/explain/{pid}"))?;
        print(service, &response, |explanation: Explanation| {
            let text = text(&explanation, width());
            std::mem::replace(&mut between, "\n").to_owned() + &text
        })
    })
}

/// Formats an explanation: the decision first, then what happens next, then the facts.
fn text(explanation: &Explanation, width: Option<usize>) -> String {
    let process = &explanation.process;
    let mut out = String::new();
    let sentences = |text: &str| wrap(&printable(&hints(text), 4 * LONG), 0, width);
    for line in sentences(&explanation.why).lines() {
        let _ = writeln!(out, "{BOLD}{line}{BOLD:#}");
    }
    out += &sentences(&explanation.next);
    out.push('\n');
    let tags = ProcessTags::state(process);
    let pid = process.pid.to_string();
    let command = fit(
        &process.command,
        NAMES + pid.len() + 1 + tags.len(),
        LONG,
        width,
    );
    let _ = writeln!(
        out,
        "{DIM}{:<NAMES$}{DIM:#}{BOLD}{pid}{BOLD:#} {command}{}",
        "process",
        tags.text()
    );
    for (name, value) in rows(explanation) {
        out += &row(name, &value, NAMES, width);
    }
    lineage(&mut out, explanation, width);
    if let Some(advice) = &explanation.keep_with {
        out.push('\n');
        out += &keep_advice(advice, width);
    }
    out
}

fn rows(explanation: &Explanation) -> Vec<(&'static str, String)> {
    let process = &explanation.process;
    let (age, user) = (time(process.age_s), user(process.uid));
    let memory = process.rss.map(|rss| format!(", {}", memory_text(rss, 0)));
    let memory = memory.unwrap_or_default();
    let mut rows = vec![("", format!("started {age} ago by user {user}{memory}"))];
    if let Some(session) = &explanation.session {
        let kind = match &*session.kind {
            "server" => "server",
            _ => "agent",
        };
        rows.push((kind, agent(session)));
        rows.push(("session", printable(&session.id, LONG)));
    }
    if let Some(evidence) = &process.evidence {
        let evidence = evidence_text(
            evidence,
            process.evidence_variable.as_deref(),
            process.evidence_directory.as_deref(),
        );
        rows.push((
            "evidence",
            format!("{evidence}; no event reported its fork"),
        ));
    }
    if let Some(adopter) = &explanation.adopter {
        rows.push(("adopted", format!("by {}", name_and_pid(adopter))));
    }
    let facts = explanation.facts.iter();
    let facts: Vec<String> = facts.map(|(name, value)| fact(name, value)).collect();
    if !facts.is_empty() {
        rows.push(("facts", facts.join(", ")));
    }
    rows
}

fn agent(session: &SessionInfo) -> String {
    let name = printable(&session.agent, NAME_MAX);
    let mut text = format!("{name} ({})", session.root_pid);
    if let Some(how) = &session.root_exit {
        let since = time(session.since_root_exit_s.unwrap_or_default());
        let _ = write!(text, ", exited {since} ago ({})", printable(how, NAME_MAX));
    }
    if let Some(outer) = &session.outer_session_id {
        let _ = write!(text, ", inside {}", printable(outer, LONG));
    }
    text
}

/// Formats a fact, given by its name in the response, such as `listens: yes`.
fn fact(fact: &str, value: &Value) -> String {
    let name = match fact {
        "keep_marker" => "REAPER_KEEP=1",
        "unit" => "systemd unit",
        "displays" => "has windows on",
        "listening" => "listens",
        "cpu_percent" => "CPU use in percent",
        "sid" => "session id",
        "terminal_input" => "reads from a terminal",
        "agent_markers" => "agent markers",
        "cwd" => "working directory",
        "clients" => "accepted connections",
        "stdio" => "standard input and output",
        other => other,
    };
    let value = match value {
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) if text.is_empty() => "none".into(),
        Value::String(text) => text.clone(),
        Value::Null => "no evidence".into(),
        Value::Array(all) if all.is_empty() => "none".into(),
        Value::Array(all) => {
            let all: Vec<_> = all.iter().filter_map(Value::as_str).collect();
            all.join(" ")
        }
        other => other.to_string(),
    };
    printable(&format!("{name}: {value}"), LONG)
}

/// Draws the birth ancestors, the oldest first, and the process itself.
fn lineage(out: &mut String, explanation: &Explanation, width: Option<usize>) {
    if explanation.lineage.is_empty() {
        return;
    }
    let mut row = |n: usize, pid: u32, command: &str, notes: &str| {
        let name = if n == 0 { "lineage" } else { "" };
        let indent = 2 * n.min(20);
        let before = format!("{pid} ");
        let taken = NAMES + indent + before.len() + notes.chars().count();
        let command = fit(command, taken, SHORT, width);
        let _ = writeln!(
            out,
            "{DIM}{name:<NAMES$}{DIM:#}{:indent$}{before}{command}{notes}",
            ""
        );
    };
    for (n, ancestor) in explanation.lineage.iter().rev().enumerate() {
        row(n, ancestor.pid, &ancestor.command, &notes(ancestor));
    }
    let process = &explanation.process;
    row(explanation.lineage.len(), process.pid, &process.command, "");
}

fn name_and_pid(process: &NamedProcess) -> String {
    format!("{} ({})", printable(&process.name, 16), process.pid)
}

/// Returns the notes behind an ancestor: agent, boundary, exit and adopter.
fn notes(ancestor: &AncestorInfo) -> String {
    let mut text = String::new();
    if let Some(agent) = &ancestor.agent {
        let _ = write!(text, " [agent: {}]", printable(agent, NAME_MAX));
    }
    if let Some(rule) = &ancestor.boundary {
        let _ = write!(text, " [boundary: {}]", printable(rule, NAME_MAX));
    }
    match &ancestor.ended {
        Some(how) => {
            let _ = write!(text, " (exited: {})", printable(how, NAME_MAX));
        }
        None if !ancestor.alive && !ancestor.command.is_empty() => text += " (exited)",
        None if !ancestor.alive => text += "(exited, no longer known)",
        None => {}
    }
    if let Some(adopter) = &ancestor.adopter {
        let _ = write!(text, ", adopted by {}", name_and_pid(adopter));
    }
    text
}
