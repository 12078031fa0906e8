//! Idle sessions: no process in the tree of the agent has worked, and no client was connected.
//!
//! Forks and exits are known from events. CPU use, I/O and connections must be read.

use std::sync::Arc;

use hashbrown::HashSet;

use super::activity::{Activity, TreeMemory};
use super::event::ProcessKey;
use super::facts::{Fact, FactSet};
use super::ruleset::SessionKind;
use super::session::{Session, SessionId};
use super::{Model, Node};

/// Maximum number of members that are read. A larger session counts as in use.
const MEMBERS_MAX: usize = 1024;

/// Idle state of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleSince {
    /// [`FactSet::ACTIVITY`] of its processes must be read first.
    Unread,
    /// A client is connected, an agent runs below it, or a fact is unreadable. A session of more than [`MEMBERS_MAX`]
    /// processes counts as in use too.
    InUse,
    /// The session is idle since `idle`; the oldest reading is from `read_at`. Both are in ns of `CLOCK_MONOTONIC`.
    Since { idle: u64, read_at: u64 },
}

/// Use of a process and its descendants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TreeUse {
    /// [`FactSet::ACTIVITY`] of the session's processes must be read first.
    Unread,
    /// A fact is unreadable, or there are more than [`MEMBERS_MAX`] processes.
    Unreadable,
    /// They last worked, or had a client, at `used_at` or before the first reading. The oldest reading is from
    /// `read_at`. Both are in ns of `CLOCK_MONOTONIC`.
    Last { used_at: u64, read_at: u64 },
}

impl Model {
    /// Returns the last use of a member and its descendants. A connection from another member of the session is no use.
    ///
    /// A descendant that was not read yet does not count: a process that respawns would be in use forever.
    pub(super) fn tree_use(&self, node: &Node, session: &Session) -> TreeUse {
        let below = self.tree.descendants(node.key);
        let below = below.filter(|node| node.state.member.session.is_some());
        let all: Vec<&Node> = std::iter::once(node)
            .chain(below)
            .take(MEMBERS_MAX + 1)
            .collect();
        if all.len() > MEMBERS_MAX {
            return TreeUse::Unreadable;
        }
        let (mut used_at, mut read_at) = (0, u64::MAX);
        let mut read = Vec::with_capacity(all.len());
        for one in all {
            match (activity(one), one.idle()) {
                (Fact::Known(activity), Some(idle)) => {
                    read.push(activity);
                    used_at = used_at.max(idle.since());
                    read_at = read_at.min(idle.read_at());
                }
                (Fact::Unread, _) if one.key == node.key => return TreeUse::Unread,
                (Fact::Unread, _) => {}
                _ => return TreeUse::Unreadable,
            }
        }
        let others = self.members_within(session.id).take(MEMBERS_MAX);
        let others = others.filter_map(|one| match activity(one) {
            Fact::Known(activity) => Some(activity),
            Fact::Unread | Fact::Unreadable => None,
        });
        if has_client(&read, others.chain(read.iter().copied())) {
            used_at = read_at;
        }
        TreeUse::Last { used_at, read_at }
    }

    /// Returns the living members of a session and of those nested in it, in no order.
    pub fn members_within(&self, id: SessionId) -> impl Iterator<Item = &Node> {
        let sessions = self.sessions.with_nested(id);
        let pids = sessions.flat_map(Session::members);
        pids.filter_map(|pid| self.tree.by_pid(pid))
    }

    /// Returns the memory of a session's tree at the last reading; `None` if a process was not read.
    pub fn memory_within(&self, id: SessionId) -> Option<TreeMemory> {
        let mut memory = TreeMemory { rss: 0, swap: 0 };
        for node in self.members_within(id) {
            let Fact::Known(read) = activity(node) else {
                return None;
            };
            memory.rss = memory.rss.saturating_add(read.rss);
            memory.swap = memory.swap.saturating_add(read.swap);
        }
        Some(memory)
    }

