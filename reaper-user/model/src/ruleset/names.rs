//! Table of program names, by which the probes find out at each exec which kinds of rules can match.
//!
//! A probe knows only the comm and the file name of the executable. For each of the two:
//!
//! 1. It reads the slot of the first byte in `first`. The `NAME_*` bits there hold for all names with that byte.
//! 2. If the slot lacks the bit of the second byte ([`second_bit`]), it stops.
//! 3. It looks up the whole name if the slot has [`NAME_INDEX_EXACT`], and the first [`PREFIX_LEN`] bytes if the slot
//!    has [`NAME_INDEX_PREFIX`].
//!
//! The result is all bits found. It may have too many bits, but never too few: a rule that can match the image has its
//! bit set. The exception is a file whose real name ends with ` (deleted)`: rules remove that suffix, because /proc adds
//! it to the path of a replaced file.

use std::collections::{BTreeMap, BTreeSet};

use reaper_common::{
    NAME_AGENT, NAME_BOUNDARY, NAME_INDEX_EXACT, NAME_INDEX_PREFIX, NAME_INDEX_SLOTS, NAME_KEEP,
    NAME_LEN, PREFIX_LEN, second_bit,
};

use super::{Action, Condition, Field, Matcher, Pattern, Ruleset, script};

/// Limit on the alternatives of a glob. A glob with more counts as one that matches any name.
const ALTERNATIVES_MAX: usize = 64;

/// Names that the rules can match, in the form of the kernel maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameTable {
    /// `NAME_*` bits by whole name (cut to `NAME_LEN - 1` bytes) and by prefix ([`PREFIX_LEN`] bytes), both NUL-padded.
    pub names: BTreeMap<[u8; NAME_LEN], u32>,
    /// `NAME_*` and `NAME_INDEX_*` bits and those of [`second_bit`], by the first byte of a name (0 if it is empty).
    pub first: [u32; NAME_INDEX_SLOTS],
    /// Whether `REAPER_KEEP=1` is the only environment variable that rules check.
    pub needs_only_keep_marker: bool,
}

/// A name or the beginning of names, as an entry of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Start {
    Whole([u8; NAME_LEN]),
    Prefix([u8; NAME_LEN]),
    First(u8),
}

/// Entries that cover all names that something can match; `None` if it can match any name.
type Starts = Option<BTreeSet<Start>>;

impl Ruleset {
    /// Returns the table for the probes. It ignores rules without conditions on the program.
    pub fn names(&self) -> NameTable {
        let mut table = NameTable {
            names: BTreeMap::new(),
            first: [0; NAME_INDEX_SLOTS],
            needs_only_keep_marker: self.needs_only_keep_marker(),
        };
        // On a host with a display, where rules about windows can hold, the probes signal no member.
        for rule in self.rules.iter().filter(|rule| !rule.when.window) {
            let bit = match rule.action {
                Action::Agent => NAME_AGENT,
                // A server leaves the session that it is in and opens its own.
                Action::Server => NAME_AGENT | NAME_BOUNDARY,
                Action::Boundary => NAME_BOUNDARY,
                _ if rule.may_keep() => NAME_KEEP,
                _ => continue,
            };
            for matcher in &rule.matchers {
                match starts_of_matcher(matcher) {
                    Some(starts) => starts.into_iter().for_each(|start| table.add(start, bit)),
                    None => table.first.iter_mut().for_each(|slot| *slot |= bit),
                }
            }
        }
        table
    }
}

impl NameTable {
    /// Adds the file name of a program that may be kept, so that the probes never signal it.
    pub fn add_keep(&mut self, name: &[u8]) {
        if !name.is_empty() {
            self.add(Start::new(name, true), NAME_KEEP);
        }
    }

    fn add(&mut self, start: Start, bit: u32) {
        let (name, index_bit) = match start {
            Start::Whole(name) => (name, NAME_INDEX_EXACT),
            Start::Prefix(name) => (name, NAME_INDEX_PREFIX),
            Start::First(byte) => {
                self.first[usize::from(byte)] |= bit;
                return;
            }
        };
        // A whole name may also be the prefix of another: they share one entry.
        *self.names.entry(name).or_default() |= bit;
        self.first[usize::from(name[0])] |= index_bit | second_bit(name[1]);
    }
}

