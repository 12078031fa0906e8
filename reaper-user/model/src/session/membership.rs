//! Assigns processes to sessions by descent: from the lineage of the creator if it is known, otherwise from the
//! kernel's map of members.

use reaper_common::MEMBER_UNCERTAIN;

use super::{Evidence, IndexKey, Session, SessionId, Sessions};
use crate::event::{Membership, ProcessKey, Provenance};
use crate::session::member::Lineage;
use crate::tree::tick;
use crate::{Node, Tree};

/// Way in which a process became known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The fork was reported, with its creator.
    Forked,
    /// The process was discovered, or first named by a later event. Its parent may be an adopter.
    Discovered,
}

/// Lineage of a process, and its certainty.
#[derive(Clone, Copy)]
pub(super) struct LineageClaim {
    lineage: Lineage,
    /// Whether no later event can know the lineage better.
    is_certain: bool,
    /// Whether the process leaves its session if the lineage names none.
    excludes_session: bool,
}

impl LineageClaim {
    /// Returns a lineage that any later event may replace.
    pub(super) fn uncertain(lineage: Lineage) -> LineageClaim {
        LineageClaim {
            lineage,
            is_certain: false,
            excludes_session: false,
        }
    }
}

impl Sessions {
    /// Gives a new process the session of its creator, or none, and the creator's scope and descent from `sudo`. `entry` is its entry in the
    /// kernel's map, which counts if the creator is unknown. Also called for a known process whose fork is reported
    /// late; a certain lineage then stays.
    pub(crate) fn on_birth(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        creator: Option<ProcessKey>,
        origin: Origin,
        entry: Option<Membership>,
    ) {
        let Some(node) = tree.get(key) else { return };
        if !node.state.member.is_lineage_certain {
            let descent = self.descent(tree, node, creator, origin, entry);
            self.set_lineage(tree, key, descent);
        }
        let creator = creator.and_then(|creator| tree.get(creator));
        let inherited = creator.map(|it| (it.state.member.in_scope, it.is_by_sudo()));
        if let (Some(node), Some((in_scope, is_by_sudo))) = (tree.get_mut(key), inherited) {
            node.state.member.in_scope |= in_scope;
            node.state.member.is_by_sudo |= is_by_sudo;
        }
    }

    /// Returns the lineage of a process. It is certain from a creator whose fork was reported, or from a certain map
    /// entry. Otherwise it is the uncertain one of the creator or birth parent, or that of the map entry.
    fn descent(
        &self,
        tree: &Tree,
        node: &Node,
        creator: Option<ProcessKey>,
        origin: Origin,
        entry: Option<Membership>,
    ) -> LineageClaim {
        let of = |key: Option<ProcessKey>| key.and_then(|key| self.lineage_of_children(tree, key));
        let inherited = of(creator);
        if let (Origin::Forked, Some(lineage)) = (origin, inherited)
            && !self.is_outdated(tree, creator, node, entry)
        {
            return LineageClaim {
                lineage,
                is_certain: true,
                // A root stays in its own session.
                excludes_session: lineage.session.is_none() && !node.state.member.root,
            };
        }
        match entry.and_then(|entry| self.kernel_lineage(node, entry)) {
            Some(descent) => LineageClaim {
                // An absent entry proves nothing about a reported fork: the map may have been created after it.
                excludes_session: descent.excludes_session && origin == Origin::Discovered,
                ..descent
            },
            None => {
                let may_be = |lineage: &Lineage| {
                    let id = lineage.session;
                    id.is_some_and(|id| entry.is_none_or(|entry| self.may_contain(id, entry)))
                };
                let inherited = inherited.or_else(|| of(node.birth_parent)).filter(may_be);
                LineageClaim::uncertain(
                    inherited.unwrap_or_else(|| self.possible_lineage(tree, node, entry)),
                )
            }
        }
    }

