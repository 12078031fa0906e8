//! Removes from output what differs from run to run, such as pids and times.

use std::path::Path;

use regex::Regex;

use super::transcript::WIDTH;

/// Patterns of values that differ from run to run, each with its label, in this order. All pids have five digits, as the label
/// has.
pub const VALUES: &[(&str, &str)] = &[
    (r"\b2[0-4]\d\d\d\b", "<pid>"),
    (r"<pid>-[0-9a-f]+\b", "<pid>-ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?Z?", "DATE"),
    (r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b", "CLOCK"),
    (r"\b\d+(?:\.\d+)? ?[kMGT]?i?B\b", "SIZE"),
    (
        r"\b\d+(?:\.\d+)? ?(?:[nmuµ]?s|min|m|h|d)\b(?: \d+ ?(?:s|min|m|h)\b)*",
        "TIME",
    ),
    (
        r"\b(?:\d+) (known|read|processes found|events read)\b",
        "N $1",
    ),
    (r"\b(reaper) \d+\.\d+\.\d+", "$1 VERSION"),
    (r"listens on \d+", "listens on PORT"),
    // The engine reads it at any time.
    ("(?:, )?systemd unit: [^,]*", ""),
    // The test program, whose path may be too long for the line.
    (r"^(process|lineage) +1 .*", "$1   1 init"),
    (
        r"DIR[^ ]+ test-process (?:sleep )?(launcher|canary).*",
        "$1",
    ),
    ("<pid> +TIME +SIZE", "<pid>    TIME      SIZE"),
    // Processes may exit before their memory is read. A long time moves the end of the line out of the terminal.
    (
        r"[,;] \d+ exited before (its|their) memory could be read",
        "",
    ),
    (r"[,;] SIZE(?: RSS)?(?: and SIZE swap)? freed", ""),
];

/// Values in the output of commands that differ from run to run.
pub struct Mask {
    dir: String,
    values: Vec<(Regex, &'static str)>,
}

impl Mask {
    /// Replaces the directory of the test and these values.
    pub fn new(dir: &Path, values: &[(&str, &'static str)]) -> Mask {
        let mut mask = Mask {
            dir: dir.display().to_string(),
            values: Vec::new(),
        };
        values
            .iter()
            .for_each(|(text, label)| mask.add(text, label));
        mask
    }

    /// Replaces further values by a label.
    pub fn add(&mut self, text: &str, label: &'static str) {
        self.values.push((pattern(text), label));
    }

    /// Returns output of a terminal without these values. Wraps its lines again, because the values have different
    /// lengths.
    pub fn wrapped(&self, output: &str) -> String {
        let lines = joined(output).into_iter();
        lines
            .map(|(hang, line)| wrapped(self.line(&line).trim_end(), &self.line(&hang)))
            .collect()
    }

    /// Returns a line without these values.
    pub fn line(&self, line: &str) -> String {
        let line = line.replace(&self.dir, "DIR");
        let values = self.values.iter();
        values.fold(line, |line, (pattern, label)| {
            pattern.replace_all(&line, *label).into_owned()
        })
    }
}

/// Compiles a pattern. The crate is built without Unicode's classes, so word boundaries and digits are those of ASCII.
pub fn pattern(text: &str) -> Regex {
    let ascii = text.replace(r"\b", r"(?-u:\b)").replace(r"\d", "[0-9]");
    Regex::new(&ascii).expect("a pattern")
}

/// Joins the lines that a command has wrapped at the terminal's width. Returns each with the beginning of its second line.
///
/// A line continues the previous one if its first word did not fit there, and starts below a word in the same style. Both may
/// begin with the same pid.
fn joined(text: &str) -> Vec<(String, String)> {
    let (row, clock) = (pattern(r"^ *\d+ +"), pattern(r"^\d\d:\d\d:"));
    // Such as `lineage   1 init` in an explanation.
    let field = pattern("^[a-z]+ {2,}");
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut before = (String::new(), None);
    for raw in text.lines() {
        let style = raw.split_once('m').filter(|_| raw.starts_with('\x1b'));
        let style = style.map(|(style, _)| style);
        let line = anstream::adapter::strip_str(raw).to_string();
        let pid = |line| row.find(line).map_or("", |pid| pid.as_str().trim());
        let start = row.find(&line).filter(|_| pid(&line) == pid(&before.0));
        let words = line[start.map_or(0, |start| start.end())..].trim_start();
        let hang = &line[..line.len() - words.len()];
        let word = words.split(' ').next().unwrap_or_default();
        let width = before.0.chars().count() + 1 + word.chars().count();
        let is_below_word = format!(" {}", before.0)
            .get(hang.len()..)
            .is_some_and(|rest| rest.starts_with(' ') && !rest[1..].starts_with(' '));
        let is_same = style == before.1 || style.is_none() && !hang.is_empty();
        let is_full = width > WIDTH && !word.is_empty() && !before.0.ends_with('…');
        let is_field = field.is_match(&line);
        let is_new = is_field || clock.is_match(words) || start.is_none() && row.is_match(&line);
        let continues = is_full && is_same && is_below_word && !is_new;
        match lines.last_mut().filter(|_| continues) {
            Some((first, last)) => {
                *first = hang.to_owned();
                *last += &format!(" {words}");
            }
            None => lines.push((String::new(), line.clone())),
        }
        before = (line, style);
    }
    lines
}

/// Wraps a line at spaces. The second line and the following ones begin with `hang`.
fn wrapped(line: &str, hang: &str) -> String {
    let mut out = String::new();
    let mut rest: Vec<char> = line.chars().collect();
    let mut start = rest.iter().take_while(|c| **c == ' ').count();
    while rest.len() > WIDTH {
        let at = (start..=WIDTH).rev().find(|at| rest[*at] == ' ');
        let Some(at) = at.or_else(|| (WIDTH..rest.len()).find(|at| rest[*at] == ' ')) else {
            break;
        };
        out.extend(&rest[..at]);
        out.push('\n');
        let words = rest[at..].iter().skip_while(|c| **c == ' ');
        rest = hang.chars().chain(words.copied()).collect();
        start = hang.chars().count();
    }
    out.extend(rest);
    out + "\n"
}
