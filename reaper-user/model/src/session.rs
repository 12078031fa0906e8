//! Sessions: an agent and everything that ever descended from it, down to a boundary.
//!
//! ```text
//!   shell ── claude ─┬─ bash ── npm ── node         members of claude's session
//!                    ├─ tmux ── bash ── claude      tmux is a boundary; the agent below it is of its own
//!                    ├─ codex ── bash               a nested session: due with its own root or with claude's
//!                    └─ codex app-server ── bash    a server's session: not due with claude's root
//! ```
//!
//! Invariant: a server's session is nested in no other, and no other is nested in it. An agent below a server is found
//! again by a restarted server, so it lives until its own end.

mod descent;
mod inferred;
mod learned;
mod lineage;
pub mod member;
mod open;
mod restore;
mod successor;
mod traces;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hashbrown::HashSet;

use super::agent::{RuleId, Ruleset, SessionKind};
use super::event::{Ended, Image, Key, TICK_NS, Uids};
use super::facts::{Inherited, Known};
use crate::{Node, Tree};
pub(super) use descent::Origin;
pub use member::{Evidence, SessionId};
pub use successor::{Handover, Search};

/// Number of the signal that a root is sent first.
const SIGTERM: u8 = 15;

/// Closed sessions that are kept for members of which nothing was known when they closed.
pub const CLOSED_MAX: usize = 64;

/// The end of a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootGone {
    /// Nanoseconds since boot.
    pub at: u64,
    pub ended: Ended,
    /// Whether it was sent a signal before by this program.
    pub signalled: bool,
}

impl RootGone {
    /// Returns the end that decides about the members. A root that exits because it was told to has not finished its
    /// work, whatever its status.
    pub fn cause(&self) -> Ended {
        match self.ended {
            Ended::Exited(_) if self.signalled => Ended::Signalled {
                signal: SIGTERM,
                core: false,
            },
            ended => ended,
        }
    }
}

/// Who had a root when it became one: a stranger, of whom nothing else is remembered once it has exited.
#[derive(Clone, Debug)]
pub struct Parent {
    pub key: Key,
    /// As it was then; nothing is in it where that is not known.
    pub image: Arc<Image>,
    pub uids: Uids,
}

impl Parent {
    fn of(tree: &Tree, key: Key) -> Parent {
        let known = tree.get(key);
        let (image, uids) = known
            .map(|node| (Arc::clone(&node.image), node.uids))
            .unwrap_or_default();
        Parent { key, image, uids }
    }
}

#[derive(Clone, Debug)]
pub struct Session {
    pub id: SessionId,
    /// The agent's name: that of its rule.
    pub agent: Arc<str>,
    pub kind: SessionKind,
    /// `None` for a session from before this program whose rule there is no more.
    pub rule: Option<RuleId>,
    pub root: Key,
    /// Uids of the root when it became one.
    pub uids: Uids,
    /// Nanoseconds since boot.
    pub opened: u64,
    /// The process that was the root first: with the start, this session's name for ever.
    pub first_root: Key,
    /// Who had the root when it became one.
    pub parent: Option<Parent>,
    /// The session that this one is nested in.
    pub outer: Option<SessionId>,
    /// Id of the root's cgroup (v2) when it became one, 0 if unknown.
    pub cgroup_id: u64,
    /// Session id of the root as the kernel has it, 0 if unknown.
    pub sid: u32,
    /// The innermost systemd unit of the root's cgroup.
    pub unit: Known<Arc<str>>,
    /// What its root has from its makers, as far as anybody has asked.
    pub inherited: Known<Arc<Inherited>>,
    /// The root was found below tmux, screen or zellij.
    pub multiplexed: bool,
    pub root_gone: Option<RootGone>,
    /// Whether another agent may continue the session after the exit of its root.
    pub handover: Handover,
    /// When the last end of one of its members was told, in nanoseconds since boot; 0: none was.
    pub last_end: u64,
    /// Start of its youngest member, in nanoseconds since boot.
    pub(super) last_birth: u64,
    /// When it was last read that a client was connected to it or an agent ran below it, in nanoseconds since boot.
    pub(super) last_use: u64,
    /// Its root was found to be an agent already: the exec that made it one may still be told.
    found: bool,
    members: HashSet<u32, foldhash::fast::FixedState>,
}

