//! Collects what the model knows of one process, for `reaper explain`.

use std::sync::Arc;
use std::time::Duration;

use super::super::Engine;
use super::view::View;
use crate::api::messages::{
    Ancestor, DecisionSnapshot, EngineReply, ExitedSnapshot, ExplainSnapshot, ProcessName,
    UntrackedReason,
};
use crate::api::{ProblemDetails, StatusCode};
use crate::config::Mode;
use reaper_model::Node;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::facts::{Fact, Facts};
use reaper_model::policy::Reason;

/// Exit status of an agent that is killed.
const KILLED: ExitStatus = ExitStatus::Signalled {
    signal: 9,
    core: false,
};

/// Limit of ancestors in an explanation.
const LINEAGE_MAX: usize = 64;

impl Engine {
    /// Returns the state of a process, or what is remembered of one that has exited.
    ///
    /// # Errors
    /// There is and was no such process, or it belongs to another user.
    pub(super) fn explain(&self, view: &View<'_>, pid: u32) -> Result<EngineReply, ProblemDetails> {
        let (enforce, honors_keep) = (
            self.settings.mode == Mode::Enforce,
            self.model.rules.honors_keep(),
        );
        let recent = self.ingest.out.recent().find(pid);
        let snapshot = match (view.explain(pid), recent) {
            // A remembered process of another user does not count: the pid may now be that of a process that the peer
            // may see, and that the engine does not know.
            (Err(refusal), Some((recent, session)))
                if refusal.status == StatusCode::NOT_FOUND
                    && view.peer.may_see(recent.process.uids) =>
            {
                return Ok(EngineReply::ExplainExited(Box::new(ExitedSnapshot {
                    recent,
                    session,
                    enforce,
                    honors_keep,
                })));
            }
            (snapshot, recent) => {
                let snapshot = snapshot?;
                let signalled = recent.map(|(recent, _)| recent).filter(|recent| {
                    recent.process.key == snapshot.row.key
                        && (recent.signal.is_some() || recent.outcome.is_some())
                });
                ExplainSnapshot {
                    signalled,
                    ..snapshot
                }
            }
        };
        let node = self.model.tree.get(snapshot.row.key);
        let escalation = node.and_then(|node| self.model.escalation_of(node));
        let own_grace = node.map_or(0, |node| self.model.longest_grace(node));
        let own_grace = Duration::from_nanos(own_grace);
        Ok(EngineReply::Explain(Box::new(ExplainSnapshot {
            enforce,
            honors_keep,
            mode_reason: self.settings.mode_reason.clone(),
            grace: self
                .ingest
                .reaper
                .grace(escalation, self.settings.times)
                .max(own_grace),
            gap: self.gap.is_some(),
            predates_service: snapshot.row.key.start < self.started_at,
            ..snapshot
        })))
    }
}

