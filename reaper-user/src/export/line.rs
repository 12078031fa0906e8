//! The stream for people: time, agent, what happened, pid, command, and what there is to say of it.

use std::fmt::Write as _;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::json::{FailureName, SignalName};
use super::record::{Body, Lifecycle, Record, Who};
use super::redact;
use super::sink::Clock;
use crate::model::event::{Ended, Key};
use crate::reap::{Outcome, Released};

/// Characters of a command line that are shown.
const COMMAND_MAX: usize = 48;

const PLAIN: Style = Style::new();
const DIM: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default();
const NOTE: Style = AnsiColor::Cyan.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// Whether a record is a line for people: an orphan is told of once its adopter is known, and what
/// every process does only where all of it was asked for.
pub fn is_shown(record: &Record, lifecycle: bool) -> bool {
    match record.body {
        Body::Lifecycle { .. } => lifecycle,
        Body::Orphan { .. } => false,
        _ => true,
    }
}

/// Writes one record as one line; colours are the writer's to take out.
pub fn write(out: &mut impl Write, record: &Record, clock: &Clock) -> io::Result<()> {
    let time = clock.time_of_day(record.time);
    let (style, event, subject, detail) = words(&record.body);
    let (agent, pid, command) = match subject {
        Subject::None => {
            return writeln!(out, "{DIM}{time}{DIM:#}  {style}{event}{style:#}  {detail}");
        }
        Subject::Root(agent, root) => (agent, root.pid, String::new()),
        Subject::Process(who) => (
            who.session.as_ref().map_or("-", |s| &s.agent),
            who.key.pid,
            command(who),
        ),
    };
    let agent = printable(agent, 16);
    write!(
        out,
        "{DIM}{time}{DIM:#}  {agent:<14} {style}{event:<10}{style:#} {pid:>7}"
    )?;
    match (command.is_empty(), detail.is_empty()) {
        (true, _) => writeln!(out, "  {detail}"),
        (false, true) => writeln!(out, "  {command}"),
        (false, false) => writeln!(out, "  {command}  {DIM}{detail}{DIM:#}"),
    }
}

