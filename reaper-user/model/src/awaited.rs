//! Programs that the rules recognise only by what is read after the exec: the end of a long command line, or the
//! resolved path of a script.
//!
//! A process whose script may show that it is an agent is *awaited*: it and its descendants are tracked like members
//! until the path is read, but nothing is decided about them.

use reaper_common::{MEMBER_CANDIDATE, MEMBER_TRACKED};

use super::event::{Membership, ProcessKey};
use super::facts::{Fact, FactSet};
use super::policy::MatchedRules;
use super::ruleset::Class;
use super::session::ImageSource;
use super::{Model, Output, TreeChange};
use crate::Node;

/// Data of an awaited process.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    /// Innermost awaited process that it descends from.
    outer: Option<ProcessKey>,
    /// Processes that descend from it and from no other awaited one in between. Some may have exited or become members.
    below: Vec<ProcessKey>,
}

/// Processes whose membership changed because a script or a command line was read. The reclassified process itself is
/// not among them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reclassified {
    /// Descendants that joined the session which it opened.
    pub joined: Vec<ProcessKey>,
    /// Descendants that left its former session, because it became a boundary or a server.
    pub left: Vec<ProcessKey>,
}

impl Model {
    /// Returns whether the end of a member's command line matters and is unread.
    pub fn needs_arguments(&self, node: &Node) -> bool {
        let wanted = MatchedRules::wants(self, node);
        node.state.member.session.is_some()
            && wanted.is_some_and(|(_, wanted)| wanted.contains(FactSet::ARGUMENTS))
    }

    /// Returns whether the resolved path of a process's script may matter and is unread. It does not matter if the path
    /// as given already classifies the process.
    pub fn needs_script(&self, node: &Node) -> bool {
        node.reported.execed
            && node.state.member.in_scope
            && !node.missing_facts(FactSet::SCRIPT).is_empty()
            && self.sessions.allows_uid(node.uids.real)
            && self.rules.reads_script(&node.image)
            && self.rules.classify(&node.image) == Class::Plain
    }

    /// Returns whether a process is untracked and its script must be read.
    pub fn is_awaited(&self, key: ProcessKey) -> bool {
        self.awaited.contains_key(&key)
    }

    /// Returns all awaited processes.
    pub fn awaited(&self) -> impl Iterator<Item = ProcessKey> {
        self.awaited.keys().copied()
    }

    /// Takes the processes that are no longer awaited, and those directly below them, noted since the last call. The
    /// caller updates their map entries: some are still tracked, for an outer awaited process or as members.
    pub fn take_released(&mut self) -> Vec<ProcessKey> {
        std::mem::take(&mut self.released)
    }

    /// Records which processes are awaited, and which descend from them, after a fork, exec or exit. A process is
    /// awaited while its script is unread. `now` is the time of the change, in ns since boot.
    pub(super) fn follow_awaited(&mut self, change: &TreeChange, now: u64) {
        match *change {
            TreeChange::Born { key, .. } => {
                self.inherit_awaited(key);
                self.await_script(key);
            }
            TreeChange::Execed { key } => {
                // What the process started under an earlier program does not belong to the agent that it may become.
                let below = self.stop_awaiting(key);
                self.await_script(key);
                let since = below.into_iter().filter(|key| key.start > now);
                since.for_each(|key| self.inherit_awaited(key));
            }
            TreeChange::Exited { ref node, .. } => drop(self.stop_awaiting(node.key)),
            _ => {}
        }
    }

    /// Records which awaited process a process descends from, if any. Does nothing for a process that is awaited
    /// itself.
    pub(super) fn inherit_awaited(&mut self, key: ProcessKey) {
        if self.awaited.is_empty() {
            return;
        }
        let parent = |node: &Node| node.birth_parent.or(node.parent);
        let parent = self.tree.get(key).and_then(parent);
        let above = parent.and_then(|parent| self.awaited_above(self.tree.get(parent)?));
        // A fork may be reported again for a process that is awaited itself.
        if self.awaited.contains_key(&key) {
            return;
        }
        if let Some(above) = above
            && let Some(node) = self.tree.get_mut(key)
            && let Some(awaited) = self.awaited.get_mut(&above)
        {
            let before = node.state.member.awaited.replace(above);
            awaited.below.extend((before != Some(above)).then_some(key));
        }
    }

