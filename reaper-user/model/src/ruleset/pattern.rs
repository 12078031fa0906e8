//! A glob or regex over bytes.

use globset::GlobBuilder;
use regex::bytes::{Regex, RegexBuilder};

/// Length of a comm in bytes (`TASK_COMM_LEN` without the final NUL); the kernel cuts longer names.
pub const COMM_MAX: usize = 15;

/// A compiled pattern. Bytes need not be UTF-8.
#[derive(Clone)]
pub struct Pattern {
    text: Box<str>,
    test: Test,
    name: Option<Box<[u8]>>,
    /// Whether `text` is a regex.
    regex: bool,
}

#[derive(Clone)]
enum Test {
    Exact(Box<[u8]>),
    /// `/**/x/y`: an absolute path that ends with `/x/y`.
    AbsoluteTail(Box<[u8]>),
    /// `**/x/y`: any path that ends with `/x/y`, or `x/y` itself.
    Tail(Box<[u8]>),
    Regex(Regex),
}

/// Reason why a text is not a valid pattern, for the end of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatternError(String);

impl std::fmt::Display for PatternError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PatternError {}

impl Pattern {
    /// Compiles a glob over comm.
    ///
    /// # Errors
    /// The glob is invalid, or it is a name longer than [`COMM_MAX`].
    pub fn comm(glob: &str) -> Result<Pattern, PatternError> {
        let plain = is_plain(glob);
        if plain && glob.len() > COMM_MAX {
            let cut = &glob[..glob.floor_char_boundary(COMM_MAX)];
            return Err(PatternError(format!(
                "the kernel keeps {COMM_MAX} bytes of a name: write {cut:?}, or match `exe`"
            )));
        }
        let name = plain.then(|| glob.as_bytes().into());
        Ok(Pattern {
            text: glob.into(),
            test: glob_test(glob, false)?,
            name,
            regex: false,
        })
    }

    /// Compiles a glob over the path of the executable. `*` stops at a slash, `**/` does not.
    ///
    /// # Errors
    /// The glob is invalid, or no absolute path can match it.
    pub fn exe(glob: &str) -> Result<Pattern, PatternError> {
        if !["/", "**", "{"].iter().any(|start| glob.starts_with(start)) {
            let tail = glob.trim_start_matches('~').trim_start_matches('/');
            return Err(PatternError(format!(
                "it is matched against the whole path, so start it with `/` or `**/`: \"**/{tail}\""
            )));
        }
        let last = glob.rsplit('/').next().unwrap_or_default();
        // A brace or a bracket may have been opened before the last slash.
        let keyed = is_plain(last) && !last.is_empty() && !glob.contains(['{', '[', '\\']);
        let test = path_test(glob)?;
        Ok(Pattern {
            text: glob.into(),
            test,
            name: keyed.then(|| last.as_bytes().into()),
            regex: false,
        })
    }

