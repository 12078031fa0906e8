//! One pattern over bytes: a glob or a regex, compiled once.

use globset::GlobBuilder;
use regex::bytes::{Regex, RegexBuilder};

/// Most bytes of comm that the kernel keeps.
pub const COMM_MAX: usize = 15;

/// A compiled pattern. Bytes need not be UTF-8.
#[derive(Clone)]
pub struct Pattern {
    text: Box<str>,
    test: Test,
    name: Option<Box<[u8]>>,
    /// It was written as a regex.
    regex: bool,
}

#[derive(Clone)]
enum Test {
    Exact(Box<[u8]>),
    /// `/**/x/y` and its like: an absolute path with this tail, which begins with a slash.
    AbsoluteTail(Box<[u8]>),
    /// `**/x/y`: the same for any path, which may be the tail itself.
    Tail(Box<[u8]>),
    Regex(Regex),
}

/// Why a text is no pattern; reads as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatternError(String);

impl std::fmt::Display for PatternError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PatternError {}

impl Pattern {
    /// A glob over comm.
    ///
    /// # Errors
    /// It is no glob, or a name so long that the kernel would have cut it.
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

    /// A glob over the path of the executable. `*` stops at a slash and `**/` does not.
    ///
    /// # Errors
    /// It is no glob, or one that no absolute path can match.
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

    /// A glob over the path of a script as it was given, which may be relative: `/**/x` is an absolute
    /// one. `*` stops at a slash and `**/` does not.
    ///
    /// # Errors
    /// It is no glob.
    pub fn script(glob: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: glob.into(),
            test: path_test(glob)?,
            name: None,
            regex: false,
        })
    }

    /// A glob over an option with its value. `*` crosses everything.
    ///
    /// # Errors
    /// It is no glob, or one that no option can match.
    pub fn option(glob: &str) -> Result<Pattern, PatternError> {
        if !glob.starts_with(['-', '{', '[', '*', '?', '\\']) {
            return Err(PatternError(format!(
                "it is matched against an option, which starts with `-`: \"--{glob}\"; `args` matches the other arguments"
            )));
        }
        Pattern::argv(glob)
    }

    /// A glob over the command line, or over one argument. `*` crosses everything.
    ///
    /// # Errors
    /// It is no glob.
    pub fn argv(glob: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: glob.into(),
            test: glob_test(glob, false)?,
            name: None,
            regex: false,
        })
    }

    /// This text and no other.
    pub(super) fn exactly(text: &str) -> Pattern {
        Pattern {
            text: text.into(),
            test: Test::Exact(text.as_bytes().into()),
            name: None,
            regex: false,
        }
    }

    /// A glob over a variable of the environment, `NAME=value`. `*` crosses everything.
    ///
    /// # Errors
    /// It is no glob, or one that no variable can match.
    pub fn marker(glob: &str) -> Result<Pattern, PatternError> {
        if is_plain(glob) && !glob.contains('=') {
            return Err(PatternError(format!(
                "it is matched against the whole variable: write \"{glob}=*\", or with its value"
            )));
        }
        Pattern::argv(glob)
    }

    /// A glob over the name of a systemd unit.
    ///
    /// # Errors
    /// It is no glob, or has a slash.
    pub fn unit(glob: &str) -> Result<Pattern, PatternError> {
        if glob.contains('/') {
            return Err(PatternError(
                "it is matched against the unit's name, which has no slash".into(),
            ));
        }
        Pattern::argv(glob)
    }

    /// A regex over the command line: of bytes, not anchored, `.` takes newlines too.
    ///
    /// # Errors
    /// It is no regex, or one that is too large.
    pub fn argv_regex(regex: &str) -> Result<Pattern, PatternError> {
        Ok(Pattern {
            text: regex.into(),
            test: Test::Regex(compile(regex)?),
            name: None,
            regex: true,
        })
    }

    /// The one comm, or the one file name of an executable, that this can match, if there is only one.
    pub fn name(&self) -> Option<&[u8]> {
        self.name.as_deref()
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether that is a regex, and no glob.
    pub fn is_regex(&self) -> bool {
        self.regex
    }

    /// Whether it says nothing but one text.
    pub fn is_exact(&self) -> bool {
        matches!(self.test, Test::Exact(_))
    }

    pub fn is_match(&self, bytes: &[u8]) -> bool {
        match &self.test {
            Test::Exact(text) => **text == *bytes,
            Test::AbsoluteTail(tail) => bytes.starts_with(b"/") && bytes.ends_with(tail),
            Test::Tail(tail) => bytes.ends_with(tail) || *bytes == tail[1..],
            Test::Regex(regex) => regex.is_match(bytes),
        }
    }

    /// Whether this matches bytes that begin with `front`. Returns `None` if what follows decides.
    pub(super) fn is_match_from(&self, front: &[u8]) -> Option<bool> {
        let start = match &self.test {
            Test::Exact(text) => text,
            Test::AbsoluteTail(_) => &b"/"[..],
            Test::Tail(_) => b"",
            // A match that ends before the last known byte rests on nothing that follows.
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

    /// Returns a text that all matches of a glob or regex begin with; empty if there is none or it takes more to find.
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

fn is_plain(glob: &str) -> bool {
    !glob.contains(['*', '?', '[', ']', '{', '}', '\\'])
}

/// Most globs over paths can be told by their end alone.
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

fn glob_test(glob: &str, path: bool) -> Result<Test, PatternError> {
    if is_plain(glob) {
        return Ok(Test::Exact(glob.as_bytes().into()));
    }
    let glob = GlobBuilder::new(glob)
        .literal_separator(path)
        .backslash_escape(true)
        .build()
        .map_err(|e| PatternError(e.kind().to_string().to_lowercase()))?;
    // A `*` at the end matches whatever follows.
    let regex = glob.regex();
    let regex = regex.strip_suffix(".*$").unwrap_or(regex);
    // The same without an anchor, which lets the search jump to the first literal.
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
            // A syntax error is drawn over several lines; the last one says what is wrong.
            let text = e.to_string();
            let last = text.lines().last().unwrap_or_default().trim();
            let what = last
                .strip_prefix("error: ")
                .unwrap_or(last)
                .trim_end_matches('.');
            PatternError(what.to_lowercase())
        })
}
