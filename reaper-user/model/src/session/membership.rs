//! Who belongs to whom: by what is known of a process's maker here, and where nothing is, by what the
//! kernel's map has.

use reaper_common::MEMBER_UNCERTAIN;

use super::{Evidence, IndexKey, Session, SessionId, Sessions};
use crate::event::{Membership, ProcessKey, Provenance};
use crate::session::member::Lineage;
use crate::tree::tick;
use crate::{Node, Tree};

/// How a process came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Its fork was told, and with it its maker.
    Forked,
    /// It was found, or told of, later on: its parent need not be its maker.
    Discovered,
}

/// Whose a process is, and on what word.
#[derive(Clone, Copy)]
pub(super) struct LineageClaim {
    lineage: Lineage,
    /// Nothing that is told later can know it better.
    is_certain: bool,
    /// It is no member of what it was taken for a member of.
    excludes_session: bool,
}

impl LineageClaim {
    /// Of which anything that is told knows better.
    pub(super) fn uncertain(lineage: Lineage) -> LineageClaim {
        LineageClaim {
            lineage,
            is_certain: false,
            excludes_session: false,
        }
    }
}

impl Sessions {
    /// A process is new, or its fork is told only now: it is what its maker is, a member of the same
    /// session or of none.
    pub(crate) fn on_birth(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        creator: Option<ProcessKey>,
        origin: Origin,
        mark: Option<Membership>,
    ) {
        let Some(node) = tree.get(key) else { return };
        if !node.state.member.is_lineage_certain {
            let descent = self.descent(tree, node, creator, origin, mark);
            self.set_lineage(tree, key, descent);
        }
        let in_scope = creator
            .and_then(|creator| tree.get(creator))
            .is_some_and(|creator| creator.state.member.in_scope);
        if let Some(node) = tree.get_mut(key) {
            node.state.member.in_scope |= in_scope;
        }
    }

    fn descent(
        &self,
        tree: &Tree,
        node: &Node,
        creator: Option<ProcessKey>,
        origin: Origin,
        mark: Option<Membership>,
    ) -> LineageClaim {
        let of = |key: Option<ProcessKey>| key.and_then(|key| self.lineage_of_children(tree, key));
        let maker = of(creator);
        if let (Origin::Forked, Some(lineage)) = (origin, maker)
            && !self.is_outdated(tree, creator, node, mark)
        {
            return LineageClaim {
                lineage,
                is_certain: true,
                // What has a session of its own by now stays in that.
                excludes_session: lineage.session.is_none() && !node.state.member.root,
            };
        }
        match mark.and_then(|mark| self.kernel_lineage(node, mark)) {
            Some(descent) => LineageClaim {
                // A map that was made after the fork knows nobody from before.
                excludes_session: descent.excludes_session && origin == Origin::Discovered,
                ..descent
            },
            None => {
                let may_be = |lineage: &Lineage| {
                    let id = lineage.session;
                    id.is_some_and(|id| mark.is_none_or(|mark| self.may_contain(id, mark)))
                };
                let maker = maker.or_else(|| of(node.birth_parent)).filter(may_be);
                LineageClaim::uncertain(
                    maker.unwrap_or_else(|| self.possible_lineage(tree, node, mark)),
                )
            }
        }
    }

    /// Whose one is that the map is not sure of, and of whose makers nothing is known: perhaps of the
    /// session that it names, unless it is known to be nobody's, or its parent to be a boundary or below
    /// one. A parent that is nobody's for another reason says nothing, as it may be an adopter.
    fn possible_lineage(&self, tree: &Tree, node: &Node, mark: Option<Membership>) -> Lineage {
        let name = mark.and_then(|mark| mark.session);
        let session = name.filter(|_| {
            let parent = node.parent.or(node.birth_parent);
            !is_disowned(tree, node) && !parent.is_some_and(|parent| is_outside(tree, parent))
        });
        Lineage {
            session: session.and_then(|name| self.id_by_name(name)),
            is_uncertain: true,
            inferred: None,
        }
    }

    /// Whether what is known of a process's maker is only what that was found to be later, while the map
    /// has what it was at the birth.
    fn is_outdated(
        &self,
        tree: &Tree,
        maker: Option<ProcessKey>,
        node: &Node,
        mark: Option<Membership>,
    ) -> bool {
        let settled = |key| {
            tree.get(key)
                .is_none_or(|maker| maker.state.member.is_lineage_certain)
        };
        let marked = || mark.and_then(|mark| self.kernel_lineage(node, mark));
        self.is_restoring
            && maker.is_some_and(|key| !settled(key))
            && marked().is_some_and(|marked| marked.lineage.session.is_some())
    }