impl Session {
    /// Pids of its living members, nested sessions' not among them, in no order.
    pub fn members(&self) -> impl Iterator<Item = u32> {
        self.members.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether this is its name, which may be known better than it was when it opened.
    fn is_named(&self, name: Key) -> bool {
        let coarse = self.first_root.start.is_multiple_of(TICK_NS);
        self.first_root == name || coarse && self.first_root.same_tick(name)
    }

    /// Takes over what its members are compared with from its root, as far as that is known.
    fn is_of_root(&mut self, root: Option<&Node>) {
        let Some(root) = root else { return };
        if root.image.cgroup_id != 0 && root.image.cgroup_id != self.cgroup_id {
            (self.cgroup_id, self.unit) = (root.image.cgroup_id, Known::Unasked);
        }
        if root.image.sid != 0 {
            self.sid = root.image.sid;
        }
        if let Some(facts) = root.facts() {
            self.learn_unit(&facts.unit);
            self.learn_inherited(&facts.inherited);
        }
    }

    /// Returns the session with the end that makes its members due. There is none while another agent may continue it.
    fn with_end(&self) -> Option<(&Session, RootGone)> {
        let end = self.root_gone?;
        (self.handover == Handover::Excluded).then_some((self, end))
    }
}

/// How a process came to run its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ran {
    /// Its exec was told.
    Told,
    /// It was found running it.
    Found,
    /// It was found running what its maker does: it has not run a program of its own yet.
    Copied,
}

/// What became of sessions by a change in the tree.
#[derive(Clone, Debug)]
pub enum Turn {
    Opened {
        session: SessionId,
        /// The session of the process that started the root, where the new one is not nested in it: one of them is a
        /// server's.
        starter: Option<SessionId>,
    },
    /// The service before this one had it, and it goes on.
    Restored {
        session: SessionId,
    },
    /// A member became a boundary, by the rule of this name.
    Boundary {
        key: Key,
        session: SessionId,
        rule: Arc<str>,
    },
    /// The root left of its own accord and handed over to its child. Where that was found out only after
    /// [`Turn::RootGone`], it takes that back.
    Relaunched {
        session: SessionId,
        old_root: Key,
        root: Key,
    },
    RootGone {
        session: SessionId,
    },
    /// Nothing of it lives, nested sessions included; it is forgotten.
    Closed {
        session: Box<Session>,
    },
}

#[derive(Debug, Default)]
pub struct Sessions {
    by_id: BTreeMap<SessionId, Session>,
    /// Oldest first.
    closed: VecDeque<Session>,
    /// Real uid of all roots; `None`: any.
    uid: Option<u32>,
    /// Sessions that something has left.
    left: Vec<SessionId>,
    /// Sessions are being taken up again, and not all that is known of them has been told.
    pub(super) restoring: bool,
    /// Sessions whose root has left of its own accord since then, with no heir among its children: one
    /// that was found with its adopter already is still to be told of.
    left_by_root: Vec<(SessionId, Node)>,
    last: u32,
}

impl Sessions {
    /// Of this user alone, if one is named.
    pub(super) fn of(uid: Option<u32>) -> Sessions {
        Sessions {
            uid,
            ..Sessions::default()
        }
    }

    pub(super) fn may_be_of(&self, uid: u32) -> bool {
        self.uid.is_none_or(|only| only == uid)
    }

    pub fn get(&self, id: SessionId) -> Option<&Session> {
        self.by_id.get(&id)
    }

    /// Returns a session that is open, or one of those that have closed last.
    pub fn find(&self, id: SessionId) -> Option<&Session> {
        let closed = || self.closed.iter().rev().find(|session| session.id == id);
        self.get(id).or_else(closed)
    }

