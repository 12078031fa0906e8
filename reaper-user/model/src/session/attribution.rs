//! Assigns adopted processes to sessions by inherited evidence: environment markers of agents and the working
//! directory.
//!
//! Evidence can have another origin, so the process joins a session only if nothing contradicts that:
//! - It started after the session's first root and under the same user. Its systemd unit, if any, is that of the root.
//! - Its parent is an adopter, and it is not a terminal emulator. No untracked process created its process group or its
//!   session in the kernel. With markers, it may share the root's kernel session.
//! - All *markers* name this session or one around it, or were inherited by its root. A marker with a pid names one
//!   session, and counts only beside another marker of the same agent. A marker without a pid names the sessions of its
//!   agent whose root was alive when the process started.
//! - Markers do not count below a multiplexer or a terminal that may have passed them on, unless the root runs in that
//!   multiplexer too.
//! - A marker does not count if a living agent of the user outside of the session, or an ancestor of one, has it: a shell
//!   started in that agent passes it on. An unreadable process may have it.
//! - The *directory* counts only without markers, terminal and multiplexer. It must be that of a root that was alive when
//!   the process started, or below. The directories of all candidate agents must be known.
//!
//! Evidence for several sessions counts for none, unless all the others are nested in one of them: then it counts for
//! that one.

use std::path::Path;

use hashbrown::HashSet;

use super::inferred::{is_later, may_be_adopted};
use super::member::Evidence;
use super::{IndexKey, Session, SessionId, Sessions};
use crate::event::{Image, ProcessKey};
use crate::facts::{Fact, FactSet, InheritedFacts};
use crate::leftover::{EnvMarker, is_login, is_terminal};
use crate::{Node, Tree};

/// Facts that are needed to assign a process.
const WANTED: FactSet = FactSet::INHERITED.union(FactSet::UNIT);

/// Maximum number of ancestors of an agent that are read. If there are more, the rest may have any marker.
const ANCESTORS_MAX: usize = 64;

impl Sessions {
    /// Returns whether a process without a session may be assigned by inherited evidence.
    ///
    /// It must not be a boundary, a kernel thread or a terminal emulator, and its real and effective uid must be equal.
    /// Its parent must be an adopter or unknown. An open or recently closed session must match by start time and user.
    pub(crate) fn is_unattributed(&self, tree: &Tree, node: &Node) -> bool {
        node.state.member.session.is_none()
            && node.state.member.boundary.is_none()
            && node.key.pid > 1
            && !node.kernel_thread
            && node.uids.real == node.uids.effective
            && may_be_adopted(tree, node)
            && parent(tree, node).is_none_or(|parent| adopts(tree, parent))
            && !is_terminal(&node.image)
            && self.possible(node).next().is_some()
    }

    /// Returns the facts that must still be read to assign the process: its own and those of roots. If the process has
    /// markers, those of living agents and their ancestors follow once these are read. Empty if all are read.
    pub(crate) fn facts_to_attribute(
        &self,
        tree: &Tree,
        node: &Node,
    ) -> Vec<(ProcessKey, FactSet)> {
        let of_root = |session: &Session| {
            let root = tree
                .get(session.root)
                .filter(|_| session.root_exit.is_none());
            let mut wanted = FactSet::NONE;
            if session.inherited == Fact::Unread {
                wanted |= FactSet::INHERITED;
            }
            if session.unit == Fact::Unread {
                wanted |= FactSet::UNIT;
            }
            root.map(|root| (root.key, wanted))
        };
        let own = std::iter::once((node.key, node.missing_facts(WANTED)));
        let all = own.chain(self.possible(node).filter_map(of_root));
        let mut wanted: Vec<_> = all.filter(|(_, wanted)| !wanted.is_empty()).collect();
        let read = node.facts().map(|facts| &facts.inherited);
        if wanted.is_empty()
            && matches!(read, Some(Fact::Known(own)) if !own.env_markers.markers.is_empty())
        {
            wanted = self.facts_of_possible_parents(tree, node);
        }
        wanted
    }

