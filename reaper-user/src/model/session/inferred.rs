//! Who is taken for a member on evidence alone.
//!
//! Where the process table is only looked at now and then, a process can be born to a member, and that be gone again,
//! between two looks. What is left of its makers then are the ids that it has from them.

use super::descent::Descent;
use super::{Session, Sessions};
use crate::model::event::{Key, TICK_NS};
use crate::model::tree::{Lineage, Node, Tree};

impl Sessions {
    /// A process was found that no known maker makes a member: it is one of the session that its ids point to, if they
    /// do, and marked so, since they can be had otherwise too.
    pub(in crate::model) fn infer(&mut self, tree: &mut Tree, key: Key) {
        let Some(node) = tree.get(key) else { return };
        if node.session.is_some() || !may_be_adopted(tree, node) {
            return;
        }
        let found = by_ids(tree, node).or_else(|| self.by_cgroup(tree, node));
        if let Some(lineage) = found {
            let lineage = Lineage {
                inferred: true,
                ..lineage
            };
            self.belong(tree, key, Descent::doubtful(lineage));
        }
    }

    /// Whose it is by running in the cgroup of a session that began one for itself.
    fn by_cgroup(&self, tree: &Tree, node: &Node) -> Option<Lineage> {
        let own = node.image.cgroup_id;
        let parent = tree.get(node.parent?)?;
        if own == 0 || parent.image.cgroup_id == own {
            return None;
        }
        let began_it = |session: &&Session| {
            let above = session.parent.as_ref().map(|above| above.image.cgroup_id);
            session.cgroup_id == own && above.is_some_and(|above| above != 0 && above != own)
        };
        let mut all = self.iter().filter(began_it);
        let session = all.next()?;
        let only = all.next().is_none() && !is_later(session.first_root, node.key);
        only.then_some(Lineage {
            session: Some(session.id),
            ..Lineage::default()
        })
    }
}

/// Whose it is by being in the process group, or the session of the kernel, that a member began. The kernel gives no
/// pid away that still is the id of either.
fn by_ids(tree: &Tree, node: &Node) -> Option<Lineage> {
    let ids = [node.image.pgid, node.image.sid].into_iter();
    for id in ids.filter(|id| *id != 0 && *id != node.key.pid) {
        let lineage = match tree.by_pid(id) {
            // Whoever is of its group is below it.
            Some(leader) if leader.boundary.is_some() => return None,
            Some(leader) => (!is_later(leader.key, node.key)).then(|| leader.lineage()),
            None => tree.left_lately(id, node.key.start),
        };
        let lineage = lineage.filter(|lineage| lineage.session.is_some());
        if lineage.is_some() {
            return lineage;
        }
    }
    None
}

/// Whether its parent may be none but by adoption. Who is in the same session of the kernel with it is its maker, as
/// the shell is of all of `agent | tee log`: whoever adopts has its own, but for the init of all in a container.
fn may_be_adopted(tree: &Tree, node: &Node) -> bool {
    let parent = node.parent.and_then(|parent| tree.get(parent));
    // One that is not to be seen is nobody's maker here.
    parent.is_none_or(|parent| {
        parent.session.is_none() && (parent.key.pid == 1 || parent.image.sid != node.image.sid)
    })
}

fn is_later(one: Key, other: Key) -> bool {
    one.start / TICK_NS > other.start / TICK_NS
}
