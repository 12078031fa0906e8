//! Errors of a config file. Each problem is one line: `path:line:column: problem`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::export::printable;
use reaper_host::advice::Advised as _;

/// A problem in a config file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Line and column in characters, both from 1; `None` if the problem concerns the whole file.
    pub place: Option<(usize, usize)>,
    pub message: String,
}

/// All problems that make a config unusable. Displayed as one line for each, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub path: PathBuf,
    /// Problems, at least one.
    pub problems: Vec<Diagnostic>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Line breaks in names are escaped, so that each problem stays on its line.
        let path = printable(&self.path.to_string_lossy(), usize::MAX);
        for (nth, Diagnostic { place, message }) in self.problems.iter().enumerate() {
            let message = printable(message, usize::MAX);
            let end = if nth == 0 { "" } else { "\n" };
            match place {
                Some((line, column)) => write!(f, "{end}{path}:{line}:{column}: {message}")?,
                None => write!(f, "{end}{path}: {message}")?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    pub(super) fn unreadable(path: &Path, error: &io::Error) -> ConfigError {
        let message = match error.kind() {
            io::ErrorKind::NotFound => {
                "no such file: check the path, or create it with `reaper config init FILE`".into()
            }
            io::ErrorKind::IsADirectory => "this is a directory: name a TOML file".into(),
            io::ErrorKind::PermissionDenied => {
                "permission denied: make it readable for this user".into()
            }
            _ => format!(
                "cannot read this file: {}",
                error.advised_or("name a TOML file that can be read")
            ),
        };
        ConfigError::of_file(path, message)
    }

    pub(super) fn not_trusted(path: &Path, uid: u32, mode: u32) -> ConfigError {
        let message = format!(
            "users other than root may change this file (owner {uid}, mode {:04o}), and it decides which processes are \
             killed: run `chown root` and `chmod go-w` on it",
            mode & 0o7777
        );
        ConfigError::of_file(path, message)
    }

    pub(super) fn replaceable(path: &Path, directory: &Path, uid: u32, mode: u32) -> ConfigError {
        let message = format!(
            "users other than root may replace this file, because they may change its directory {} (owner {uid}, mode \
             {:04o}), and it decides which processes are killed: run `chown root` and `chmod go-w` on that directory, or \
             move the file",
            directory.display(),
            mode & 0o7777
        );
        ConfigError::of_file(path, message)
    }

    pub(super) fn not_utf8(path: &Path, bytes: &[u8], at: usize) -> ConfigError {
        let good = String::from_utf8_lossy(&bytes[..at]);
        let message = format!(
            "byte 0x{:02x} is not UTF-8: save the file as UTF-8",
            bytes[at]
        );
        ConfigError::at(path, &good, vec![(at, message)])
    }

    pub(super) fn not_toml(path: &Path, text: &str, errors: &[toml::de::Error]) -> ConfigError {
        let message =
            |e: &toml::de::Error| format!("not TOML: {}", e.message().replace('\n', ": "));
        let errors = errors.iter();
        let problems = errors.map(|e| (e.span().map_or(0, |s| s.start), message(e)));
        ConfigError::at(path, text, problems.collect())
    }

    fn of_file(path: &Path, message: String) -> ConfigError {
        ConfigError {
            path: path.into(),
            problems: vec![Diagnostic {
                place: None,
                message,
            }],
        }
    }

    /// Creates the error for problems at byte offsets in `text`.
    pub(super) fn at(path: &Path, text: &str, mut problems: Vec<(usize, String)>) -> ConfigError {
        problems.sort_by_key(|(at, _)| *at);
        let problem = |(at, message)| Diagnostic {
            place: Some(line_and_column(text, at)),
            message,
        };
        ConfigError {
            path: path.into(),
            problems: problems.into_iter().map(problem).collect(),
        }
    }
}

/// Returns the line and the column in characters, both from 1, of the byte offset `at`.
fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(at)];
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}