    /// Returns the living agents of the same user, and up to [`ANCESTORS_MAX`] ancestors of each, whose environment is
    /// unread.
    fn facts_of_possible_parents(&self, tree: &Tree, node: &Node) -> Vec<(ProcessKey, FactSet)> {
        let mut wanted: HashSet<ProcessKey> = HashSet::new();
        for session in self.living(node) {
            if session.inherited == Fact::Unread {
                wanted.insert(session.root);
            }
            let above = may_pass_on(tree, session).take(ANCESTORS_MAX);
            let unread = above.filter(|above| !above.missing_facts(FactSet::INHERITED).is_empty());
            wanted.extend(unread.map(|above| above.key));
        }
        let with_needs = |key| (key, FactSet::INHERITED);
        wanted.into_iter().map(with_needs).collect()
    }

    /// Returns the session of an unattributed process by its markers or its directory, and the evidence for it. Returns
    /// `None` if its environment or unit is not completely read, or if no single session fits.
    pub(super) fn attribution_by_markers(
        &self,
        tree: &Tree,
        node: &Node,
    ) -> Option<(SessionId, Evidence)> {
        let facts = node.facts()?;
        let (Fact::Known(own), Fact::Known(unit)) = (&facts.inherited, &facts.unit) else {
            return None;
        };
        if own.env_markers.cut || !self.is_unattributed(tree, node) {
            return None;
        }
        let in_unit = |session: &&Session| unit.is_empty() || session.unit == facts.unit;
        let possible: Vec<&Session> = self.possible(node).filter(in_unit).collect();
        let Some(first) = own.env_markers.markers.first() else {
            let session = self.by_directory(tree, node, own, &possible)?;
            return Some((session.id, Evidence::Directory));
        };
        // In a nested PID namespace the pids in markers mean other processes.
        let mut above = tree.ancestors(node.key);
        let nested = above.any(|above| above.namespace_init && above.key.pid > 1);
        let named = possible.iter().copied().filter(|session| {
            // In the kernel session of the shell from which the agent was started.
            let in_session_of_root = session.sid == node.image.sid && session.sid != 0;
            self.is_named_by_all(tree, session, (node, own, nested), &possible)
                && !may_be_from_multiplexer(own, session)
                && (in_session_of_root || !is_in_untracked_group(tree, node))
        });
        let named: Vec<&Session> = named.collect();
        if let Some(session) = self.only(&named) {
            return Some((session.id, Evidence::Marker(first.variable)));
        }
        let session = self.by_directory(tree, node, own, &named)?;
        Some((session.id, Evidence::Directory))
    }

    /// Returns the open and recently closed sessions of the same real uid whose first root started in an earlier tick.
    fn possible(&self, node: &Node) -> impl Iterator<Item = &Session> {
        let uid = node.uids.real;
        let closed = self.closed.iter().filter(move |session| {
            session.uids.real == uid && is_later(node.key, session.first_root)
        });
        let open = self.open.of_user_before(uid, node.key.start);
        open.chain(closed)
    }

