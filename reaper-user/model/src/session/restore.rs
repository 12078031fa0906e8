//! Sessions that the service before this one has left, taken up again.

use std::sync::Arc;

use hashbrown::HashSet;

use super::{Handover, Parent, RootGone, Session, SessionId, Sessions, Turn};
use crate::agent::{Ruleset, SessionKind};
use crate::event::{Ended, Key, Restored};
use crate::facts::Known;
use crate::{Node, Tree};

impl Sessions {
    /// From here on what is told is what has happened while nobody listened, after what came of it has
    /// been found. Nothing closes until [`Sessions::finish_restore`].
    pub(crate) fn begin_restore(&mut self) {
        self.restoring = true;
    }

    /// Opens a session again. Its root is in the tree if it can still live.
    pub(crate) fn restore(
        &mut self,
        tree: &mut Tree,
        rules: &Ruleset,
        restored: &Restored,
        now: u64,
        turns: &mut Vec<Turn>,
    ) {
        self.begin_restore();
        self.last += 1;
        let id = SessionId(self.last);
        let outer = restored.outer.and_then(|outer| self.by_first_root(outer));
        let outer = outer.map(|outer| outer.id);
        let root = tree.get(restored.root).map(|node| node.key);
        let gone = restored.gone.map(|(at, ended)| RootGone {
            at,
            ended,
            signalled: restored.signalled,
        });
        let unseen = RootGone {
            at: now,
            ended: Ended::Unknown,
            signalled: false,
        };
        let rule = rules.session_rule(&restored.rule);
        let root_gone = gone.or(root.is_none().then_some(unseen));
        let handover = match root_gone {
            // The service before this one has found no successor.
            Some(_) if restored.decided => Handover::Excluded,
            Some(gone) => Handover::after(rules, rule, gone.cause()),
            None => Handover::Excluded,
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
            opened: restored.opened,
            first_root: restored.first_root,
            parent: restored.parent.map(|key| Parent::of(tree, key)),
            outer,
            cgroup_id: restored.cgroup_id,
            sid: 0,
            unit: Known::Unasked,
            inherited: Known::Unasked,
            multiplexed: false,
            root_gone,
            handover,
            last_end: 0,
            last_birth: 0,
            last_use: 0,
            found: false,
            members: HashSet::default(),
        };
        self.by_id.insert(id, session);
        turns.push(Turn::Restored { session: id });
        if gone.is_some() {
            return;
        }
        let Some(root) = tree.get_mut(restored.root) else {
            turns.push(Turn::RootGone { session: id });
            return;
        };
        root.state.member.root = true;
        let (key, own, stopped) = (
            root.key,
            root.state.member.session,
            root.state.member.boundary.is_some(),
        );
        // The root of several, one nested in the other, is a member of the innermost.
        if !stopped && own.is_none_or(|own| self.outwards(id).any(|outer| outer.id == own)) {
            self.join(tree, key, id, false);
        }
    }

    /// See [`Sessions::heir`]: among those of whom it has been told before that they are its children no more.
    pub(super) fn heir_elsewhere(&self, tree: &Tree, root: &Node, id: SessionId) -> Option<Key> {
        if !self.restoring {
            return None;
        }
        let was_child =
            |node: &&Node| (node.orphaned).is_some_and(|from| from.old_parent == root.key);
        let children: Vec<Key> = tree.iter().filter(was_child).map(|node| node.key).collect();
        self.heir(tree, root, id, &children)
    }

    /// A child of a process that has exited has gone to another parent. If that process was a root, and
    /// the child was found with its adopter before the exit was told, it may be the heir all the same.
    pub(crate) fn left_to(
        &mut self,
        tree: &mut Tree,
        old_parent: Key,
        child: Key,
        turns: &mut Vec<Turn>,
    ) {
        let Some(child) = tree.get(child).map(|child| child.key) else {
            return;
        };
        let (to_it, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.left_by_root)
            .into_iter()
            .partition(|(id, root)| {
                root.is(old_parent) && self.heir(tree, root, *id, &[child]).is_some()
            });
        self.left_by_root = others;
        for (id, _) in to_it {
            self.hand_over(tree, id, child, turns);
        }
    }

    /// All that there is has been told: closes what is over.
    pub(crate) fn finish_restore(&mut self, tree: &Tree, turns: &mut Vec<Turn>) {
        self.restoring = false;
        for parent in self.by_id.values_mut().filter_map(|s| s.parent.as_mut()) {
            // Sessions were taken up before all that runs was.
            if parent.image.comm.is_empty() {
                *parent = Parent::of(tree, parent.key);
            }
        }
        self.left_by_root.clear();
        self.left = self.by_id.keys().copied().collect();
        self.close_finished(turns);
    }
}
