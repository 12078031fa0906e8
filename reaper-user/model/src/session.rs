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

mod attribution;
mod index;
mod inferred;
mod lineage;
pub mod member;
mod membership;
mod open;
mod restore;
mod root_facts;
mod succession;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::event::{ExitStatus, Image, ProcessKey, TICK_NS, Uids};
use super::facts::{Fact, InheritedFacts};
use super::ruleset::{RuleId, Ruleset, SessionKind};
use crate::tree::tick;
use crate::{Node, Tree};
use index::{Due, IndexKey, Nesting, SessionIndex};
pub use member::{Evidence, SessionId};
pub(super) use membership::Origin;
pub use succession::{Succession, SuccessorSearch};

/// Number of the signal that a root is sent first.
const SIGTERM: u8 = 15;
/// Name of the rule that recognises `reaper run`.
const RUN: &str = "reaper-run";

/// Closed sessions that are kept for members of which nothing was known when they closed.
pub const CLOSED_MAX: usize = 64;

/// The end of a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RootExit {
    /// Nanoseconds since boot.
    pub at: u64,
    pub exit_status: ExitStatus,
    /// Whether it was sent a signal before by this program.
    pub was_signalled: bool,
}

impl RootExit {
    /// Returns the end that decides about the members. A root that exits because it was told to has not finished its
    /// work, whatever its status.
    pub fn cause(&self) -> ExitStatus {
        match self.exit_status {
            ExitStatus::Exited(_) if self.was_signalled => ExitStatus::Signalled {
                signal: SIGTERM,
                core: false,
            },
            ended => ended,
        }
    }
}

/// Who had a root when it became one: a stranger, of whom nothing else is remembered once it has exited.
#[derive(Clone, Debug)]
pub struct RootParent {
    pub key: ProcessKey,
    /// As it was then; nothing is in it where that is not known.
    pub image: Arc<Image>,
    pub uids: Uids,
}

impl RootParent {
    fn of(tree: &Tree, key: ProcessKey) -> RootParent {
        let known = tree.get(key);
        let (image, uids) = known
            .map(|node| (Arc::clone(&node.image), node.uids))
            .unwrap_or_default();
        RootParent { key, image, uids }
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
    pub root: ProcessKey,
    /// Uids of the root when it became one.
    pub uids: Uids,
    /// Nanoseconds since boot.
    pub opened_at: u64,
    /// The process that was the root first: with the start, this session's name for ever.
    pub first_root: ProcessKey,
    /// Who had the root when it became one.
    pub parent: Option<RootParent>,
    /// The session that this one is nested in.
    pub outer: Option<SessionId>,
    /// Id of the root's cgroup (v2) when it became one, 0 if unknown.
    pub cgroup_id: u64,
    /// Session id of the root as the kernel has it, 0 if unknown.
    pub sid: u32,
    /// The innermost systemd unit of the root's cgroup.
    pub unit: Fact<Arc<str>>,
    /// What its root has from its makers, as far as anybody has asked.
    pub inherited: Fact<Arc<InheritedFacts>>,
    /// The root was found below tmux, screen or zellij.
    pub multiplexed: bool,
    pub root_exit: Option<RootExit>,
    /// Whether another agent may continue the session after the exit of its root.
    pub succession: Succession,
    /// When the last end of one of its members was told, in nanoseconds since boot; 0: none was.
    pub last_exit_at: u64,
    /// Start of its youngest member, in nanoseconds since boot.
    pub(super) last_birth_at: u64,
    /// When it was last read that a client was connected to it or an agent ran below it, in nanoseconds since boot.
    pub(super) last_use_at: u64,
    /// Its root was found to be an agent already: the exec that made it one may still be told.
    is_discovered: bool,
    /// Kept up by [`SessionIndex`].
    nesting: Nesting,
    members: HashSet<u32, foldhash::fast::FixedState>,
}

impl Session {
    /// Pids of its living members, nested sessions' not among them, in no order.
    pub fn members(&self) -> impl ExactSizeIterator<Item = u32> {
        self.members.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether this is its name, which may be known better than it was when it opened.
    fn has_name(&self, name: ProcessKey) -> bool {
        let coarse = self.first_root.start.is_multiple_of(TICK_NS);
        self.first_root == name || coarse && self.first_root.has_same_tick(name)
    }

    /// Takes over what its members are compared with from its root, as far as that is known.
    fn copy_from_root(&mut self, root: Option<&Node>) {
        let Some(root) = root else { return };
        if root.image.cgroup_id != 0 && root.image.cgroup_id != self.cgroup_id {
            (self.cgroup_id, self.unit) = (root.image.cgroup_id, Fact::Unread);
        }
        if root.image.sid != 0 {
            self.sid = root.image.sid;
        }
        if let Some(facts) = root.facts() {
            self.set_unit(&facts.unit);
            self.set_inherited(&facts.inherited);
        }
    }

    /// Whether the root is the command of a `reaper run` that lives; `outer` is the session around it.
    fn is_command_of(&self, outer: Option<&Session>) -> bool {
        let parent = self.parent.as_ref().map(|parent| parent.key);
        outer.is_some_and(|run| {
            &*run.agent == RUN && run.root_exit.is_none() && parent == Some(run.root)
        })
    }

    /// Returns the end that makes its members due. There is none while another agent may continue it.
    fn end(&self) -> Option<RootExit> {
        self.root_exit
            .filter(|_| self.succession == Succession::Excluded)
    }
}

/// How a process came to run its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageSource {
    /// Its exec was told.
    Reported,
    /// It was found running it.
    Discovered,
    /// It was found running what its maker does: it has not run a program of its own yet.
    Copied,
}

/// What became of sessions by a change in the tree.
#[derive(Clone, Debug)]
pub enum SessionEvent {
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
        key: ProcessKey,
        session: SessionId,
        rule: Arc<str>,
    },
    /// The root left of its own accord and handed over to its child. Where that was found out only after
    /// [`SessionEvent::RootExited`], it takes that back.
    Relaunched {
        session: SessionId,
        old_root: ProcessKey,
        root: ProcessKey,
    },
    RootExited {
        session: SessionId,
    },
    /// Nothing of it lives, nested sessions included; it is forgotten.
    Closed {
        session: Box<Session>,
    },
}

