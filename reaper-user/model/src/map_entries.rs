//! What the kernel's map should have for a process, so that the probes hand it on, and the service that
//! comes after this one finds it.

use reaper_common::{
    MEMBER_GENERATION_MASK, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE, MEMBER_ROOT, MEMBER_SCOPE,
    MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_TRACKED, MEMBER_UNCERTAIN, MEMBER_WATCHED,
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
            if let Some(mark) = model.awaited_membership(node) {
                return Some(Membership {
                    flags: mark.flags & !MEMBER_GENERATION_MASK | flags,
                    ..mark
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
    /// What the map should say of a living process: `None` that it should not be in there.
    ///
    /// Whatever the probes only suspect has been settled here by now and is not handed back to them, but
    /// for whose a process is where that was lost.
    pub fn wanted_membership(&self, key: ProcessKey) -> Option<Membership> {
        self.evaluation().wanted_membership(key)
    }

    /// Whether a member is kept though it should be due, or is never signalled at all.
    pub fn is_kept(&self, node: &Node) -> bool {
        policy::is_kept(&self.evaluation(), node)
    }

    /// Whether nothing that the service could come to know of a member, but for its running another program,
    /// would spare it if a signal ended its root: no rule, no mark in its environment and no user's keep. All
    /// facts that matter for that are known.
    pub fn is_kernel_killable(&self, node: &Node) -> bool {
        policy::is_kernel_killable(&self.evaluation(), node)
    }

    /// Takes note of what has been written to the map for a process; `None`: it has been taken out.
    pub fn set_membership(&mut self, key: ProcessKey, mark: Option<Membership>) {
        let Some(node) = self.tree.get_mut(key) else {
            return;
        };
        let old = std::mem::replace(&mut node.membership, mark);
        let has_session =
            |mark: Option<Membership>| mark.is_some_and(|mark| mark.session.is_some());
        if has_session(old)
            && !has_session(mark)
            && let Some(exact) = node.exact_key()
        {
            self.tree.disown(exact);
        }
        self.sessions.note_mark(&self.tree, key);
    }

    /// Takes note of signals that were sent to a process: `MEMBER_SIGTERM_SENT` and `MEMBER_SIGKILL_SENT` of `flags`.
    pub fn on_signal_sent(&mut self, key: ProcessKey, flags: u32) {
        if let Some(node) = self.tree.get_mut(key) {
            node.state.member.signals_sent |= flags & (MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
        }
    }
}
