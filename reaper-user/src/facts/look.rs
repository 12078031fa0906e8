//! One look at one process for its facts.

#[cfg(target_os = "linux")]
mod registry;
#[cfg(target_os = "linux")]
mod sockets;
#[cfg_attr(target_os = "macos", path = "look/darwin.rs")]
mod subject;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reaper_model::agent::{Pattern, Ruleset};
use reaper_model::event::{Image, Key};
use reaper_model::facts::{Facts, Known, Needs};
pub(super) use subject::Subject;
#[cfg(test)]
pub(super) use subject::{ARGUMENTS_MAX, ENVIRON_MAX};

/// Processor time used up to a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Used {
    /// In ticks of [`TICK_NS`](reaper_model::event::TICK_NS), by all threads.
    pub(super) ticks: u64,
    /// On the monotonic clock, in ns.
    pub(super) at: u64,
}

/// What a look has found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// All but the CPU use, which takes two looks.
    pub(super) facts: Facts,
    pub(super) used: Option<Used>,
}

impl Found {
    pub(super) fn nothing() -> Found {
        Found {
            facts: Facts::unreadable(),
            used: None,
        }
    }
}

/// Reads what is asked for of a process. `root` is where /proc is, `image` what the process is known to run.
pub(super) fn look(
    root: &Path,
    key: Key,
    needs: Needs,
    image: Option<&Arc<Image>>,
    rules: &Ruleset,
) -> Found {
    let Some(mut subject) = Subject::open(root, key) else {
        return Found::nothing();
    };
    let mut found = Found::nothing();
    let facts = &mut found.facts;
    if needs.has(Needs::MARKS) {
        facts.marks = subject.marks(rules.marks());
    }
    if needs.has(Needs::UNIT) {
        facts.unit = subject.unit();
    }
    if needs.has(Needs::SESSION) {
        facts.session = subject.session();
    }
    if needs.has(Needs::INPUT) {
        facts.input = subject.input();
    }
    if needs.has(Needs::INHERITED) {
        facts.inherited = subject
            .inherited()
            .map_or(Known::Unreadable, |all| Known::Is(all.into()));
    }
    if needs.has(Needs::CONVERSATIONS) {
        facts.conversations = subject
            .conversations(key, &rules.conversations())
            .map_or(Known::Unreadable, |all| Known::Is(all.into()));
    }
    if needs.has(Needs::ACTIVITY) {
        let activity = subject.activity().ok().flatten();
        facts.activity = activity.map_or(Known::Unreadable, |all| Known::Is(all.into()));
    }
    if needs.has(Needs::STDIO) {
        facts.stdio = subject.stdio(key).map_or(Known::Unreadable, Known::Is);
    }
    if needs.has(Needs::LISTENING) {
        let listening = subject.listening().ok().flatten();
        facts.listening = listening.map_or(Known::Unreadable, Known::Is);
    }
    if needs.has(Needs::ARGUMENTS)
        && let Some(image) = image
        && let Some(argv) = subject.arguments(image)
    {
        facts.arguments = Known::Is(rules.matched(image, argv));
    }
    if needs.has(Needs::SCRIPT)
        && let Some(image) = image
        && let Some(path) = subject.script(image)
    {
        facts.script = Known::Is(rules.matched_script(image, path));
    }
    if needs.has(Needs::CPU) {
        found.used = subject.used();
    }
    if subject.lives() {
        found
    } else {
        Found::nothing()
    }
}

/// Which patterns some variable of an environment matches. Of one that was cut, what has not been found is
/// not known; but that a process is to be kept, which is what the first pattern says, is enough to know.
fn marks(environ: &[u8], whole: bool, patterns: &[Pattern]) -> Known<u64> {
    let mut found = 0_u64;
    let patterns = &patterns[..patterns.len().min(64)];
    for variable in environ.split(|b| *b == 0).filter(|v| !v.is_empty()) {
        for (n, pattern) in patterns.iter().enumerate() {
            if found & 1 << n == 0 && pattern.is_match(variable) {
                found |= 1 << n;
            }
        }
    }
    let complete = found.count_ones() as usize == patterns.len();
    if whole || complete || found & 1 != 0 {
        Known::Is(found)
    } else {
        Known::Unreadable
    }
}

/// The user's home, by an environment.
fn home(environ: &[u8]) -> Option<PathBuf> {
    let mut variables = environ.split(|b| *b == 0);
    let home = variables.find_map(|variable| variable.strip_prefix(b"HOME="))?;
    Some(OsStr::from_bytes(home).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_by_whole_variables() {
        let patterns = ["REAPER_KEEP=1", "CI=*"].map(|glob| Pattern::argv(glob).unwrap());
        for (environ, whole, expected) in [
            ("A=1\0REAPER_KEEP=1\0", true, Known::Is(1)),
            ("REAPER_KEEP=12\0XREAPER_KEEP=1\0", true, Known::Is(0)),
            ("CI=a\nb\0", true, Known::Is(2)),
            ("", true, Known::Is(0)),
            // What was cut off might say anything.
            ("CI=1\0", false, Known::Unreadable),
            ("A=1\0REAPER_KEEP=1\0", false, Known::Is(1)),
            ("CI=1\0REAPER_KEEP=1\0", false, Known::Is(3)),
        ] {
            let found = marks(environ.as_bytes(), whole, &patterns);
            assert_eq!(found, expected, "{environ:?} {whole}");
        }
    }
}
