//! Lays out the columns of a line.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use tracing::Level;

use crate::export::journald;
use crate::export::text::printable;

pub(super) const PLAIN: Style = Style::new();
pub(super) const DIM: Style = Style::new().dimmed();
pub(super) const GOOD: Style = AnsiColor::Green.on_default();
pub(super) const NOTE: Style = AnsiColor::Cyan.on_default();
pub(super) const WARN: Style = AnsiColor::Yellow.on_default();
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();

/// Maximum number of characters of a command line.
const COMMAND_MAX: usize = 48;
/// Number of characters that remain of a command line on a narrow terminal.
const COMMAND_LEAST: usize = 12;
/// Maximum number of characters of an agent's name.
const AGENT_MAX: usize = 16;

/// Start of a line.
pub(super) enum LineStart {
    /// Time of day.
    Time(String),
    /// Priority for the systemd journal, which adds the time itself.
    Priority,
}

/// A line before it is laid out. Its texts are not escaped.
pub(super) struct Line {
    pub style: Style,
    pub event: &'static str,
    /// Process of the line; `None` if it is about the service.
    pub subject: Option<Subject>,
    pub detail: String,
    /// Further rows, each below the event; none for most lines.
    pub more: Vec<String>,
}

/// Process of a line.
pub(super) struct Subject {
    pub agent: String,
    /// 0 if the line is about several processes.
    pub pid: u32,
    /// Empty if it is unknown.
    pub command: String,
}

impl Line {
    /// Writes the line. It takes several rows if it is longer than `width` columns.
    pub(super) fn write(
        &self,
        out: &mut impl Write,
        start: &LineStart,
        width: Option<usize>,
    ) -> io::Result<()> {
        let (style, event) = (self.style, self.event);
        let time = match start {
            LineStart::Time(time) => {
                write!(out, "{DIM}{time}{DIM:#}  ")?;
                time.len() + 2
            }
            // The journal removes the priority, which must be at the start.
            LineStart::Priority if style == BAD => {
                write!(out, "{}", journald::prefix(Level::WARN))?;
                0
            }
            LineStart::Priority => 0,
        };
        // A line break in the name of a rule or agent, a scope or a reason would forge a line.
        let detail = printable(&self.detail, usize::MAX);
        let Some(Subject {
            agent,
            pid,
            command,
        }) = &self.subject
        else {
            let detail = wrapped(&detail, time + event.len() + 2, time, width);
            writeln!(out, "{style}{event}{style:#}  {detail}")?;
            return self.more.iter().try_for_each(|row| {
                let row = wrapped(&printable(row, usize::MAX), time, time, width);
                writeln!(out, "{:time$}{row}", "")
            });
        };
        let agent = printable(agent, AGENT_MAX);
        let head = format!("{agent:<12} ");
        let taken = time + head.chars().count() + 10 + 1 + 7 + 2;
        let pid = match pid {
            0 => "-".to_owned(),
            pid => pid.to_string(),
        };
        write!(out, "{head}{style}{event:<10}{style:#} {pid:>7}  ")?;
        if command.is_empty() {
            return writeln!(out, "{}", wrapped(&detail, taken, taken, width));
        }
        let command = printable(command, usize::MAX);
        let room = width.map_or(usize::MAX, |width| width.saturating_sub(taken));
        let detail_room = detail.chars().count() + 2;
        // A command that would leave no room for the detail takes the first row.
        let left = match room.checked_sub(detail_room) {
            _ if detail.is_empty() => room,
            Some(left) if left >= COMMAND_LEAST => left,
            _ => room.max(COMMAND_LEAST),
        };
        let command = cut(&command, left.min(COMMAND_MAX));
        if detail.is_empty() {
            return writeln!(out, "{command}");
        }
        let before = taken + command.chars().count() + 2;
        let detail = wrapped(&detail, before, taken, width);
        let gap = if detail.starts_with('\n') { "" } else { "  " };
        writeln!(out, "{command}{gap}{DIM}{detail}{DIM:#}")
    }
}

/// Cuts a text to `max` characters, of which the last one is then an ellipsis.
pub(super) fn cut(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        None => text.to_owned(),
        Some(_) => text.chars().take(max - 1).chain(['…']).collect(),
    }
}

/// Wraps a text that begins after `taken` columns. Further rows are indented by `indent` columns, less on a narrow
/// terminal.
fn wrapped(text: &str, taken: usize, indent: usize, width: Option<usize>) -> String {
    let Some(width) = width else {
        return text.to_owned();
    };
    let indent = indent.min(width / 2 + 4);
    let (mut rows, mut column) = (String::new(), taken);
    for (n, word) in text.split(' ').enumerate() {
        let length = word.chars().count() + usize::from(n > 0);
        if column + length > width && column > indent {
            rows += "\n";
            rows.extend(std::iter::repeat_n(' ', indent));
            column = indent + word.chars().count();
        } else {
            rows += if n > 0 { " " } else { "" };
            column += length;
        }
        rows += word;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_fitted_to_the_terminal() {
        let line = |command: &str, detail: &str, width| {
            let line = Line {
                style: PLAIN,
                event: "ended",
                subject: Some(Subject {
                    agent: "claude-code".into(),
                    pid: 24_810,
                    command: command.into(),
                }),
                detail: detail.into(),
                more: Vec::new(),
            };
            let mut out = Vec::new();
            let mut plain = anstream::StripStream::new(&mut out);
            line.write(&mut plain, &LineStart::Time("14:23:21".into()), width)
                .unwrap();
            String::from_utf8(out).unwrap()[8..].to_owned()
        };
        let long = "x".repeat(60);
        for (command, detail, width, expected) in [
            ("npm run dev", "SIGTERM", Some(80), "npm run dev  SIGTERM\n".into()),
            (
                &long,
                "exit 0 after SIGTERM, 1.7 MB freed",
                Some(80),
                format!(
                    "{}…\n{:43}exit 0 after SIGTERM, 1.7 MB freed\n",
                    "x".repeat(36),
                    ""
                ),
            ),
            (&long, "SIGTERM", Some(80), format!("{}…  SIGTERM\n", "x".repeat(27))),
            (&long, "", None, format!("{}…\n", "x".repeat(47))),
            (
                "node vite.js",
                "10 min: it listens on 5173, and its agent left by itself",
                Some(80),
                "node vite.js  10 min: it listens on\n                                           5173, and its agent left by itself\n".into(),
            ),
        ] {
            let expected = format!("  claude-code  ended        24810  {expected}");
            let line = line(command, detail, width);
            assert_eq!(line, expected);
            let fits = |row: &str| row.chars().count() <= width.unwrap_or(usize::MAX);
            assert!(line.lines().all(fits), "{line}");
        }
    }

    #[test]
    fn line_for_the_journal_has_a_priority_instead_of_a_time() {
        let text = |style, more: &[&str]| {
            let line = Line {
                style,
                event: "gap",
                subject: None,
                detail: "3 events lost".into(),
                more: more.iter().map(ToString::to_string).collect(),
            };
            let mut out = Vec::new();
            let mut plain = anstream::StripStream::new(&mut out);
            line.write(&mut plain, &LineStart::Priority, None).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(text(BAD, &[]), "<4>gap  3 events lost\n");
        assert_eq!(text(GOOD, &["more"]), "gap  3 events lost\nmore\n");
    }
}
