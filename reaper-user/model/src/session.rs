//! Sessions: an agent and all of its descendants, down to a boundary.
//!
//! ```text
//!   shell ── claude ─┬─ bash ── npm ── node         members of claude's session
//!                    ├─ tmux ── bash ── claude      tmux is a boundary; the agent below it has its own session
//!                    ├─ codex ── bash               a nested session: due with its own root or with claude's
//!                    └─ codex app-server ── bash    a server's session: not due with claude's root
//! ```
//!
//! Invariant: the session of a server is nested in no other, and no other is nested in it. A restarted server finds the
//! agents below it again, so these live until they exit themselves.

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
pub use lineage::ANCESTORS_MAX;
pub use member::{Evidence, SessionId};
pub(super) use membership::Origin;
pub use succession::{Succession, SuccessorSearch};

/// Number of SIGTERM, the first signal that a root is sent.
const SIGTERM: u8 = 15;
/// Name of the rule that recognises `reaper run`.
const RUN: &str = "reaper-run";

/// Maximum number of closed sessions that are remembered, for members that become known after their session closed.
pub const CLOSED_MAX: usize = 64;

/// Maximum number of sessions in which one is nested. An agent below more than that stays a member of the innermost of
/// these. Each event then changes or visits a bounded number of sessions around it, however deep agents start agents.
pub const ENCLOSING_MAX: u32 = 64;

/// Exit of a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RootExit {
    /// Time of the exit, in nanoseconds since boot.
    pub at: u64,
    /// Status of the root as the kernel reports it; see [`RootExit::cause`].
    pub exit_status: ExitStatus,
    /// Whether the service had signalled it before.
    pub was_signalled: bool,
}

impl RootExit {
    /// Returns the status that decides about the members: `exit_status`, or a kill by SIGTERM if the root called exit
    /// after the service had signalled it. Such a root has not finished its work, whatever its status.
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

/// Parent of a root when its session opened. If it is untracked, nothing else is remembered of it after its exit.
#[derive(Clone, Debug)]
pub struct RootParent {
    /// Identity of the parent, also after its exit.
    pub key: ProcessKey,
    /// Image at that time, empty if unknown.
    pub image: Arc<Image>,
    /// Uids at that time, 0 if unknown.
    pub uids: Uids,
}

impl RootParent {
    /// Returns the parent with the image and uids of the living process, or empty ones if it is not in the tree.
    fn of(tree: &Tree, key: ProcessKey) -> RootParent {
        let known = tree.get(key);
        let (image, uids) = known
            .map(|node| (Arc::clone(&node.image), node.uids))
            .unwrap_or_default();
        RootParent { key, image, uids }
    }
}

/// Processes that descend from one root, without those of nested sessions.
#[derive(Clone, Debug)]
pub struct Session {
    /// Number of the session, unique within one model.
    pub id: SessionId,
    /// Name of the agent, which is that of its rule.
    pub agent: Arc<str>,
    /// Kind of the root: an agent or a server.
    pub kind: SessionKind,
    /// Rule that recognises the root; `None` if the rule of a restored session no longer exists.
    pub rule: Option<RuleId>,
    /// Current root: the first one or its last successor.
    pub root: ProcessKey,
    /// Uids of the root when the session opened.
    pub uids: Uids,
    /// Time of the opening, in nanoseconds since boot.
    pub opened_at: u64,
    /// First root; with its start, the permanent name of the session.
    pub first_root: ProcessKey,
    /// Parent of the root when the session opened.
    pub parent: Option<RootParent>,
    /// Session that this one is nested in.
    pub outer: Option<SessionId>,
    /// Id of the root's cgroup (v2), 0 if unknown.
    pub cgroup_id: u64,
    /// Id of the root's session in the kernel (sid), 0 if unknown.
    pub sid: u32,
    /// Innermost systemd unit of the root's cgroup.
    pub unit: Fact<Arc<str>>,
    /// Hash of the unit as the previous service has stored it, 0 for none. Used while the unit itself is unknown.
    pub stored_unit_hash: u32,
    /// Environment markers and working directory of the root, as far as they were read.
    pub inherited: Fact<Arc<InheritedFacts>>,
    /// Whether the root started below tmux, screen or zellij; false for a restored session.
    pub multiplexed: bool,
    /// Whether a person may still use what the agent started. Always true for a server and for a restored session. An
    /// agent's session is attended if its first root had a terminal, or started below another attended session or a
    /// program with [`Rule::attends`](crate::ruleset::Rule::attends).
    pub attended: bool,
    /// Exit of the current root, if it has exited.
    pub root_exit: Option<RootExit>,
    /// Whether another agent may continue the session after the exit of its root.
    pub succession: Succession,
    /// Time of the last reported exit of a member, in nanoseconds since boot; 0 for none.
    pub last_exit_at: u64,
    /// Start of the youngest process that has ever been a member, in nanoseconds since boot; 0 for none.
    pub(super) last_birth_at: u64,
    /// Last time at which a client was connected or an agent ran below it, in nanoseconds since boot; 0 for none.
    pub(super) last_use_at: u64,
    /// Last known result of [`Sessions::followed_at`]. It has the later ones too while the session is indexed.
    followed_at: u64,
    /// Whether a scan discovered the root when it already ran the agent. The exec that made it one may still be
    /// reported.
    is_discovered: bool,
    /// Derived state, maintained by [`SessionIndex`].
    nesting: Nesting,
    members: HashSet<u32, foldhash::fast::FixedState>,
}

impl Session {
    /// Returns the pids of the living members without those of nested sessions, in no order.
    pub fn members(&self) -> impl ExactSizeIterator<Item = u32> {
        self.members.iter().copied()
    }

