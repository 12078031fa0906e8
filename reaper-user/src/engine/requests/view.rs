//! Copies of the model's state that a user may see.

use std::sync::Arc;

use crate::api::messages::{
    AgentSnapshot, DecisionSnapshot, KeepSnapshot, ProcessSnapshot, SessionSnapshot, TreeSnapshot,
    WaitSnapshot,
};
use crate::api::peer::Peer;
use crate::api::recognition::unknown_agent;
use crate::api::{ProblemDetails, StatusCode};
use crate::config::Mode;
use crate::export::{EvidenceRef, SessionRef};
use reaper_model::Model;
use reaper_model::Node;
use reaper_model::event::ProcessKey;
use reaper_model::policy::{Decision, Evaluation, Verdict};
use reaper_model::ruleset::{Rule, SessionCondition, SessionKind};
use reaper_model::session::{Session, SessionId};

/// The model as one user may see it.
pub(super) struct View<'a> {
    pub(super) model: &'a Model,
    pub(super) peer: Peer,
    round: Evaluation<'a>,
    mode: Mode,
}

impl<'a> View<'a> {
    /// Returns the view of a user, for a service in enforce mode.
    pub(super) fn new(model: &'a Model, peer: Peer) -> View<'a> {
        View {
            model,
            peer,
            round: model.evaluation(),
            mode: Mode::Enforce,
        }
    }

    /// Sets the mode of the service.
    pub(super) fn in_mode(self, mode: Mode) -> View<'a> {
        View { mode, ..self }
    }

    /// Decides about a process.
    pub(super) fn decide(&self, key: ProcessKey) -> Decision {
        self.round.decide(key)
    }

    pub(super) fn may_see(&self, node: &Node) -> bool {
        self.peer.may_see(node.uids)
    }

