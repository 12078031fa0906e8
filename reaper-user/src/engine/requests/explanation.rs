//! All that there is to say of one process.

use std::time::Duration;

use super::view::View;
use crate::api::ErrorResponse;
use crate::api::messages::{
    Ancestor, DecisionSnapshot, ExplainSnapshot, ProcessName, UntrackedReason,
};
use reaper_model::Node;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::facts::{Fact, Facts};

/// How an agent ends that is not let end.
const KILLED: ExitStatus = ExitStatus::Signalled {
    signal: 9,
    core: false,
};

/// Ancestors that are told of.
const LINEAGE_MAX: usize = 64;

impl View<'_> {
    /// What is known of a process, and of those from whom it comes.
    ///
    /// # Errors
    /// There is no such process, or it is another user's.
    pub(super) fn explain(&self, pid: u32) -> Result<ExplainSnapshot, ErrorResponse> {
        let Some(node) = self.model.tree.by_pid(pid) else {
            let what = format!(
                "there is no process {pid}; `reaper history` tells of those that have ended"
            );
            return Err(ErrorResponse::new("not_found", what));
        };
        if !self.may_see(node) {
            let what = format!("process {pid} is another user's: only its owner or root may ask");
            return Err(ErrorResponse::new("eperm", what));
        }
        let sessions = &self.model.sessions;
        let session = node.state.member.session.and_then(|id| sessions.get(id));
        let due = node.state.member.session.and_then(|id| sessions.due(id));
        let lineage = self.lineage(node);
        Ok(ExplainSnapshot {
            row: self.process_snapshot(node),
            adopter: self.adopter(node),
            session: session.map(|session| self.session_snapshot(session)),
            due: due.map(|(ladder, end)| (self.session_snapshot(ladder), end.at, end.exit_status)),
            if_killed: self.foreseen(node, KILLED),
            if_succeeded: self.foreseen(node, ExitStatus::Exited(0)),
            untracked_reason: self.untracked_reason(node, &lineage),
            facts: facts(node),
            lineage,
            enforce: true,
            mode_reason: None,
            grace: Duration::ZERO,
            gap: false,
            unwatched: false,
        })
    }

    fn foreseen(&self, node: &Node, ended: ExitStatus) -> Option<DecisionSnapshot> {
        let decision = self.model.decide_if_root_exits(node.key, ended)?;
        Some(self.decision_snapshot(decision))
    }

    /// Who begot it, and who begot them.
    pub(super) fn lineage(&self, node: &Node) -> Vec<Ancestor> {
        let mut lineage: Vec<Ancestor> = Vec::new();
        let mut next = node.birth_parent;
        while let Some(key) = next.filter(|_| lineage.len() < LINEAGE_MAX) {
            // A loop, which damaged input could make, ends it.
            if key == node.key || lineage.iter().any(|known| known.key == key) {
                break;
            }
            let (ancestor, before) = self.ancestor(key);
            lineage.push(ancestor);
            next = before;
        }
        lineage
    }

    /// What is remembered of one of those from whom a process comes, and who begot it.
    fn ancestor(&self, key: ProcessKey) -> (Ancestor, Option<ProcessKey>) {
        let mut ancestor = Ancestor {
            key,
            image: None,
            visible: false,
            alive: false,
            ended: None,
            agent: None,
            boundary: None,
            adopter: None,
        };
        let root_of = |session: &&reaper_model::session::Session| {
            session.root == key || session.first_root == key
        };
        let session = self.model.sessions.iter().find(root_of);
        ancestor.agent = session.map(|session| session.agent.clone());
        if let Some(node) = self.model.tree.get(key) {
            ancestor.image = Some(node.image.clone());
            ancestor.visible = self.may_see(node);
            ancestor.alive = true;
            ancestor.boundary = node.state.member.boundary.clone();
            ancestor.adopter = self.adopter(node);
            return (ancestor, node.birth_parent);
        }
        let Some(exited) = self.model.tree.exited(key) else {
            let mut parents = self.model.sessions.iter().flat_map(|s| &s.parent);
            if let Some(parent) = parents.find(|parent| parent.key == key) {
                ancestor.image = Some(parent.image.clone()).filter(|i| !i.comm.is_empty());
                ancestor.visible = self.peer.may_see(parent.uids);
            }
            return (ancestor, None);
        };
        ancestor.image = Some(exited.image.clone());
        ancestor.visible = self.peer.may_see(exited.uids);
        ancestor.ended = Some(exited.exit_status);
        (ancestor, exited.birth_parent)
    }

    /// Who has a process now, where that is not who begot it.
    fn adopter(&self, node: &Node) -> Option<ProcessName> {
        let parent = node
            .parent
            .filter(|parent| Some(*parent) != node.birth_parent)?;
        node.orphaned?;
        Some(ProcessName {
            pid: parent.pid,
            comm: self.model.tree.comm(parent).to_vec(),
        })
    }

    fn untracked_reason(&self, node: &Node, lineage: &[Ancestor]) -> Option<UntrackedReason> {
        if node.state.member.session.is_some() {
            return None;
        }
        if node.kernel_thread {
            return Some(UntrackedReason::KernelThread);
        }
        if let Some(rule) = &node.state.member.boundary {
            return Some(UntrackedReason::Boundary(rule.clone()));
        }
        if !node.state.member.in_scope {
            return Some(UntrackedReason::OutOfScope);
        }
        let boundary = lineage.iter().find_map(|ancestor| {
            let comm = ancestor.image.as_ref().map(|image| image.comm.clone());
            let name = ProcessName {
                pid: ancestor.key.pid,
                comm: comm.unwrap_or_default(),
            };
            Some(UntrackedReason::BelowBoundary(
                name,
                ancestor.boundary.clone()?,
            ))
        });
        Some(boundary.unwrap_or(UntrackedReason::NoAgent))
    }
}

/// What has been read of it, and what its exec has told of its environment.
fn facts(node: &Node) -> Facts {
    let mut facts = node.facts().cloned().unwrap_or_default();
    if let (Fact::Unread, Fact::Known(marked)) = (facts.markers, node.keep_marker()) {
        facts.markers = Fact::Known(marked.into());
    }
    facts
}
