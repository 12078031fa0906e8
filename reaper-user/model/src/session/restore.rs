//! Restores sessions of the previous service.

use std::sync::Arc;

use hashbrown::HashSet;

use super::{
    Nesting, RootExit, RootParent, Session, SessionEvent, SessionId, Sessions, Succession,
};
use crate::event::{ExitStatus, ProcessKey, RestoredSession};
use crate::facts::Fact;
use crate::ruleset::{Ruleset, SessionKind};
use crate::{Node, Tree};

impl Sessions {
    /// Starts a restore. Events that follow are older than the process table that was already read. No session closes
    /// before [`Sessions::finish_restore`].
    pub(crate) fn begin_restore(&mut self) {
        self.is_restoring = true;
    }

    /// Opens a session again and reports [`SessionEvent::Restored`]. Its root is in the tree, unless it has exited. A
    /// root that is not in the tree and has no recorded exit counts as exited at `now` (ns since boot) with unknown
    /// status. That exit is reported as [`SessionEvent::RootExited`].
    pub(crate) fn restore(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        restored: &RestoredSession,
        now: u64,
        session_events: &mut Vec<SessionEvent>,
    ) {
        self.begin_restore();
        self.last += 1;
        let id = SessionId(self.last);
        let outer = restored.outer.and_then(|outer| self.by_first_root(outer));
        let outer = outer.map(|outer| outer.id);
        let root = tree.get(restored.root).map(|node| node.key);
        let gone = restored.exited.map(|(at, ended)| RootExit {
            at,
            exit_status: ended,
            was_signalled: restored.was_signalled,
        });
        let unseen = RootExit {
            at: now,
            exit_status: ExitStatus::Unknown,
            was_signalled: false,
        };
        let rule = rules.session_rule(&restored.rule);
        let root_gone = gone.or(root.is_none().then_some(unseen));
        let handover = match root_gone {
            // The previous service found no successor.
            Some(_) if restored.is_evaluated => Succession::Excluded,
            Some(gone) => Succession::after(rules, rule, gone.cause()),
            None => Succession::Excluded,
        };
        let session = Session {
            id,
            agent: Arc::clone(&restored.rule),
            kind: rule.map_or(SessionKind::Agent, |id| {
                SessionKind::of(rules.rule(id).action)
            }),
            rule,
            root: root.unwrap_or(restored.root),
            uids: restored.uids,
            opened_at: restored.opened_at,
            first_root: restored.first_root,
            parent: restored.parent.map(|key| RootParent::of(tree, key)),
            outer,
            cgroup_id: restored.cgroup_id,
            sid: 0,
            unit: Fact::Unread,
            stored_unit_hash: restored.unit_hash,
            inherited: Fact::Unread,
            // An agent may have followed it before.
            followed_at: root_gone.map_or(0, |_| now),
            multiplexed: false,
            attended: true,
            root_exit: root_gone,
            succession: handover,
            last_exit_at: 0,
            last_birth_at: 0,
            last_use_at: 0,
            is_discovered: false,
            nesting: Nesting::default(),
            members: HashSet::default(),
        };
        self.open.insert(session);
        session_events.push(SessionEvent::Restored { session: id });
        if gone.is_some() {
            return;
        }
        let Some(root) = tree.get_mut(restored.root) else {
            session_events.push(SessionEvent::RootExited { session: id });
            return;
        };
        root.state.member.root = true;
        let (key, own, stopped) = (
            root.key,
            root.state.member.session,
            root.state.member.boundary.is_some(),
        );
        // The root of several nested sessions is a member of the innermost one.
        if !stopped && own.is_none_or(|own| self.with_enclosing(id).any(|outer| outer.id == own)) {
            self.join(tree, key, id, false);
        }
    }

    /// Returns the successor of a root among the children that it lost to an adopter before its exit was reported.
    /// Returns `None` outside of a restore. See [`Sessions::successor_root`].
    pub(super) fn reparented_successor(
        &self,
        tree: &Tree,
        root: &Node,
        id: SessionId,
    ) -> Option<ProcessKey> {
        if !self.is_restoring {
            return None;
        }
        let was_child =
            |node: &&Node| (node.orphaned).is_some_and(|from| from.old_parent == root.key);
        let children = self.reparented.get(&root.key)?.iter();
        let children = children.filter_map(|key| tree.get(*key)).filter(was_child);
        let children: Vec<ProcessKey> = children.map(|node| node.key).collect();
        self.successor_root(tree, root, id, &children)
    }

    /// Remembers a child that lost its parent, from a reparent event of the backlog. If the parent was a root whose
    /// exit is already recorded, the child continues its session if it qualifies. See [`Sessions::successor_root`].
    pub(crate) fn on_reparent(
        &mut self,
        tree: &mut Tree,
        old_parent: ProcessKey,
        child: ProcessKey,
        session_events: &mut Vec<SessionEvent>,
    ) {
        if let Some(parent) = tree.get(old_parent) {
            self.reparented.entry(parent.key).or_default().push(child);
        }
        let Some(child) = tree.get(child).map(|child| child.key) else {
            return;
        };
        let Some(roots) = self.exited_roots.remove(&old_parent.pid) else {
            return;
        };
        let (continued, others): (Vec<_>, Vec<_>) = roots.into_iter().partition(|(id, root)| {
            root.has_key(old_parent) && self.successor_root(tree, root, *id, &[child]).is_some()
        });
        self.exited_roots.insert(old_parent.pid, others);
        for (id, _) in continued {
            self.set_successor(tree, id, child, session_events);
        }
    }

    /// Ends a restore after the backlog is applied. Reads the unknown parents of roots from the tree and closes
    /// finished sessions.
    pub(crate) fn finish_restore(&mut self, tree: &Tree, session_events: &mut Vec<SessionEvent>) {
        self.is_restoring = false;
        self.open.update_all(|session| {
            // Sessions were restored before the process table was read.
            if let Some(parent) = &mut session.parent
                && parent.image.comm.is_empty()
            {
                *parent = RootParent::of(tree, parent.key);
            }
        });
        self.exited_roots.clear();
        self.reparented.clear();
        self.to_check = self.iter().map(|session| session.id).collect();
        self.close_finished(session_events);
    }
}