    /// Compiles a glob over the path of a script, which may be relative. `*` stops at a slash, `**/` does not.
    ///
    /// `/**/x` matches absolute paths only.
    ///
    /// # Errors
    /// The glob is invalid.
    pub fn script(glob: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: glob.into(),
            test: path_test(glob)?,
            name: None,
            regex: false,
        })
    }

    /// Compiles a glob over an option with its value. `*` matches any characters.
    ///
    /// # Errors
    /// The glob is invalid, or no option can match it.
    pub fn option(glob: &str) -> Result<Pattern, PatternError> {
        if !glob.starts_with(['-', '{', '[', '*', '?', '\\']) {
            return Err(PatternError(format!(
                "it is matched against an option, which starts with `-`: \"--{glob}\"; `args` matches the other arguments"
            )));
        }
        Pattern::argv(glob)
    }

    /// Compiles a glob over the command line or over one argument. `*` matches any characters.
    ///
    /// # Errors
    /// The glob is invalid.
    pub fn argv(glob: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: glob.into(),
            test: glob_test(glob, false)?,
            name: None,
            regex: false,
        })
    }

    /// Returns a pattern that matches only this text.
    pub(super) fn exactly(text: &str) -> Pattern {
        Pattern {
            text: text.into(),
            test: Test::Exact(text.as_bytes().into()),
            name: None,
            regex: false,
        }
    }

    /// Compiles a glob over a variable of the environment, `NAME=value`. `*` matches any characters.
    ///
    /// # Errors
    /// The glob is invalid, or no variable can match it.
    pub fn marker(glob: &str) -> Result<Pattern, PatternError> {
        if is_plain(glob) && !glob.contains('=') {
            return Err(PatternError(format!(
                "it is matched against the whole variable: write \"{glob}=*\", or with its value"
            )));
        }
        Pattern::argv(glob)
    }

    /// Compiles a glob over the name of a systemd unit.
    ///
    /// # Errors
    /// The glob is invalid or has a slash.
    pub fn unit(glob: &str) -> Result<Pattern, PatternError> {
        if glob.contains('/') {
            return Err(PatternError(
                "it is matched against the unit's name, which has no slash: write only that name"
                    .into(),
            ));
        }
        Pattern::argv(glob)
    }

    /// Compiles a regex over the bytes of the command line. It is not anchored, and `.` matches newlines too.
    ///
    /// # Errors
    /// The regex is invalid or too large.
    pub fn argv_regex(regex: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: regex.into(),
            test: Test::Regex(compile(regex)?),
            name: None,
            regex: true,
        })
    }

    /// Returns the comm or file name of an executable, if the pattern can match only one.
    pub fn name(&self) -> Option<&[u8]> {
        self.name.as_deref()
    }

    /// Returns the text from which the pattern was compiled.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether the text is a regex and not a glob.
    pub fn is_regex(&self) -> bool {
        self.regex
    }

    /// Returns whether the pattern matches only its own text.
    pub fn is_exact(&self) -> bool {
        matches!(self.test, Test::Exact(_))
    }

    /// Returns whether the pattern matches these bytes. A glob must match them as a whole.
    pub fn is_match(&self, bytes: &[u8]) -> bool {
        match &self.test {
            Test::Exact(text) => **text == *bytes,
            Test::AbsoluteTail(tail) => bytes.starts_with(b"/") && bytes.ends_with(tail),
            Test::Tail(tail) => bytes.ends_with(tail) || *bytes == tail[1..],
            Test::Regex(regex) => regex.is_match(bytes),
        }
    }

    /// Returns whether the pattern matches bytes that begin with `front`, `None` if that depends on what follows.
    pub(super) fn matches_prefix(&self, front: &[u8]) -> Option<bool> {
        let start = match &self.test {
            Test::Exact(text) => text,
            Test::AbsoluteTail(_) => &b"/"[..],
            Test::Tail(_) => b"",
            // A match that ends before the last known byte does not depend on the bytes that follow.
            Test::Regex(regex)
                if regex
                    .shortest_match(front)
                    .is_some_and(|end| end < front.len()) =>
            {
                return Some(true);
            }
            Test::Regex(_) => self.literal_start(),
        };
        let may_match = start.starts_with(front)
            || front.starts_with(start) && !matches!(self.test, Test::Exact(_));
        (!may_match).then_some(false)
    }

    /// Returns a text with which all matches of a glob or regex begin, empty if none is easy to find.
    fn literal_start(&self) -> &[u8] {
        let text = match self.text.strip_prefix('^').filter(|_| self.regex) {
            Some(anchored) if !anchored.contains('|') => anchored,
            _ if self.regex => "",
            None | Some(_) => &self.text,
        };
        let is_literal = |c: char| c.is_alphanumeric() || "/ -_=:,@".contains(c);
        let end = text.find(|c| !is_literal(c)).unwrap_or(text.len());
        let (literal, rest) = text.split_at(end);
        // A quantifier makes the character before it optional.
        let is_optional = self.regex && rest.starts_with(['?', '*', '{']);
        let last = literal.chars().next_back().filter(|_| is_optional);
        &literal.as_bytes()[..literal.len() - last.map_or(0, char::len_utf8)]
    }
}

impl serde::Serialize for Pattern {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&self.text)
    }
}

impl std::fmt::Debug for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.text.fmt(f)
    }
}

/// Returns whether a glob has no special characters, so that it matches only its own text.
fn is_plain(glob: &str) -> bool {
    !glob.contains(['*', '?', '[', ']', '{', '}', '\\'])
}

/// Compiles a glob over paths; most need only a comparison of the path's end.
fn path_test(glob: &str) -> Result<Test, PatternError> {
    let tail_after = |start| {
        glob.strip_prefix(start)
            .filter(|tail| tail.starts_with('/') && is_plain(tail))
    };
    match (tail_after("/**"), tail_after("**")) {
        (Some(tail), _) => Ok(Test::AbsoluteTail(tail.as_bytes().into())),
        (_, Some(tail)) => Ok(Test::Tail(tail.as_bytes().into())),
        _ => glob_test(glob, true),
    }
}

/// Compiles a glob. With `path`, `*` and `?` do not match a slash.
fn glob_test(glob: &str, path: bool) -> Result<Test, PatternError> {
    if is_plain(glob) {
        return Ok(Test::Exact(glob.as_bytes().into()));
    }
    let glob = GlobBuilder::new(glob)
        .literal_separator(path)
        .backslash_escape(true)
        .build()
        .map_err(|e| PatternError(e.kind().to_string().to_lowercase()))?;
    // A `*` at the end matches anything, so the search need not go on to the end.
    let regex = glob.regex();
    let regex = regex.strip_suffix(".*$").unwrap_or(regex);
    // Without the anchor at the start, the search can jump to the first literal.
    let regex = match regex.strip_prefix("(?-u)^(?:/?|.*/)") {
        Some(rest) => format!("(?:^|/){rest}"),
        None => regex.into(),
    };
    compile(&regex).map(Test::Regex)
}

fn compile(regex: &str) -> Result<Regex, PatternError> {
    RegexBuilder::new(regex)
        .unicode(false)
        .dot_matches_new_line(true)
        .build()
        .map_err(|e| {
            // The message of a syntax error has several lines; the last one names the cause.
            let text = e.to_string();
            let last = text.lines().last().unwrap_or_default().trim();
            let what = last
                .strip_prefix("error: ")
                .unwrap_or(last)
                .trim_end_matches('.');
            PatternError(what.to_lowercase())
        })
}
