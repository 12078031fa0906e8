//! Data that policy caches for a process: facts that were read, and the rules that match its program.

use std::sync::Arc;

use super::activity::Idle;
use super::event::Image;
use super::fact::{Fact, FactSet};
use super::facts::Facts;
use super::matched_rules::MatchedRules;

/// Facts that belong to the program of a process, so that an exec changes them.
pub(crate) const PROGRAM_FACTS: FactSet = FactSet::MARKERS
    .union(FactSet::UNIT)
    .union(FactSet::INHERITED)
    .union(FactSet::CONVERSATIONS)
    .union(FactSet::ARGUMENTS)
    .union(FactSet::SCRIPT);

/// Facts that were read about one process.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadFacts {
    pub(crate) facts: Facts,
    /// Time of the last reading of a fact in [`PROGRAM_FACTS`], in ns since boot.
    pub(crate) at: u64,
    /// Period without work, once [`FactSet::ACTIVITY`] was read.
    pub(crate) idle: Option<Idle>,
    /// Time since which each reading of [`FactSet::STDIO`] found it hung up, in ns of `CLOCK_MONOTONIC`.
    pub(crate) hung_up_since: Option<u64>,
}

/// Data that policy caches for a living process.
#[derive(Clone, Debug, Default)]
pub struct CachedFacts {
    /// Rules that match its program, once they were evaluated.
    pub(crate) matched_rules: Option<MatchedRules>,
    /// Facts that were read on request.
    pub(crate) readings: Option<Box<ReadFacts>>,
    /// Whether the program was started with `REAPER_KEEP=1` in its environment, as reported by a probe: with the exec,
    /// or inherited at fork. Unread after an exec that was not reported.
    pub(crate) keep_marker: Fact<bool>,
    /// Time of its last move to another cgroup, in ns since boot; 0 if no move is known.
    pub(crate) moved_at: u64,
}

impl CachedFacts {
    /// Returns the facts that were read, successfully or not; `None` if nothing was.
    pub fn facts(&self) -> Option<&Facts> {
        self.readings.as_deref().map(|read| &read.facts)
    }

    /// Returns the period without work; `None` if it was not read.
    pub(crate) fn idle(&self) -> Option<Idle> {
        self.readings.as_deref()?.idle
    }

    /// Returns since when its standard input and output are hung up, in ns of `CLOCK_MONOTONIC`; `None` if they are not
    /// or were not read.
    pub(crate) fn hung_up_since(&self) -> Option<u64> {
        self.readings.as_deref()?.hung_up_since
    }

    /// Returns the facts in `wanted` that are unread.
    pub fn missing(&self, wanted: FactSet) -> FactSet {
        self.facts()
            .map_or(wanted, |facts| wanted.without(facts.read_facts()))
    }

    /// Returns whether the current program was started with `REAPER_KEEP=1`, as a probe reported: with its exec, or by
    /// inheritance at fork. Unread without such a report, and after an exec that was not reported.
    pub fn keep_marker(&self) -> Fact<bool> {
        self.keep_marker
    }

    /// Returns what a child inherits that is forked at `born`, in ns since boot: the facts about environment, cgroup
    /// and command line that were read before. Later facts may belong to a later program. `is_current` says that no
    /// exec of the parent after that time is known.
    pub(crate) fn at_birth(&self, born: u64, is_current: bool) -> CachedFacts {
        let read = self.readings.as_deref().filter(|read| read.at <= born);
        let read = read.and_then(|read| {
            let facts = Facts {
                markers: read.facts.markers,
                unit: read.facts.unit.clone(),
                arguments: read.facts.arguments.clone(),
                script: read.facts.script.clone(),
                ..Facts::default()
            };
            let at = read.at;
            (facts != Facts::default()).then(|| {
                Box::new(ReadFacts {
                    facts,
                    at,
                    ..ReadFacts::default()
                })
            })
        });
        let keep_mark = if is_current {
            self.keep_marker
        } else {
            Fact::Unread
        };
        CachedFacts {
            readings: read,
            keep_marker: keep_mark,
            ..CachedFacts::default()
        }
    }

    /// Forgets all facts that were read, except the unit. `other_cgroup` says that the cgroup may have changed as well,
    /// so the unit is forgotten too.
    pub(crate) fn forget_program(&mut self, other_cgroup: bool) {
        if let Some(read) = &mut self.readings {
            let unit = match other_cgroup {
                true => Fact::Unread,
                false => read.facts.unit.clone(),
            };
            read.facts = Facts {
                unit,
                ..Facts::default()
            };
            (read.idle, read.hung_up_since) = (None, None);
        }
    }

    /// Forgets the facts about `old` if the exec of `new` is later (`is_later`). Takes the keep marker from `new` and
    /// forgets which rules match, in any case.
    pub(crate) fn on_exec(&mut self, old: &Image, new: &Image, is_later: bool) {
        if is_later {
            self.forget_program(old.cgroup_id != new.cgroup_id);
        }
        self.keep_marker = new.keep_marker;
        self.matched_rules = None;
    }

    /// Forgets all facts, the unit and the keep marker after an exec that no event reported. The process may be in
    /// another cgroup too.
    pub(crate) fn on_unseen_exec(&mut self) {
        self.keep_marker = Fact::Unread;
        self.forget_program(true);
    }

    /// Records a move to another cgroup at `time`, in ns since boot, and forgets the unit.
    pub(crate) fn on_move(&mut self, time: u64) {
        self.moved_at = time;
        if let Some(read) = &mut self.readings {
            read.facts.unit = Fact::Unread;
        }
    }

    /// Returns whether `unit` differs from the unit that was read before, which shows a move that no event reported.
    pub(crate) fn has_moved_unseen(&self, unit: &Fact<Arc<str>>) -> bool {
        match (self.facts().map(|facts| &facts.unit), unit) {
            (Some(Fact::Known(before)), Fact::Known(now)) => before != now,
            _ => false,
        }
    }
}
