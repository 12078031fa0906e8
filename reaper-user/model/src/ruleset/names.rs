//! Which rules can match a program of which name: the table that the probes ask at every exec.
//!
//! The probe knows a program's comm and the file name of its executable, no more. For each of the two
//! it asks `first`, by the first byte. What is said there holds for all names that begin so; if the second
//! byte may follow ([`second_bit`]) and it says [`NAME_INDEX_EXACT`] the whole name is looked up too, where it
//! says [`NAME_INDEX_PREFIX`] the first [`PREFIX_LEN`] bytes. All that is found is or-ed.
//!
//! The answer may say too much and never too little: a rule that can match the image at all has its
//! bit there. (A file that is really named `x (deleted)` is the exception: rules take it for `x`, since
//! /proc calls one so that has been replaced.)

use std::collections::{BTreeMap, BTreeSet};

use reaper_common::{
    NAME_AGENT, NAME_BOUNDARY, NAME_INDEX_EXACT, NAME_INDEX_PREFIX, NAME_INDEX_SLOTS, NAME_KEEP,
    NAME_LEN, PREFIX_LEN, second_bit,
};

use super::{Action, Condition, Field, Matcher, Pattern, Ruleset, script};

/// Ways that a glob is followed at most; one with more might match any name.
const WAYS_MAX: usize = 64;

/// See the module. The bits are `NAME_*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameTable {
    /// Whole names, cut to `NAME_LEN - 1` bytes, and beginnings of [`PREFIX_LEN`], both NUL-padded.
    pub names: BTreeMap<[u8; NAME_LEN], u32>,
    /// By the first byte of a name, 0 for an empty one. The bits are `NAME_*` and `FIRST_*`.
    pub first: [u32; NAME_INDEX_SLOTS],
    /// `REAPER_KEEP=1` is all that rules ask of an environment.
    pub needs_only_keep_marker: bool,
}

/// What a name is, or how it begins, as the table has it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Start {
    Whole([u8; NAME_LEN]),
    Prefix([u8; NAME_LEN]),
    First(u8),
}

/// `None` where it may be any name.
type Starts = Option<BTreeSet<Start>>;

impl Ruleset {
    /// What the probes are to know of the rules. What looks at no program is not in it: that is no matter of
    /// names.
    pub fn names(&self) -> NameTable {
        let mut table = NameTable {
            names: BTreeMap::new(),
            first: [0; NAME_INDEX_SLOTS],
            needs_only_keep_marker: self.needs_only_keep_marker(),
        };
        for rule in &self.rules {
            let bit = match rule.action {
                Action::Agent => NAME_AGENT,
                // Begins a session outside of any, and leaves the one that it is in.
                Action::Server => NAME_AGENT | NAME_BOUNDARY,
                Action::Boundary => NAME_BOUNDARY,
                _ if rule.may_keep() => NAME_KEEP,
                _ => continue,
            };
            for matcher in &rule.matchers {
                match of_matcher(matcher) {
                    Some(starts) => starts.into_iter().for_each(|start| table.add(start, bit)),
                    None => table.first.iter_mut().for_each(|slot| *slot |= bit),
                }
            }
        }
        table
    }
}

impl NameTable {
    /// Has the probes take a program of this file name for one that may be kept: they signal none such.
    pub fn add_keep(&mut self, name: &[u8]) {
        if !name.is_empty() {
            self.add(Start::new(name, true), NAME_KEEP);
        }
    }