    /// Whose a process's children are; `None` if nothing is known of it.
    fn lineage_of_children(&self, tree: &Tree, key: ProcessKey) -> Option<Lineage> {
        let mut lineage = tree.lineage_of(key)?;
        // It may have become a boundary.
        lineage.is_uncertain |=
            lineage.session.is_some() && tree.get(key).is_some_and(|node| node.image.is_unread());
        if !self.is_restoring {
            return Some(lineage);
        }
        // What it has become while nobody listened will be told, and then handed on.
        let to_come = |session: &&Session| {
            let is_root = |node: &Node| node.key == session.root;
            session.is_discovered && tree.get(key).is_some_and(is_root)
        };
        let own = lineage.session.and_then(|id| self.get(id));
        Some(own.filter(to_come).map_or(lineage, |own| Lineage {
            session: own.outer,
            ..Lineage::default()
        }))
    }

    /// What the kernel's map says; `None` where that proves nothing.
    fn kernel_lineage(&self, node: &Node, mark: Membership) -> Option<LineageClaim> {
        if mark.has(MEMBER_UNCERTAIN) {
            return None;
        }
        let session = mark.session.and_then(|name| self.id_by_name(name));
        // A session that the probe began may open yet. Its root was nobody's; the others wait for it.
        let waits = |name: ProcessKey| session.is_none() && !node.has_key(name);
        Some(LineageClaim {
            lineage: Lineage {
                session,
                ..Lineage::default()
            },
            is_certain: !mark.session.is_some_and(waits),
            excludes_session: mark.session.is_none(),
        })
    }

    /// Whether one that the map is not sure of may be a member: of the session that it names, or of one
    /// nested in that.
    fn may_contain(&self, id: SessionId, mark: Membership) -> bool {
        let is_it = |session: &Session| mark.session.is_some_and(|name| session.has_name(name));
        self.with_enclosing(id).any(is_it)
    }

    /// Whether the kernel's map has for a process that it is a member of a session that is open.
    pub(crate) fn has_open(&self, mark: Membership) -> bool {
        let name = mark.session.filter(|_| !mark.has(MEMBER_UNCERTAIN));
        name.is_some_and(|name| self.by_first_root(name).is_some())
    }

    /// The session of this name, also one that is closed: a birth may have been lost.
    pub(crate) fn id_by_name(&self, name: ProcessKey) -> Option<SessionId> {
        let closed = || self.closed.iter().find(|session| session.has_name(name));
        let session = self.open.by_name(name).or_else(closed)?;
        Some(session.id)
    }

    /// What the ring still tells of a process that was found, and whose descent is not known for sure,
    /// may say whose it is: whether it does.
    pub(crate) fn settle(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        mark: Option<Membership>,
    ) -> bool {
        if !self.is_restoring {
            return false;
        }
        let unsure = tree
            .get(key)
            .filter(|node| !node.state.member.is_lineage_certain);
        let marked = unsure.and_then(|node| self.kernel_lineage(node, mark?));
        let Some(descent) = marked.filter(|descent| descent.lineage.session.is_some()) else {
            return false;
        };
        self.set_lineage(tree, key, descent);
        true
    }

    /// Notes a process that was found with a mark, if the session of that may open yet.
    pub(crate) fn note_mark(&mut self, tree: &Tree, key: ProcessKey) {
        if let Some(node) = tree.get(key).filter(|node| is_early(node))
            && let Some(name) = node.membership.and_then(|mark| mark.session)
            && self.by_first_root(name).is_none()
        {
            self.early_members.insert((tick(name), node.key));
        }
    }

