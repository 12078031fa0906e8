//! What was read of processes because a rule asked for it.

use std::sync::Arc;

use super::Model;
use super::activity::Idle;
use super::event::Key;
use super::facts::{Facts, Known, Needs, Stdio};
use super::session::{Session, Turn};
use super::tree::Node;

/// What was of the program before, where a process has run another since it was looked at.
const LASTING: Needs = Needs::MARKS
    .and(Needs::UNIT)
    .and(Needs::INHERITED)
    .and(Needs::CONVERSATIONS)
    .and(Needs::ARGUMENTS)
    .and(Needs::SCRIPT);

/// What has been read of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct Read {
    facts: Facts,
    /// When the last of what lasts was read, in ns since boot.
    at: u64,
    /// Since when it has not worked, once [`Needs::ACTIVITY`] was read.
    idle: Option<Idle>,
    /// Since when it was hung up at each reading of [`Needs::STDIO`], in ns of CLOCK_MONOTONIC.
    hung_up_since: Option<u64>,
}

impl Node {
    /// What has been read of it; `None`: nothing yet.
    pub fn facts(&self) -> Option<&Facts> {
        self.read.as_deref().map(|read| &read.facts)
    }

    /// Returns since when it has not worked; `None` if that was not read.
    pub(super) fn idle(&self) -> Option<Idle> {
        self.read.as_deref()?.idle
    }

    /// Returns since when its standard input and output are hung up, in ns of CLOCK_MONOTONIC.
    pub(super) fn hung_up_since(&self) -> Option<u64> {
        self.read.as_deref()?.hung_up_since
    }

    /// What a child has from it that was born at that time: its environment, its cgroup and its command line, if they
    /// were read before. What was read later may be of a program that it has run since.
    pub(super) fn read_at_birth(&self, born: u64) -> Option<Box<Read>> {
        let Read { facts, at, .. } = self.read.as_deref().filter(|read| read.at <= born)?;
        let facts = Facts {
            marks: facts.marks,
            unit: facts.unit.clone(),
            arguments: facts.arguments.clone(),
            script: facts.script.clone(),
            ..Facts::default()
        };
        (facts != Facts::default()).then(|| {
            Box::new(Read {
                facts,
                at: *at,
                ..Read::default()
            })
        })
    }

    /// It runs another program, in a cgroup that may be another.
    pub(super) fn read_anew(&mut self, other_cgroup: bool) {
        if let Some(read) = &mut self.read {
            let unit = match other_cgroup {
                true => Known::Unasked,
                false => read.facts.unit.clone(),
            };
            read.facts = Facts {
                unit,
                ..Facts::default()
            };
            (read.idle, read.hung_up_since) = (None, None);
        }
    }

    /// It may run another program in another cgroup by now, of which nobody has told: what it was started with is not
    /// known any more.
    pub(super) fn has_changed_unseen(&mut self) {
        self.keep_mark = Known::Unasked;
        self.read_anew(true);
    }

    /// It is in another cgroup.
    pub(super) fn moved(&mut self, cgroup_id: u64, time: u64) {
        Arc::make_mut(&mut self.image).cgroup_id = cgroup_id;
        self.moved_at = time;
        if let Some(read) = &mut self.read {
            read.facts.unit = Known::Unasked;
        }
    }

    /// Whether it has gone to another cgroup, of which nobody has told, if it is in this unit now.
    fn is_elsewhere(&self, unit: &Known<Arc<str>>) -> bool {
        match (self.facts().map(|facts| &facts.unit), unit) {
            (Some(Known::Is(before)), Known::Is(now)) => before != now,
            _ => false,
        }
    }

    /// Whether `REAPER_KEEP=1` is in its environment, if its exec has told.
    pub fn told_mark(&self) -> Known<bool> {
        self.keep_mark
    }

    /// Which of these nobody has read yet.
    pub fn lacks(&self, wanted: Needs) -> Needs {
        self.facts()
            .map_or(wanted, |facts| wanted.without(facts.known()))
    }
}

