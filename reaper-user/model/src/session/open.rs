//! Opens sessions: what the program of a process makes it, which is the root of a session, a boundary, or neither.

use std::sync::Arc;

use hashbrown::HashSet;

use super::{
    ENCLOSING_MAX, ImageSource, IndexKey, Nesting, RUN, RootParent, Session, SessionEvent,
    SessionId, Sessions, Succession,
};
use crate::event::ProcessKey;
use crate::facts::Fact;
use crate::ruleset::{Class, RuleId, Ruleset, SessionKind};
use crate::{Node, Tree};

impl Sessions {
    /// Applies the class of a program that a process runs. `now` is in ns since boot.
    ///
    /// A boundary leaves its session. An agent or server in scope, of an allowed uid, opens a session. If it is a root
    /// already, it continues its session. Otherwise a server only leaves its session, and an agent stays in it. A
    /// program copied from the parent ([`ImageSource::Copied`]) can only make a boundary.
    ///
    /// The process may already run a later program that a scan has read.
    pub(crate) fn on_class(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        key: ProcessKey,
        (class, ran): (Class, ImageSource),
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let Some(node) = tree.get(key) else { return };
        match class {
            Class::Plain => {}
            Class::Boundary(rule) => self.on_boundary(tree, key, rules.name(rule), session_events),
            Class::Agent(rule) | Class::Server(rule)
                if node.state.member.in_scope
                    && ran != ImageSource::Copied
                    && self.allows_uid(node.uids.real) =>
            {
                self.open(tree, key, (rules, rule), ran, now, session_events)
            }
            // A service for one user opens no session for a server of another user, but the server leaves its session.
            Class::Server(rule) if ran != ImageSource::Copied => {
                self.on_boundary(tree, key, rules.name(rule), session_events)
            }
            Class::Agent(_) | Class::Server(_) => {}
        }
    }

    /// Returns the session in which one of this kind is nested if a process of `starter` started its root: `starter`,
    /// or `None` if either session is that of a server.
    pub(super) fn outer_of(
        &self,
        kind: SessionKind,
        starter: Option<SessionId>,
    ) -> Option<SessionId> {
        let is_agents = |id: &SessionId| {
            let starter = self.get(*id);
            starter.is_none_or(|starter| starter.kind == SessionKind::Agent)
        };
        starter
            .filter(|_| kind == SessionKind::Agent)
            .filter(is_agents)
    }

    /// Returns whether another session may be nested in this one; see [`ENCLOSING_MAX`].
    pub(super) fn has_room(&self, outer: SessionId) -> bool {
        self.get(outer)
            .is_none_or(|outer| outer.nesting.depth < ENCLOSING_MAX)
    }

    /// Returns the root of the `reaper run` of which this process is the supervisor; `None` if it is not a supervisor. A `reaper
    /// run` whose process already has children forks a supervisor, which executes no program.
    fn run_of_supervisor(&self, tree: &Tree, key: ProcessKey) -> Option<ProcessKey> {
        let supervisor = tree.get(key)?;
        let root = tree.get(supervisor.birth_parent.or(supervisor.parent)?)?;
        let mut sessions = self.open.all(IndexKey::Root(root.key));
        let is_run = sessions.any(|session| &*session.agent == RUN);
        (is_run && root.image == supervisor.image).then_some(root.key)
    }

    /// Makes a process a boundary by this rule: it is watched and leaves its session, if it has one. Reports
    /// [`SessionEvent::Boundary`] only if it was a member. Its descendants stay where they are.
    fn on_boundary(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        rule: &Arc<str>,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        node.state.member.boundary = Some(Arc::clone(rule));
        node.state.member.watched = true;
        (
            node.state.member.is_lineage_uncertain,
            node.state.member.inferred,
        ) = (false, None);
        let Some(id) = node.state.member.session.take() else {
            return;
        };
        let outer = self.open.update(id, |session| {
            session.members.remove(&key.pid);
            // The process was discovered as an agent, which it became after it was this boundary. Its session is not
            // nested.
            let is_below = session.is_discovered && session.root == key;
            session.outer.take_if(|_| is_below)
        });
        self.to_check.extend(outer.flatten());
        session_events.push(SessionEvent::Boundary {
            key,
            session: id,
            rule: Arc::clone(rule),
        });
        self.to_check.push(id);
    }

