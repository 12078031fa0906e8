//! Sessions: an agent and everything that ever descended from it, down to a boundary.
//!
//! ```text
//!   shell ── claude ─┬─ bash ── npm ── node         members of claude's session
//!                    ├─ tmux ── bash ── claude      tmux is a boundary; the agent below it is of its own
//!                    └─ codex ── bash               a nested session: due with its own root or with claude's
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hashbrown::HashSet;

use super::agent::{Class, RuleId, Ruleset};
use super::event::{Ended, Key, Uids};
use super::tree::{Node, Tree};

/// Closed sessions that are kept for members of which nothing was known when they closed.
const CLOSED_MAX: usize = 64;

/// Number of a session, never given twice by one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u32);

/// The end of a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootGone {
    /// Nanoseconds since boot.
    pub at: u64,
    pub ended: Ended,
}

#[derive(Clone, Debug)]
pub struct Session {
    pub id: SessionId,
    /// The agent's name: that of its rule.
    pub agent: Arc<str>,
    pub rule: RuleId,
    pub root: Key,
    /// Uids of the root when it became one.
    pub uids: Uids,
    /// Nanoseconds since boot.
    pub opened: u64,
    /// The process that was the root first: with the start, this session's name for ever.
    pub first_root: Key,
    /// The session that this one is nested in.
    pub outer: Option<SessionId>,
    pub root_gone: Option<RootGone>,
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

    fn with_end(&self) -> Option<(&Session, RootGone)> {
        Some((self, self.root_gone?))
    }
}

/// What became of sessions by a change in the tree.
#[derive(Clone, Debug)]
pub enum Turn {
    Opened {
        session: SessionId,
    },
    /// A member became a boundary, by the rule of this name.
    Boundary {
        key: Key,
        session: SessionId,
        rule: Arc<str>,
    },
    /// The root left of its own accord and handed over to its child.
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
    /// Sessions that something has left.
    left: Vec<SessionId>,
    last: u32,
}