#[derive(Debug, Default)]
pub struct Sessions {
    open: SessionIndex,
    /// Oldest first.
    closed: VecDeque<Session>,
    /// Real uid of all roots; `None`: any.
    uid: Option<u32>,
    /// Sessions that something has left.
    to_check: Vec<SessionId>,
    /// Sessions are being taken up again, and not all that is known of them has been told.
    pub(super) is_restoring: bool,
    /// Sessions whose root has left of its own accord since then, with no heir among its children: one
    /// that was found with its adopter already is still to be told of. By the pid of the root.
    exited_roots: HashMap<u32, Vec<(SessionId, Node)>>,
    /// Children that living processes have lost to an adopter since then.
    reparented: HashMap<ProcessKey, Vec<ProcessKey>>,
    /// Processes that were found with a mark of a session that has not opened, after its name to the tick.
    early_members: BTreeSet<(ProcessKey, ProcessKey)>,
    last: u32,
}

impl Sessions {
    /// Of this user alone, if one is named.
    pub(super) fn for_uid(uid: Option<u32>) -> Sessions {
        Sessions {
            uid,
            ..Sessions::default()
        }
    }

    /// Notes that a client was connected to a session, or that an agent ran below it, at `now`.
    pub(super) fn note_use(&mut self, id: SessionId, now: u64) {
        self.open.update(id, |session| session.last_use_at = now);
    }

    pub(super) fn allows_uid(&self, uid: u32) -> bool {
        self.uid.is_none_or(|only| only == uid)
    }

    pub fn get(&self, id: SessionId) -> Option<&Session> {
        self.open.get(id)
    }

    /// Returns a session that is open, or one of those that have closed last.
    pub fn find(&self, id: SessionId) -> Option<&Session> {
        let closed = || self.closed.iter().rev().find(|session| session.id == id);
        self.get(id).or_else(closed)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.open.iter()
    }

    /// The session of this name: of the process that was its root first.
    pub fn by_first_root(&self, name: ProcessKey) -> Option<&Session> {
        self.open.by_name(name)
    }

    /// The session and those it is nested in, innermost first.
    pub fn with_enclosing(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let outer = |session: &&Session| self.get(session.outer?);
        std::iter::successors(self.get(id), outer).take(self.open.len())
    }