    /// Returns the open sessions of which the user may see the agent or a member.
    pub(super) fn sessions(&self) -> impl Iterator<Item = &'a Session> {
        let (model, peer) = (self.model, self.peer);
        model.sessions.iter().filter(move |session| {
            let mut members = session.members().filter_map(|pid| model.tree.by_pid(pid));
            peer.may_see(session.uids) || members.any(|node| peer.may_see(node.uids))
        })
    }

    /// Returns the sessions with their living members, as far as the user may see them. A nested session is part of its
    /// outer one. With `agent`, only sessions of that agent and those nested in them. With `all`, also the other
    /// processes in scope, except kernel threads.
    ///
    /// # Errors
    /// No rule and no session has the name `agent`.
    pub(super) fn tree(
        &self,
        agent: Option<&str>,
        all: bool,
    ) -> Result<TreeSnapshot, ProblemDetails> {
        if let Some(agent) = agent.filter(|agent| !self.agent_names().contains(agent)) {
            let message = unknown_agent(agent, &self.agent_names());
            return Err(ProblemDetails::new(StatusCode::NOT_FOUND, message));
        }
        let wanted = |session: &&Session| agent.is_none_or(|agent| *session.agent == *agent);
        let seen: Vec<&Session> = self.sessions().filter(wanted).collect();
        let is_listed = |id: SessionId| seen.iter().any(|session| session.id == id);
        // A nested session is part of the group of its outer session.
        let outermost = |session: &&&Session| {
            let mut outwards = self.model.sessions.with_enclosing(session.id).skip(1);
            !outwards.any(|outer| is_listed(outer.id))
        };
        let mut groups: Vec<_> = seen
            .iter()
            .filter(outermost)
            .map(|s| self.group(s))
            .collect();
        if all {
            let others = self.model.tree.iter();
            let others = others.filter(|node| {
                node.state.member.in_scope
                    && node.state.member.session.is_none()
                    && !node.kernel_thread
                    && self.may_see(node)
            });
            groups.push((
                None,
                others.map(|node| self.process_snapshot(node)).collect(),
            ));
        }
        Ok(TreeSnapshot { groups })
    }

    /// Returns the names of the rules for agents and servers, and of open sessions.
    fn agent_names(&self) -> Vec<&str> {
        let open = self.model.sessions.iter();
        let mut names = self.model.rules.agent_names();
        names.extend(open.map(|session| &*session.agent));
        names
    }

    /// Returns a session with the visible members of it and of nested sessions. Each is followed by its children that
    /// are boundaries, that is, processes that a rule excludes from the session.
    fn group(&self, session: &Session) -> (Option<SessionSnapshot>, Vec<ProcessSnapshot>) {
        let nested = self.model.sessions.with_nested(session.id);
        let members = nested.flat_map(|session| session.members());
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        let mut rows = Vec::new();
        for node in members {
            let children = node.children().iter();
            let children = children.filter_map(|pid| self.model.tree.by_pid(*pid));
            let boundaries = children.filter(|child| {
                child.state.member.session.is_none() && child.state.member.boundary.is_some()
            });
            let all = std::iter::once(node).chain(boundaries);
            rows.extend(
                all.filter(|node| self.may_see(node))
                    .map(|node| self.process_snapshot(node)),
            );
        }
        (Some(self.session_snapshot(session)), rows)
    }

    /// Returns all agents and servers that rules know, and those of open sessions whose rule was removed. Each has its
    /// open sessions that the user may see.
    pub(super) fn agents(&self) -> Vec<AgentSnapshot> {
        let rules = self.model.rules.rules().iter();
        let rules = rules.filter(|rule| rule.action.opens_session());
        let mut agents: Vec<AgentSnapshot> = rules
            .map(|rule| AgentSnapshot {
                name: Arc::clone(&rule.name),
                kind: SessionKind::of(rule.action),
                matches: rule.matchers.iter().map(ToString::to_string).collect(),
                sessions: Vec::new(),
            })
            .collect();
        for session in self.sessions() {
            let at = agents.iter().position(|agent| agent.name == session.agent);
            let at = at.unwrap_or_else(|| {
                agents.push(AgentSnapshot {
                    name: Arc::clone(&session.agent),
                    kind: session.kind,
                    matches: Vec::new(),
                    sessions: Vec::new(),
                });
                agents.len() - 1
            });
            agents[at].sessions.push(self.session_snapshot(session));
        }
        agents
    }

    /// Returns the processes that users keep, as far as this user may see them.
    pub(super) fn keeps(&self) -> Vec<KeepSnapshot> {
        let kept = self.model.kept_by_users();
        let kept = kept.filter(|(node, _)| self.may_see(node));
        let kept = kept.map(|(node, keep)| KeepSnapshot {
            row: self.process_snapshot(node),
            by: keep.by_uid,
            until: keep.until_monotonic_ns,
            tree: keep.with_descendants,
        });
        kept.collect()
    }

    /// Returns all members that the user may see.
    pub(super) fn members(&self) -> impl Iterator<Item = &'a Node> {
        let model = self.model;
        let members = model.sessions.iter().flat_map(|session| session.members());
        let members = members.filter_map(|pid| model.tree.by_pid(pid));
        members.filter(|node| self.may_see(node))
    }

    /// Returns all members that the user may see, with the decision about each.
    pub(super) fn scan(&self) -> Vec<ProcessSnapshot> {
        self.members()
            .map(|node| self.process_snapshot(node))
            .collect()
    }

    /// Returns a copy of a process, with the present decision about it if it is a member.
    pub(super) fn process_snapshot(&self, node: &Node) -> ProcessSnapshot {
        let session = node
            .state
            .member
            .session
            .and_then(|id| self.model.sessions.get(id));
        let decision = session.map(|_| self.decision_snapshot(self.decide(node.key)));
        ProcessSnapshot {
            key: node.key,
            parent: node.parent,
            image: Arc::clone(&node.image),
            uids: node.uids,
            session: session.map(SessionRef::from),
            root: session.is_some_and(|session| session.root == node.key),
            orphan: node.orphaned.is_some(),
            due: session.is_some_and(|session| self.model.sessions.due(session.id).is_some()),
            boundary: node.state.member.boundary.clone(),
            decision,
            evidence: EvidenceRef::from_node(self.model, node),
        }
    }

    /// Returns a copy of a session. The number of kept members is 0 while the session is not due.
    pub(super) fn session_snapshot(&self, session: &Session) -> SessionSnapshot {
        let outer = session.outer.and_then(|id| self.model.sessions.get(id));
        let is_due = self.model.sessions.due(session.id).is_some();
        let members = session.members().filter(|_| is_due);
        let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
        let kept = members.filter(|node| {
            let verdict = self.decide(node.key).verdict;
            matches!(verdict, Verdict::Keep | Verdict::Report)
        });
        SessionSnapshot {
            kept: kept.count(),
            name: SessionRef::from(session),
            kind: session.kind,
            root: session.root,
            opened: session.opened_at,
            members: session.members().count(),
            outer: outer.map(SessionRef::from),
            root_exit: session.root_exit.map(|exit| (exit.at, exit.exit_status)),
            waits: match session.root_exit {
                None => self.waits(session),
                Some(_) => Vec::new(),
            },
        }
    }

    /// Returns the rules that make members wait after an exit of the root.
    fn waits(&self, session: &Session) -> Vec<WaitSnapshot> {
        let rules = self.model.rules.waits(&session.agent, session.attended);
        let snapshot = |rule: &Rule| WaitSnapshot {
            rule: Arc::clone(&rule.name),
            wait: rule.delay_ns.max(rule.until_age_ns),
            after_status_0: rule.when.session.covers(SessionCondition::Ok),
            after_others: rule.when.session.covers(SessionCondition::Failed)
                || rule.when.session.covers(SessionCondition::Signalled),
        };
        rules.map(snapshot).collect()
    }

    /// Returns a decision with the names that the stream uses.
    pub(super) fn decision_snapshot(&self, decision: Decision) -> DecisionSnapshot {
        let mut rules = self.model.rules.rules().iter();
        let named = |rule: &&Rule| Some(&rule.name) == decision.rule.as_ref();
        DecisionSnapshot {
            action: rules.find(named).map(|rule| rule.action),
            decision: decision.verdict.name(),
            mode: self.mode.name(),
            reason: decision.reason.name(),
            rule: decision.rule,
            until: decision.until,
            needs: decision.needs,
        }
    }
}
