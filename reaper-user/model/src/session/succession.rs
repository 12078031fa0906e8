//! Search for the agent that continues a session whose root has exited.
//!
//! ```text
//!   claude (exits 0) ─┬─ bash ── npm run dev      carries the conversation's id
//!                     └─ tool shell               carries the conversation's id
//!   claude daemon ──── claude (worker)            names that id: becomes the root of the remaining processes
//! ```
//!
//! A successor only ever keeps processes. It is an agent of the same rule and user, and meets one of these conditions:
//! - Its registry lists a remaining process.
//! - Its command line or registry names the id of a conversation that a remaining process carries.
//!
//! An environment marker alone is not enough.

use super::{IndexKey, Session, SessionEvent, SessionId, Sessions};
use crate::Model;
use crate::Node;
use crate::conversation::{Conversations, Ids};
use crate::event::{ExitStatus, ProcessKey};
use crate::facts::{Fact, FactSet};
use crate::ruleset::{RuleId, Ruleset};

/// Time after the exit of a root with status 0 in which its successor may appear, in ns.
const WINDOW_NS: u64 = 2_000_000_000;
/// Maximum number of members whose conversations are read, oldest first.
const MEMBERS_MAX: usize = 64;

/// Whether another agent may continue a session after the exit of its root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Succession {
    /// No: the root is alive, the rule does not allow it, the root did not exit with status 0, or no successor was
    /// found.
    #[default]
    Excluded,
    /// A successor may still appear. No member of the session is due.
    Awaited,
    /// The facts that would show a successor are unreadable. No member of the session is due.
    Unknown,
    /// No: the root was the command of a living `reaper run`, which ends the remaining processes. No member is due
    /// before that run exits: a second SIGTERM could interrupt a clean-up.
    LeftToRun,
}

impl Succession {
    /// Returns the state after the exit of a root: awaited if the rule names a source of conversations and the status
    /// is 0 or unknown. An unknown status may have been 0.
    pub(super) fn after(rules: &Ruleset, rule: Option<RuleId>, ended: ExitStatus) -> Succession {
        let source = rule.and_then(|rule| rules.rule(rule).conversation.as_ref());
        match ended {
            ExitStatus::Exited(0) | ExitStatus::Unknown if source.is_some() => Succession::Awaited,
            _ => Succession::Excluded,
        }
    }

    /// Returns whether another agent may still continue the session.
    pub fn is_open(self) -> bool {
        matches!(self, Succession::Awaited | Succession::Unknown)
    }
}

/// Result of a search for a successor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuccessorSearch {
    /// These facts must be read first.
    Needs(Vec<(ProcessKey, FactSet)>),
    /// This agent continues the session.
    Found(ProcessKey),
    /// No living agent names a conversation of the remaining processes.
    NotFound,
    /// No successor was found, but some facts were unreadable.
    Unreadable,
}

impl Sessions {
    /// Returns the agents that may continue a session: roots of the same rule and real uid that are not below it,
    /// newest first.
    fn candidates(&self, of: &Session) -> Vec<ProcessKey> {
        let may_continue = |session: &&Session| {
            session.agent == of.agent
                && self
                    .with_enclosing(session.id)
                    .all(|outer| outer.id != of.id)
        };
        let living = self.open.all(IndexKey::Living(of.uids.real));
        let sessions = living.filter(may_continue);
        let mut roots: Vec<ProcessKey> = sessions.map(|session| session.root).collect();
        roots.sort_unstable_by_key(|key| std::cmp::Reverse((key.start, key.pid)));
        roots.dedup();
        roots
    }
}

impl Model {
    /// Returns the succession state of a session; `None` if the session is closed.
    pub fn succession(&self, id: SessionId) -> Option<Succession> {
        Some(self.sessions.get(id)?.succession)
    }

    /// Returns when the search for a successor ends, in ns of `CLOCK_MONOTONIC`; `None` while the root is alive.
    ///
    /// That is 2 s after the root exited by itself. If a signal ended it, or its exit was not observed, it is the time of
    /// the exit: a successor must then already exist.
    pub fn succession_deadline(&self, session: &Session) -> Option<u64> {
        let gone = session.root_exit?;
        let window = match gone.cause() {
            ExitStatus::Exited(_) => WINDOW_NS,
            _ => 0,
        };
        Some(self.clock.to_monotonic(gone.at).saturating_add(window))
    }