    /// Returns whether at least one marker proves the session, and all the others name it or one around it or were
    /// inherited by its root. `nested` says that the process is in a nested PID namespace.
    fn is_named_by_all(
        &self,
        tree: &Tree,
        session: &Session,
        (node, own, nested): (&Node, &InheritedFacts, bool),
        possible: &[&Session],
    ) -> bool {
        let trace = &own.env_markers;
        let came_with_root = |marker: &EnvMarker| match &session.inherited {
            Fact::Known(root) => root.env_markers.markers.contains(marker),
            Fact::Unread | Fact::Unreadable => false,
        };
        // Beside a marker with a pid, other markers of the same agent say nothing more.
        let is_distinct = |marker: &EnvMarker| {
            let mut markers = trace.markers.iter();
            marker.agent_pid.is_some()
                || !markers.any(|other| other.agent == marker.agent && other.agent_pid.is_some())
        };
        let distinct: Vec<&EnvMarker> = trace
            .markers
            .iter()
            .filter(|marker| is_distinct(marker))
            .collect();
        let names = |marker: &EnvMarker, session: &Session| match marker.agent_pid {
            Some(_) if nested => false,
            Some(pid) => trace.has_second_marker(marker) && has_pid(session, pid, possible),
            None => ran_at_birth(session, node),
        };
        let named = |marker: &EnvMarker, session: &Session| {
            *session.agent == *marker.agent && names(marker, session)
        };
        // A marker that the root inherited is in unrelated processes too. A pid is unique.
        let proves = |marker: &EnvMarker| {
            let read = matches!(session.inherited, Fact::Known(_));
            marker.agent_pid.is_some() || read && !came_with_root(marker)
        };
        let elsewhere =
            |marker: &EnvMarker| self.may_have_marker_elsewhere(tree, marker, session, node);
        distinct
            .iter()
            .any(|marker| proves(marker) && named(marker, session) && !elsewhere(marker))
            && distinct.iter().all(|marker| {
                came_with_root(marker)
                    || self
                        .outwards_of(session)
                        .any(|around| named(marker, around))
            })
    }

    /// Returns the open sessions of the same user whose root is alive.
    fn living(&self, node: &Node) -> impl Iterator<Item = &Session> {
        self.open.all(IndexKey::Living(node.uids.real))
    }

    /// Returns whether a living agent outside of the session, or an ancestor of one, has or may have the marker.
    fn may_have_marker_elsewhere(
        &self,
        tree: &Tree,
        marker: &EnvMarker,
        session: &Session,
        node: &Node,
    ) -> bool {
        let carries =
            |own: &InheritedFacts| own.env_markers.cut || own.env_markers.markers.contains(marker);
        let of_root = |other: &Session| match &other.inherited {
            Fact::Known(own) => carries(own),
            Fact::Unread | Fact::Unreadable => !is_later(other.root, node.key),
        };
        let of_ancestor = |above: &Node| match above.facts().map(|facts| &facts.inherited) {
            Some(Fact::Known(own)) => carries(own),
            _ => !is_login(&above.image) && !is_later(above.key, node.key),
        };
        let is_within = |other: &Session| self.outwards_of(other).any(|one| one.id == session.id);
        let mut others = self.living(node).filter(|other| !is_within(other));
        others.any(|other| {
            let mut above = may_pass_on(tree, other).take(ANCESTORS_MAX);
            of_root(other)
                || above.any(of_ancestor)
                || may_pass_on(tree, other).nth(ANCESTORS_MAX).is_some()
        })
    }

    /// Returns a session, which may be closed, and those that it is nested in.
    fn outwards_of<'a>(&'a self, session: &'a Session) -> impl Iterator<Item = &'a Session> {
        let outer = session.outer.into_iter();
        std::iter::once(session).chain(outer.flat_map(|outer| self.with_enclosing(outer)))
    }

    /// Returns the session among `possible` in whose root's directory, or below it, the process works. Returns `None`
    /// if several fit that are not nested in one, or if the directory does not count (see the module).
    fn by_directory<'a>(
        &self,
        tree: &Tree,
        node: &Node,
        own: &InheritedFacts,
        possible: &[&'a Session],
    ) -> Option<&'a Session> {
        let place = own.directory.as_deref()?;
        let seen = parent(tree, node).is_some();
        let elsewhere = !own.env_markers.multiplexers.is_empty() || node.image.tty != 0;
        if !seen || elsewhere || is_in_untracked_group(tree, node) {
            return None;
        }
        let mut works_here = Vec::new();
        for session in possible.iter().filter(|one| ran_at_birth(one, node)) {
            // An agent whose directory is unknown may be the right one.
            let Fact::Known(root) = &session.inherited else {
                return None;
            };
            let holds = |directory: &Path| place.starts_with(directory);
            if root.directory.as_deref().is_some_and(holds) {
                works_here.push(*session);
            }
        }
        self.only(&works_here)
    }

    /// Returns the session of `all` in which all the others are nested, or `None` if none exists.
    fn only<'a>(&self, all: &[&'a Session]) -> Option<&'a Session> {
        let holds = |one: &&&Session| {
            let is_in = |other: &&Session| self.outwards_of(other).any(|s| s.id == one.id);
            all.iter().all(is_in)
        };
        all.iter().find(holds).copied()
    }
}

