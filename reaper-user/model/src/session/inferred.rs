//! Assigns discovered processes to sessions by evidence alone.
//!
//! Between two polls of the process table, a member can start a process and exit. Then only what the process inherited
//! shows its origin: ids, which each entry of the table has, and facts that must be read (see [`super::attribution`]).

use std::path::Path;

use super::member::{Evidence, Lineage};
use super::membership::LineageClaim;
use super::{IndexKey, Sessions};
use crate::event::{ProcessKey, TICK_NS};
use crate::facts::Fact;
use crate::{Node, Tree};

impl Sessions {
    /// Returns the evidence by which a process is a member, with the agent's directory if that is the evidence. Returns
    /// `None` if the process is no member, or if its membership is known by descent.
    pub fn evidence(&self, node: &Node) -> Option<(Evidence, Option<&Path>)> {
        let evidence = node.state.member.inferred?;
        let session = node.state.member.session.and_then(|id| self.find(id));
        let directory = session.and_then(|session| match &session.inherited {
            Fact::Known(root) => root.directory.as_deref(),
            Fact::Unread | Fact::Unreadable => None,
        });
        Some((
            evidence,
            directory.filter(|_| evidence == Evidence::Directory),
        ))
    }

    /// Assigns a discovered process whose creator is unknown to the session that its ids or its cgroup point to. Does
    /// nothing if it is a member already, or if its parent cannot be an adopter.
    ///
    /// The membership is marked as inferred, because ids can have another origin. Ids are compared with those of known
    /// members. A cgroup may also belong to an agent out of scope, so it counts only for a process in scope.
    pub(crate) fn infer(&mut self, tree: &mut Tree, key: ProcessKey, in_scope: bool) {
        let Some(node) = tree.get(key) else { return };
        if node.state.member.session.is_some() || !may_be_adopted(tree, node) {
            return;
        }
        let by_cgroup = || self.by_cgroup(tree, node).filter(|_| in_scope);
        let found = by_ids(tree, node).or_else(by_cgroup);
        if let Some((lineage, evidence)) = found {
            self.set_inferred_lineage(tree, key, lineage, evidence);
        }
    }

    /// Assigns an unattributed process to a session by its ids, its cgroup or the facts that were read. Only ids count
    /// if it is not in the scope of the service.
    ///
    /// Returns the new members: the process and its descendants, parents before children. Empty if nothing fits, or if
    /// the process is a member already.
    pub(crate) fn attribute(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        in_scope: bool,
    ) -> Vec<ProcessKey> {
        if tree
            .get(key)
            .is_none_or(|node| node.state.member.session.is_some())
        {
            return Vec::new();
        }
        self.infer(tree, key, in_scope);
        if let Some(node) = tree.get(key)
            && in_scope
            && node.state.member.session.is_none()
            && let Some((id, evidence)) = self.attribution_by_markers(tree, node)
        {
            let lineage = Lineage {
                session: Some(id),
                ..Lineage::default()
            };
            self.set_inferred_lineage(tree, key, lineage, evidence);
        }
        let Some(lineage) = tree.get(key).map(Node::lineage) else {
            return Vec::new();
        };
        if lineage.session.is_none() {
            return Vec::new();
        }
        let mut joined = vec![key];
        let below: Vec<ProcessKey> = tree.descendants(key).map(|node| node.key).collect();
        for key in below {
            let Some(node) = tree.get(key) else { continue };
            // Boundaries stay outside, and agents stay in their own session.
            let from = node.parent.filter(|parent| joined.contains(parent));
            if from.is_some()
                && node.state.member.session.is_none()
                && node.state.member.boundary.is_none()
            {
                self.set_lineage(tree, key, LineageClaim::uncertain(lineage));
                joined.push(key);
            }
        }
        joined
    }

    /// Assigns a process to the session in `lineage`, marked as inferred from `evidence`.
    fn set_inferred_lineage(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        lineage: Lineage,
        evidence: Evidence,
    ) {
        let lineage = Lineage {
            // The evidence for the leader, if the leader's membership is inferred itself.
            inferred: lineage.inferred.or(Some(evidence)),
            ..lineage
        };
        self.set_lineage(tree, key, LineageClaim::uncertain(lineage));
    }

    /// Returns the lineage of a process whose cgroup is that of exactly one open session. The parent of the root and
    /// the parent of the process must be in other cgroups: the session then created the cgroup for itself.
    fn by_cgroup(&self, tree: &Tree, node: &Node) -> Option<(Lineage, Evidence)> {
        let own = node.image.cgroup_id;
        let parent = tree.get(node.parent?)?;
        if own == 0 || parent.image.cgroup_id == own {
            return None;
        }
        let mut all = self.open.all(IndexKey::NewCgroup(own));
        let session = all.next()?;
        let only = all.next().is_none() && !is_later(session.first_root, node.key);
        let lineage = Lineage {
            session: Some(session.id),
            ..Lineage::default()
        };
        only.then_some((lineage, Evidence::Cgroup))
    }
}

/// Returns the lineage of a process whose process group or kernel session was created by a member, which may have
/// exited recently. Returns `None` also if a boundary created it. The kernel does not reuse a pid while a process group
/// or session has it as its id.
fn by_ids(tree: &Tree, node: &Node) -> Option<(Lineage, Evidence)> {
    let ids = [
        (node.image.pgid, Evidence::Group),
        (node.image.sid, Evidence::Session),
    ];
    let others = ids
        .into_iter()
        .filter(|(id, _)| *id != 0 && *id != node.key.pid);
    for (id, evidence) in others {
        let lineage = match tree.by_pid(id) {
            // The group of a boundary is below that boundary.
            Some(leader) if leader.state.member.boundary.is_some() => return None,
            Some(leader) => (!is_later(leader.key, node.key)).then(|| leader.lineage()),
            None => tree
                .last_with_pid(id, node.key.start)
                .map(|remains| remains.lineage),
        };
        let lineage = lineage.filter(|lineage| lineage.session.is_some());
        if let Some(lineage) = lineage {
            return Some((lineage, evidence));
        }
    }
    None
}

/// Returns whether the parent of a process may be an adopter.
///
/// A parent in the same kernel session is the creator, like the shell of all of `agent | tee log`. An adopter has its
/// own session, except pid 1 of a container.
pub(super) fn may_be_adopted(tree: &Tree, node: &Node) -> bool {
    let parent = node.parent.and_then(|parent| tree.get(parent));
    // A parent that is not visible here counts as an adopter.
    parent.is_none_or(|parent| {
        parent.state.member.session.is_none()
            && (parent.key.pid == 1 || parent.image.sid != node.image.sid)
    })
}

/// Returns whether `one` started in a later tick than `other`.
pub(super) fn is_later(one: ProcessKey, other: ProcessKey) -> bool {
    one.start / TICK_NS > other.start / TICK_NS
}
