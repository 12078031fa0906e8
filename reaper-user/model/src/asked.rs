//! What was read of processes because a rule asked for it.

use std::sync::Arc;

use super::activity::Idle;
use super::cached_facts::LASTING;
use super::event::Key;
use super::facts::{Facts, Known, Needs, Stdio};
use super::session::{Session, Turn};
use super::{Model, Node};

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
        let asked = if at >= node.state.cached.moved_at {
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
        if asked.has(Needs::UNIT) && node.state.cached.is_elsewhere(&found.unit) {
            node.moved(0, at);
        }
        let read = node.state.cached.read.get_or_insert_default();
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
                node.state.cached.on_unseen_exec();
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
        if let Some(read) = self
            .tree
            .get_mut(key)
            .and_then(|node| node.state.cached.read.as_mut())
        {
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
        if let Some(read) = self
            .tree
            .get_mut(key)
            .and_then(|node| node.state.cached.read.as_mut())
        {
            read.facts.learn(facts, Facts::default());
        }
    }
}