impl Model {
    /// Takes in what has been found out of what was asked for, by a look that began at `at` (ns since boot).
    /// What was read before the program that a process runs by now says nothing of that.
    pub fn set_facts(&mut self, key: Key, asked: Needs, found: Facts, at: u64) {
        let Some(node) = self.tree.get_mut(key) else {
            return self.sessions.learn_of_gone_root(key, asked, &found);
        };
        let asked = if node.is_news(at) {
            asked
        } else {
            asked.without(LASTING)
        };
        let asked = if at >= node.moved_at {
            asked
        } else {
            asked.without(Needs::UNIT)
        };
        let mut asked = asked;
        for (needs, read) in [
            (Needs::ARGUMENTS, &found.arguments),
            (Needs::SCRIPT, &found.script),
        ] {
            // The process has run another program since it was asked about.
            if matches!(read, Known::Is(read) if !Arc::ptr_eq(&read.image, &node.image)) {
                asked = asked.without(needs);
            }
        }
        if asked.has(Needs::UNIT) && node.is_elsewhere(&found.unit) {
            node.moved(0, at);
        }
        let read = node.read.get_or_insert_default();
        let awake = self.clock.awake(at);
        if asked.has(Needs::ACTIVITY)
            && let Known::Is(activity) = &found.activity
        {
            read.idle = Some(Idle::after(read.idle, activity, awake));
        }
        if asked.has(Needs::STDIO) {
            let since = read.hung_up_since.unwrap_or(awake);
            read.hung_up_since = (found.stdio == Known::Is(Stdio::HungUp)).then_some(since);
        }
        read.facts.learn(asked, found);
        if asked.has_any(LASTING) {
            read.at = read.at.max(at);
        }
        let (unit, inherited) = (read.facts.unit.clone(), read.facts.inherited.clone());
        if asked.has(Needs::INHERITED) {
            self.sessions.learn_inherited(key, &inherited);
        }
        if asked.has(Needs::UNIT)
            && let Some(node) = self.tree.get(key)
        {
            self.sessions.learn_unit(node, &unit);
        }
    }

    /// Of whom the unit can be read that the root of a session had: of the root itself, or of one in its cgroup once
    /// that has failed. Nobody where it is known, or not wanted yet, as none of its members is due.
    ///
    /// That comes to an end: whoever is asked makes it known, or cannot be asked again.
    pub(super) fn tells_unit_of_root(&self, session: &Session) -> Option<Key> {
        self.sessions.due(session.id)?;
        // Of one that is there, though it is taken to be gone, nothing is learned.
        let hears = session.root_gone.is_none() == self.tree.get(session.root).is_some();
        match session.unit {
            Known::Is(_) => None,
            // It may have been read before the root has gone, and not be told yet.
            Known::Unasked if hears => Some(session.root),
            _ if session.cgroup_id == 0 => None,
            _ => {
                let failed = |facts: &Facts| facts.unit == Known::Unreadable;
                let there = self.tree.iter().filter(|node| {
                    node.image.cgroup_id == session.cgroup_id
                        && node.key != session.root
                        && !node.facts().is_some_and(failed)
                });
                there.map(|node| node.key).min()
            }
        }
    }

    /// Takes no environment and no unit for known any more: where events are missing, an exec may be among them, of
    /// whom it is asked about or of who has begot it.
    pub fn doubt_what_was_read(&mut self) {
        let all: Vec<Key> = self.tree.iter().map(|node| node.key).collect();
        for key in all {
            if let Some(node) = self.tree.get_mut(key) {
                node.has_changed_unseen();
            }
        }
    }

    /// Takes no cgroup for known of those who are due by these turns.
    pub(super) fn doubt_cgroups(&mut self, turns: &[Turn], now: u64) {
        let gone = turns.iter().filter_map(|turn| match turn {
            Turn::RootGone { session } => Some(*session),
            _ => None,
        });
        let sessions = gone.flat_map(|id| self.sessions.inwards(id));
        let members: Vec<u32> = sessions.flat_map(Session::members).collect();
        for pid in members {
            if let Some(key) = self.tree.by_pid(pid).map(|node| node.key)
                && let Some(node) = self.tree.get_mut(key)
            {
                node.moved(0, now);
            }
        }
    }

    /// Whether something about a process could not be read.
    pub fn is_unread(&self, key: Key) -> bool {
        let facts = self.tree.get(key).and_then(Node::facts);
        facts.is_some_and(|facts| *facts != facts.without_unreadable())
    }

    /// Forgets what could not be read, so that it is tried again.
    pub fn forget_unreadable(&mut self, key: Key) {
        if let Some(read) = self.tree.get_mut(key).and_then(|node| node.read.as_mut()) {
            read.facts = read.facts.without_unreadable();
        }
    }

    /// Forgets what may have changed since it was read: whether a process listens, how busy it is, whether it is hung
    /// up, and what its session and terminal are. A rule that asks for these after a delay reads them again.
    pub fn forget_volatile(&mut self, key: Key) {
        let volatile = Needs::LISTENING | Needs::CPU | Needs::SESSION | Needs::STDIO;
        self.forget_facts(key, volatile);
        self.forget_activity_within(key);
    }

    /// Forgets these facts about a process.
    pub(super) fn forget_facts(&mut self, key: Key, facts: Needs) {
        if let Some(read) = self.tree.get_mut(key).and_then(|node| node.read.as_mut()) {
            read.facts.learn(facts, Facts::default());
        }
    }
}
