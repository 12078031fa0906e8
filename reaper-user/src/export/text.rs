//! Formats the parts of a line: memory, processes, durations, command lines.

use std::fmt::Write as _;
use std::time::Duration;

use bytesize::ByteSize;
use nix::sys::signal::Signal;

use super::names::SignalName;
use super::record::{FreedMemory, NestedSummary};
use super::redact;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey};
use reaper_model::value::show_duration;

/// Formats a number with its noun: `1 process`, `2 processes`.
pub fn counted(n: u64, one: &str, many: &str) -> String {
    match n {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    }
}

/// Formats a number of bytes, such as `1.2 GB`.
pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().si().to_string()
}

/// Formats memory by its measure, such as `1.2 GB RSS`, with ` and 30.0 MB swap` if some is swapped out.
///
/// RSS is the resident set size. It counts a page that several processes share once in each of them.
pub fn memory_text(rss: u64, swap: u64) -> String {
    match (rss, swap) {
        (_, 0) => format!("{} RSS", size(rss)),
        (0, _) => format!("{} swap", size(swap)),
        _ => format!("{} RSS and {} swap", size(rss), size(swap)),
    }
}

/// Returns `, 1.2 GB RSS freed`. Empty if no memory was freed and no process is unmeasured.
pub fn freed(memory: &FreedMemory) -> String {
    let FreedMemory {
        rss,
        swap,
        unmeasured,
        ..
    } = *memory;
    let mut text = String::new();
    if rss > 0 || swap > 0 {
        let _ = write!(text, ", {} freed", memory_text(rss, swap));
    }
    if unmeasured > 0 {
        let _ = write!(text, ", {}", unmeasured_count(unmeasured));
    }
    text
}

/// Returns text such as `2 exited before their memory could be read`.
pub fn unmeasured_count(n: u64) -> String {
    let whose = if n == 1 { "its" } else { "their" };
    format!("{n} exited before {whose} memory could be read")
}

/// Numbers of processes of a session or a service, by what became of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessCounts {
    pub reaped: u64,
    pub would_have_reaped: u64,
    pub kept: u64,
    pub failed: u64,
}

impl ProcessCounts {
    /// Returns text such as `3 reaped, 2 kept (REAPER_KEEP=1), 1 failed`. `kept_by` is the text in brackets, if any. Only
    /// the number of reaped processes is shown if it is 0.
    pub fn text(&self, kept_by: &str) -> String {
        let mut text = match (self.would_have_reaped, self.reaped) {
            (0, reaped) => format!("{reaped} reaped"),
            (would, 0) => format!(
                "{} would have been reaped",
                counted(would, "process", "processes")
            ),
            (would, reaped) => format!("{reaped} reaped, {would} would have been"),
        };
        if self.kept > 0 {
            let _ = write!(text, ", {} kept", self.kept);
            if !kept_by.is_empty() {
                let _ = write!(text, " ({kept_by})");
            }
        }
        if self.failed > 0 {
            let _ = write!(text, ", {} failed", self.failed);
        }
        text
    }
}

/// Returns a text with an uppercase first letter.
pub fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(char::to_uppercase).into_iter().flatten();
    first.chain(letters).collect()
}

/// Returns text such as `, its tree has 1.2 GB RSS`.
pub(super) fn tree_memory(memory: TreeMemory) -> String {
    format!(", its tree has {}", memory_text(memory.rss, memory.swap))
}

/// Returns `; nested sessions remain: 10906 (2 kept, 1 waiting)`; empty without nested sessions.
pub(super) fn remaining_sessions(nested: &[NestedSummary]) -> String {
    let describe = |session: &NestedSummary| {
        let kept = (session.kept > 0).then(|| format!("{} kept", session.kept));
        let waiting = (session.waiting > 0).then(|| format!("{} waiting", session.waiting));
        let counts: Vec<_> = kept.into_iter().chain(waiting).collect();
        match counts.is_empty() {
            true => session.root_pid.to_string(),
            false => format!("{} ({})", session.root_pid, counts.join(", ")),
        }
    };
    match nested {
        [] => String::new(),
        all => {
            let all: Vec<_> = all.iter().map(describe).collect();
            format!("; nested sessions remain: {}", all.join(", "))
        }
    }
}

/// Returns the short form of a process, such as `bash (42)`. Without a name it is the pid, without a key
/// `an unknown process`.
pub(super) fn process_label(key: Option<ProcessKey>, command: &[u8]) -> String {
    let command = printable(&String::from_utf8_lossy(command), 16);
    match key {
        Some(key) if command.is_empty() => key.pid.to_string(),
        Some(key) => format!("{command} ({})", key.pid),
        None => "an unknown process".into(),
    }
}

pub(super) fn forked_by(parent: Option<ProcessKey>) -> String {
    parent
        .map(|key| format!("by {}", key.pid))
        .unwrap_or_default()
}

/// Returns an exit status for people: `exit 3`, `exit 143, as after SIGTERM`, `SIGTERM`.
pub fn exit_status_text(status: ExitStatus) -> String {
    match status {
        ExitStatus::Exited(code) => exit_code_text(code),
        ExitStatus::Signalled {
            signal,
            core: false,
        } => SignalName(signal).to_string(),
        ExitStatus::Signalled { signal, core: true } => {
            format!("{} (core dumped)", SignalName(signal))
        }
        ExitStatus::Unknown => "exit status unknown".into(),
    }
}