    pub(super) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.by_id.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.by_id.values()
    }

    /// The session of this name: of the process that was its root first.
    pub fn by_first_root(&self, name: Key) -> Option<&Session> {
        self.iter().find(|session| session.is_named(name))
    }

    /// The session and those it is nested in, innermost first.
    pub fn outwards(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let outer = |session: &&Session| self.get(session.outer?);
        std::iter::successors(self.get(id), outer).take(self.by_id.len())
    }

    /// The sessions nested in one, itself first.
    pub fn inwards(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        self.by_id
            .values()
            .filter(move |session| self.outwards(session.id).any(|outer| outer.id == id))
    }

    /// Whether the members of a session are due: the outermost session whose root is gone, on whose
    /// ladder they belong, and the first end of a root, which made them so.
    pub fn due(&self, id: SessionId) -> Option<(&Session, RootGone)> {
        let gone = || self.outwards(id).filter_map(Session::with_end);
        let (outermost, _) = gone().last()?;
        let first = gone().map(|(_, end)| end).min_by_key(|end| end.at)?;
        Some((outermost, first))
    }

    /// The session that has this process for its root.
    pub fn of_root(&self, key: Key) -> Option<&Session> {
        self.by_id
            .values()
            .find(|session| session.root == key && session.root_gone.is_none())
    }

    /// A process has exited.
    pub(super) fn exited(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        node: &Node,
        (ended, orphans): (Ended, &[Key]),
        now: u64,
        turns: &mut Vec<Turn>,
    ) {
        if let Some(session) = node
            .state
            .member
            .session
            .and_then(|id| self.by_id.get_mut(&id))
        {
            session.members.remove(&node.key.pid);
            session.last_end = now;
        }
        self.left.extend(node.state.member.session);
        // Two, if it had become the root of another's session: of its own and of that.
        while node.state.member.root
            && let Some(id) = self.of_root(node.key).map(|session| session.id)
        {
            let gone = RootGone {
                at: now,
                ended,
                signalled: node.state.member.signalled != 0,
            };
            let left = matches!(gone.cause(), Ended::Exited(_));
            let heir = || {
                self.heir(tree, node, id, orphans)
                    .or_else(|| self.heir_elsewhere(tree, node, id))
            };
            if left && let Some(heir) = heir() {
                self.hand_over(tree, id, heir, turns);
                continue;
            }
            let Some(session) = self.by_id.get_mut(&id) else {
                break;
            };
            session.root_gone = Some(gone);
            session.handover = Handover::after(rules, session.rule, gone.cause());
            turns.push(Turn::RootGone { session: id });
            // It need not have been a member of it still: it may be a boundary.
            self.left.push(id);
            if left && self.restoring {
                self.left_by_root.push((id, node.clone()));
            }
        }
    }

    /// Makes `root` the root of a session whose root has exited.
    fn hand_over(&mut self, tree: &mut Tree, id: SessionId, root: Key, turns: &mut Vec<Turn>) {
        let Some(session) = self.by_id.get_mut(&id) else {
            return;
        };
        let old_root = std::mem::replace(&mut session.root, root);
        (session.root_gone, session.handover) = (None, Handover::Excluded);
        if let Some(root) = tree.get_mut(root) {
            root.state.member.root = true;
        }
        if let Some(session) = self.by_id.get_mut(&id) {
            session.is_of_root(tree.get(root));
        }
        turns.push(Turn::Relaunched {
            session: id,
            old_root,
            root,
        });
    }

    /// The child to which a root that left of its own accord has handed over: one that has become an
    /// agent by the same rule, in the same terminal, and in the foreground there: what reads from elsewhere while
    /// the root reads from the terminal was started by that for its own ends.
    fn heir(&self, tree: &Tree, root: &Node, id: SessionId, orphans: &[Key]) -> Option<Key> {
        let session = self.get(id)?;
        // Of a rule that there is no more the name is left.
        let by_same_rule =
            |other: &Session| (other.rule, &other.agent) == (session.rule, &session.agent);
        let reads = |node: &Node| node.facts().map_or(Known::Unasked, |facts| facts.input);
        let is_heir = |key: &&Key| {
            tree.get(**key).is_some_and(|child| {
                let nested = child.state.member.session.and_then(|id| self.get(id));
                root.image.tty != 0
                    && child.image.tty == root.image.tty
                    && (reads(root), reads(child)) != (Known::Is(true), Known::Is(false))
                    && nested.is_some_and(|nested| nested.root == child.key && by_same_rule(nested))
            })
        };
        orphans.iter().find(is_heir).copied()
    }

    /// There are other rules now.
    pub(super) fn rename(&mut self, rules: &Ruleset) {
        for session in self.by_id.values_mut().chain(&mut self.closed) {
            session.rule = rules.session_rule(&session.agent);
        }
    }

    /// Closes what is over since the last call. Apart from the rest, so that whoever follows the turns
    /// still finds the session that the ones before this were about.
    pub(super) fn close_finished(&mut self, turns: &mut Vec<Turn>) {
        if self.restoring {
            return;
        }
        while let Some(id) = self.left.pop() {
            self.close_if_empty(id, turns);
        }
    }

    fn close_if_empty(&mut self, id: SessionId, turns: &mut Vec<Turn>) {
        let mut next = Some(id);
        while let Some(id) = next {
            let nested = self.by_id.values().any(|session| session.outer == Some(id));
            let finished = |session: &Session| session.is_empty() && session.root_gone.is_some();
            if nested || !self.by_id.get(&id).is_some_and(finished) {
                return;
            }
            let Some(session) = self.by_id.remove(&id) else {
                return;
            };
            next = session.outer;
            if self.closed.len() == CLOSED_MAX {
                self.closed.pop_front();
            }
            self.closed.push_back(session.clone());
            turns.push(Turn::Closed {
                session: Box::new(session),
            });
        }
    }
}
