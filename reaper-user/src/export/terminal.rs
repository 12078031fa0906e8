//! Writes to standard output and standard error for people. All such output passes through here.
//!
//! Names, arguments and paths come from processes, files and other users. Control characters in them control the
//! terminal, and some characters hide or reorder text. This module escapes all of them. Callers must still escape each
//! value with [`printable`], because only they can distinguish their own line breaks from those in a name.

use std::fmt::Arguments;
use std::io::{self, BufWriter, Stderr, Stdout, Write};

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};
use terminal_size::{Width, terminal_size_of};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use super::journald;
use super::text::{is_unprintable, printable};

/// Smallest width of wrapped text and of a last column, in characters. A narrower terminal wraps it itself.
pub const LEAST: usize = 12;

/// Writer that passes colours (SGR sequences), line breaks and tabs, and escapes everything else that controls a
/// terminal.
pub struct TerminalWriter<W: Write>(W);

/// Sets whether all later output has colours. `None`: on a terminal, unless `NO_COLOR` is set.
pub fn set_colors(always: Option<bool>) {
    let choice = match always {
        None => ColorChoice::Auto,
        Some(true) => ColorChoice::Always,
        Some(false) => ColorChoice::Never,
    };
    choice.write_global();
}

/// Returns whether standard error has colours.
pub fn colors_on_stderr() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// Returns buffered standard output that escapes control characters.
///
/// Removes colours as set by [`set_colors`].
pub fn stdout() -> TerminalWriter<BufWriter<AutoStream<Stdout>>> {
    TerminalWriter(BufWriter::new(anstream::stdout()))
}

/// Returns the width of the terminal in columns, `None` if stdout is not a terminal: then nothing is cut.
pub fn width() -> Option<usize> {
    let (Width(columns), _) = terminal_size_of(io::stdout())?;
    Some(columns.into())
}

/// Wraps a text at spaces to the terminal's width, with each line indented. A longer word stays whole. Escapes nothing.
pub fn wrap(text: &str, indent: usize, width: Option<usize>) -> String {
    let room = width.map_or(usize::MAX, |width| width.saturating_sub(indent).max(LEAST));
    let columns = |text: &str| {
        strip_str(text)
            .map(|part| part.chars().count())
            .sum::<usize>()
    };
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if columns(line) + 1 + columns(word) <= room => *line += &format!(" {word}"),
            _ => lines.push(word.into()),
        }
    }
    let indented = |line: String| format!("{:indent$}{line}\n", "");
    lines.into_iter().map(indented).collect()
}

/// Returns lines as they are written to standard error: wrapped if it is a terminal. A log or a pipe gets each line whole.
fn for_stderr(text: &str) -> String {
    let width = terminal_size_of(io::stderr()).map(|(Width(columns), _)| columns.into());
    text.lines().map(|line| wrap(line, 0, width)).collect()
}

/// Writes a text with colours to standard error, with each line wrapped to the width of a terminal.
pub fn print_error(text: &str) {
    // A failure cannot be reported anywhere.
    let _ = stderr().write_all(for_stderr(text).as_bytes());
}

/// Returns unbuffered standard error for text with colours. It escapes and removes colours as [`stdout`] does.
fn stderr() -> TerminalWriter<AutoStream<Stderr>> {
    TerminalWriter(anstream::stderr())
}

/// Writes text to standard output as [`stdout`] does (escaped, colours only on a terminal), and flushes it.
///
/// # Errors
/// Standard output cannot be written to.
pub fn print(text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_ref())?;
    out.flush()
}

/// Returns text as [`print`] would write it, for another program that shows it on this terminal.
///
/// # Errors
/// Never, as memory can be written to.
#[cfg(target_os = "linux")]
pub fn for_terminal(text: &[u8]) -> io::Result<Vec<u8>> {
    let choice = AutoStream::choice(&io::stdout());
    let mut out = TerminalWriter(AutoStream::new(Vec::new(), choice));
    out.write_all(text)?;
    Ok(out.0.into_inner())
}

/// Formats a message as `format!` does, and writes it as one line to standard error, wrapped only on a terminal. Line breaks
/// and other control characters in it are escaped.
macro_rules! message {
    ($($part:tt)*) => {
        $crate::export::write_message(format_args!($($part)*))
    };
}
pub(crate) use message;

/// Writes one line to standard error, for [`message`].
pub fn write_message(message: Arguments<'_>) {
    let prefix = match journald::is_journal(io::stderr()) {
        true => journald::prefix(Level::ERROR),
        false => "",
    };
    let line = printable(&without_error_codes(&message.to_string()), usize::MAX);
    // A failure cannot be reported anywhere.
    let _ = io::stderr().write_all(for_stderr(&format!("{prefix}{line}")).as_bytes());
}

/// Standard error for the log. Each call of `write` is one line, which is how `tracing_subscriber::fmt` calls it.
pub struct Log {
    /// Start of the line, for the systemd journal.
    prefix: &'static str,
}

/// Creates a [`Log`] for each line of the log.
pub struct MakeLog {
    /// Whether the systemd journal gets the lines. Then they begin with a priority.
    pub for_journal: bool,
}