impl Sessions {
    pub fn get(&self, id: SessionId) -> Option<&Session> {
        self.by_id.get(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.by_id.values()
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

    /// A new process is what its creator is: a member of its session, or of none.
    pub(super) fn born(&mut self, tree: &mut Tree, key: Key, creator: Option<Key>) {
        let Some(node) = tree.get(key) else { return };
        let (birth_parent, found) = (node.birth_parent, node.session);
        let stopped = node.boundary.is_some();
        let by_creator = creator.and_then(|creator| tree.session_of(creator));
        let inherited =
            by_creator.or_else(|| birth_parent.and_then(|parent| tree.session_of(parent)));
        match (found, inherited.flatten()) {
            (None, Some(id)) if !stopped => self.join(tree, key, id),
            // An agent that was found in /proc before it was known whose it is.
            (Some(own), Some(outer)) if self.may_nest(own, outer) => {
                if let Some(session) = self.by_id.get_mut(&own).filter(|own| own.root == key) {
                    session.outer.get_or_insert(outer);
                }
            }
            _ => {}
        }
        if let Some(scope) = creator
            .and_then(|creator| tree.get(creator))
            .map(|node| node.in_scope)
            && let Some(node) = tree.get_mut(key)
        {
            node.in_scope |= scope;
        }
    }

    /// Whether one session can become nested in another: that lives and is not nested in it.
    fn may_nest(&self, inner: SessionId, outer: SessionId) -> bool {
        self.get(outer).is_some() && self.outwards(outer).all(|session| session.id != inner)
    }

    fn join(&mut self, tree: &mut Tree, key: Key, id: SessionId) {
        self.reopen(id);
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        if let Some(session) = node.session.and_then(|old| self.by_id.get_mut(&old)) {
            session.members.remove(&key.pid);
        }
        node.session = self.by_id.get_mut(&id).map(|session| {
            session.members.insert(key.pid);
            // Whoever descends from a root is in scope with it, also where those between are forgotten.
            node.in_scope = true;
            id
        });
    }

    /// A member turns up of which nothing was known when the last one was gone: its birth was lost.
    fn reopen(&mut self, id: SessionId) {
        if let Some(at) = self.closed.iter().position(|session| session.id == id)
            && let Some(session) = self.closed.remove(at)
        {
            self.by_id.insert(id, session);
        }
    }

    /// A process runs another program, which may make it an agent or a boundary.
    pub(super) fn execed(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        key: Key,
        now: u64,
        turns: &mut Vec<Turn>,
    ) {
        let Some(node) = tree.get(key) else { return };
        match rules.classify(&node.image) {
            Class::Plain => {}
            Class::Boundary(rule) => self.stop_at(tree, key, rules.name(rule), turns),
            Class::Agent(rule) if node.in_scope => self.open(tree, rules, key, rule, now, turns),
            Class::Agent(_) => {}
        }
    }

    fn stop_at(&mut self, tree: &mut Tree, key: Key, rule: &Arc<str>, turns: &mut Vec<Turn>) {
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        node.boundary = Some(Arc::clone(rule));
        let Some(id) = node.session.take() else {
            return;
        };
        if let Some(session) = self.by_id.get_mut(&id) {
            session.members.remove(&key.pid);
        }
        turns.push(Turn::Boundary {
            key,
            session: id,
            rule: Arc::clone(rule),
        });
        self.left.push(id);
    }

    fn open(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        key: Key,
        rule: RuleId,
        now: u64,
        turns: &mut Vec<Turn>,
    ) {
        let agent = Arc::clone(rules.name(rule));
        let mut own = None;
        for session in self.by_id.values_mut() {
            if session.root == key && session.root_gone.is_none() {
                // A shim that has turned into the agent itself.
                (session.agent, session.rule) = (Arc::clone(&agent), rule);
                own = Some(session.id);
            }
        }
        if let Some(id) = own {
            if let Some(node) = tree.get_mut(key).filter(|node| node.session.is_none()) {
                // It has been a boundary in between.
                node.boundary = None;
                self.join(tree, key, id);
            }
            return;
        }
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        self.last += 1;
        let id = SessionId(self.last);
        node.boundary = None;
        let outer = node.session;
        self.by_id.insert(
            id,
            Session {
                id,
                agent,
                rule,
                root: key,
                uids: node.uids,
                opened: now,
                first_root: key,
                outer,
                root_gone: None,
                members: HashSet::default(),
            },
        );
        self.join(tree, key, id);
        turns.push(Turn::Opened { session: id });
    }

    /// A process has exited.
    pub(super) fn exited(
        &mut self,
        tree: &Tree,
        node: &Node,
        ended: Ended,
        orphans: &[Key],
        now: u64,
        turns: &mut Vec<Turn>,
    ) {
        if let Some(session) = node.session.and_then(|id| self.by_id.get_mut(&id)) {
            session.members.remove(&node.key.pid);
        }
        self.left.extend(node.session);
        // Two, if it had become the root of another's session: of its own and of that.
        while let Some(id) = self.of_root(node.key).map(|session| session.id) {
            let heir = match ended {
                Ended::Exited(_) => self.heir(tree, node, id, orphans),
                Ended::Signalled { .. } | Ended::Unknown => None,
            };
            let Some(session) = self.by_id.get_mut(&id) else {
                break;
            };
            match heir {
                Some(root) => {
                    session.root = root;
                    turns.push(Turn::Relaunched {
                        session: id,
                        old_root: node.key,
                        root,
                    });
                }
                None => {
                    session.root_gone = Some(RootGone { at: now, ended });
                    turns.push(Turn::RootGone { session: id });
                    // It need not have been a member of it still: it may be a boundary.
                    self.left.push(id);
                }
            }
        }
    }

    /// The child to which a root that left of its own accord has handed over: one that has become an
    /// agent by the same rule, in the same terminal.
    fn heir(&self, tree: &Tree, root: &Node, id: SessionId, orphans: &[Key]) -> Option<Key> {
        let session = self.get(id)?;
        let is_heir = |key: &&Key| {
            tree.get(**key).is_some_and(|child| {
                let nested = child.session.and_then(|id| self.get(id));
                root.image.tty != 0
                    && child.image.tty == root.image.tty
                    && nested.is_some_and(|nested| {
                        nested.root == child.key && nested.rule == session.rule
                    })
            })
        };
        orphans.iter().find(is_heir).copied()
    }

    /// Closes what is over since the last call. Apart from the rest, so that whoever follows the turns
    /// still finds the session that the ones before this were about.
    pub(super) fn close_finished(&mut self, turns: &mut Vec<Turn>) {
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
