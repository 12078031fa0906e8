//! Whose an adopted process is by what it has from its makers: agents' marks in its environment, and where it works.
//!
//! Both can be had otherwise, so all that speaks against it counts:
//! - It began after the session's first root, under the same user, in no systemd unit that is not the root's too.
//! - It is the child of one that adopts, it is no terminal, and nobody else has begun its process group or its session
//!   in the kernel; but for marks that may be the session that the root is in too.
//! - *Marks* have to name this session, all of them, but for those that its root has from elsewhere or that name a session around it. A
//!   pid names one session, and needs another mark of the agent beside it; a mark without a pid names those of its agent that ran when
//!   the process began. Below a multiplexer or a terminal that may have handed them on they are worth nothing, unless
//!   the root runs in that multiplexer too.
//!   A mark that a living agent of that user carries too, or an ancestor of one, names nothing, unless that agent is
//!   nested in the session: a shell started inside of an agent hands it on. What cannot be read may carry it.
//! - A *directory* says something only if it is that of a root that ran when the process began, or is below it, and only
//!   where nothing else can: without marks, a terminal and a multiplexer. Of all agents that may be its own it has to be known where
//!   they work.
//!
//! What speaks for several sessions alike speaks for none, unless all the others are nested in one: then it is that one's.

use std::path::Path;

use hashbrown::HashSet;

use super::inferred::{is_later, may_be_adopted};
use super::member::Evidence;
use super::{IndexKey, Session, SessionId, Sessions};
use crate::event::{Image, ProcessKey};
use crate::facts::{Fact, FactSet, InheritedFacts};
use crate::leftover::{EnvMarker, is_login, is_terminal};
use crate::{Node, Tree};

/// What has to be known of one before it can be told whose it is.
const WANTED: FactSet = FactSet::INHERITED.union(FactSet::UNIT);

/// Number of ancestors of an agent that are read. Where there are more, one of them may carry any mark.
const ANCESTORS_MAX: usize = 64;

impl Sessions {
    /// Whether a process that nothing else makes a member may be one by what it has from its makers.
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

    /// What has to be read before it can be told whose a suspect is, of itself and of roots.
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

    /// Returns the living agents of the same user, and their ancestors, whose environment has not been read.
    fn facts_of_possible_parents(&self, tree: &Tree, node: &Node) -> Vec<(ProcessKey, FactSet)> {
        let mut wanted: HashSet<ProcessKey> = HashSet::new();
        for session in self.living(node) {
            if session.inherited == Fact::Unread {
                wanted.insert(session.root);
            }
            let above = may_hand_on(tree, session).take(ANCESTORS_MAX);
            let unread = above.filter(|above| !above.missing_facts(FactSet::INHERITED).is_empty());
            wanted.extend(unread.map(|above| above.key));
        }
        let with_needs = |key| (key, FactSet::INHERITED);
        wanted.into_iter().map(with_needs).collect()
    }

