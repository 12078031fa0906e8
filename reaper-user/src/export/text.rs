//! How what a line is made of is put into words.

use std::fmt::Write as _;

use bytesize::ByteSize;

use super::names::SignalName;
use super::record::{FreedMemory, NestedSummary, ProcessRef};
use super::redact;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey};

/// Characters of a command line that are shown.
const COMMAND_MAX: usize = 48;

/// `, 1.2 GiB given back`, and what is not in that; empty where nobody has ended.
pub(super) fn freed(memory: &FreedMemory) -> String {
    let FreedMemory {
        rss,
        swap,
        unmeasured: unread,
        ..
    } = *memory;
    let mut text = String::new();
    let whole = rss.saturating_add(swap);
    if whole > 0 {
        let _ = write!(text, ", {} given back", ByteSize::b(whole));
    }
    if swap > 0 {
        let _ = write!(text, " ({} of it swapped out)", ByteSize::b(swap));
    }
    if unread > 0 {
        let _ = write!(text, ", {unread} too quick to weigh");
    }
    text
}

/// `, its tree has 1.2 GiB of memory`.
pub(super) fn held(memory: TreeMemory) -> String {
    let TreeMemory { rss, swap } = memory;
    let mut text = format!(", its tree has {} of memory", ByteSize::b(rss));
    if swap > 0 {
        let _ = write!(text, " and {} swapped out", ByteSize::b(swap));
    }
    text
}

/// Returns `, the rest belongs to 10906, 2 kept, 1 waits` for what is left of nested sessions; empty if there are none.
pub(super) fn rest(nested: &[NestedSummary]) -> String {
    let of_each = |rest: &NestedSummary| {
        let kept = match rest.kept {
            0 => String::new(),
            n => format!(", {n} kept"),
        };
        let waiting = match rest.waiting {
            0 => String::new(),
            1 => ", 1 waits".into(),
            n => format!(", {n} wait"),
        };
        format!("to {}{kept}{waiting}", rest.root_pid)
    };
    match nested {
        [] => String::new(),
        all => {
            let each: Vec<_> = all.iter().map(of_each).collect();
            format!(", the rest belongs {}", each.join(", and "))
        }
    }
}

/// A process where there is little room.
pub(super) fn process_label(key: Option<ProcessKey>, command: &[u8]) -> String {
    let command = printable(&String::from_utf8_lossy(command), 16);
    match key {
        Some(key) if command.is_empty() => key.pid.to_string(),
        Some(key) => format!("{command} ({})", key.pid),
        None => "an unknown process".into(),
    }
}

pub(super) fn by(parent: Option<ProcessKey>) -> String {
    parent
        .map(|key| format!("by {}", key.pid))
        .unwrap_or_default()
}

/// How a process ended.
pub fn exit_status_text(ended: ExitStatus) -> String {
    match ended {
        ExitStatus::Exited(code) => format!("exit {code}"),
        ExitStatus::Signalled {
            signal,
            core: false,
        } => SignalName(signal).to_string(),
        ExitStatus::Signalled { signal, core: true } => {
            format!("{} (core dumped)", SignalName(signal))
        }
        ExitStatus::Unknown => "nobody saw how".into(),
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

pub(super) fn command(who: &ProcessRef) -> String {
    printable(&command_line(&who.image, 4 * COMMAND_MAX), COMMAND_MAX)
}

/// The command line without its secrets, of about `max` bytes; in brackets the kernel's name where there is none.
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

/// How many processes something was about, where that is not the one.
pub(super) fn more(processes: usize) -> String {
    match processes {
        0 | 1 => String::new(),
        n => format!(": {n} processes"),
    }
}

/// Whether a character could command a terminal, or hide or reorder the text around it.
pub(super) fn is_unprintable(c: char) -> bool {
    let invisible = matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || invisible
}

/// What may be shown on a terminal: no control characters, and not more than `max` characters.
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