impl MakeWriter<'_> for MakeLog {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        Log { prefix: "" }
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> Log {
        match self.for_journal {
            true => Log {
                prefix: journald::prefix(*metadata.level()),
            },
            false => self.make_writer(),
        }
    }
}

impl<W: Write> Write for TerminalWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(escaped(bytes, true).as_bytes())?;
        Ok(bytes.len())
    }

    /// Formats the whole text before it escapes it, because a colour sequence may span several parts.
    fn write_fmt(&mut self, text: Arguments<'_>) -> io::Result<()> {
        self.write_all(text.to_string().as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let line = without_error_codes(&escaped(line, false));
        let line = format!("{}{line}", self.prefix);
        io::stderr().write_all(for_stderr(&line).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Removes the codes of the operating system from a text: `: No space left on device (os error 28)` becomes
/// `: no space left on device`.
pub fn without_error_codes(text: &str) -> String {
    const MARK: &str = " (os error ";
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(MARK) {
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        match after[digits..].strip_prefix(')') {
            Some(tail) if digits > 0 => {
                let cause = before.rfind(": ").map_or(0, |at| at + 2);
                let (start, cause) = before.split_at(cause);
                shown += start;
                let mut letters = cause.chars();
                shown.extend(letters.next().map(|first| first.to_ascii_lowercase()));
                shown += letters.as_str();
                rest = tail;
            }
            _ => {
                shown += before;
                shown += MARK;
                rest = after;
            }
        }
    }
    shown + rest
}

/// Escapes everything that controls a terminal, except colours and tabs, and except line breaks if `lines` is set.
fn escaped(bytes: &[u8], lines: bool) -> String {
    let mut shown = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        let mut rest = chunk.valid();
        while let Some(at) = rest.find(is_unprintable) {
            let (plain, tail) = rest.split_at(at);
            shown += plain;
            let allowed = match tail.as_bytes()[0] {
                b'\n' if lines => 1,
                b'\t' => 1,
                _ => sgr_length(tail),
            };
            let mut after = tail[allowed..].chars();
            match allowed {
                0 => shown.extend(after.next().into_iter().flat_map(char::escape_default)),
                _ => shown += &tail[..allowed],
            }
            rest = after.as_str();
        }
        shown += rest;
        shown.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    shown
}

/// Returns the length of the SGR sequence at the start of a text, or 0 without one.
fn sgr_length(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\x1b[") else {
        return 0;
    };
    let end = parameters.find(|c: char| !c.is_ascii_digit() && c != ';');
    match end {
        Some(end) if parameters[end..].starts_with('m') => end + 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colours_and_line_breaks_pass_unescaped() {
        let mut shown = Vec::new();
        let mut screen = TerminalWriter(&mut shown);
        let name = "\x1b]0;x\x07\u{9b}2J\u{202e}\u{2066}\u{2028}\u{feff}\u{7f}\r\x08\0";
        writeln!(screen, "\x1b[1;31m{name}\x1b[0m\t\x1b[2J\x1b[1").unwrap();
        screen.write_all(b"\x9b2J \x1b[38;5;9mx\xff").unwrap();
        assert_eq!(
            String::from_utf8(shown).unwrap(),
            "\x1b[1;31m\\u{1b}]0;x\\u{7}\\u{9b}2J\\u{202e}\\u{2066}\\u{2028}\\u{feff}\\u{7f}\\r\\u{8}\\u{0}\x1b[0m\t\
             \\u{1b}[2J\\u{1b}[1\n\\x9b2J \x1b[38;5;9mx\\xff"
        );
    }

    #[test]
    fn wrap_breaks_lines_between_words() {
        let text = "one two three four fives a-word-that-is-longer-than-a-line six";
        assert_eq!(
            wrap(text, 2, Some(20)),
            "  one two three four\n  fives\n  a-word-that-is-longer-than-a-line\n  six\n"
        );
        assert_eq!(wrap(text, 2, None), format!("  {text}\n"));
        let coloured = "\x1b[1m\x1b[31mone\x1b[0m \x1b[1mtwo three\x1b[0m";
        assert_eq!(wrap(coloured, 0, Some(13)), format!("{coloured}\n"));
        assert_eq!(wrap("  tip: a similar", 0, Some(12)), "  tip: a\nsimilar\n");
    }

    #[test]
    fn messages_have_no_error_codes() {
        for (text, shown) in [
            (
                "cannot write x: No space left on device (os error 28); free some",
                "cannot write x: no space left on device; free some",
            ),
            ("Permission denied (os error 13)", "permission denied"),
            (
                "a: Is a directory (os error 21), b: Not found (os error 2)",
                "a: is a directory, b: not found",
            ),
            ("plain (os error x) text", "plain (os error x) text"),
            ("", ""),
        ] {
            assert_eq!(without_error_codes(text), shown);
        }
    }

    #[test]
    fn log_line_stays_one_line() {
        assert_eq!(escaped(b"a\nforged\x1b[2J", false), "a\\nforged\\u{1b}[2J");
    }
}
