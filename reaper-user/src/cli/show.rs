//! Formats values and processes for a terminal of any width.

use anstyle::{AnsiColor, Style};
use nix::unistd::{Uid, User};

use crate::api::{DecisionInfo, ProcessInfo};
pub(super) use crate::export::{LEAST, counted as count, memory_text, size, time, width, wrap};
use crate::export::{printable, without_error_codes};

pub(super) const BOLD: Style = Style::new().bold();
pub(super) const DIM: Style = Style::new().dimmed();
const NOTE: Style = AnsiColor::Cyan.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const GOOD: Style = AnsiColor::Green.on_default();

/// Longest name of a rule or an agent, in characters.
pub(super) const NAME_MAX: usize = 64;

/// Escapes a text, and cuts it to the room that `taken` characters leave in the line, and to at most `max` characters.
/// The room is at least [`LEAST`]. Without `width` only `max` counts.
pub(super) fn fit(text: &str, taken: usize, max: usize, width: Option<usize>) -> String {
    // The ellipsis needs one column too.
    let room = width.map_or(max, |width| {
        width.saturating_sub(taken + 1).clamp(LEAST, max.max(LEAST))
    });
    printable(text, room)
}

/// Formats a row of a list: a dim name, padded to `column`, and its value wrapped beside it.
pub(super) fn row(name: &str, value: &str, column: usize, width: Option<usize>) -> String {
    let value = wrap(value, column, width);
    let value = value.get(column..).unwrap_or_default();
    format!("{DIM}{name:<column$}{DIM:#}{value}")
}

/// Result of a check of `reaper doctor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Yes,
    /// Failed, and the probes or a daemon need it.
    Needed,
    /// Failed, and something works less well without it.
    No,
    /// Not failed, but only because the value is unknown.
    Unknown,
}

impl Mark {
    /// Returns the mark of a check. An unknown value begins with that word.
    pub(super) fn of(ok: bool, needed: bool, value: &str) -> Mark {
        match (ok, needed) {
            (true, _) if value.starts_with("unknown") => Mark::Unknown,
            (true, _) => Mark::Yes,
            (false, true) => Mark::Needed,
            (false, false) => Mark::No,
        }
    }
}

/// Formats one check of `reaper doctor`: `yes`, `no` or `?`, name and value, then the reason and the advice. `names` is the
/// width of the column with the names.
pub(super) fn check(
    mark: Mark,
    name: &str,
    value: &str,
    [reason, advice]: [Option<&str>; 2],
    names: usize,
    width: Option<usize>,
) -> String {
    let (word, colour) = match mark {
        Mark::Yes => ("yes", AnsiColor::Green),
        Mark::Needed => ("no ", AnsiColor::Red),
        Mark::No => ("no ", AnsiColor::Yellow),
        Mark::Unknown => ("?  ", AnsiColor::Yellow),
    };
    let style = colour.on_default().bold();
    // The word takes three columns, with two spaces behind it and behind the name.
    let column = 3 + 2 + names + 2;
    let value = printable(&without_error_codes(value), usize::MAX);
    let value = wrap(&value, column, width);
    let value = value.get(column..).unwrap_or_default();
    let mut out = format!("{style}{word}{style:#}  {name:names$}  {value}");
    for (label, text) in [("why:", reason), ("do: ", advice)] {
        let Some(text) = text else { continue };
        let text = printable(&without_error_codes(text), usize::MAX);
        let text = wrap(&text, column + 5, width);
        let text = text.get(column + 5..).unwrap_or_default();
        out += &format!("{:column$}{DIM}{label} {DIM:#}{text}", "");
    }
    out
}

/// Formats a size that may be unknown.
pub(super) fn memory(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".into(), size)
}

/// Returns the name of a user, or the uid without one.
pub(super) fn user(uid: u32) -> String {
    let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    known.map_or_else(|| uid.to_string(), |user| printable(&user.name, NAME_MAX))
}

/// Tags of a process, shown in brackets behind its command.
pub(super) struct ProcessTags(Vec<(Style, String)>);

impl ProcessTags {
    /// Returns the state of a process and the decision about it.
    pub(super) fn of(process: &ProcessInfo) -> ProcessTags {
        let mut tags = ProcessTags::state(process);
        if let Some(tag) = process.decision.as_ref().and_then(decision_tag) {
            let style = if process.due { WARN } else { NOTE };
            tags.put(style, tag);
        }
        tags
    }

    /// Returns the state of a process, without the decision about it.
    pub(super) fn state(process: &ProcessInfo) -> ProcessTags {
        let mut tags = ProcessTags(Vec::new());
        if process.session_root {
            tags.put(GOOD, process.agent.as_deref().unwrap_or("agent"));
        }
        if process.detached {
            tags.put(NOTE, "detached");
        }
        if process.zombie {
            tags.put(DIM, "zombie");
        }
        if let Some(rule) = &process.boundary {
            tags.put(NOTE, &format!("boundary: {rule}"));
        }
        tags
    }

    fn put(&mut self, style: Style, tag: &str) {
        self.0.push((style, printable(tag, 2 * NAME_MAX)));
    }

    /// Returns their length in characters.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|(_, tag)| tag.chars().count() + 3).sum()
    }

    /// Returns the tags, each with a space before it.
    pub(super) fn text(&self) -> String {
        let bracketed = |(style, tag): &(Style, String)| format!(" {style}[{tag}]{style:#}");
        self.0.iter().map(bracketed).collect()
    }
}

/// Returns a tag for the decision, `None` if it only follows from the living agent.
fn decision_tag(decision: &DecisionInfo) -> Option<&str> {
    match (&*decision.decision, &*decision.reason) {
        ("keep", "root_alive" | "detached") => None,
        _ => Some(&decision.text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_cuts_to_the_width() {
        assert_eq!(fit(&"x".repeat(90), 40, 200, Some(80)).chars().count(), 40);
        assert_eq!(fit("short", 40, 200, Some(80)), "short");
        assert_eq!(
            fit(&"x".repeat(90), 79, 200, Some(80)).chars().count(),
            LEAST + 1
        );
        assert_eq!(fit(&"x".repeat(90), 0, 72, None).chars().count(), 73);
    }

    #[test]
    fn tags_show_state_and_decision() {
        let process = |decision: &str, reason: &str| ProcessInfo {
            detached: true,
            decision: Some(DecisionInfo {
                decision: decision.into(),
                reason: reason.into(),
                text: "kept: a user keeps it".into(),
                ..DecisionInfo::default()
            }),
            ..ProcessInfo::default()
        };
        let text = |process: &ProcessInfo| {
            let tags = ProcessTags::of(process).text();
            anstream::adapter::strip_str(&tags).to_string()
        };
        assert_eq!(text(&process("keep", "detached")), " [detached]");
        assert_eq!(
            text(&process("keep", "kept_by_user")),
            " [detached] [kept: a user keeps it]"
        );
    }
}
