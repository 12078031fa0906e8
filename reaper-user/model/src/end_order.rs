//! What the root of a session wants ended: all that descends from it, and whoever is born to those.
//!
//! It is an order about processes, not about the session: what the root starts afterwards is not meant, though it is a
//! member of the same one. It is over when nobody is left of those whom it reaches, and goes no further than that: not to who
//! is born to one whom it does not reach, and not beyond a boundary.

use std::sync::Arc;

use hashbrown::HashSet;

use super::event::ProcessKey;
pub use super::keeps::EndOrder;
use super::policy::{Decision, Reason};
use super::session::{Session, SessionId};
use super::{Model, Node};

impl Model {
    /// Whom an order of the root of a session would be for, on behalf of `by`: all that descends from it now, by the parents
    /// that they have, who are surely members of that session, or of one in it. `None` where the process is no root.
    pub fn end_order_for(&self, root: ProcessKey, by: u32) -> Option<(EndOrder, Vec<ProcessKey>)> {
        let order = EndOrder {
            session: self.sessions.by_root(root)?.id,
            by_uid: by,
            at: self.clock.now(),
        };
        let inwards = self.sessions.with_nested(order.session);
        let inwards: HashSet<SessionId> = inwards.map(|session| session.id).collect();
        let is_meant = |node: &&Node| {
            let member = node
                .state
                .member
                .session
                .is_some_and(|id| inwards.contains(&id));
            member
                && !node.state.member.is_lineage_uncertain
                && node.state.member.inferred.is_none()
                && order.applies_to(node.uids.real)
        };
        let meant = self.tree.descendants(root).filter(is_meant);
        let meant = meant.map(|node| node.key).collect();
        Some((order, meant))
    }

    /// Has them ended by an order.
    pub fn order_end(&mut self, order: EndOrder, meant: &[ProcessKey]) {
        let order = Arc::new(order);
        for key in meant {
            if let Some(node) = self.tree.get_mut(*key) {
                // What is ordered once more began when it was ordered first, be it by who is outside of this session.
                node.state
                    .keeps
                    .end_order
                    .get_or_insert_with(|| Arc::clone(&order));
            }
        }
    }

    /// What a session's root has ordered is over.
    pub fn clear_end_orders(&mut self, session: SessionId) {
        let inwards = self.sessions.with_nested(session);
        let members: Vec<u32> = inwards.flat_map(Session::members).collect();
        for pid in members {
            let key = self.tree.by_pid(pid).map(|node| node.key);
            if let Some(node) = key.and_then(|key| self.tree.get_mut(key)) {
                let other = |order: &Arc<EndOrder>| order.session != session;
                node.state.keeps.end_order = node.state.keeps.end_order.take().filter(other);
            }
        }
    }

    /// On whose ladder a member belongs that is to be ended because a root is gone, or has ordered so.
    pub fn escalation_of(&self, node: &Node) -> Option<SessionId> {
        let due = self.sessions.due(node.state.member.session?);
        let due = due.map(|(ladder, _)| ladder.id);
        let ordered = node.ordered_by().map(|order| order.session);
        match (due, ordered) {
            // The outer one of both.
            (Some(due), Some(ordered)) => {
                let outer = self
                    .sessions
                    .with_enclosing(due)
                    .any(|outer| outer.id == ordered);
                Some(if outer { ordered } else { due })
            }
            (due, ordered) => due.or(ordered),
        }
    }

    /// Whether a member was born when its end was decided already: what its maker needs for a clean-up, perhaps.
    pub fn is_born_late(&self, node: &Node, decision: &Decision) -> bool {
        match node.ordered_by() {
            Some(order) => node.key.start > order.at || self.has_signalled_ancestor(node),
            None => decision.reason == Reason::ForkedAfterRootExit,
        }
    }

    /// Whether one from whom it descends has been signalled, and all between them were born, as it was, when the root of their
    /// session was gone: then that is why, and an order that came later changes nothing.
    fn has_signalled_ancestor(&self, node: &Node) -> bool {
        let Some((_, due)) = node
            .state
            .member
            .session
            .and_then(|id| self.sessions.due(id))
        else {
            return false;
        };
        let late = |node: &Node| self.born_after(node, due);
        let mut makers = self.tree.ancestors(node.key);
        // Who was born before, and was not signalled, is the last to be looked at.
        late(node)
            && makers
                .find(|maker| maker.state.member.signals_sent != 0 || !late(maker))
                .is_some_and(|maker| maker.state.member.signals_sent != 0)
    }
}