/// Returns an exit code for people. Shells add 128 to the number of the signal that ended a command.
pub fn exit_code_text(code: u8) -> String {
    let signal = code.checked_sub(128).map(i32::from);
    match signal.map(Signal::try_from) {
        Some(Ok(signal)) => format!("exit {code}, as after {signal}"),
        _ => format!("exit {code}"),
    }
}

/// Formats whole seconds with their two largest units, such as `9m 59s` or `3d 4h`.
pub fn time(seconds: u64) -> String {
    let step = match seconds {
        0..3600 => 1,
        3600..86_400 => 60,
        _ => 3600,
    };
    show_duration(Duration::from_secs(seconds - seconds % step))
}

/// Formats a duration in nanoseconds: from 10 s on as [`time`] does, below with one unit, such as `1.5ms` or `5s`.
pub fn duration(ns: u64) -> String {
    let (value, unit) = match ns as f64 {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "µs"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns if ns < 1e10 => (ns / 1e9, "s"),
        _ => return time(ns / 1_000_000_000),
    };
    let digits = if value < 10.0 { 1 } else { 0 };
    let value = format!("{value:.digits$}");
    format!("{}{unit}", value.strip_suffix(".0").unwrap_or(&value))
}

/// Returns the command line with secrets redacted, in about `max` bytes. Without arguments, returns `[comm]`.
pub fn command_line(image: &Image, max: usize) -> String {
    let mut line = String::new();
    for arg in redact::arguments(image.args()) {
        let space = if line.is_empty() { "" } else { " " };
        let _ = write!(line, "{space}{}", String::from_utf8_lossy(&arg));
        if line.len() > max {
            line.truncate(line.floor_char_boundary(max));
            line.push('…');
            break;
        }
    }
    if line.is_empty() {
        line = format!("[{}]", String::from_utf8_lossy(&image.comm));
    }
    line
}

/// Returns text such as `: 3 processes`; empty for one process or none.
pub(super) fn process_count(processes: usize) -> String {
    match processes {
        0 | 1 => String::new(),
        n => format!(": {n} processes"),
    }
}

/// Returns whether a character could control a terminal, or hide or reorder the text around it.
pub(super) fn is_unprintable(c: char) -> bool {
    let invisible = matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || invisible
}

/// Returns text that is safe to show on a terminal: escaped, and with at most `max` characters of the original. An
/// ellipsis follows if it is cut.
pub fn printable(text: &str, max: usize) -> String {
    let mut shown = String::new();
    for (n, c) in text.chars().enumerate() {
        if n >= max {
            shown.push('…');
            break;
        }
        if is_unprintable(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_above_128_are_named() {
        for (code, expected) in [
            (3, "exit 3"),
            (128, "exit 128"),
            (143, "exit 143, as after SIGTERM"),
            (255, "exit 255"),
        ] {
            assert_eq!(exit_code_text(code), expected);
        }
    }

    #[test]
    fn printable_text_is_escaped_and_truncated() {
        assert_eq!(
            printable("a\nb\x1b[31mc\u{202e}", 40),
            "a\\nb\\u{1b}[31mc\\u{202e}"
        );
        assert_eq!(printable("abcdef", 3), "abc…");
    }

    #[test]
    fn counts_of_zero_are_left_out() {
        let text = |counts: [u64; 4], kept_by: &str| {
            let [reaped, would_have_reaped, kept, failed] = counts;
            let counts = ProcessCounts {
                reaped,
                would_have_reaped,
                kept,
                failed,
            };
            counts.text(kept_by)
        };
        assert_eq!(text([0; 4], ""), "0 reaped");
        assert_eq!(
            text([3, 0, 2, 1], "a, b"),
            "3 reaped, 2 kept (a, b), 1 failed"
        );
        assert_eq!(
            text([0, 1, 1, 0], ""),
            "1 process would have been reaped, 1 kept"
        );
        assert_eq!(text([2, 1, 0, 0], ""), "2 reaped, 1 would have been");
    }

    #[test]
    fn durations_have_one_form() {
        for (ns, shown) in [
            (999, "999ns"),
            (48_200, "48µs"),
            (1_500_000, "1.5ms"),
            (2_000_000, "2ms"),
            (1_500_000_000, "1.5s"),
            (5_002_000_000, "5s"),
            (59_900_000_000, "59s"),
            (599_000_000_000, "9m 59s"),
        ] {
            assert_eq!(duration(ns), shown);
        }
        for (seconds, shown) in [
            (0, "0s"),
            (119, "1m 59s"),
            (600, "10m"),
            (7200, "2h"),
            (7500, "2h 5m"),
            (86_399, "23h 59m"),
            (40 * 86_400 + 3 * 3600 + 59, "40d 3h"),
        ] {
            assert_eq!(time(seconds), shown);
        }
    }

    #[test]
    fn memory_names_its_measure() {
        for (rss, swap, shown) in [
            (0, 0, "0 B RSS"),
            (1_200_000_000, 0, "1.2 GB RSS"),
            (3_000_000, 30_000_000, "3.0 MB RSS and 30.0 MB swap"),
            (0, 30_000_000, "30.0 MB swap"),
        ] {
            assert_eq!(memory_text(rss, swap), shown);
        }
    }
}