impl Start {
    fn new(bytes: &[u8], whole: bool) -> Start {
        let cut = |len| {
            let mut name = [0; NAME_LEN];
            let len = bytes.len().min(len);
            name[..len].copy_from_slice(&bytes[..len]);
            name
        };
        if whole {
            Start::Whole(cut(NAME_LEN - 1))
        } else if bytes.len() >= PREFIX_LEN {
            Start::Prefix(cut(PREFIX_LEN))
        } else {
            Start::First(cut(1)[0])
        }
    }

    /// Returns whether a name may have both beginnings.
    fn meets(&self, other: &Start) -> bool {
        match (self, other) {
            (Start::Whole(one), Start::Whole(other)) => one == other,
            (Start::First(byte), other) | (other, Start::First(byte)) => other.bytes()[0] == *byte,
            (one, other) => one.bytes()[..PREFIX_LEN] == other.bytes()[..PREFIX_LEN],
        }
    }

    fn bytes(&self) -> [u8; NAME_LEN] {
        match self {
            Start::Whole(name) | Start::Prefix(name) => *name,
            Start::First(byte) => {
                let mut name = [0; NAME_LEN];
                name[0] = *byte;
                name
            }
        }
    }
}

/// Returns the names that a matcher can match.
///
/// All conditions must hold, so the names of the most selective condition cover the matcher.
fn starts_of_matcher(matcher: &Matcher) -> Starts {
    let positive = matcher
        .conditions()
        .iter()
        .filter(|condition| !condition.negative);
    let of_script = matcher.needs_script().then(starts_of_interpreters);
    positive
        .filter_map(starts_of_condition)
        .chain(of_script)
        .min_by_key(|starts| {
            let is_unselective = |start: &&Start| matches!(start, Start::First(_));
            (starts.iter().filter(is_unselective).count(), starts.len())
        })
}

/// Returns the names that a condition on comm or exe can match. Returns `None` if it can match any name, and for other
/// conditions.
fn starts_of_condition(condition: &Condition) -> Starts {
    let starts = |pattern: &Pattern| match condition.field {
        Field::Comm => starts_of_glob(pattern.text(), false),
        Field::Exe => starts_of_glob(pattern.text(), true),
        _ => None,
    };
    let all: Option<Vec<_>> = condition.any_of.iter().map(starts).collect();
    all.map(|all| all.into_iter().flatten().collect())
}

fn starts_of_interpreters() -> BTreeSet<Start> {
    script::interpreters()
        .flat_map(starts_of_interpreter)
        .collect()
}

fn starts_of_interpreter(one: &script::Interpreter) -> BTreeSet<Start> {
    let mut starts = BTreeSet::new();
    for (name, versioned) in one.file_names() {
        starts.insert(Start::new(name, true));
        let versions = script::VERSION.iter().filter(|_| versioned);
        let versions = versions.map(|byte| [name, &[*byte]].concat());
        starts.extend(versions.map(|name| Start::new(&name, false)));
    }
    starts
}

/// Returns the interpreters whose file names fulfil the conditions on exe, by their place. The result may have too many.
pub(super) fn interpreters(matcher: &Matcher) -> impl Iterator<Item = usize> {
    let exe = |c: &&Condition| c.field == Field::Exe && !c.negative;
    let exe = matcher.conditions().iter().filter(exe);
    let wanted: Vec<_> = exe.filter_map(starts_of_condition).collect();
    let places = script::interpreters()
        .map(starts_of_interpreter)
        .enumerate();
    let fits = move |own: &BTreeSet<Start>| {
        let share = |wanted: &BTreeSet<Start>| {
            let meets = |one: &Start| own.iter().any(|other| one.meets(other));
            wanted.iter().any(meets)
        };
        wanted.iter().all(share)
    };
    places.filter(move |(_, own)| fits(own)).map(|(at, _)| at)
}