/// Returns whether the session's root had this pid, and no younger candidate's root had it since.
fn has_pid(session: &Session, pid: u32, possible: &[&Session]) -> bool {
    let had = |one: &Session| one.root.pid == pid || one.first_root.pid == pid;
    let younger = |one: &&&Session| is_later(one.first_root, session.first_root);
    had(session) && !possible.iter().filter(younger).any(|one| had(one))
}

/// Returns whether the root of the session was alive when the process started.
fn ran_at_birth(session: &Session, node: &Node) -> bool {
    session
        .root_exit
        .is_none_or(|gone| node.key.start <= gone.at)
}

/// Returns the ancestors of a session's root that run under the same user, up to the first init or service manager.
fn may_pass_on<'a>(tree: &'a Tree, session: &Session) -> impl Iterator<Item = &'a Node> {
    let uid = session.uids.real;
    tree.ancestors(session.root).take_while(move |above| {
        above.uids.real == uid
            && above.key.pid > 1
            && !above.namespace_init
            && !is_manager(&above.image)
    })
}

/// Returns whether a multiplexer may have passed on the markers of a process, other than one that the root runs in.
fn may_be_from_multiplexer(own: &InheritedFacts, session: &Session) -> bool {
    let with_root = |one| match &session.inherited {
        Fact::Known(root) => root.env_markers.multiplexers.contains(one),
        Fact::Unread | Fact::Unreadable => false,
    };
    let mut all = own.env_markers.multiplexers.iter();
    all.any(|one| one.server.is_none() || !with_root(one))
}

/// Returns whether another process, which is untracked, created the process group or the kernel session of `node`.
/// An unknown creator does not count.
fn is_in_untracked_group(tree: &Tree, node: &Node) -> bool {
    [node.image.pgid, node.image.sid].into_iter().any(|id| {
        let begun = match tree.by_pid(id) {
            Some(leader) => Some(leader.lineage()).filter(|_| !is_later(leader.key, node.key)),
            None => tree
                .last_with_pid(id, node.key.start)
                .map(|remains| remains.lineage),
        };
        id != 0 && id != node.key.pid && begun.is_some_and(|by| by.session.is_none())
    })
}

/// Returns the current parent if it is in the tree.
fn parent<'a>(tree: &'a Tree, node: &Node) -> Option<&'a Node> {
    node.parent.and_then(|parent| tree.get(parent))
}

/// Returns whether a process adopts orphans: an init, a service manager of a user, or the parent of an orphan.
fn adopts(tree: &Tree, node: &Node) -> bool {
    let mut children = node.children().iter();
    node.key.pid == 1
        || node.namespace_init
        || is_manager(&node.image)
        || children.any(|pid| {
            tree.by_pid(*pid)
                .is_some_and(|child| child.orphaned.is_some())
        })
}

/// Returns whether it is the service manager of a user.
fn is_manager(image: &Image) -> bool {
    image.exe.ends_with(b"/systemd") && image.args().any(|arg| arg == b"--user")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_systemd_of_a_user_is_a_manager() {
        for (exe, argv, expected) in [
            ("/usr/lib/systemd/systemd", "systemd\0--user\0", true),
            ("/usr/lib/systemd/systemd", "systemd\0--system\0", false),
            ("/usr/bin/pip", "pip\0install\0--user\0", false),
        ] {
            let image = Image {
                exe: exe.into(),
                argv: argv.into(),
                ..Image::default()
            };
            assert_eq!(is_manager(&image), expected, "{argv}");
        }
    }
}
