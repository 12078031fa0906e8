//! How processes and sentences are put on a screen, however wide it is.

use std::io;

use anstyle::{AnsiColor, Style};
use nix::unistd::{Uid, User};
use terminal_size::{Width, terminal_size_of};

use super::client::{DIM, span};
use crate::api::{DecisionInfo, ProcessInfo};
use crate::export::printable;

const NOTE: Style = AnsiColor::Cyan.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const GOOD: Style = AnsiColor::Green.on_default();

/// Characters of a name of a rule or an agent.
pub(super) const NAME_MAX: usize = 64;
/// The least of a line that is left to what it is about, on however narrow a screen.
const LEAST: usize = 16;

/// Columns of the screen; none where the output goes somewhere else and nothing has to be cut.
pub(super) fn width() -> Option<usize> {
    let (Width(columns), _) = terminal_size_of(io::stdout())?;
    Some(columns.into())
}

/// As much of a text as there is room for beside `taken` characters, at most `max`.
pub(super) fn fit(text: &str, taken: usize, max: usize, width: Option<usize>) -> String {
    // The sign for what was left out takes a place too.
    let room = width.map_or(max, |width| {
        width.saturating_sub(taken + 1).clamp(LEAST, max.max(LEAST))
    });
    printable(text, room)
}

/// Words in lines of the screen's width, each indented.
pub(super) fn wrap(text: &str, indent: usize, width: Option<usize>) -> String {
    let room = width.map_or(usize::MAX, |width| width.saturating_sub(indent).max(LEAST));
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let long = word.chars().count() + 1;
        match lines.last_mut() {
            Some(line) if line.chars().count() + long <= room => *line += &format!(" {word}"),
            _ => lines.push(word.into()),
        }
    }
    let indented = |line: String| format!("{:indent$}{line}\n", "");
    lines.into_iter().map(indented).collect()
}

/// A user's name, or the number where there is none.
pub(super) fn user(uid: u32) -> String {
    let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    known.map_or_else(|| uid.to_string(), |user| printable(&user.name, NAME_MAX))
}

/// `1 process`, `2 processes`.
pub(super) fn count(n: u64, one: &str, many: &str) -> String {
    match n {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    }
}

/// What there is to say of a process beside its program, in brackets.
pub(super) struct ProcessTags(Vec<(Style, String)>);

impl ProcessTags {
    pub(super) fn of(process: &ProcessInfo) -> ProcessTags {
        let mut marks = ProcessTags(Vec::new());
        if process.session_root {
            marks.put(GOOD, process.agent.as_deref().unwrap_or("agent"));
        }
        for (is, style, mark) in [
            (process.detached, NOTE, "detached"),
            (process.due, WARN, "due"),
            (process.zombie, DIM, "zombie"),
        ] {
            if is {
                marks.put(style, mark);
            }
        }
        if let Some(rule) = &process.boundary {
            marks.put(NOTE, &format!("boundary: {rule}"));
        }
        if let Some(mark) = process.decision.as_ref().and_then(decided) {
            marks.put(NOTE, &mark);
        }
        marks
    }

    fn put(&mut self, style: Style, mark: &str) {
        self.0.push((style, printable(mark, 2 * NAME_MAX)));
    }

    /// Characters that they take.
    pub(super) fn len(&self) -> usize {
        self.0
            .iter()
            .map(|(_, mark)| mark.chars().count() + 3)
            .sum()
    }

    /// Each with a space before it.
    pub(super) fn text(&self) -> String {
        let mark = |(style, mark): &(Style, String)| format!(" {style}[{mark}]{style:#}");
        self.0.iter().map(mark).collect()
    }
}

/// What is decided, where that is not what goes without saying.
fn decided(judged: &DecisionInfo) -> Option<String> {
    let rule = judged.rule.as_deref();
    let named = || rule.unwrap_or(&judged.reason);
    let time = judged.remaining_s.map(span);
    Some(match (judged.decision.as_str(), judged.reason.as_str()) {
        ("keep", "root_alive" | "detached")
        | ("reap", "root_exited" | "forked_after_root_exit") => {
            return None;
        }
        ("wait", "unread") => "undecided".into(),
        ("wait", _) => match time {
            Some(time) => format!("waits {time}: {}", named()),
            None => format!("waits: {}", named()),
        },
        ("keep", "keep_marker") => "kept: REAPER_KEEP".into(),
        ("keep", "kept_by_user") => match time {
            Some(time) => format!("kept by a user for {time}"),
            None => "kept by a user".into(),
        },
        ("keep", "keep_rule" | "other_uid") => format!("kept: {}", named()),
        ("keep", reason) => match rule {
            Some(rule) => format!("kept: {reason}, {rule}"),
            None => format!("kept: {reason}"),
        },
        ("report", _) => format!("report: {}", named()),
        (verdict, _) => format!("{verdict}: {}", named()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_broken_between_words() {
        let text = "one two three four fives a-word-that-is-longer-than-a-line six";
        assert_eq!(
            wrap(text, 2, Some(20)),
            "  one two three four\n  fives\n  a-word-that-is-longer-than-a-line\n  six\n"
        );
        assert_eq!(wrap(text, 2, None), format!("  {text}\n"));
    }

    #[test]
    fn what_does_not_fit_is_cut() {
        assert_eq!(fit(&"x".repeat(90), 40, 200, Some(80)).chars().count(), 40);
        assert_eq!(fit("short", 40, 200, Some(80)), "short");
        assert_eq!(
            fit(&"x".repeat(90), 79, 200, Some(80)).chars().count(),
            LEAST + 1
        );
        assert_eq!(fit(&"x".repeat(90), 0, 72, None).chars().count(), 73);
    }

    #[test]
    fn decisions_have_short_names() {
        let short = |verdict: &str, reason: &str, rule: Option<&str>, for_s| {
            decided(&DecisionInfo {
                decision: verdict.into(),
                reason: reason.into(),
                rule: rule.map(Into::into),
                remaining_s: for_s,
            })
        };
        for (judged, mark) in [
            (short("keep", "root_alive", None, None), None),
            (short("reap", "root_exited", None, None), None),
            (
                short("wait", "rule_delay", Some("asked-for-servers"), Some(600)),
                Some("waits 10m: asked-for-servers"),
            ),
            (short("wait", "unread", Some("x"), None), Some("undecided")),
            (
                short("keep", "keep_rule", Some("gradle"), None),
                Some("kept: gradle"),
            ),
            (
                short("keep", "kept_by_user", None, Some(7200)),
                Some("kept by a user for 2h"),
            ),
            (
                short("keep", "ancestor_kept", Some("pm2"), None),
                Some("kept: ancestor_kept, pm2"),
            ),
            (
                short("reap", "reap_rule", Some("busy-loops"), None),
                Some("reap: busy-loops"),
            ),
        ] {
            assert_eq!(judged.as_deref(), mark);
        }
    }
}