    /// Searches for the agent that continues a session, by the facts that are known. Returns
    /// [`SuccessorSearch::NotFound`] also for a session that is not open.
    pub fn find_successor(&self, id: SessionId) -> SuccessorSearch {
        let Some(session) = self.sessions.get(id) else {
            return SuccessorSearch::NotFound;
        };
        let candidates = self.candidates(session);
        if candidates.is_empty() {
            return SuccessorSearch::NotFound;
        }
        let left = self.oldest_members(id);
        let unread = |node: &&&Node| conversations(node) == &Fact::Unread;
        let unread: Vec<(ProcessKey, FactSet)> = (left.iter().chain(&candidates).filter(unread))
            .map(|node| (node.key, FactSet::CONVERSATIONS))
            .collect();
        if !unread.is_empty() {
            return SuccessorSearch::Needs(unread);
        }
        let mut ids = Ids::default();
        let carried = left.iter().filter_map(|node| known(node));
        carried.for_each(|all| ids.extend(&all.inherited));
        let continues = |node: &&&Node| {
            let by_registry = known(node).is_some_and(|all| {
                let is_left =
                    |key: &ProcessKey| left.iter().any(|node| node.key.has_same_tick(*key));
                all.registered.iter().any(|id| ids.contains(id)) || all.adopted.iter().any(is_left)
            });
            by_registry || ids.is_named_in(&node.image.argv)
        };
        if let Some(successor) = candidates.iter().find(continues) {
            return SuccessorSearch::Found(successor.key);
        }
        let unread = left.iter().any(|node| known(node).is_none());
        let incomplete = |node: &&Node| known(node).is_none_or(|all| all.registry_unreadable);
        match unread || candidates.iter().any(incomplete) {
            true => SuccessorSearch::Unreadable,
            false => SuccessorSearch::NotFound,
        }
    }

    /// Makes `root` the root of a session whose succession is open. Otherwise, or if the session is closed, does nothing
    /// and returns no events.
    pub fn set_successor(&mut self, id: SessionId, root: ProcessKey) -> Vec<SessionEvent> {
        let mut session_events = Vec::new();
        if self.succession(id).is_some_and(Succession::is_open) {
            self.sessions
                .set_successor(&mut self.tree, id, root, &mut session_events);
        }
        session_events
    }

    /// Sets the result of a search that has found no successor. Does nothing if the session or its succession is not
    /// open.
    pub fn set_succession(&mut self, id: SessionId, state: Succession) {
        if self.succession(id).is_some_and(Succession::is_open) {
            let sessions = &mut self.sessions.open;
            sessions.update(id, |session| session.succession = state);
        }
    }

    /// Forgets the conversations of all processes that a search reads, so that the next search reads them again.
    pub fn forget_conversations(&mut self, id: SessionId) {
        let candidates = self
            .sessions
            .get(id)
            .map(|session| self.candidates(session));
        let candidates = candidates.unwrap_or_default();
        let all = self.oldest_members(id).into_iter().chain(candidates);
        let all: Vec<ProcessKey> = all.map(|node| node.key).collect();
        for key in all {
            self.forget_facts(key, FactSet::CONVERSATIONS);
        }
    }

    /// Returns the living processes of [`Sessions::candidates`].
    fn candidates(&self, session: &Session) -> Vec<&Node> {
        let roots = self.sessions.candidates(session).into_iter();
        roots.filter_map(|root| self.tree.get(root)).collect()
    }

    /// Returns the oldest members of a session and of those nested in it, at most [`MEMBERS_MAX`].
    fn oldest_members(&self, id: SessionId) -> Vec<&Node> {
        let sessions = self.sessions.with_nested(id);
        let pids = sessions.flat_map(Session::members);
        let mut members: Vec<&Node> = pids.filter_map(|pid| self.tree.by_pid(pid)).collect();
        members.sort_unstable_by_key(|node| (node.key.start, node.key.pid));
        members.truncate(MEMBERS_MAX);
        members
    }
}

fn conversations(node: &Node) -> &Fact<std::sync::Arc<Conversations>> {
    node.facts()
        .map_or(&Fact::Unread, |facts| &facts.conversations)
}

/// Returns the conversations of a process; `None` if they are unread or unreadable.
fn known(node: &Node) -> Option<&Conversations> {
    match conversations(node) {
        Fact::Known(all) => Some(all),
        _ => None,
    }
}