    /// Returns since when no process in the tree of a session has worked, unless it is in use now ([`IdleSince::InUse`]).
    ///
    /// A member whose activity was not read yet counts as working now: it has started or executed a program since the
    /// last reading. If that is the root, all must be read first ([`IdleSince::Unread`]).
    pub(super) fn idle_since(&self, session: &Session) -> IdleSince {
        let root = self.tree.get(session.root);
        if root.is_some_and(|root| !root.missing_facts(FactSet::ACTIVITY).is_empty()) {
            return IdleSince::Unread;
        }
        let members: Vec<&Node> = self.members_within(session.id).collect();
        if members.len() > MEMBERS_MAX {
            return IdleSince::InUse;
        }
        let now = self.monotonic_now();
        let (mut idle, mut read_at) = (0, now);
        let mut read = Vec::with_capacity(members.len());
        for node in members {
            match (activity(node), node.idle()) {
                (Fact::Known(activity), Some(since)) => {
                    read.push(activity);
                    idle = idle.max(since.since());
                    read_at = read_at.min(since.read_at());
                }
                (Fact::Unread, _) => idle = now,
                _ => return IdleSince::InUse,
            }
        }
        if has_client(&read, read.iter().copied()) || self.has_agent_below(session) {
            return IdleSince::InUse;
        }
        // A process that has exited or a former client counts as work up to that time.
        let within = self.sessions.with_nested(session.id);
        let changed =
            within.map(|one| one.last_birth_at.max(one.last_exit_at).max(one.last_use_at));
        let changed = changed.max();
        IdleSince::Since {
            idle: idle.max(self.clock.to_monotonic(changed.unwrap_or(0))),
            read_at,
        }
    }

    /// Records the current time as the last use of a root's session if a client is connected or an agent runs below it.
    /// Called once the activity of all its processes has been read.
    pub fn on_tree_read(&mut self, root: ProcessKey) {
        let now = self.clock.now();
        let Some(session) = self.sessions.by_root(root) else {
            return;
        };
        let id = session.id;
        let read = self.members_within(id).map(activity);
        let read: Vec<_> = read
            .filter_map(|activity| match activity {
                Fact::Known(activity) => Some(activity),
                Fact::Unread | Fact::Unreadable => None,
            })
            .collect();
        if has_client(&read, read.iter().copied()) || self.has_agent_below(session) {
            self.sessions.note_use(id, now);
        }
    }

    /// Returns whether an agent runs below a server. Its session is not nested in that of the server. False for the
    /// session of an agent.
    fn has_agent_below(&self, server: &Session) -> bool {
        // Agents share ancestors, which are visited once.
        let mut visited = HashSet::new();
        let is_below = |session: &Session| {
            let above = self.tree.ancestors(session.root);
            let mut above = above.take_while(|above| visited.insert(above.key));
            session.kind == SessionKind::Agent
                && session.root_exit.is_none()
                && above.any(|above| above.state.member.session == Some(server.id))
        };
        server.kind == SessionKind::Server && self.sessions.iter().any(is_below)
    }

    /// Forgets the activity of all processes of a root's session and of those nested in it, so that they are read
    /// again. Does nothing if the process is no living root.
    pub fn forget_activity_within(&mut self, root: ProcessKey) {
        let Some(id) = self.sessions.by_root(root).map(|session| session.id) else {
            return;
        };
        let members: Vec<ProcessKey> = self.members_within(id).map(|node| node.key).collect();
        for key in members {
            self.forget_facts(key, FactSet::ACTIVITY);
        }
    }
}

fn activity(node: &Node) -> &Fact<Arc<Activity>> {
    node.facts().map_or(&Fact::Unread, |facts| &facts.activity)
}

/// Returns whether one of the processes has accepted a connection from outside of the processes `own`.
fn has_client<'a>(read: &[&Arc<Activity>], own: impl Iterator<Item = &'a Arc<Activity>>) -> bool {
    let own = own.flat_map(|one| one.sockets.iter());
    let own: HashSet<u64> = own.copied().collect();
    let mut clients = read.iter().flat_map(|one| one.clients.iter());
    clients.any(|client| !own.contains(client))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_between_two_members_is_no_client() {
        let server = Arc::new(Activity {
            clients: [7].into(),
            ..Activity::default()
        });
        let member = Arc::new(Activity {
            sockets: [7].into(),
            ..Activity::default()
        });
        assert!(has_client(&[&server], [&server].into_iter()));
        assert!(!has_client(&[&server], [&server, &member].into_iter()));
        let unknown = Arc::new(Activity {
            clients: [0].into(),
            ..Activity::default()
        });
        assert!(has_client(&[&unknown], [&unknown, &member].into_iter()));
    }
}