    /// Whose a suspect is, and what says so.
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
        // There pids are others, and the marks have those.
        let mut above = tree.ancestors(node.key);
        let nested = above.any(|above| above.namespace_init && above.key.pid > 1);
        let named = possible.iter().copied().filter(|session| {
            // With the shell that the agent was typed in.
            let at_home = session.sid == node.image.sid && session.sid != 0;
            self.is_named_by_all(tree, session, (node, own, nested), &possible)
                && !may_be_from_multiplexer(own, session)
                && (at_home || !is_in_untracked_group(tree, node))
        });
        let named: Vec<&Session> = named.collect();
        if let Some(session) = self.only(&named) {
            return Some((session.id, Evidence::Marker(first.variable)));
        }
        let session = self.by_directory(tree, node, own, &named)?;
        Some((session.id, Evidence::Directory))
    }

    /// Sessions, open or closed lately, that it may be a member of by the order of births and the user.
    fn possible(&self, node: &Node) -> impl Iterator<Item = &Session> {
        let all = self.iter().chain(&self.closed);
        all.filter(|session| {
            session.uids.real == node.uids.real && is_later(node.key, session.first_root)
        })
    }

    /// Whether all marks say so that are not known to come from elsewhere.
    fn is_named_by_all(
        &self,
        tree: &Tree,
        session: &Session,
        (node, own, nested): (&Node, &InheritedFacts, bool),
        possible: &[&Session],
    ) -> bool {
        let trace = &own.env_markers;
        let came_with_root = |mark: &EnvMarker| match &session.inherited {
            Fact::Known(root) => root.env_markers.markers.contains(mark),
            Fact::Unread | Fact::Unreadable => false,
        };
        // Beside one that tells the pid the others of that agent say nothing more.
        let is_told = |mark: &EnvMarker| {
            let mut marks = trace.markers.iter();
            mark.agent_pid.is_some()
                || !marks.any(|other| other.agent == mark.agent && other.agent_pid.is_some())
        };
        let told: Vec<&EnvMarker> = trace.markers.iter().filter(|mark| is_told(mark)).collect();
        let names = |mark: &EnvMarker, session: &Session| match mark.agent_pid {
            Some(_) if nested => false,
            Some(pid) => trace.has_second_marker(mark) && has_pid(session, pid, possible),
            None => ran_at_birth(session, node),
        };
        let named = |mark: &EnvMarker, session: &Session| {
            *session.agent == *mark.agent && names(mark, session)
        };
        // One that the root has from elsewhere others have from there too; a pid is nobody else's.
        let proves = |mark: &EnvMarker| {
            let read = matches!(session.inherited, Fact::Known(_));
            mark.agent_pid.is_some() || read && !came_with_root(mark)
        };
        let elsewhere =
            |mark: &EnvMarker| self.may_have_marker_elsewhere(tree, mark, session, node);
        told.iter()
            .any(|mark| proves(mark) && named(mark, session) && !elsewhere(mark))
            && told.iter().all(|mark| {
                came_with_root(mark) || self.outwards_of(session).any(|around| named(mark, around))
            })
    }

    /// Open sessions of the same user whose root lives.
    fn living(&self, node: &Node) -> impl Iterator<Item = &Session> {
        self.open.all(IndexKey::Living(node.uids.real))
    }

    /// Whether a living agent that is not of this session, or an ancestor of one, carries a mark, or may.
    fn may_have_marker_elsewhere(
        &self,
        tree: &Tree,
        mark: &EnvMarker,
        session: &Session,
        node: &Node,
    ) -> bool {
        let carries =
            |own: &InheritedFacts| own.env_markers.cut || own.env_markers.markers.contains(mark);
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
            let mut above = may_hand_on(tree, other).take(ANCESTORS_MAX);
            of_root(other)
                || above.any(of_ancestor)
                || may_hand_on(tree, other).nth(ANCESTORS_MAX).is_some()
        })
    }

    /// The session itself, be it closed, and those that it is nested in.
    fn outwards_of<'a>(&'a self, session: &'a Session) -> impl Iterator<Item = &'a Session> {
        let outer = session.outer.into_iter();
        std::iter::once(session).chain(outer.flat_map(|outer| self.with_enclosing(outer)))
    }

    /// Whose it is by the directory that it works in.
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
            // One of which it is not known might be the one.
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

    /// The one of them in which all the others are nested.
    fn only<'a>(&self, all: &[&'a Session]) -> Option<&'a Session> {
        let holds = |one: &&&Session| {
            let is_in = |other: &&Session| self.outwards_of(other).any(|s| s.id == one.id);
            all.iter().all(is_in)
        };
        all.iter().find(holds).copied()
    }
}

/// Whether a pid is that of the session's root: of those that had it the last.
fn has_pid(session: &Session, pid: u32, possible: &[&Session]) -> bool {
    let had = |one: &Session| one.root.pid == pid || one.first_root.pid == pid;
    let younger = |one: &&&Session| is_later(one.first_root, session.first_root);
    had(session) && !possible.iter().filter(younger).any(|one| had(one))
}

fn ran_at_birth(session: &Session, node: &Node) -> bool {
    session
        .root_exit
        .is_none_or(|gone| node.key.start <= gone.at)
}

/// Returns the ancestors of a session's root that run under the same user and are no init.
fn may_hand_on<'a>(tree: &'a Tree, session: &Session) -> impl Iterator<Item = &'a Node> {
    let uid = session.uids.real;
    tree.ancestors(session.root).take_while(move |above| {
        above.uids.real == uid
            && above.key.pid > 1
            && !above.namespace_init
            && !is_manager(&above.image)
    })
}

/// Whether its marks may come from a place that people start processes from.
fn may_be_from_multiplexer(own: &InheritedFacts, session: &Session) -> bool {
    let with_root = |one| match &session.inherited {
        Fact::Known(root) => root.env_markers.multiplexers.contains(one),
        Fact::Unread | Fact::Unreadable => false,
    };
    let mut all = own.env_markers.multiplexers.iter();
    all.any(|one| one.server.is_none() || !with_root(one))
}

/// Whether a stranger has begun its process group, or its session in the kernel.
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

fn parent<'a>(tree: &'a Tree, node: &Node) -> Option<&'a Node> {
    node.parent.and_then(|parent| tree.get(parent))
}

/// Whether it takes in those who have lost their makers: an init, a user's service manager, or one that has done so.
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

/// Whether it is a user's service manager.
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
