//! Facts that policy keeps of one process: read from it, and the rules that match its program.

use std::sync::Arc;

use super::activity::Idle;
use super::event::Image;
use super::fact::{Fact, FactSet};
use super::facts::Facts;
use super::matched_rules::MatchedRules;

/// Facts that belong to the program a process runs, so that they change with an exec.
pub(crate) const PROGRAM_FACTS: FactSet = FactSet::MARKERS
    .union(FactSet::UNIT)
    .union(FactSet::INHERITED)
    .union(FactSet::CONVERSATIONS)
    .union(FactSet::ARGUMENTS)
    .union(FactSet::SCRIPT);

/// What has been read of one process.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadFacts {
    pub(crate) facts: Facts,
    /// Time of the last reading of a fact in [`PROGRAM_FACTS`], in ns since boot.
    pub(crate) at: u64,
    /// Since when it has not worked, once [`FactSet::ACTIVITY`] was read.
    pub(crate) idle: Option<Idle>,
    /// Since when it was hung up at each reading of [`FactSet::STDIO`], in ns of CLOCK_MONOTONIC.
    pub(crate) hung_up_since: Option<u64>,
}

/// What policy keeps of a living process.
#[derive(Clone, Debug, Default)]
pub struct CachedFacts {
    /// Rules that match its program, once they were asked.
    pub(crate) matched_rules: Option<MatchedRules>,
    /// Facts that rules have asked for and no event reports.
    pub(crate) readings: Option<Box<ReadFacts>>,
    /// Whether `REAPER_KEEP=1` is in the environment that it was started with, if a probe has reported that: with its
    /// exec, or inherited at fork. Unasked where it may have changed unseen.
    pub(crate) keep_marker: Fact<bool>,
    /// Time of its last move to another cgroup, in ns since boot; 0 if it has not moved since it is known.
    pub(crate) moved_at: u64,
}

impl CachedFacts {
    /// Returns what has been read of it; `None` if nothing has been yet.
    pub fn facts(&self) -> Option<&Facts> {
        self.readings.as_deref().map(|read| &read.facts)
    }

    /// Returns since when it has not worked; `None` if that was not read.
    pub(crate) fn idle(&self) -> Option<Idle> {
        self.readings.as_deref()?.idle
    }

    /// Returns since when its standard input and output are hung up, in ns of CLOCK_MONOTONIC.
    pub(crate) fn hung_up_since(&self) -> Option<u64> {
        self.readings.as_deref()?.hung_up_since
    }

    /// Returns which of these facts have not been read yet.
    pub fn missing(&self, wanted: FactSet) -> FactSet {
        self.facts()
            .map_or(wanted, |facts| wanted.without(facts.read_facts()))
    }

    /// Returns whether `REAPER_KEEP=1` is in its environment, if its exec has reported that.
    pub fn keep_marker(&self) -> Fact<bool> {
        self.keep_marker
    }

    /// Returns what a child inherits that is born at `born`, in ns since boot: the facts on environment, cgroup and
    /// command line that were read before. What was read later may be of a program that the process has run since.
    /// `is_current`: no exec of the process after that birth is known.
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

    /// Forgets what was of the program before. `other_cgroup`: the process may be in another cgroup too.
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

    /// The process runs `new` now. `is_later`: that is later than what is known of `old`, which it ran before.
    pub(crate) fn on_exec(&mut self, old: &Image, new: &Image, is_later: bool) {
        if is_later {
            self.forget_program(old.cgroup_id != new.cgroup_id);
        }
        self.keep_marker = new.keep_marker;
        self.matched_rules = None;
    }

    /// The process may run another program in another cgroup by now, which no event has reported.
    pub(crate) fn on_unseen_exec(&mut self) {
        self.keep_marker = Fact::Unread;
        self.forget_program(true);
    }

    /// The process is in another cgroup since `time`, in ns since boot.
    pub(crate) fn on_move(&mut self, time: u64) {
        self.moved_at = time;
        if let Some(read) = &mut self.readings {
            read.facts.unit = Fact::Unread;
        }
    }

    /// Whether the process has moved to another cgroup unseen, if it is in this unit now.
    pub(crate) fn has_moved_unseen(&self, unit: &Fact<Arc<str>>) -> bool {
        match (self.facts().map(|facts| &facts.unit), unit) {
            (Some(Fact::Known(before)), Fact::Known(now)) => before != now,
            _ => false,
        }
    }
}