    fn add(&mut self, start: Start, bit: u32) {
        let (name, how) = match start {
            Start::Whole(name) => (name, NAME_INDEX_EXACT),
            Start::Prefix(name) => (name, NAME_INDEX_PREFIX),
            Start::First(byte) => {
                self.first[usize::from(byte)] |= bit;
                return;
            }
        };
        // A whole name may be another's beginning too: the entry is for both.
        *self.names.entry(name).or_default() |= bit;
        self.first[usize::from(name[0])] |= how | second_bit(name[1]);
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
}

/// The names outside of which a matcher never matches: all its conditions must hold, so those of the
/// one that says most.
fn of_matcher(matcher: &Matcher) -> Starts {
    let positive = matcher
        .conditions()
        .iter()
        .filter(|condition| !condition.negative);
    let of_script = matcher.needs_script().then(interpreters);
    positive
        .filter_map(of_condition)
        .chain(of_script)
        .min_by_key(|starts| {
            let loose = |start: &&Start| matches!(start, Start::First(_));
            (starts.iter().filter(loose).count(), starts.len())
        })
}

fn of_condition(condition: &Condition) -> Starts {
    let of = |pattern: &Pattern| match condition.field {
        Field::Comm => of_glob(pattern.text(), false),
        Field::Exe => of_glob(pattern.text(), true),
        _ => None,
    };
    let all: Option<Vec<_>> = condition.any_of.iter().map(of).collect();
    all.map(|all| all.into_iter().flatten().collect())
}

fn interpreters() -> BTreeSet<Start> {
    let mut starts = BTreeSet::new();
    for name in script::INTERPRETERS {
        starts.insert(Start::new(name, true));
        let versioned = script::VERSION.iter().map(|byte| [name, &[*byte]].concat());
        starts.extend(versioned.map(|name| Start::new(&name, false)));
    }
    starts
}

/// Of the names that a glob over comm matches, or of the last components if it is one over paths.
fn of_glob(glob: &str, path: bool) -> Starts {
    // With nothing escaped, every bracket and brace is what it looks like.
    if glob.contains('\\') {
        return None;
    }
    let mut starts = BTreeSet::new();
    for glob in without_braces(glob.as_bytes())? {
        let slash = outside(&glob).filter(|(_, byte)| path && *byte == b'/');
        let last = slash.last().map_or(0, |(at, _)| at + 1);
        starts.extend(of_component(&glob[last..], path)?);
    }
    Some(starts)
}

/// The globs without braces that together match what this one does.
fn without_braces(glob: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (mut todo, mut done) = (vec![glob.to_vec()], Vec::new());
    while let Some(glob) = todo.pop() {
        if todo.len() + done.len() > WAYS_MAX {
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
            let way = &glob[cut[0] + 1..cut[1]];
            // Where an alternative begins with it, it may stand for nothing: `a{**/b}` matches `ab`.
            if way.starts_with(b"**") && !before.is_empty() && !before.ends_with(b"/") {
                return None;
            }
            todo.push([before, way, after].concat());
        }
    }
    Some(done)
}

/// Of the names that a glob without braces matches, which has no slash if it is of a path.
fn of_component(glob: &[u8], path: bool) -> Starts {
    let (mut starts, mut whole) = (vec![Vec::new()], true);
    for (at, byte) in outside(glob) {
        let bytes = match byte {
            // It may cross slashes, and then the name begins somewhere behind it.
            b'*' if path && glob[at..].starts_with(b"**") => return None,
            b'*' | b'?' => None,
            b'[' => {
                let listed = listed(&glob[at + 1..class_end(glob, at)]);
                if path && listed.is_none() {
                    // A slash may be in it.
                    return None;
                }
                listed.filter(|bytes| starts.len() * bytes.len() <= WAYS_MAX)
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
    // Where nothing is said, as at the end of `**/` too, it may be anything.
    let any = starts.iter().any(Vec::is_empty);
    (!any).then(|| {
        starts
            .iter()
            .map(|start| Start::new(start, whole))
            .collect()
    })
}

/// The bytes of a glob with their places; of a class only the bracket that opens it.
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

/// Where the class ends that is opened there.
fn class_end(glob: &[u8], open: usize) -> usize {
    let negated = matches!(glob.get(open + 1), Some(b'!' | b'^'));
    // A bracket that comes first is one of the class.
    let from = open + 2 + usize::from(negated);
    let close = glob.iter().skip(from).position(|byte| *byte == b']');
    close.map_or(glob.len(), |close| from + close)
}

/// The bytes of a class of letters and digits, which has no slash.
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