    /// Returns whether no member is alive, apart from those of nested sessions.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns whether `name` is the first root of the session. If the session's own start is a whole tick (from
    /// /proc), any start within that tick matches.
    fn has_name(&self, name: ProcessKey) -> bool {
        let coarse = self.first_root.start.is_multiple_of(TICK_NS);
        self.first_root == name || coarse && self.first_root.has_same_tick(name)
    }

    /// Copies cgroup, kernel session, unit, environment markers and directory from the root, as far as they are known.
    /// In a new cgroup, the unit counts as unread.
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

    /// Returns whether the root is a `reaper run`.
    fn is_run(&self) -> bool {
        &*self.agent == RUN
    }

    /// Returns whether the root is the command of a living `reaper run`. `outer` is the session around it.
    fn is_command_of(&self, outer: Option<&Session>) -> bool {
        let parent = self.parent.as_ref().map(|parent| parent.key);
        outer.is_some_and(|run| run.is_run() && run.root_exit.is_none() && parent == Some(run.root))
    }

    /// Returns the exit that makes the members due. Returns `None` while the root is alive, while another agent may
    /// continue the session, and if a living `reaper run` ends the members.
    fn end(&self) -> Option<RootExit> {
        self.root_exit
            .filter(|_| self.succession == Succession::Excluded)
    }
}

/// Way in which a process came to run its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageSource {
    /// Its exec was reported.
    Reported,
    /// It was discovered running the program.
    Discovered,
    /// It was discovered running the program of its parent, and has executed none itself.
    Copied,
}

/// Change of a session after a change of the tree.
#[derive(Clone, Debug)]
pub enum SessionEvent {
    /// A process became a root.
    Opened {
        /// New session.
        session: SessionId,
        /// Session of the process that started the root, if the new session is not nested in it. For example, one of
        /// the two belongs to a server.
        starter: Option<SessionId>,
    },
    /// A session of the previous service continues.
    Restored {
        /// Session that continues.
        session: SessionId,
    },
    /// A member became a boundary, by the rule with this name.
    Boundary {
        /// Process that left the session.
        key: ProcessKey,
        /// Session that it left.
        session: SessionId,
        /// Name of the rule.
        rule: Arc<str>,
    },
    /// A root exited, and another agent continues the session: its child, or one that
    /// [`Model::find_successor`](crate::Model::find_successor) found. If this is noticed only after
    /// [`SessionEvent::RootExited`], it revokes that event.
    Relaunched {
        /// Session that continues.
        session: SessionId,
        /// Root that exited.
        old_root: ProcessKey,
        /// Its successor.
        root: ProcessKey,
    },
    /// The root of a session exited, so its members may be due.
    RootExited {
        /// Session whose root exited.
        session: SessionId,
    },
    /// The root has exited, and the session and those nested in it have no members left. The session is no longer open,
    /// but [`Sessions::find`] still returns the last [`CLOSED_MAX`] closed ones.
    Closed {
        /// Last state of the session.
        session: Box<Session>,
    },
}