    /// A session has opened that the kernel has followed for longer: takes in who was found before it
    /// and is a member by the kernel's map.
    pub(super) fn adopt_marked(&mut self, tree: &mut Tree, root: ProcessKey, id: SessionId) {
        let Some(session) = self.get(id) else {
            return;
        };
        let name = |mark: Membership| mark.session.is_some_and(|name| session.has_name(name));
        if !tree
            .get(root)
            .is_some_and(|root| root.membership.is_some_and(name))
        {
            return;
        }
        let first_root = tick(session.first_root);
        let first = ProcessKey { pid: 0, start: 0 };
        let early = self.early_members.range((first_root, first)..);
        let early = early.take_while(|(name, _)| *name == first_root);
        let early: Vec<_> = early.copied().collect();
        let found = early.iter().filter_map(|(_, key)| tree.get(*key));
        let found = found.filter(|node| is_early(node) && node.membership.is_some_and(name));
        let mut found: Vec<ProcessKey> = found.map(|node| node.key).collect();
        for entry in &early {
            self.early_members.remove(entry);
        }
        // Parents before their children.
        found.sort_unstable_by_key(|key| key.start);
        for key in found {
            if let Some(node) = tree.get(key) {
                let maker = node.birth_parent;
                let descent = self.descent(tree, node, maker, Origin::Discovered, node.membership);
                self.set_lineage(tree, key, descent);
            }
        }
    }

    pub(super) fn set_lineage(&mut self, tree: &mut Tree, key: ProcessKey, descent: LineageClaim) {
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        node.state.member.is_lineage_certain = descent.is_certain;
        let (own, stopped) = (
            node.state.member.session,
            node.state.member.boundary.is_some(),
        );
        let session = own.and_then(|own| self.get(own));
        let is_root = session.is_some_and(|session| session.root == key);
        let Lineage {
            session: found,
            is_uncertain: unsure,
            inferred,
        } = descent.lineage;
        match (own, found) {
            (None, Some(id)) if !stopped => {
                self.join(tree, key, id, unsure);
                self.set_inferred(tree, key, inferred);
            }
            (Some(_), None) if descent.excludes_session => self.leave(node),
            // An agent that was found in /proc before it was known whose it is.
            (Some(own), outer) if is_root => {
                let can = descent.is_certain
                    && !unsure
                    && inferred.is_none()
                    && outer.is_none_or(|outer| self.may_nest(own, outer));
                let kind = self.get(own).map(|own| own.kind);
                let outer = kind.and_then(|kind| self.outer_of(kind, outer));
                let old = self.open.update(own, |own| {
                    let can = own.is_discovered && can;
                    can.then(|| std::mem::replace(&mut own.outer, outer))
                });
                self.to_check.extend(old.flatten().flatten());
            }
            (Some(own), Some(id)) if descent.is_certain && own == id => {
                (
                    node.state.member.is_lineage_uncertain,
                    node.state.member.inferred,
                ) = (unsure, inferred);
            }
            (Some(_), Some(id)) if descent.is_certain => {
                self.join(tree, key, id, unsure);
                self.set_inferred(tree, key, inferred);
            }
            _ => {}
        }
    }

    /// That a process is a member is only concluded.
    fn set_inferred(&self, tree: &mut Tree, key: ProcessKey, inferred: Option<Evidence>) {
        if let Some(node) = tree.get_mut(key).filter(|_| inferred.is_some()) {
            node.state.member.inferred = inferred.filter(|_| node.state.member.session.is_some());
            node.provenance = Provenance::Inferred;
        }
    }

    /// Whether one session can become nested in another: that lives and is not nested in it.
    fn may_nest(&self, inner: SessionId, outer: SessionId) -> bool {
        self.get(outer).is_some()
            && self
                .with_enclosing(outer)
                .all(|session| session.id != inner)
    }

    /// Makes a process a member of a session; for `unsure` see [`Member::is_lineage_uncertain`](super::member::Member::is_lineage_uncertain).
    pub(super) fn join(&mut self, tree: &mut Tree, key: ProcessKey, id: SessionId, unsure: bool) {
        self.reopen(id);
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        self.leave(node);
        node.state.member.session = self.open.update(id, |session| {
            session.members.insert(key.pid);
            session.last_birth_at = session.last_birth_at.max(key.start);
            node.state.member.is_lineage_uncertain = unsure;
            // Whoever descends from a root is in scope with it, also where those between are forgotten.
            node.state.member.in_scope = true;
            id
        });
    }

