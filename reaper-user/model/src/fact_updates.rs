//! Updates of the facts that were read about processes.

use std::sync::Arc;

use super::activity::Idle;
use super::cached_facts::PROGRAM_FACTS;
use super::event::ProcessKey;
use super::facts::{Fact, FactSet, Facts, Stdio};
use super::session::{Session, SessionEvent};
use super::{Model, Node};

impl Model {
    /// Stores the facts in `requested` that were read about a process. `at` is the start of the read, in ns since boot.
    ///
    /// Facts about an earlier program are ignored, and so is a unit from before the last move. A changed unit shows an
    /// unreported move: the cgroup then becomes unknown. The sessions of a root get its unit and inherited facts. For a
    /// process that has exited, only that is done.
    pub fn set_facts(&mut self, key: ProcessKey, requested: FactSet, found: Facts, at: u64) {
        let Some(node) = self.tree.get_mut(key) else {
            return self.sessions.update_exited_root(key, requested, &found);
        };
        let mut requested = if node.is_current_at(at) {
            requested
        } else {
            requested.without(PROGRAM_FACTS)
        };
        if at < node.state.cached.moved_at {
            requested = requested.without(FactSet::UNIT);
        }
        for (needs, read) in [
            (FactSet::ARGUMENTS, &found.arguments),
            (FactSet::SCRIPT, &found.script),
        ] {
            // The process has executed another program since the request.
            if matches!(read, Fact::Known(read) if !Arc::ptr_eq(&read.image, &node.image)) {
                requested = requested.without(needs);
            }
        }
        if requested.contains(FactSet::UNIT) && node.state.cached.has_moved_unseen(&found.unit) {
            self.tree.set_cgroup(key, 0, at);
        }
        let Some(node) = self.tree.get_mut(key) else {
            return;
        };
        let read = node.state.cached.readings.get_or_insert_default();
        let awake = self.clock.to_monotonic(at);
        if requested.contains(FactSet::ACTIVITY)
            && let Fact::Known(activity) = &found.activity
        {
            read.idle = Some(Idle::after(read.idle, activity, awake));
        }
        if requested.contains(FactSet::STDIO) {
            let since = read.hung_up_since.unwrap_or(awake);
            read.hung_up_since = (found.stdio == Fact::Known(Stdio::HungUp)).then_some(since);
        }
        read.facts.update(requested, found);
        if requested.intersects(PROGRAM_FACTS) {
            read.at = read.at.max(at);
        }
        let (unit, inherited) = (read.facts.unit.clone(), read.facts.inherited.clone());
        if requested.contains(FactSet::INHERITED) {
            self.sessions.update_inherited(key, &inherited);
        }
        if requested.contains(FactSet::UNIT)
            && let Some(node) = self.tree.get(key)
        {
            self.sessions.update_unit(node, &unit);
        }
    }

    /// Returns the process whose unit to read in place of the session's unit: the root or, if that failed, another
    /// process in its cgroup. Returns `None` if the unit is known, or if no member is due.
    ///
    /// Each read either makes the unit known or excludes one process, so the search ends.
    pub(super) fn unit_source(&self, session: &Session) -> Option<ProcessKey> {
        self.sessions.due(session.id)?;
        // The unit of a root that is in the tree although it counts as exited is not applied.
        let is_consistent = session.root_exit.is_none() == self.tree.get(session.root).is_some();
        match session.unit {
            Fact::Known(_) => None,
            // The unit may have been read before the root exited, with the answer still to come.
            Fact::Unread if is_consistent => Some(session.root),
            _ if session.cgroup_id == 0 => None,
            _ => {
                let failed = |facts: &Facts| facts.unit == Fact::Unreadable;
                let mut in_cgroup = self.tree.in_cgroup(session.cgroup_id);
                let source = in_cgroup
                    .find(|node| node.key != session.root && !node.facts().is_some_and(failed));
                source.map(|node| node.key)
            }
        }
    }

    /// Forgets all facts about all processes, and their keep markers: an exec may be among lost events, also one of an
    /// ancestor.
    pub fn forget_program_facts(&mut self) {
        let all: Vec<ProcessKey> = self.tree.iter().map(|node| node.key).collect();
        for key in all {
            if let Some(node) = self.tree.get_mut(key) {
                node.state.cached.on_unseen_exec();
            }
        }
    }

    /// Makes the cgroup and the unit unknown for the members of sessions whose root exited in these events, and of
    /// those nested in them. `now` is in ns since boot.
    pub(super) fn forget_cgroups(&mut self, session_events: &[SessionEvent], now: u64) {
        let gone = session_events
            .iter()
            .filter_map(|session_event| match session_event {
                SessionEvent::RootExited { session } => Some(*session),
                _ => None,
            });
        let sessions = gone.flat_map(|id| self.sessions.with_nested(id));
        let members: Vec<u32> = sessions.flat_map(Session::members).collect();
        for pid in members {
            if let Some(key) = self.tree.by_pid(pid).map(|node| node.key) {
                self.tree.set_cgroup(key, 0, now);
            }
        }
    }

    /// Returns whether a fact about a process is unreadable.
    pub fn has_unreadable_facts(&self, key: ProcessKey) -> bool {
        let facts = self.tree.get(key).and_then(Node::facts);
        facts.is_some_and(|facts| *facts != facts.without_unreadable())
    }

    /// Resets unreadable facts of a process to unread, for a retry.
    pub fn forget_unreadable(&mut self, key: ProcessKey) {
        if let Some(read) = self
            .tree
            .get_mut(key)
            .and_then(|node| node.state.cached.readings.as_mut())
        {
            read.facts = read.facts.without_unreadable();
        }
    }

    /// Forgets the facts of a process that may change at any time. If it is a root, also forgets the activity of all
    /// processes of its session. A rule that needs them after a delay reads them again.
    pub fn forget_volatile(&mut self, key: ProcessKey) {
        let volatile = FactSet::LISTENING
            | FactSet::LOCAL_SOCKETS
            | FactSet::CPU
            | FactSet::KERNEL_SESSION
            | FactSet::STDIO;
        self.forget_facts(key, volatile);
        self.forget_activity_within(key);
    }

    /// Resets these facts about a process to unread.
    pub(super) fn forget_facts(&mut self, key: ProcessKey, facts: FactSet) {
        if let Some(read) = self
            .tree
            .get_mut(key)
            .and_then(|node| node.state.cached.readings.as_mut())
        {
            read.facts.update(facts, Facts::default());
        }
    }
}