/// Open sessions, and the last [`CLOSED_MAX`] closed ones.
#[derive(Debug, Default)]
pub struct Sessions {
    open: SessionIndex,
    /// Recently closed sessions, oldest first.
    closed: VecDeque<Session>,
    /// Real uid of all roots; `None`: any.
    uid: Option<u32>,
    /// Sessions that a process has left, which may be finished.
    to_check: Vec<SessionId>,
    /// Whether sessions are being restored, so that events of the backlog are still missing.
    pub(super) is_restoring: bool,
    /// Sessions whose root exited normally during the restore and has no successor among its known children, by pid of
    /// the root. A child that was discovered with its adopter may still be reported as the root's child.
    exited_roots: HashMap<u32, Vec<(SessionId, Node)>>,
    /// Children that living processes lost to an adopter during the restore, by old parent.
    reparented: HashMap<ProcessKey, Vec<ProcessKey>>,
    /// Discovered processes whose map entry names a session that is not open yet, by that name rounded to the tick.
    early_members: BTreeSet<(ProcessKey, ProcessKey)>,
    /// Number of the session that was opened last.
    last: u32,
}

impl Sessions {
    /// Returns an empty set of sessions, restricted to roots of one user if `uid` is given.
    pub(super) fn for_uid(uid: Option<u32>) -> Sessions {
        Sessions {
            uid,
            ..Sessions::default()
        }
    }

    /// Records `now` (ns since boot) as the last time at which a client was connected or an agent ran below a session.
    /// Does nothing if the session is not open.
    pub(super) fn note_use(&mut self, id: SessionId, now: u64) {
        self.open.update(id, |session| session.last_use_at = now);
    }

    /// Returns whether a process with this real uid can be a root.
    pub(super) fn allows_uid(&self, uid: u32) -> bool {
        self.uid.is_none_or(|only| only == uid)
    }

    /// Returns an open session; `None` also for a closed one.
    pub fn get(&self, id: SessionId) -> Option<&Session> {
        self.open.get(id)
    }

    /// Returns an open session, or one of the last [`CLOSED_MAX`] closed ones.
    pub fn find(&self, id: SessionId) -> Option<&Session> {
        let closed = || self.closed.iter().rev().find(|session| session.id == id);
        self.get(id).or_else(closed)
    }

