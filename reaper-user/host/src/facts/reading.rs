//! Reads the facts of one process.

#[cfg(target_os = "linux")]
mod listeners;
#[cfg(target_os = "linux")]
mod local;
#[cfg(target_os = "linux")]
mod netlink;
#[cfg_attr(target_os = "macos", path = "reading/darwin.rs")]
mod proc_dir;
#[cfg(target_os = "linux")]
mod registry;
#[cfg(target_os = "linux")]
mod script;
#[cfg(target_os = "linux")]
mod sockets;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) use proc_dir::ProcDir;
#[cfg(test)]
pub(super) use proc_dir::{ARGUMENTS_MAX, ENVIRON_MAX};
use reaper_model::event::{Image, ProcessKey};
use reaper_model::facts::{Fact, FactSet, Facts};
use reaper_model::ruleset::{Pattern, Ruleset};

/// CPU time of a process at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuTime {
    /// CPU time of all threads in ticks of [`TICK_NS`](reaper_model::event::TICK_NS).
    pub(super) ticks: u64,
    /// Time of the reading (CLOCK_MONOTONIC, ns).
    pub(super) at: u64,
}

/// Result of a read.
#[derive(Clone, Debug)]
pub(super) struct ReadResult {
    /// All requested facts except the CPU use, which takes two readings. The others are unreadable.
    pub(super) facts: Facts,
    /// CPU time so far; `None` if it was not requested or could not be read.
    pub(super) used: Option<CpuTime>,
}

impl ReadResult {
    /// Returns a result in which all facts are unreadable.
    pub(super) fn nothing() -> ReadResult {
        ReadResult {
            facts: Facts::unreadable(),
            used: None,
        }
    }
}

/// Reads the requested facts of a process. `root` is the directory of /proc, and `image` the known program of the
/// process. Nothing returned is older than `requested` (ns since boot).
///
/// A fact that cannot be read is unreadable. All are if the process has exited, also if it exits during the read.
/// [`FactSet::ARGUMENTS`] and [`FactSet::SCRIPT`] need `image`.
pub(super) fn read_facts(
    root: &Path,
    key: ProcessKey,
    needs: FactSet,
    image: Option<&Arc<Image>>,
    rules: &Ruleset,
    requested: u64,
) -> ReadResult {
    let Some(mut subject) = ProcDir::open(root, key) else {
        return ReadResult::nothing();
    };
    let mut found = ReadResult::nothing();
    let facts = &mut found.facts;
    if needs.contains(FactSet::MARKERS) {
        facts.markers = subject.markers(rules.marker_patterns());
    }
    if needs.contains(FactSet::UNIT) {
        facts.unit = subject.unit();
    }
    if needs.contains(FactSet::KERNEL_SESSION) {
        facts.kernel_session = subject.session();
    }
    if needs.contains(FactSet::STDIN) {
        facts.stdin_is_terminal = subject.input();
    }
    if needs.contains(FactSet::INHERITED) {
        facts.inherited = subject
            .inherited()
            .map_or(Fact::Unreadable, |all| Fact::Known(all.into()));
    }
    if needs.contains(FactSet::CONVERSATIONS) {
        facts.conversations = subject
            .conversations(key, &rules.conversations())
            .map_or(Fact::Unreadable, |all| Fact::Known(all.into()));
    }
    if needs.contains(FactSet::ACTIVITY) {
        let activity = subject.activity().ok().flatten();
        facts.activity = activity.map_or(Fact::Unreadable, |all| Fact::Known(all.into()));
    }
    if needs.contains(FactSet::STDIO) {
        facts.stdio = subject.stdio(key).map_or(Fact::Unreadable, Fact::Known);
    }
    if needs.contains(FactSet::LISTENING) {
        let listening = subject.listening(requested).ok().flatten();
        facts.listening = listening.map_or(Fact::Unreadable, Fact::Known);
    }
    if needs.contains(FactSet::LOCAL_SOCKETS) {
        let local = subject.local_sockets(requested).ok().flatten();
        facts.local_sockets = local.map_or(Fact::Unreadable, |local| Fact::Known(local.into()));
    }
    if let Some(image) = image
        && needs.intersects(FactSet::ARGUMENTS | FactSet::SCRIPT)
    {
        read_program(&mut subject, image, needs, rules, facts);
    }
    if needs.contains(FactSet::CPU) {
        found.used = subject.cpu_time();
    }
    if subject.is_alive() {
        found
    } else {
        ReadResult::nothing()
    }
}

/// Returns whether a display server runs in the service's network namespace; `None` if that cannot be read.
#[cfg(target_os = "linux")]
pub(super) fn has_display() -> Option<bool> {
    local::table(0).ok().map(|table| table.has_display)
}

/// Returns false: members with windows are not looked for on macOS.
#[cfg(target_os = "macos")]
pub(super) fn has_display() -> Option<bool> {
    Some(false)
}

/// Reads the rest of the command line, the resolved path of the script, or both, and matches the rules with them.
fn read_program(
    subject: &mut ProcDir,
    image: &Arc<Image>,
    needs: FactSet,
    rules: &Ruleset,
    facts: &mut Facts,
) {
    // A rule may have conditions on the script and on arguments, so the command line is matched with the script too.
    let is_script = needs.contains(FactSet::SCRIPT) || rules.reads_script(image);
    let script = is_script.then(|| subject.script(image)).flatten();
    if needs.contains(FactSet::ARGUMENTS)
        && let Some(argv) = subject.arguments(image)
    {
        let script = script.clone().unwrap_or_default();
        facts.arguments = Fact::Known(rules.matched(image, argv, script));
    }
    if needs.contains(FactSet::SCRIPT)
        && let Some(path) = script
    {
        facts.script = Fact::Known(rules.matched_script(image, path));
    }
}

/// Returns which patterns match a variable (`NAME=value`) of an environment: bit n is set if pattern n does. Patterns
/// after the first 64 are ignored. `whole` says whether the environment is complete.
///
/// In a truncated environment a pattern without a match is unknown, so the result is unreadable. It is known if all
/// patterns match, or if the first does: that is `REAPER_KEEP=1`, which alone keeps the process.
fn match_markers(environ: &[u8], whole: bool, patterns: &[Pattern]) -> Fact<u64> {
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
        Fact::Known(found)
    } else {
        Fact::Unreadable
    }
}

/// Returns the value of `HOME` in an environment (format of `/proc/PID/environ`), or `None` if it is not set.
fn home(environ: &[u8]) -> Option<PathBuf> {
    let mut variables = environ.split(|b| *b == 0);
    let home = variables.find_map(|variable| variable.strip_prefix(b"HOME="))?;
    Some(OsStr::from_bytes(home).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_match_whole_variables() {
        let patterns = ["REAPER_KEEP=1", "CI=*"].map(|glob| Pattern::argv(glob).unwrap());
        for (environ, whole, expected) in [
            ("A=1\0REAPER_KEEP=1\0", true, Fact::Known(1)),
            ("REAPER_KEEP=12\0XREAPER_KEEP=1\0", true, Fact::Known(0)),
            ("CI=a\nb\0", true, Fact::Known(2)),
            ("", true, Fact::Known(0)),
            // The cut part could contain anything.
            ("CI=1\0", false, Fact::Unreadable),
            ("A=1\0REAPER_KEEP=1\0", false, Fact::Known(1)),
            ("CI=1\0REAPER_KEEP=1\0", false, Fact::Known(3)),
        ] {
            let found = match_markers(environ.as_bytes(), whole, &patterns);
            assert_eq!(found, expected, "{environ:?} {whole}");
        }
    }
}