    /// Moves what descends from a process that has left a session: into its own session if it is the root of one, or out of
    /// any. A session nested in the one that it left is nested in none then. Returns the processes that moved.
    pub(crate) fn move_below(
        &mut self,
        tree: &mut Tree,
        top: ProcessKey,
        left: SessionId,
    ) -> Vec<ProcessKey> {
        let nested: Vec<SessionId> = self.open.ids(IndexKey::Outer(left)).collect();
        for id in nested {
            let is_below = |session: &Session| tree.descends_from(session.root, top);
            if self.get(id).is_some_and(is_below) {
                self.open.update(id, |session| session.outer = None);
                self.to_check.push(left);
            }
        }
        let own = tree.get(top).and_then(|node| node.state.member.session);
        // A root that has become a server, or a copy of one that has not run it itself.
        if own == Some(left) {
            return Vec::new();
        }
        let members = self.get(left).into_iter().flat_map(Session::members);
        let members = members.filter_map(|pid| tree.by_pid(pid));
        let members = members.map(|node| node.key);
        let below: Vec<ProcessKey> = members
            .filter(|key| *key != top && tree.descends_from(*key, top))
            .collect();
        for key in &below {
            let Some(node) = tree.get_mut(*key) else {
                continue;
            };
            let (unsure, inferred) = (
                node.state.member.is_lineage_uncertain,
                node.state.member.inferred,
            );
            match own {
                Some(own) => {
                    self.join(tree, *key, own, unsure);
                    self.set_inferred(tree, *key, inferred);
                }
                None => self.leave(node),
            }
        }
        below
    }

    /// Makes processes that come from a root members of its session, which opened later than they began. An agent's session
    /// that has begun among them is nested in it then. Returns the processes that joined.
    pub(crate) fn adopt(
        &mut self,
        tree: &mut Tree,
        root: ProcessKey,
        mut below: Vec<ProcessKey>,
    ) -> Vec<ProcessKey> {
        let id = tree.get(root).and_then(|node| node.state.member.session);
        below.retain(|key| id.is_some() && self.settle_with(tree, *key, root, None));
        below
    }

    /// Makes a descendant of `top` what that has become: a member of its session, or of none. `left` is the session that
    /// `top` was a member of before. An agent keeps its session, which is nested in that of `top` then. Returns whether
    /// the process goes with `top`.
    pub(crate) fn settle_with(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        top: ProcessKey,
        left: Option<SessionId>,
    ) -> bool {
        let Some(member) = tree.get(top).map(|top| &top.state.member) else {
            return false;
        };
        let (own, unsure) = (member.session, member.is_lineage_uncertain);
        let Some(node) = tree.get_mut(key) else {
            return false;
        };
        if let Some(id) = node.state.member.session
            && let Some(session) = self.get(id).filter(|session| session.root == key)
        {
            let outer = self.outer_of(session.kind, own).filter(|_| !unsure);
            let outer = outer.filter(|outer| self.may_nest(id, *outer));
            if session.outer.is_none() || session.outer == left {
                let old = self
                    .open
                    .update(id, |session| std::mem::replace(&mut session.outer, outer));
                self.to_check.extend(old.flatten());
            }
            return false;
        }
        if node.state.member.boundary.is_some() || node.state.member.session != left {
            return false;
        }
        match own {
            Some(own) => self.join(tree, key, own, unsure),
            None => self.leave(node),
        }
        true
    }

    /// It is a member of nothing any more.
    fn leave(&mut self, node: &mut Node) {
        (
            node.state.member.is_lineage_uncertain,
            node.state.member.inferred,
        ) = (false, None);
        let Some(old) = node.state.member.session.take() else {
            return;
        };
        self.open
            .update(old, |session| session.members.remove(&node.key.pid));
        self.to_check.push(old);
    }

    /// A member turns up of which nothing was known when the last one was gone: its birth was lost.
    fn reopen(&mut self, id: SessionId) {
        if let Some(at) = self.closed.iter().position(|session| session.id == id)
            && let Some(session) = self.closed.remove(at)
        {
            self.open.insert(session);
        }
    }
}

/// Whether a process was found, and nothing yet has said for sure whose it is.
fn is_early(node: &Node) -> bool {
    !node.reported.by_probe && !node.state.member.is_lineage_certain
}

/// Whether a process is known to be nobody's that the kernel follows for a session, or has followed.
fn is_outside(tree: &Tree, key: ProcessKey) -> bool {
    let Some(node) = tree.get(key) else {
        return tree.is_disowned(key);
    };
    let followed = node.membership.is_some_and(|mark| mark.session.is_some());
    node.state.member.boundary.is_some()
        || node.state.member.session.is_none() && (followed || is_disowned(tree, node))
}

fn is_disowned(tree: &Tree, node: &Node) -> bool {
    node.exact_key().is_some_and(|key| tree.is_disowned(key))
}
