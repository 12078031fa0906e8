//! `reaper explain`

use std::fmt::Write;

use serde_json::Value;

use super::client::{BOLD, DIM, client, memory, print, span};
use super::show::{NAME_MAX, ProcessTags, fit, user, width, wrap};
use super::{Failure, ServiceArgs};
use crate::api::{AncestorInfo, Explanation, NamedProcess};
use crate::export::{evidence_text, printable};

/// Characters of the command line that is asked about, and of one above it.
const LONG: usize = 400;
const SHORT: usize = 120;
/// Characters of the names of rows.
const NAMES: usize = 10;

pub(super) fn run(pid: u32, asking: &ServiceArgs) -> Result<(), Failure> {
    let said = client(asking).get(&format!("/v1/explain/{pid}"))?;
    print(asking, &said, |told: Explanation| text(&told, width()))
}

fn text(told: &Explanation, width: Option<usize>) -> String {
    let process = &told.process;
    let mut out = String::new();
    let (command, marks) = (printable(&process.command, LONG), ProcessTags::of(process));
    let _ = writeln!(
        out,
        "{BOLD}{}{BOLD:#} {command}{}",
        process.pid,
        marks.text()
    );
    for sentences in [&told.why, &told.next] {
        out += &wrap(&printable(sentences, 4 * LONG), 2, width);
    }
    let mut rows: Vec<(&str, String)> = Vec::new();
    let (age, memory, user) = (span(process.age_s), memory(process.rss), user(process.uid));
    rows.push((
        "process",
        format!("{age} old, {memory} of memory, of user {user}"),
    ));
    if let Some(session) = &told.session {
        let kind = match &*session.kind {
            "server" => "server",
            _ => "agent",
        };
        rows.push((kind, agent(session)));
        rows.push(("session", printable(&session.id, LONG)));
    }
    if let Some(evidence) = &process.evidence {
        let by = (
            process.evidence_variable.as_deref(),
            process.evidence_directory.as_deref(),
        );
        let words = evidence_text(evidence, by.0, by.1);
        rows.push(("evidence", format!("{words}: nobody saw its birth")));
    }
    if let Some(adopter) = &told.adopter {
        rows.push(("adopted", format!("by {}", named(adopter))));
    }
    let facts = told.facts.iter().map(|(fact, value)| known(fact, value));
    let facts: Vec<String> = facts.collect();
    rows.push(("facts", facts.join(", ")));
    for (name, value) in rows {
        let value = wrap(&value, NAMES, width);
        let value = value.get(NAMES..).unwrap_or_default();
        let _ = write!(out, "{DIM}{name:<NAMES$}{DIM:#}{value}");
    }
    lineage(&mut out, told, width);
    out
}

fn agent(session: &crate::api::SessionInfo) -> String {
    let name = printable(&session.agent, NAME_MAX);
    let mut text = format!("{name} ({})", session.root_pid);
    if let Some(how) = &session.root_exit {
        let since = span(session.since_root_exit_s.unwrap_or_default());
        let _ = write!(text, ", gone for {since} ({})", printable(how, NAME_MAX));
    }
    if let Some(outer) = &session.outer_session_id {
        let _ = write!(text, ", inside {}", printable(outer, LONG));
    }
    text
}

/// What is known of a process, in words.
fn known(fact: &str, value: &Value) -> String {
    let name = match fact {
        "keep_marker" => "REAPER_KEEP=1",
        "unit" => "systemd unit",
        "listening" => "listens on a port",
        "cpu_percent" => "use of a processor in percent",
        "sid" => "session id",
        "terminal_input" => "reads from a terminal",
        "agent_markers" => "agents' marks",
        "cwd" => "works in",
        "clients" => "accepted connections",
        "stdio" => "standard input and output",
        other => other,
    };
    let value = match value {
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) if text.is_empty() => "none".into(),
        Value::String(text) => text.clone(),
        Value::Null => "one that tells nothing".into(),
        Value::Array(all) if all.is_empty() => "none".into(),
        Value::Array(all) => {
            let all: Vec<_> = all.iter().filter_map(Value::as_str).collect();
            all.join(" ")
        }
        other => other.to_string(),
    };
    printable(&format!("{name}: {value}"), LONG)
}

/// From whom it comes, as it was: the first at the top, itself at the bottom.
fn lineage(out: &mut String, told: &Explanation, width: Option<usize>) {
    if told.lineage.is_empty() {
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
    for (n, forebear) in told.lineage.iter().rev().enumerate() {
        row(n, forebear.pid, &forebear.command, &notes(forebear));
    }
    let process = &told.process;
    row(told.lineage.len(), process.pid, &process.command, "");
}

fn named(named: &NamedProcess) -> String {
    format!("{} ({})", printable(&named.name, 16), named.pid)
}

/// What there is to say of one of those above.
fn notes(forebear: &AncestorInfo) -> String {
    let mut text = String::new();
    if let Some(agent) = &forebear.agent {
        let _ = write!(text, " [agent: {}]", printable(agent, NAME_MAX));
    }
    if let Some(rule) = &forebear.boundary {
        let _ = write!(text, " [boundary: {}]", printable(rule, NAME_MAX));
    }
    match &forebear.ended {
        Some(how) => {
            let _ = write!(text, " (gone: {})", printable(how, NAME_MAX));
        }
        None if !forebear.alive && !forebear.command.is_empty() => text += " (gone)",
        None if !forebear.alive => text += "(gone, and no longer remembered)",
        None => {}
    }
    if let Some(adopter) = &forebear.adopter {
        let _ = write!(text, ", adopted by {}", self::named(adopter));
    }
    text
}