    /// Returns the uncertain lineage of a process whose ancestors are unknown: the session that its map entry names.
    ///
    /// Names no session if the process was removed from it, or if its parent is a boundary or below one. Any other
    /// untracked parent proves nothing, because it may be an adopter.
    fn possible_lineage(&self, tree: &Tree, node: &Node, entry: Option<Membership>) -> Lineage {
        let name = entry.and_then(|entry| entry.session);
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

    /// Returns whether the lineage of the creator is only a later discovery, while the map entry has the session at the
    /// fork. False outside of a restore.
    fn is_outdated(
        &self,
        tree: &Tree,
        creator: Option<ProcessKey>,
        node: &Node,
        entry: Option<Membership>,
    ) -> bool {
        let settled = |key| {
            tree.get(key)
                .is_none_or(|creator| creator.state.member.is_lineage_certain)
        };
        let marked = || entry.and_then(|entry| self.kernel_lineage(node, entry));
        self.is_restoring
            && creator.is_some_and(|key| !settled(key))
            && marked().is_some_and(|marked| marked.lineage.session.is_some())
    }

    /// Returns the lineage that the children of a process inherit; `None` if the process is unknown.
    fn lineage_of_children(&self, tree: &Tree, key: ProcessKey) -> Option<Lineage> {
        let mut lineage = tree.lineage_of(key)?;
        // The program that is still unread may be a boundary.
        lineage.is_uncertain |=
            lineage.session.is_some() && tree.get(key).is_some_and(|node| node.image.is_unread());
        if !self.is_restoring {
            return Some(lineage);
        }
        // The backlog still contains the exec that made a discovered root an agent. Children from before it belong
        // outside.
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

    /// Returns the lineage by the entry in the kernel's map; `None` if the entry is uncertain. The result is not
    /// certain while the named session is not open here.
    fn kernel_lineage(&self, node: &Node, entry: Membership) -> Option<LineageClaim> {
        if entry.has(MEMBER_UNCERTAIN) {
            return None;
        }
        let session = entry.session.and_then(|name| self.id_by_name(name));
        // A probe opened a session that is not open here yet. Its root was untracked; all others wait for the session.
        let waits = |name: ProcessKey| session.is_none() && !node.has_key(name);
        Some(LineageClaim {
            lineage: Lineage {
                session,
                ..Lineage::default()
            },
            is_certain: !entry.session.is_some_and(waits),
            excludes_session: entry.session.is_none(),
        })
    }

    /// Returns whether a session is the one that an uncertain entry names, or is nested in it.
    fn may_contain(&self, id: SessionId, entry: Membership) -> bool {
        let is_it = |session: &Session| entry.session.is_some_and(|name| session.has_name(name));
        self.with_enclosing(id).any(is_it)
    }

    /// Returns whether the entry names an open session with certainty.
    pub(crate) fn has_open(&self, entry: Membership) -> bool {
        let name = entry.session.filter(|_| !entry.has(MEMBER_UNCERTAIN));
        name.is_some_and(|name| self.by_first_root(name).is_some())
    }

    /// Returns the id of the open or recently closed session with this first root. It may be closed: a birth in it may
    /// have been lost.
    pub(crate) fn id_by_name(&self, name: ProcessKey) -> Option<SessionId> {
        let closed = || self.closed.iter().find(|session| session.has_name(name));
        let session = self.open.by_name(name).or_else(closed)?;
        Some(session.id)
    }

    /// Assigns a discovered process of uncertain lineage by the entry in a later event of the backlog. Returns whether
    /// the entry named its session. Does nothing and returns false outside of a restore.
    pub(crate) fn settle(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        entry: Option<Membership>,
    ) -> bool {
        if !self.is_restoring {
            return false;
        }
        let uncertain = tree
            .get(key)
            .filter(|node| !node.state.member.is_lineage_certain);
        let marked = uncertain.and_then(|node| self.kernel_lineage(node, entry?));
        let Some(descent) = marked.filter(|descent| descent.lineage.session.is_some()) else {
            return false;
        };
        self.set_lineage(tree, key, descent);
        true
    }

    /// Remembers a discovered process of uncertain lineage if its map entry names a session that is not open yet.
    pub(crate) fn note_early_member(&mut self, tree: &Tree, key: ProcessKey) {
        if let Some(node) = tree.get(key).filter(|node| is_early(node))
            && let Some(name) = node.membership.and_then(|entry| entry.session)
            && self.by_first_root(name).is_none()
        {
            self.early_members.insert((tick(name), node.key));
        }
    }

    /// Assigns the processes that were discovered before their session opened and that the kernel's map has as members.
    /// Does nothing unless the map entry of `root` names this session too.
    pub(super) fn adopt_early_members(&mut self, tree: &mut Tree, root: ProcessKey, id: SessionId) {
        let Some(session) = self.get(id) else {
            return;
        };
        let name = |entry: Membership| entry.session.is_some_and(|name| session.has_name(name));
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
        for pair in &early {
            self.early_members.remove(pair);
        }
        // Parents before their children.
        found.sort_unstable_by_key(|key| key.start);
        for key in found {
            if let Some(node) = tree.get(key) {
                let birth_parent = node.birth_parent;
                let descent = self.descent(
                    tree,
                    node,
                    birth_parent,
                    Origin::Discovered,
                    node.membership,
                );
                self.set_lineage(tree, key, descent);
            }
        }
    }

    /// Gives a process the membership that `descent` states. A process without a session joins the stated one, unless
    /// it is a boundary. A known session changes only by a certain lineage. The session of a discovered root is instead
    /// nested in the stated one, if that is certain.
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
            is_uncertain: uncertain,
            inferred,
        } = descent.lineage;
        match (own, found) {
            (None, Some(id)) if !stopped => {
                self.join(tree, key, id, uncertain);
                self.set_inferred(tree, key, inferred);
            }
            (Some(_), None) if descent.excludes_session => self.leave(node),
            // An agent that was discovered before its lineage was known: nests its session.
            (Some(own), outer) if is_root => {
                let can = descent.is_certain
                    && !uncertain
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
                ) = (uncertain, inferred);
            }
            (Some(_), Some(id)) if descent.is_certain => {
                self.join(tree, key, id, uncertain);
                self.set_inferred(tree, key, inferred);
            }
            _ => {}
        }
    }

    /// Marks the membership of a process as inferred from this evidence. Does nothing for `None`.
    fn set_inferred(&self, tree: &mut Tree, key: ProcessKey, inferred: Option<Evidence>) {
        if let Some(node) = tree.get_mut(key).filter(|_| inferred.is_some()) {
            node.state.member.inferred = inferred.filter(|_| node.state.member.session.is_some());
            node.provenance = Provenance::Inferred;
        }
    }

    /// Returns whether `inner` can be nested in `outer`: that is open, not nested too deep and not nested in `inner`.
    fn may_nest(&self, inner: SessionId, outer: SessionId) -> bool {
        self.get(outer).is_some()
            && self.has_room(outer)
            && self
                .with_enclosing(outer)
                .all(|session| session.id != inner)
    }

    /// Makes a process a member of a session, which is reopened if it has closed, and adds the process to the scope. It
    /// leaves its old session first. `uncertain` sets
    /// [`Member::is_lineage_uncertain`](super::member::Member::is_lineage_uncertain).
    pub(super) fn join(
        &mut self,
        tree: &mut Tree,
        key: ProcessKey,
        id: SessionId,
        uncertain: bool,
    ) {
        self.reopen(id);
        let Some(node) = tree.get_mut(key) else {
            return;
        };
        self.leave(node);
        node.state.member.session = self.open.update(id, |session| {
            session.members.insert(key.pid);
            session.last_birth_at = session.last_birth_at.max(key.start);
            node.state.member.is_lineage_uncertain = uncertain;
            // Descendants of a root are in scope, also once the processes in between are forgotten.
            node.state.member.in_scope = true;
            id
        });
    }

    /// Moves the members of `left` that descend from `top`, which has left that session. They join the session of which
    /// `top` is the root, or none. Sessions of descendants nested in `left` are nested in none afterwards.
    ///
    /// Returns the moved processes. Moves no members if `top` is still one of `left`.
    pub(crate) fn move_below(
        &mut self,
        tree: &mut Tree,
        top: ProcessKey,
        left: SessionId,
    ) -> Vec<ProcessKey> {
        let mut descends = tree.descent_from(top);
        let nested = self.open.all(IndexKey::Outer(left));
        let nested = nested.filter(|session| descends(session.root));
        let nested: Vec<SessionId> = nested.map(|session| session.id).collect();
        for id in nested {
            self.open.update(id, |session| session.outer = None);
            self.to_check.push(left);
        }
        let own = tree.get(top).and_then(|node| node.state.member.session);
        // The root itself became a server, or the process shares the image of a server and has not executed it.
        if own == Some(left) {
            return Vec::new();
        }
        let members = self.get(left).into_iter().flat_map(Session::members);
        let members = members.filter_map(|pid| tree.by_pid(pid));
        let members = members.map(|node| node.key);
        let below: Vec<ProcessKey> = members
            .filter(|key| *key != top && descends(*key))
            .collect();
        drop(descends);
        for key in &below {
            let Some(node) = tree.get_mut(*key) else {
                continue;
            };
            let (uncertain, inferred) = (
                node.state.member.is_lineage_uncertain,
                node.state.member.inferred,
            );
            match own {
                Some(own) => {
                    self.join(tree, *key, own, uncertain);
                    self.set_inferred(tree, *key, inferred);
                }
                None => self.leave(node),
            }
        }
        below
    }

    /// Adds descendants of a root to its session, which opened after they started. Skips boundaries and members of
    /// other sessions. The session of an agent among them is nested in it. Returns the new members.
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

    /// Gives a descendant of `top` the membership that `top` has now: the same session, or none. `left` is the session
    /// that `top` was a member of before. A boundary, and a process that is not in `left`, stays as it is. An agent
    /// keeps its own session, which is nested in that of `top`. Returns whether the membership of the descendant
    /// follows that of `top`.
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
        let (own, uncertain) = (member.session, member.is_lineage_uncertain);
        let Some(node) = tree.get_mut(key) else {
            return false;
        };
        if let Some(id) = node.state.member.session
            && let Some(session) = self.get(id).filter(|session| session.root == key)
        {
            let outer = self.outer_of(session.kind, own).filter(|_| !uncertain);
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
            Some(own) => self.join(tree, key, own, uncertain),
            None => self.leave(node),
        }
        true
    }

    /// Removes a process from its session, if it has one, and clears how certain its membership was.
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

    /// Reopens a closed session for a late member, whose birth was lost.
    fn reopen(&mut self, id: SessionId) {
        if let Some(at) = self.closed.iter().position(|session| session.id == id)
            && let Some(session) = self.closed.remove(at)
        {
            self.open.insert(session);
        }
    }
}

/// Returns whether a process was discovered and its lineage is still uncertain.
fn is_early(node: &Node) -> bool {
    !node.reported.by_probe && !node.state.member.is_lineage_certain
}

/// Returns whether a process is known to be outside of all sessions: it is a boundary, the service has removed it from
/// its session, or it has no session although its map entry names one. False for any other untracked process.
fn is_outside(tree: &Tree, key: ProcessKey) -> bool {
    let Some(node) = tree.get(key) else {
        return tree.is_disowned(key);
    };
    let followed = node.membership.is_some_and(|entry| entry.session.is_some());
    node.state.member.boundary.is_some()
        || node.state.member.session.is_none() && (followed || is_disowned(tree, node))
}

/// Returns whether the service removed the process from its session (see [`Tree::disown`]); false while its exact start
/// is unknown.
fn is_disowned(tree: &Tree, node: &Node) -> bool {
    node.exact_key().is_some_and(|key| tree.is_disowned(key))
}
