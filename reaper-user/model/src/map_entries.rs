//! Entries that processes should have in the kernel's map of members. The probes copy them at forks, and the next
//! service restores sessions from them.

use reaper_common::{
    MEMBER_BY_SUDO, MEMBER_DETACHED, MEMBER_GENERATION_MASK, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE,
    MEMBER_ROOT, MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_TRACKED,
    MEMBER_UNCERTAIN, MEMBER_WATCHED,
};

use super::event::{Membership, ProcessKey};
use super::policy::Evaluation;
use super::{Model, policy};
use crate::Node;

impl Evaluation<'_> {
    /// See [`Model::wanted_membership`].
    pub fn wanted_membership(&self, key: ProcessKey) -> Option<Membership> {
        let model = self.model();
        let node = model.tree.get(key)?;
        let session = node
            .state
            .member
            .session
            .and_then(|id| model.sessions.get(id));
        let mut flags = MEMBER_TRACKED;
        let scoped = model.scope.is_by_pid() && node.state.member.in_scope;
        if scoped {
            flags |= MEMBER_SCOPE;
        }
        if session.is_some() {
            flags |= node.state.member.signals_sent;
            if node.state.member.root {
                flags |= MEMBER_ROOT;
            }
            if node.state.member.is_detached {
                flags |= MEMBER_DETACHED;
            }
            if node.state.member.is_by_sudo {
                flags |= MEMBER_BY_SUDO;
            }
            if policy::is_kept(self, node) {
                flags |= MEMBER_KEPT;
            }
            if node.state.member.is_lineage_uncertain {
                flags |= MEMBER_UNCERTAIN;
            }
            if policy::is_kernel_killable(self, node) {
                flags |= MEMBER_KERNEL_KILLABLE;
            }
        } else {
            if node.state.member.watched || node.state.member.boundary.is_some() {
                flags |= MEMBER_WATCHED;
            }
            if let Some(membership) = model.awaited_membership(node) {
                return Some(Membership {
                    flags: membership.flags & !MEMBER_GENERATION_MASK | flags,
                    ..membership
                });
            }
            if flags == MEMBER_TRACKED {
                return None;
            }
        }
        Some(Membership {
            session: session.map(|session| session.first_root),
            flags,
        })
    }
}

impl Model {
    /// Returns the entry that a living process should have in the kernel's map; `None` if it should have none.
    ///
    /// Open questions of the probes are settled here and not written back, except an uncertain lineage.
    pub fn wanted_membership(&self, key: ProcessKey) -> Option<Membership> {
        self.evaluation().wanted_membership(key)
    }

    /// Returns whether a member would be kept if it were due, or is never signalled. Unread facts do not count as a
    /// keep while the root is alive. For any other process, returns whether it is never signalled.
    pub fn is_kept(&self, node: &Node) -> bool {
        policy::is_kept(&self.evaluation(), node)
    }

    /// Returns whether the kernel may signal a member when a signal ends its root. All facts that matter are known, and
    /// no rule, environment marker or user can keep the member unless it executes another program.
    pub fn is_kernel_killable(&self, node: &Node) -> bool {
        policy::is_kernel_killable(&self.evaluation(), node)
    }

    /// Records the entry that was written to the map for a process; `None` if it was removed. If the old entry named a
    /// session and the new one names none, descendants of the process are untracked from now on.
    pub fn set_membership(&mut self, key: ProcessKey, membership: Option<Membership>) {
        let Some(node) = self.tree.get_mut(key) else {
            return;
        };
        let old = std::mem::replace(&mut node.membership, membership);
        let has_session = |membership: Option<Membership>| {
            membership.is_some_and(|membership| membership.session.is_some())
        };
        if has_session(old)
            && !has_session(membership)
            && let Some(exact) = node.exact_key()
        {
            self.tree.disown(exact);
        }
        self.sessions.note_early_member(&self.tree, key);
    }

    /// Records signals that were sent to a process: `MEMBER_SIGTERM_SENT` and `MEMBER_SIGKILL_SENT` in `flags`. Other
    /// flags are ignored.
    pub fn on_signal_sent(&mut self, key: ProcessKey, flags: u32) {
        if let Some(node) = self.tree.get_mut(key) {
            node.state.member.signals_sent |= flags & (MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
        }
    }
}