    /// Returns the open sessions, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.open.iter()
    }

    /// Returns the oldest open session with this first root. If the session's own start is a whole tick (from /proc),
    /// any start within that tick matches.
    pub fn by_first_root(&self, name: ProcessKey) -> Option<&Session> {
        self.open.by_name(name)
    }

    /// Returns a session and those that it is nested in, innermost first; nothing if it is not open.
    pub fn with_enclosing(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let outer = |session: &&Session| self.get(session.outer?);
        std::iter::successors(self.get(id), outer).take(self.open.len())
    }

    /// Returns a session and those nested in it, directly or through others, oldest first; nothing if it is not open.
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

    /// Returns why the members of a session are due; `None` if they are not.
    ///
    /// Members are *due* once the root of their session, or of one around it, has exited and no other agent may
    /// continue that session. They are then reaped unless there is a reason to keep them. The exit of the command of a
    /// living `reaper run` makes no member due: that run ends them itself.
    ///
    /// The result is the outermost session with such an exit, whose escalation ends the members, and the earliest of
    /// the exits.
    pub fn due(&self, id: SessionId) -> Option<(&Session, RootExit)> {
        let Due { outermost, first } = self.get(id)?.nesting.due?;
        Some((self.get(outermost)?, first))
    }

    /// Returns the innermost session, from the given one outwards, that another agent may continue; `None` if there is
    /// none.
    pub(super) fn awaiting_successor(&self, id: SessionId) -> Option<&Session> {
        self.get(self.get(id)?.nesting.awaiting?)
    }

    /// Returns whether a living `reaper run` ends the members of a session when its command exits. That holds for the
    /// session of the command and for those nested in it.
    pub(super) fn is_ended_by_run(&self, id: SessionId) -> bool {
        self.get(id)
            .is_some_and(|session| session.nesting.is_ended_by_run)
    }

    /// Returns the oldest open session whose living root is this process. A root that continues another session has
    /// several.
    pub fn by_root(&self, key: ProcessKey) -> Option<&Session> {
        let mut all = self.open.all(IndexKey::Root(key));
        all.find(|session| session.root_exit.is_none())
    }

    /// Returns the open sessions whose current or last root is this process.
    pub fn of_root(&self, key: ProcessKey) -> impl Iterator<Item = &Session> {
        self.open.all(IndexKey::Root(key))
    }

    /// Removes an exited process from its session. If it was a root and exited normally, a child or former child that
    /// qualifies as its successor becomes the root. Otherwise the root's exit is recorded and reported as
    /// [`SessionEvent::RootExited`].
    ///
    /// `orphans` are its children, and `now` is in ns since boot. Closes no session yet.
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
        // A root that continues the session of another root has two sessions.
        while node.state.member.root
            && let Some(id) = self.by_root(node.key).map(|session| session.id)
        {
            let gone = RootExit {
                at: now,
                exit_status: ended,
                was_signalled: node.state.member.signals_sent != 0,
            };
            let exited_normally = matches!(gone.cause(), ExitStatus::Exited(_));
            let successor = || {
                self.successor_root(tree, node, id, orphans)
                    .or_else(|| self.reparented_successor(tree, node, id))
            };
            if exited_normally && let Some(successor) = successor() {
                self.set_successor(tree, id, successor, session_events);
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
            // The root may have left the session as a boundary.
            self.to_check.push(id);
            if exited_normally && self.is_restoring {
                let roots = self.exited_roots.entry(node.key.pid).or_default();
                roots.push((id, node.clone()));
            }
        }
        self.reparented.remove(&node.key);
        if let Some(name) = node.membership.and_then(|mark| mark.session) {
            self.early_members.remove(&(tick(name), node.key));
        }
    }

    /// Makes `root` the root of a session whose root has exited. Deletes the recorded exit and reports
    /// [`SessionEvent::Relaunched`].
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
            session.stored_unit_hash = 0;
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

    /// Returns the child that continues the session of a root which exited normally.
    ///
    /// The child is the first of `orphans` that is itself a root by the same rule, in the same terminal. A root without
    /// a terminal has no such successor. If the root reads from the terminal, a child known to read from elsewhere is a
    /// helper of the root and does not qualify.
    fn successor_root(
        &self,
        tree: &Tree,
        root: &Node,
        id: SessionId,
        orphans: &[ProcessKey],
    ) -> Option<ProcessKey> {
        let session = self.get(id)?;
        // The name is compared for sessions whose rule no longer exists.
        let by_same_rule =
            |other: &Session| (other.rule, &other.agent) == (session.rule, &session.agent);
        let reads = |node: &Node| {
            node.facts()
                .map_or(Fact::Unread, |facts| facts.stdin_is_terminal)
        };
        let is_successor = |key: &&ProcessKey| {
            tree.get(**key).is_some_and(|child| {
                let nested = child.state.member.session.and_then(|id| self.get(id));
                root.image.tty != 0
                    && child.image.tty == root.image.tty
                    && (reads(root), reads(child)) != (Fact::Known(true), Fact::Known(false))
                    && nested.is_some_and(|nested| nested.root == child.key && by_same_rule(nested))
            })
        };
        orphans.iter().find(is_successor).copied()
    }

    /// Sets the rule of each open or recently closed session to that with the agent's name in `rules`; `None` if
    /// none exists.
    pub(super) fn resolve_rules(&mut self, rules: &Ruleset) {
        let resolve = |session: &mut Session| session.rule = rules.session_rule(&session.agent);
        self.open.update_all(resolve);
        self.closed.iter_mut().for_each(resolve);
    }

    /// Closes the sessions that have finished since the last call: the root has exited, and no member and no nested
    /// session is left. Does nothing during a restore. Handlers of earlier session events can still look up their
    /// session, because this is a separate step.
    pub(super) fn close_finished(&mut self, session_events: &mut Vec<SessionEvent>) {
        if self.is_restoring {
            return;
        }
        while let Some(id) = self.to_check.pop() {
            self.close_if_empty(id, session_events);
        }
    }

    /// Closes a session if it has finished, and then each session around it that has finished too.
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