/// Returns the names that a glob over comm matches or, with `path`, the last components of the paths that it matches.
fn starts_of_glob(glob: &str, path: bool) -> Starts {
    // Without a backslash, no bracket or brace is escaped.
    if glob.contains('\\') {
        return None;
    }
    let mut starts = BTreeSet::new();
    for glob in without_braces(glob.as_bytes())? {
        let slash = outside(&glob).filter(|(_, byte)| path && *byte == b'/');
        let last = slash.last().map_or(0, |(at, _)| at + 1);
        starts.extend(starts_of_component(&glob[last..], path)?);
    }
    Some(starts)
}

/// Expands the braces of a glob. Returns `None` if that is not possible or results in too many globs.
pub(super) fn without_braces(glob: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (mut todo, mut done) = (vec![glob.to_vec()], Vec::new());
    while let Some(glob) = todo.pop() {
        if todo.len() + done.len() > ALTERNATIVES_MAX {
            return None;
        }
        let (mut cuts, mut depth) = (Vec::new(), 0);
        for (at, byte) in outside(&glob) {
            match (byte, depth) {
                (b'{', 0) | (b',', 1) | (b'}', 1) => cuts.push(at),
                _ => {}
            }
            match byte {
                b'{' => depth += 1,
                b'}' if depth == 1 => break,
                b'}' => depth -= 1,
                _ => {}
            }
        }
        let [open, .., close] = cuts[..] else {
            done.push(glob);
            continue;
        };
        let (before, after) = (&glob[..open], &glob[close + 1..]);
        for cut in cuts.windows(2) {
            let alternative = &glob[cut[0] + 1..cut[1]];
            // `**/` at the start of an alternative may match nothing: `a{**/b}` matches `ab`.
            if alternative.starts_with(b"**") && !before.is_empty() && !before.ends_with(b"/") {
                return None;
            }
            todo.push([before, alternative, after].concat());
        }
    }
    Some(done)
}

/// Returns the names that a glob without braces matches; with `path` it is the last component of a path.
fn starts_of_component(glob: &[u8], path: bool) -> Starts {
    let (mut starts, mut whole) = (vec![Vec::new()], true);
    for (at, byte) in outside(glob) {
        let bytes = match byte {
            // It may match slashes, and the name begins after the last of them.
            b'*' if path && glob[at..].starts_with(b"**") => return None,
            b'*' | b'?' => None,
            b'[' => {
                let listed = listed(&glob[at + 1..class_end(glob, at)]);
                if path && listed.is_none() {
                    // The class may contain a slash.
                    return None;
                }
                listed.filter(|bytes| starts.len() * bytes.len() <= ALTERNATIVES_MAX)
            }
            byte => Some(vec![byte]),
        };
        match bytes.filter(|_| whole) {
            Some(bytes) => {
                starts = starts
                    .iter()
                    .flat_map(|start| bytes.iter().map(|byte| [start, &[*byte][..]].concat()))
                    .collect();
            }
            None => whole = false,
        }
    }
    // An empty start, as after a final `**/`, matches any name.
    let any = starts.iter().any(Vec::is_empty);
    (!any).then(|| {
        starts
            .iter()
            .map(|start| Start::new(start, whole))
            .collect()
    })
}

/// Returns the bytes of a glob with their positions. Of a class, only the opening bracket is included.
fn outside(glob: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let (at, byte) = (next, *glob.get(next)?);
        next = 1 + if byte == b'[' {
            class_end(glob, at)
        } else {
            at
        };
        Some((at, byte))
    })
}

/// Returns the position of the bracket that closes the class opened at `open`.
fn class_end(glob: &[u8], open: usize) -> usize {
    let negated = matches!(glob.get(open + 1), Some(b'!' | b'^'));
    // A closing bracket directly after the opening one is part of the class.
    let from = open + 2 + usize::from(negated);
    let close = glob.iter().skip(from).position(|byte| *byte == b']');
    close.map_or(glob.len(), |close| from + close)
}

/// Returns the bytes of a class, `None` unless it has only letters and digits.
fn listed(class: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = class;
    while let [first, after @ ..] = rest {
        let (last, after) = match after {
            [b'-', last, after @ ..] => (last, after),
            _ => (first, after),
        };
        if !first.is_ascii_alphanumeric() || !last.is_ascii_alphanumeric() {
            return None;
        }
        bytes.extend(*first..=*last);
        rest = after;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