/// Whom a line is about.
enum Subject<'a> {
    None,
    Root(&'a str, Key),
    Process(&'a Who),
}

fn words(body: &Body) -> (Style, &'static str, Subject<'_>, String) {
    use Subject::{None as Nobody, Process, Root};
    match body {
        Body::Ready {
            mode,
            source,
            processes,
            scope,
        } => {
            let scope = if scope.is_empty() {
                "the whole host".to_owned()
            } else {
                scope.join(", ")
            };
            let detail = format!(
                "watching {scope} through {source}, {processes} processes found, mode {mode}"
            );
            (GOOD, "ready", Nobody, detail)
        }
        Body::Lifecycle { what, who, .. } => match what {
            Lifecycle::Fork => (DIM, "fork", Process(who), by(who.parent)),
            Lifecycle::Exec => (DIM, "exec", Process(who), String::new()),
            Lifecycle::Exit { ended: how, .. } => (DIM, "exit", Process(who), ended(*how)),
        },
        Body::Orphan { who, .. } => (NOTE, "orphan", Process(who), String::new()),
        Body::Reparent {
            who,
            old_parent,
            old_parent_command,
            adopter,
            adopter_command,
            ..
        } => {
            let parent = process(*old_parent, old_parent_command);
            let adopter = process(*adopter, adopter_command);
            (
                NOTE,
                "orphan",
                Process(who),
                format!("{parent} exited, {adopter} adopted it"),
            )
        }
        Body::SessionOpen { who, outer, .. } => {
            let nested = outer
                .as_ref()
                .map(|outer| format!("inside {} ({})", outer.agent, outer.first_root.pid));
            (GOOD, "agent", Process(who), nested.unwrap_or_default())
        }
        Body::SessionRootGone {
            session,
            root,
            ended: how,
            members,
        } => (
            WARN,
            "agent gone",
            Root(&session.agent, *root),
            format!("{}, {members} left behind", ended(*how)),
        ),
        Body::SessionRelaunch { who, old_root, .. } => (
            NOTE,
            "relaunched",
            Process(who),
            format!("{} handed over to it", old_root.pid),
        ),
        Body::SessionClose {
            session,
            reaped,
            kept,
            failed,
            lost_before,
        } => {
            let good = *failed == 0 && *lost_before == 0;
            let style = if good { GOOD } else { BAD };
            let mut detail = format!("{reaped} reaped, {kept} kept, {failed} failed");
            if *lost_before > 0 {
                detail +=
                    &format!("; {lost_before} events were lost meanwhile, something may be left");
            }
            (
                style,
                "closed",
                Root(&session.agent, session.first_root),
                detail,
            )
        }
        Body::Boundary { who, rule, .. } => (
            NOTE,
            "boundary",
            Process(who),
            format!("{rule}: not ours from here on"),
        ),
        Body::Decision { who, names } => {
            let style = if names.verdict == "reap" { WARN } else { PLAIN };
            let rule = names
                .rule
                .as_ref()
                .map(|rule| format!(" ({rule})"))
                .unwrap_or_default();
            (
                style,
                names.verdict,
                Process(who),
                format!("{}{rule}", names.reason),
            )
        }
        Body::Signal { who, sent } => {
            let after = sent
                .latency
                .map(|ns| format!("after {}", duration(ns)))
                .unwrap_or_default();
            (WARN, sent.signal.as_str(), Process(who), after)
        }
        Body::Outcome {
            who,
            outcome,
            duration: took,
            ..
        } => {
            let after = took
                .map(|ns| format!(", {} after the first signal", duration(ns)))
                .unwrap_or_default();
            match outcome {
                Outcome::Ended(how) => (GOOD, "ended", Process(who), ended(*how) + &after),
                Outcome::Failed(why) => (
                    BAD,
                    "FAILED",
                    Process(who),
                    format!("{}{after}", FailureName(why)),
                ),
                Outcome::Released(Released::Unreadable) => (
                    NOTE,
                    "spared",
                    Process(who),
                    "its uid cannot be read".into(),
                ),
                Outcome::Released(Released::Observed) => {
                    (DIM, "observed", Process(who), String::new())
                }
                Outcome::Released(Released::Gone) => {
                    (DIM, "gone", Process(who), "before a signal was sent".into())
                }
                Outcome::Released(Released::NotDue(why)) => {
                    (NOTE, "spared", Process(who), why.name().into())
                }
                Outcome::Released(Released::Identity) => (
                    NOTE,
                    "spared",
                    Process(who),
                    "its pid belongs to another process now".into(),
                ),
            }
        }
        Body::Lost { total, .. } => (
            BAD,
            "lost",
            Nobody,
            format!("{total} events; looked through /proc for what they told"),
        ),
        Body::Dropped { count } => (
            BAD,
            "dropped",
            Nobody,
            format!("{count} lines of this stream: its reader is too slow"),
        ),
        Body::Malformed { count, reason } => (
            BAD,
            "malformed",
            Nobody,
            format!("{count} records skipped: {reason}"),
        ),
        Body::Summary { count, reason } => {
            let detail = format!(
                "{reason}: {} sessions, {} reaped, {} kept, {} failed; {} signals sent, {} events read, {} lost",
                count.sessions,
                count.reaped,
                count.kept,
                count.failed,
                count.signals,
                count.events,
                count.lost
            );
            (GOOD, "stopped", Nobody, detail)
        }
    }
}

/// A process where there is little room.
fn process(key: Option<Key>, command: &[u8]) -> String {
    let command = printable(&String::from_utf8_lossy(command), 16);
    match key {
        Some(key) if command.is_empty() => key.pid.to_string(),
        Some(key) => format!("{command} ({})", key.pid),
        None => "nobody known".into(),
    }
}

fn by(parent: Option<Key>) -> String {
    parent
        .map(|key| format!("by {}", key.pid))
        .unwrap_or_default()
}

fn ended(ended: Ended) -> String {
    match ended {
        Ended::Exited(code) => format!("exit {code}"),
        Ended::Signalled {
            signal,
            core: false,
        } => SignalName(signal).to_string(),
        Ended::Signalled { signal, core: true } => format!("{} (core dumped)", SignalName(signal)),
        Ended::Unknown => "nobody saw how".into(),
    }
}

/// A span of time with three digits.
pub fn duration(ns: u64) -> String {
    let (value, unit) = match ns as f64 {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "µs"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let digits = if value < 10.0 && unit != "ns" { 1 } else { 0 };
    format!("{value:.digits$} {unit}")
}

fn command(who: &Who) -> String {
    let mut line = String::new();
    for arg in redact::arguments(who.image.args()) {
        let space = if line.is_empty() { "" } else { " " };
        let _ = write!(line, "{space}{}", String::from_utf8_lossy(&arg));
        if line.len() > 4 * COMMAND_MAX {
            break;
        }
    }
    if line.is_empty() {
        line = format!("[{}]", String::from_utf8_lossy(&who.image.comm));
    }
    printable(&line, COMMAND_MAX)
}

/// What may be shown on a terminal: no control characters, and not more than `max` characters.
fn printable(text: &str, max: usize) -> String {
    let mut shown = String::new();
    for (n, c) in text.chars().enumerate() {
        if n >= max {
            shown.push('…');
            break;
        }
        // Direction marks and the like would let a command line rearrange the line it stands on.
        let invisible = matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        if c.is_control() || invisible {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::{duration, printable};

    #[test]
    fn control_characters_are_escaped_and_length_is_bounded() {
        assert_eq!(
            printable("a\nb\x1b[31mc\u{202e}", 40),
            "a\\nb\\u{1b}[31mc\\u{202e}"
        );
        assert_eq!(printable("abcdef", 3), "abc…");
    }

    #[test]
    fn durations_have_a_unit_that_fits() {
        assert_eq!(duration(48_200), "48 µs");
        assert_eq!(duration(1_500_000), "1.5 ms");
        assert_eq!(duration(5_002_000_000), "5.0 s");
    }
}