    /// Opens a session with this process as root and reports [`SessionEvent::Opened`]. If the process is a root
    /// already, its open session takes over the agent, the rule and the kind instead.
    fn open(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        (rules, rule_id): (&Ruleset, RuleId),
        ran: ImageSource,
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        let rule = rules.rule(rule_id);
        let (agent, kind) = (Arc::clone(&rule.name), SessionKind::of(rule.action));
        let living = self.open.all(IndexKey::Root(key));
        let living = living.filter(|session| session.root_exit.is_none());
        let mut own: Vec<SessionId> = living.map(|session| session.id).collect();
        // Includes the session of a root whose exit became known before this exec was reported.
        own.extend(self.open.ids(IndexKey::FirstRoot(key)));
        for id in &own {
            let outer = self.open.update(*id, |session| {
                // A wrapper has executed the agent itself.
                (session.agent, session.rule) = (Arc::clone(&agent), Some(rule_id));
                session.kind = kind;
                session.copy_from_root(tree.get(key));
                session.is_discovered &= ran == ImageSource::Discovered;
                session.outer.take_if(|_| kind == SessionKind::Server)
            });
            self.to_check.extend(outer.flatten());
        }
        if let Some(id) = own.into_iter().max() {
            if kind == SessionKind::Server {
                self.unnest(id);
            }
            if let Some(node) = tree
                .get_mut(key)
                .filter(|node| node.state.member.session.is_none())
            {
                // It was a boundary in between.
                node.state.member.boundary = None;
                self.join(tree, key, id, false);
            }
            return;
        }
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        // The end of a session that the root may not descend from must not make its members due.
        let sure = !node.state.member.is_lineage_uncertain && node.state.member.inferred.is_none();
        let (starter, parent) = (node.state.member.session.filter(|_| sure), node.parent);
        let outer = self.outer_of(kind, starter);
        if outer.is_some_and(|outer| !self.has_room(outer)) {
            return;
        }
        self.last += 1;
        let id = SessionId(self.last);
        node.state.member.boundary = None;
        node.state.member.root = true;
        node.state.member.is_by_sudo = false;
        let parent_of_root = node.birth_parent.or(parent);
        let (uids, cgroup_id, sid) = (node.uids, node.image.cgroup_id, node.image.sid);
        let has_terminal = node.image.tty != 0;
        let unit = node
            .facts()
            .map(|facts| facts.unit.clone())
            .unwrap_or_default();
        let multiplexed = tree.ancestors(key).any(Node::is_multiplexer);
        let attended = kind == SessionKind::Server
            || has_terminal
            || tree.ancestors(key).any(|above| self.attends(rules, above));
        // An exec that is reported after the exit of the agent above, though it came first, may be that of its
        // successor.
        let last_root_exit_at = |id| {
            self.get(id)
                .map_or(0, |outer| outer.nesting.last_root_exit_at)
        };
        let outer = outer.filter(|outer| self.is_restoring || last_root_exit_at(*outer) <= now);
        let parent_of_root =
            parent_of_root.map(|key| self.run_of_supervisor(tree, key).unwrap_or(key));
        self.open.insert(Session {
            id,
            agent,
            kind,
            rule: Some(rule_id),
            root: key,
            uids,
            opened_at: now,
            first_root: key,
            parent: parent_of_root.map(|key| RootParent::of(tree, key)),
            outer,
            cgroup_id,
            sid,
            unit,
            stored_unit_hash: 0,
            inherited: Fact::Unread,
            followed_at: 0,
            multiplexed,
            attended,
            root_exit: None,
            succession: Succession::Excluded,
            last_exit_at: 0,
            last_birth_at: 0,
            last_use_at: 0,
            is_discovered: ran == ImageSource::Discovered,
            nesting: Nesting::default(),
            members: HashSet::default(),
        });
        self.join(tree, key, id, false);
        if let Some(parent) = parent.and_then(|key| tree.get_mut(key)) {
            parent.state.member.watched |= parent.state.member.session.is_none();
        }
        self.adopt_early_members(tree, key, id);
        session_events.push(SessionEvent::Opened {
            session: id,
            starter: starter.filter(|_| outer.is_none()),
        });
    }

    /// Returns whether an agent below this process is attended: the process is a boundary that says so, or belongs to an
    /// attended session.
    fn attends(&self, rules: &Ruleset, above: &Node) -> bool {
        let session = above.state.member.session.and_then(|id| self.get(id));
        let boundary = above.state.member.boundary.is_some();
        session.is_some_and(|session| session.attended)
            || boundary
                && matches!(rules.classify(&above.image), Class::Boundary(id) if rules.rule(id).attends)
    }

    /// Makes the sessions that are nested in that of a server nested in none.
    fn unnest(&mut self, server: SessionId) {
        let nested: Vec<SessionId> = self.open.ids(IndexKey::Outer(server)).collect();
        for id in nested {
            self.open.update(id, |session| session.outer = None);
            self.to_check.push(server);
        }
    }
}