    /// Starts to await a process if it is untracked and its script must be read. Otherwise stops awaiting it.
    pub(super) fn await_script(&mut self, key: ProcessKey) {
        let Some(node) = self.tree.get(key) else {
            return;
        };
        let is_untracked =
            node.state.member.session.is_none() && node.state.member.boundary.is_none();
        if !is_untracked || !self.needs_script(node) {
            self.stop_awaiting(key);
        } else if let Some(node) = self.tree.get_mut(key)
            && !self.awaited.contains_key(&key)
        {
            let outer = node.state.member.awaited.replace(key);
            let below = Vec::new();
            self.awaited.insert(key, Awaited { outer, below });
        }
    }

    /// Stops awaiting a process. The processes below it pass to the awaited process above, if there is one. Returns
    /// them.
    fn stop_awaiting(&mut self, key: ProcessKey) -> Vec<ProcessKey> {
        let Some(Awaited { outer, below }) = self.awaited.remove(&key) else {
            return Vec::new();
        };
        for key in below.iter().chain([&key]) {
            if let Some(inner) = self.awaited.get_mut(key) {
                inner.outer = outer;
            } else if let Some(node) = self.tree.get_mut(*key) {
                node.state.member.awaited = outer;
            }
            self.released.push(*key);
        }
        if let Some(outer) = outer.and_then(|outer| self.awaited.get_mut(&outer)) {
            outer.below.extend(&below);
        }
        below
    }

    /// Returns these processes, and those below the awaited ones among them at any depth.
    fn with_awaited_below(&self, mut all: Vec<ProcessKey>) -> Vec<ProcessKey> {
        let mut at = 0;
        while let Some(key) = all.get(at) {
            let inner = self.awaited.get(key);
            all.extend(inner.into_iter().flat_map(|inner| &inner.below));
            at += 1;
        }
        all
    }

    /// Returns the awaited process that an untracked process is, or descends from without a boundary in between.
    pub(super) fn awaited_above(&self, node: &Node) -> Option<ProcessKey> {
        let is_untracked =
            node.state.member.session.is_none() && node.state.member.boundary.is_none();
        let above = node.state.member.awaited.filter(|_| is_untracked)?;
        self.awaited.contains_key(&above).then_some(above)
    }

    /// Returns the map entry of a process that is awaited or below an awaited one: it names the session that may open
    /// there.
    pub(super) fn awaited_membership(&self, node: &Node) -> Option<Membership> {
        let root = self.awaited_above(node)?;
        let name = self.tree.get(root)?.exact_key()?;
        let known = node
            .membership
            .filter(|membership| membership.session == Some(name));
        Some(known.unwrap_or(Membership {
            session: Some(name),
            flags: MEMBER_TRACKED | MEMBER_CANDIDATE,
        }))
    }

    /// Reclassifies a process as agent, server or boundary if only its whole command line or the path of its script
    /// shows that. Descendants join its session, or leave the session of a process that became a boundary or a server.
    /// An awaited process whose script was read is no longer awaited. `now` is in ns since boot. Returns the
    /// descendants that joined or left.
    pub fn reclassify(&mut self, key: ProcessKey, now: u64, out: &mut Vec<Output>) -> Reclassified {
        let mut all = Reclassified::default();
        let Some(node) = self.tree.get(key) else {
            return all;
        };
        let is_read = node.missing_facts(FactSet::SCRIPT).is_empty();
        let (before, given) = (node.state.member.session, self.rules.classify(&node.image));
        let was_awaited = is_read && self.awaited.contains_key(&key);
        let below = match was_awaited {
            true => self.stop_awaiting(key),
            false => Vec::new(),
        };
        let Some(node) = self.tree.get(key) else {
            return all;
        };
        let Some(facts) = node.facts().filter(|_| before.is_some() || was_awaited) else {
            return all;
        };
        let read = [&facts.arguments, &facts.script];
        let class = read.into_iter().find_map(|fact| match fact {
            Fact::Known(read) if read.class != given && read.class != Class::Plain => {
                Some(read.class)
            }
            _ => None,
        });
        let Some(class) = class else { return all };
        let ran = match node.reported.execed && !self.runs_parents_program(node) {
            true => ImageSource::Discovered,
            false => ImageSource::Copied,
        };
        let mut session_events = std::mem::take(&mut self.session_events);
        self.on_class(key, (class, ran), now, &mut session_events);
        if let (Some(before), Class::Boundary(_) | Class::Server(_)) = (before, class) {
            let moved = self.sessions.move_below(&mut self.tree, key, before);
            all.left = moved;
        }
        if before.is_none() {
            let below = self.with_awaited_below(below);
            all.joined = self.sessions.adopt(&mut self.tree, key, below);
            for key in &all.joined {
                self.inherit_keep(*key, None);
            }
        }
        self.match_rules(key);
        all.joined.iter().for_each(|key| self.match_rules(*key));
        self.emit_session_events(&mut session_events, out);
        self.session_events = session_events;
        all
    }
}
