//! Who is taken for a member on evidence alone.
//!
//! Where the process table is only looked at now and then, a process can be born to a member, and that be gone again,
//! between two looks. What is left of its makers then is what it has from them: ids, which every row of the table shows,
//! and what has to be read (see [`super::attribution`]).

use std::path::Path;

use super::member::{Evidence, Lineage};
use super::membership::LineageClaim;
use super::{IndexKey, Session, Sessions};
use crate::event::{ProcessKey, TICK_NS};
use crate::facts::Fact;
use crate::{Node, Tree};

impl Sessions {
    /// What says that a process is a member whose birth nobody saw, and of one that works where its agent does the directory
    /// of that; `None` if it is known by its descent.
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

    /// A process was found that no known maker makes a member: it is one of the session that its ids point to, if they
    /// do, and marked so, since they can be had otherwise too. The ids are those of a member, wherever it is; its cgroup
    /// may be that of an agent outside of the scope too, of which nothing is known.
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

    /// What has been read of a suspect that is nobody's yet, and what was found since, says whose it is, or nothing does. Gives who has become
    /// a member: it, and what it has begotten meanwhile, parents before their children.
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
            // A boundary stops it, and an agent has a session of its own.
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

    fn set_inferred_lineage(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        lineage: Lineage,
        evidence: Evidence,
    ) {
        let lineage = Lineage {
            // By what its leader is one, if that is concluded too.
            inferred: lineage.inferred.or(Some(evidence)),
            ..lineage
        };
        self.set_lineage(tree, key, LineageClaim::uncertain(lineage));
    }

    /// Whose it is by running in the cgroup of a session that began one for itself.
    fn by_cgroup(&self, tree: &Tree, node: &Node) -> Option<(Lineage, Evidence)> {
        let own = node.image.cgroup_id;
        let parent = tree.get(node.parent?)?;
        if own == 0 || parent.image.cgroup_id == own {
            return None;
        }
        let began_it = |session: &&Session| {
            let above = session.parent.as_ref().map(|above| above.image.cgroup_id);
            above.is_some_and(|above| above != 0 && above != own)
        };
        let all = self.open.all(IndexKey::Cgroup(own));
        let mut all = all.filter(began_it);
        let session = all.next()?;
        let only = all.next().is_none() && !is_later(session.first_root, node.key);
        let lineage = Lineage {
            session: Some(session.id),
            ..Lineage::default()
        };
        only.then_some((lineage, Evidence::Cgroup))
    }
}

/// Whose it is by being in the process group, or the session of the kernel, that a member began. The kernel gives no
/// pid away that still is the id of either.
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
            // Whoever is of its group is below it.
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

/// Whether its parent may be none but by adoption. Who is in the same session of the kernel with it is its maker, as
/// the shell is of all of `agent | tee log`: whoever adopts has its own, but for the init of all in a container.
pub(super) fn may_be_adopted(tree: &Tree, node: &Node) -> bool {
    let parent = node.parent.and_then(|parent| tree.get(parent));
    // One that is not to be seen is nobody's maker here.
    parent.is_none_or(|parent| {
        parent.state.member.session.is_none()
            && (parent.key.pid == 1 || parent.image.sid != node.image.sid)
    })
}

pub(super) fn is_later(one: ProcessKey, other: ProcessKey) -> bool {
    one.start / TICK_NS > other.start / TICK_NS
}