    /// The session and those nested in it, oldest first.
    pub fn with_nested(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let mut ids: Vec<SessionId> = self.get(id).map(|session| session.id).into_iter().collect();
        let mut at = 0;
        while let Some(outer) = ids.get(at).copied() {
            ids.extend(self.open.ids(IndexKey::Outer(outer)));
            at += 1;
        }
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| self.get(id))
    }

    /// Whether the members of a session are due: the outermost session whose root is gone, on whose
    /// ladder they belong, and the first end of a root, which made them so.
    pub fn due(&self, id: SessionId) -> Option<(&Session, RootExit)> {
        let Due { outermost, first } = self.get(id)?.nesting.due?;
        Some((self.get(outermost)?, first))
    }

    /// Returns the innermost session around the members of a session that another agent may continue.
    pub(super) fn awaiting_successor(&self, id: SessionId) -> Option<&Session> {
        self.get(self.get(id)?.nesting.awaiting?)
    }

    /// Whether a `reaper run` ends the members of a session, which is its command's or nested in that, when the command exits.
    pub(super) fn is_ended_by_run(&self, id: SessionId) -> bool {
        self.get(id)
            .is_some_and(|session| session.nesting.is_ended_by_run)
    }

    /// The session that has this process for its root.
    pub fn by_root(&self, key: ProcessKey) -> Option<&Session> {
        let mut all = self.open.all(IndexKey::Root(key));
        all.find(|session| session.root_exit.is_none())
    }

    /// A process has exited.
    pub(super) fn on_exit(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        node: &Node,
        (ended, orphans): (ExitStatus, &[ProcessKey]),
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        if let Some(id) = node.state.member.session {
            self.open.update(id, |session| {
                session.members.remove(&node.key.pid);
                session.last_exit_at = now;
            });
            self.to_check.push(id);
        }
        // Two, if it had become the root of another's session: of its own and of that.
        while node.state.member.root
            && let Some(id) = self.by_root(node.key).map(|session| session.id)
        {
            let gone = RootExit {
                at: now,
                exit_status: ended,
                was_signalled: node.state.member.signals_sent != 0,
            };
            let left = matches!(gone.cause(), ExitStatus::Exited(_));
            let heir = || {
                self.successor_root(tree, node, id, orphans)
                    .or_else(|| self.reparented_successor(tree, node, id))
            };
            if left && let Some(heir) = heir() {
                self.set_successor(tree, id, heir, session_events);
                continue;
            }
            let outer = |session: &Session| self.get(session.outer?);
            let is_left_to_run = self.get(id).is_some_and(|it| it.is_command_of(outer(it)));
            self.open.update(id, |session| {
                session.root_exit = Some(gone);
                session.succession = match is_left_to_run {
                    true => Succession::LeftToRun,
                    false => Succession::after(rules, session.rule, gone.cause()),
                };
            });
            session_events.push(SessionEvent::RootExited { session: id });
            // It need not have been a member of it still: it may be a boundary.
            self.to_check.push(id);
            if left && self.is_restoring {
                let roots = self.exited_roots.entry(node.key.pid).or_default();
                roots.push((id, node.clone()));
            }
        }
        self.reparented.remove(&node.key);
        if let Some(name) = node.membership.and_then(|mark| mark.session) {
            self.early_members.remove(&(tick(name), node.key));
        }
    }

    /// Makes `root` the root of a session whose root has exited.
    fn set_successor(
        &mut self,
        tree: &mut Tree,
        id: SessionId,
        root: ProcessKey,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let old_root = self.open.update(id, |session| {
            (session.root_exit, session.succession) = (None, Succession::Excluded);
            let old_root = std::mem::replace(&mut session.root, root);
            session.copy_from_root(tree.get(root));
            old_root
        });
        let Some(old_root) = old_root else { return };
        if let Some(root) = tree.get_mut(root) {
            root.state.member.root = true;
        }
        session_events.push(SessionEvent::Relaunched {
            session: id,
            old_root,
            root,
        });
    }

    /// The child to which a root that left of its own accord has handed over: one that has become an
    /// agent by the same rule, in the same terminal, and in the foreground there: what reads from elsewhere while
    /// the root reads from the terminal was started by that for its own ends.
    fn successor_root(
        &self,
        tree: &Tree,
        root: &Node,
        id: SessionId,
        orphans: &[ProcessKey],
    ) -> Option<ProcessKey> {
        let session = self.get(id)?;
        // Of a rule that there is no more the name is left.
        let by_same_rule =
            |other: &Session| (other.rule, &other.agent) == (session.rule, &session.agent);
        let reads = |node: &Node| {
            node.facts()
                .map_or(Fact::Unread, |facts| facts.stdin_is_terminal)
        };
        let is_heir = |key: &&ProcessKey| {
            tree.get(**key).is_some_and(|child| {
                let nested = child.state.member.session.and_then(|id| self.get(id));
                root.image.tty != 0
                    && child.image.tty == root.image.tty
                    && (reads(root), reads(child)) != (Fact::Known(true), Fact::Known(false))
                    && nested.is_some_and(|nested| nested.root == child.key && by_same_rule(nested))
            })
        };
        orphans.iter().find(is_heir).copied()
    }

    /// There are other rules now.
    pub(super) fn resolve_rules(&mut self, rules: &Ruleset) {
        let resolve = |session: &mut Session| session.rule = rules.session_rule(&session.agent);
        self.open.update_all(resolve);
        self.closed.iter_mut().for_each(resolve);
    }

    /// Closes what is over since the last call. Apart from the rest, so that whoever follows the turns
    /// still finds the session that the ones before this were about.
    pub(super) fn close_finished(&mut self, session_events: &mut Vec<SessionEvent>) {
        if self.is_restoring {
            return;
        }
        while let Some(id) = self.to_check.pop() {
            self.close_if_empty(id, session_events);
        }
    }

    fn close_if_empty(&mut self, id: SessionId, session_events: &mut Vec<SessionEvent>) {
        let mut next = Some(id);
        while let Some(id) = next {
            let nested = self.open.ids(IndexKey::Outer(id)).next().is_some();
            let finished = |session: &Session| session.is_empty() && session.root_exit.is_some();
            if nested || !self.get(id).is_some_and(finished) {
                return;
            }
            let Some(session) = self.open.remove(id) else {
                return;
            };
            next = session.outer;
            if self.closed.len() == CLOSED_MAX {
                self.closed.pop_front();
            }
            self.closed.push_back(session.clone());
            session_events.push(SessionEvent::Closed {
                session: Box::new(session),
            });
        }
    }
}