impl View<'_> {
    /// Returns the state of a process and of its ancestors. The caller fills in the state of the engine: the fields from
    /// `enforce` on.
    ///
    /// # Errors
    /// There is no such process, or it belongs to another user.
    pub(super) fn explain(&self, pid: u32) -> Result<ExplainSnapshot, ProblemDetails> {
        let Some(node) = self.model.tree.by_pid(pid) else {
            let message = format!(
                "there is no process {pid}, and this service has no record of one; check the pid, or search earlier boots with \
                 `reaper history {pid}`"
            );
            return Err(ProblemDetails::new(StatusCode::NOT_FOUND, message));
        };
        if !self.may_see(node) {
            return Err(ProblemDetails::not_visible(pid));
        }
        let sessions = &self.model.sessions;
        let session = node.state.member.session.and_then(|id| sessions.get(id));
        let due = node.state.member.session.and_then(|id| sessions.due(id));
        let lineage = self.lineage(node);
        let untracked_reason = self.untracked_reason(node, &lineage);
        let rules = match untracked_reason {
            Some(UntrackedReason::NoAgent(_)) => self.model.rules.shared_rules(),
            _ => Arc::default(),
        };
        Ok(ExplainSnapshot {
            row: self.process_snapshot(node),
            adopter: self.adopter(node),
            session: session.map(|session| self.session_snapshot(session)),
            exited_root: due
                .map(|(outer, exit)| (self.session_snapshot(outer), exit.at, exit.exit_status)),
            if_killed: self.predicted(node, KILLED),
            if_succeeded: self.predicted(node, ExitStatus::Exited(0)),
            untracked_reason,
            rules,
            facts: facts(node),
            lineage,
            enforce: true,
            mode_reason: None,
            grace: Duration::ZERO,
            gap: false,
            predates_service: false,
            signalled: None,
            honors_keep: true,
            leftover: None,
        })
    }

    /// Returns the decision about a member if the root of its session exited now. `None` if the process is no member,
    /// is already due, or is never signalled.
    fn predicted(&self, node: &Node, exit_status: ExitStatus) -> Option<DecisionSnapshot> {
        let decision = self.model.decide_if_root_exits(node.key, exit_status)?;
        Some(self.decision_snapshot(decision))
    }

    /// Returns the chain of birth parents of a process, nearest first: at most [`LINEAGE_MAX`], exited ones included.
    pub(super) fn lineage(&self, node: &Node) -> Vec<Ancestor> {
        let mut lineage: Vec<Ancestor> = Vec::new();
        let mut next = node.birth_parent;
        while let Some(key) = next.filter(|_| lineage.len() < LINEAGE_MAX) {
            // Damaged input could contain a loop.
            if key == node.key || lineage.iter().any(|known| known.key == key) {
                break;
            }
            let (ancestor, birth_parent) = self.ancestor(key);
            lineage.push(ancestor);
            next = birth_parent;
        }
        lineage
    }

    /// Returns what is known of an ancestor, and its birth parent.
    fn ancestor(&self, key: ProcessKey) -> (Ancestor, Option<ProcessKey>) {
        let mut ancestor = Ancestor {
            key,
            image: None,
            visible: false,
            alive: false,
            exit_status: None,
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
        ancestor.exit_status = Some(exited.exit_status);
        (ancestor, exited.birth_parent)
    }

    /// Returns the current parent of an orphan. `None` for other processes, or if that is unknown or its birth parent.
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

    /// Returns why a process belongs to no session. `None` if it does.
    fn untracked_reason(&self, node: &Node, lineage: &[Ancestor]) -> Option<UntrackedReason> {
        if node.state.member.session.is_some() {
            return None;
        }
        let reason = self.decide(node.key).reason;
        if let Reason::NeverPid1 | Reason::NeverKernelThread | Reason::NeverSelf = reason {
            return Some(UntrackedReason::Never(reason.name()));
        }
        if let Some(rule) = &node.state.member.boundary {
            return Some(UntrackedReason::Boundary(rule.clone()));
        }
        if !node.state.member.in_scope {
            return Some(UntrackedReason::OutOfScope);
        }
        let Some(at) = lineage.iter().position(|a| a.boundary.is_some()) else {
            return Some(UntrackedReason::NoAgent(None));
        };
        let (key, image) = (lineage[at].key, lineage[at].image.as_ref());
        let name = ProcessName {
            pid: key.pid,
            comm: image.map(|image| image.comm.clone()).unwrap_or_default(),
        };
        // Without an agent above it, the boundary changes nothing.
        let is_below_agent = lineage[at..].iter().any(|a| a.agent.is_some());
        let rule = lineage[at].boundary.clone().filter(|_| is_below_agent);
        Some(match rule {
            Some(rule) => UntrackedReason::BelowBoundary(name, rule),
            None => UntrackedReason::NoAgent(Some(name)),
        })
    }
}

/// Returns the facts read from /proc, with the keep marker that the exec event reported.
fn facts(node: &Node) -> Facts {
    let mut facts = node.facts().cloned().unwrap_or_default();
    if let (Fact::Unread, Fact::Known(keeps)) = (facts.markers, node.keep_marker()) {
        facts.markers = Fact::Known(keeps.into());
    }
    facts
}
