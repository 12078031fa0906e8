//! Who is to be reaped, who is kept, and why: a pure function over the model.

mod case;
mod matched;
mod relatives;

use std::sync::Arc;

use super::Model;
use super::event::{ExitStatus, ProcessKey};
use super::facts::{Fact, FactSet};
use super::session::{RootExit, Session, Succession};
use crate::Node;
pub(super) use crate::matched_rules::MatchedRules;
use case::{Case, Hold};
use relatives::Relatives;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    Reap,
    Keep,
    /// Kept, and something for a person to look at.
    Report,
    /// Kept for now: see [`Decision::needs`] and [`Decision::until`].
    Wait,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Reap => "reap",
            Verdict::Keep => "keep",
            Verdict::Report => "report",
            Verdict::Wait => "wait",
        }
    }
}

/// Why. The names stand in the event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Its agent is gone.
    RootExited,
    /// It was born when its agent was gone already.
    ForkedAfterRootExit,
    /// Its parent is gone, its agent is not.
    Detached,
    /// Its agent lives, and so does its parent.
    RootAlive,
    /// It has `REAPER_KEEP=1` in its environment.
    KeepMarker,
    /// A user has asked to keep it.
    KeptByUser,
    /// A rule holds, and its delay is not over.
    RuleDelay,
    /// Its agent exited with status 0, and another process may continue the agent's conversation.
    SuccessorAwaited,
    /// As [`Reason::SuccessorAwaited`], but what would show a successor could not be read.
    SuccessorUnknown,
    /// A rule reports it.
    ReportRule,
    /// A rule reaps it, though its agent lives.
    ReapRule,
    /// What a rule asks for is not known yet. Never told.
    Unread,
    /// A rule keeps it.
    KeepRule,
    /// It runs under another uid than its agent.
    OtherUid,
    /// A process above it is kept.
    AncestorKept,
    /// A process below it is kept, and may need it.
    DescendantKept,
    /// Its program, or the end of its command line, is not known, and might be one that is kept.
    Unreadable,
    /// It descends from its agent, but perhaps through a boundary: what was told of its makers was lost.
    LineageUncertain,
    /// Nothing but evidence says that it descends from its agent.
    Inferred,
    NotAMember,
    NeverPid1,
    NeverKernelThread,
    /// This program or one of its ancestors.
    NeverSelf,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Reason::RootExited => "root_exited",
            Reason::ForkedAfterRootExit => "forked_after_root_exit",
            Reason::Detached => "detached",
            Reason::RootAlive => "root_alive",
            Reason::KeepMarker => "keep_marker",
            Reason::KeptByUser => "kept_by_user",
            Reason::RuleDelay => "rule_delay",
            Reason::SuccessorAwaited => "successor_awaited",
            Reason::SuccessorUnknown => "successor_unknown",
            Reason::ReportRule => "report_rule",
            Reason::ReapRule => "reap_rule",
            Reason::Unread => "unread",
            Reason::KeepRule => "keep_rule",
            Reason::OtherUid => "other_uid",
            Reason::AncestorKept => "ancestor_kept",
            Reason::DescendantKept => "descendant_kept",
            Reason::Unreadable => "unreadable",
            Reason::LineageUncertain => "lineage_uncertain",
            Reason::Inferred => "inferred",
            Reason::NotAMember => "not_a_member",
            Reason::NeverPid1 => "never_pid1",
            Reason::NeverKernelThread => "never_kernel_thread",
            Reason::NeverSelf => "never_self",
        }
    }
}

/// A decision about one process, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub verdict: Verdict,
    pub reason: Reason,
    /// Name of the rule that decided, if one did.
    pub rule: Option<Arc<str>>,
    /// What made the process due, if it is.
    pub due: Option<RootExit>,
    /// Facts that are wanted before it can be said: then, and only then, the verdict is [`Verdict::Wait`] with
    /// [`Reason::Unread`].
    pub needs: FactSet,
    /// The process that they are wanted of, if not of itself: a relative, or one that has the unit of its root.
    pub relative: Option<ProcessKey>,
    /// Monotonic nanoseconds at which this may change though nothing happens: the end of a delay, with
    /// [`Verdict::Wait`], or of what keeps it.
    pub until: Option<u64>,
}

impl Decision {
    fn keep(reason: Reason) -> Decision {
        Decision {
            verdict: Verdict::Keep,
            reason,
            rule: None,
            due: None,
            needs: FactSet::NONE,
            relative: None,
            until: None,
        }
    }
}

/// Decides about many by one state of the model: what several decisions rest on is found out once.
pub struct Evaluation<'a> {
    model: &'a Model,
    relatives: Relatives,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(model: &'a Model) -> Evaluation<'a> {
        let relatives = Relatives::default();
        Evaluation { model, relatives }
    }

    /// What the model decides.
    pub(super) fn model(&self) -> &'a Model {
        self.model
    }

    /// The living process with this key.
    pub fn node(&self, key: ProcessKey) -> Option<&'a Node> {
        self.model.tree.get(key)
    }

    /// See [`Model::decide`].
    pub fn decide(&self, key: ProcessKey) -> Decision {
        decide(self, key)
    }
}

/// Decides about a process; one that does not live is not a member.
///
/// The first that says something wins: what is never signalled, what is no member, what a user
/// keeps, what is marked in its environment, the rules in their order. What none of these speaks of is reaped if it is
/// due, and lives by right of its agent if not. Nothing is read that does not matter.
fn decide(round: &Evaluation<'_>, key: ProcessKey) -> Decision {
    let model = round.model;
    let Some(node) = model.tree.get(key) else {
        return Decision::keep(Reason::NotAMember);
    };
    if let Some(reason) = never_list(model, node) {
        return Decision::keep(reason);
    }
    let Some(session) = session_of(model, node) else {
        return Decision::keep(Reason::NotAMember);
    };
    let due = model.sessions.due(session.id).map(|(_, due)| due);
    match due
        .is_none()
        .then(|| await_successor(model, session))
        .flatten()
    {
        Some(decision) => decision,
        None => evaluate(round, node, session, due),
    }
}

/// Keeps the members of a session while it is open whether another agent continues it, or one that it is nested in.
fn await_successor(model: &Model, session: &Session) -> Option<Decision> {
    let session = model.sessions.awaiting_successor(session.id)?;
    Some(match session.succession {
        Succession::Unknown => Decision::keep(Reason::SuccessorUnknown),
        _ => Decision {
            verdict: Verdict::Wait,
            until: model.succession_deadline(session),
            ..Decision::keep(Reason::SuccessorAwaited)
        },
    })
}

fn session_of<'a>(model: &'a Model, node: &Node) -> Option<&'a Session> {
    model.sessions.get(
        node.state
            .member
            .session
            .filter(|_| node.state.member.in_scope)?,
    )
}

/// The never-list: no rule and no mode gets past it.
fn never_list(model: &Model, node: &Node) -> Option<Reason> {
    if node.key.pid <= 1 {
        Some(Reason::NeverPid1)
    } else if node.kernel_thread {
        Some(Reason::NeverKernelThread)
    } else if node.key.pid == model.own_pid || model.is_own_ancestry(node.key) {
        Some(Reason::NeverSelf)
    } else {
        None
    }
}

fn evaluate(
    round: &Evaluation<'_>,
    node: &Node,
    session: &Session,
    due: Option<RootExit>,
) -> Decision {
    let model = round.model;
    let keep = |reason| Decision {
        due,
        ..Decision::keep(reason)
    };
    if let Some(user) = node
        .user_keep()
        .filter(|keep| keep.is_in_force(model.monotonic_now()))
    {
        return Decision {
            until: user.until_monotonic_ns,
            ..keep(Reason::KeptByUser)
        };
    }
    let marked = keep_marker(model, node);
    let said = Case::new(model, node, session, due).decide();
    // It lives by right of its agent first of all.
    let by_right = due.is_none() && said.verdict == Verdict::Keep;
    if marked == Fact::Known(true) && !by_right {
        return keep(Reason::KeepMarker);
    }
    let mut decision = Decision {
        verdict: said.verdict,
        reason: said.reason,
        rule: said.rule.map(|rule| Arc::clone(model.rules.name(rule))),
        due,
        needs: said.needs,
        relative: None,
        until: said.until,
    };
    let kept = matches!(said.verdict, Verdict::Keep | Verdict::Report);
    let wants_arguments = !kept && MatchedRules::wants_arguments(model, node).is_some();
    if wants_arguments {
        decision.needs |= FactSet::ARGUMENTS;
        (decision.verdict, decision.reason) = (Verdict::Wait, Reason::Unread);
        decision.until = None;
    } else if !kept && let Some(decision) = kept_by_state(round, node, due) {
        return decision;
    }
    let matters = said.verdict != Verdict::Keep;
    match marked {
        Fact::Unread if matters => {
            decision.needs |= FactSet::MARKERS;
            (decision.verdict, decision.reason) = (Verdict::Wait, Reason::Unread);
            decision.until = None;
        }
        Fact::Unreadable if matters && !kept => return keep(Reason::Unreadable),
        _ => {}
    }
    (decision.needs, decision.relative) = facts_and_owner(model, session, decision.needs);
    match due.filter(|_| decision.verdict == Verdict::Reap) {
        Some(due) => round.relatives.held(model, node, due).unwrap_or(decision),
        None => decision,
    }
}

/// What is to be read for what a member of a session wants, and of whom, if not of itself: that comes first, as it may
/// settle the rest.
fn facts_and_owner(
    model: &Model,
    session: &Session,
    needs: FactSet,
) -> (FactSet, Option<ProcessKey>) {
    if needs == FactSet::ROOT_UNIT {
        return (FactSet::UNIT, model.unit_source(session));
    }
    (needs.without(FactSet::ROOT_UNIT), None)
}

/// Whether it has `REAPER_KEEP=1` in its environment, where that means something.
fn keep_marker(model: &Model, node: &Node) -> Fact<bool> {
    if !model.rules.honors_keep() {
        return Fact::Known(false);
    }
    match node.facts().map(|facts| facts.markers) {
        _ if node.state.cached.keep_marker != Fact::Unread => node.state.cached.keep_marker,
        None | Some(Fact::Unread) => Fact::Unread,
        Some(Fact::Unreadable) => Fact::Unreadable,
        Some(Fact::Known(marks)) => Fact::Known(marks & 1 != 0),
    }
}

/// Whether a rule about roots may come to decide about a process while it lives.
pub(super) fn has_rules_for_root(model: &Model, node: &Node) -> bool {
    session_of(model, node)
        .is_some_and(|session| Case::new(model, node, session, None).may_be_judged_as_root())
}

/// Whether a member is kept though it should be due, or is never signalled at all. As long as its root lives,
/// what is not known yet does not count.
pub(super) fn is_kept(round: &Evaluation<'_>, node: &Node) -> bool {
    let model = round.model;
    let Some(session) = session_of(model, node) else {
        return never_list(model, node).is_some();
    };
    let due = model.sessions.due(session.id).map(|(_, due)| due);
    let decision = evaluate(round, node, session, Some(due.unwrap_or(killed(model))));
    let unread = !decision.needs.is_empty();
    never_list(model, node).is_some()
        || decision.verdict != Verdict::Reap && (due.is_some() || !unread)
}

/// What would be decided about a member if its root ended now in this way, by what is known. None, if it is
/// gone already or it is never signalled.
pub(super) fn decide_if_root_exits(
    round: &Evaluation<'_>,
    key: ProcessKey,
    ended: ExitStatus,
) -> Option<Decision> {
    let model = round.model;
    let node = model.tree.get(key)?;
    let session = session_of(model, node)?;
    let open = never_list(model, node).is_none() && model.sessions.due(session.id).is_none();
    open.then(|| evaluate(round, node, session, Some(gone(model, ended))))
}

/// Whether nothing that this program could come to know, but for its running another program, would spare a
/// member if a signal ended its root now.
pub(super) fn is_kernel_killable(round: &Evaluation<'_>, node: &Node) -> bool {
    let model = round.model;
    let unmarked = matches!(keep_marker(model, node), Fact::Known(false));
    let killed = killed(model);
    // Its relatives may be others by then.
    let unheld = !model.rules.may_keep_relatives(killed.exit_status);
    let clear = |session| !Case::new(model, node, session, Some(killed)).may_be_kept();
    let is_read = MatchedRules::wants_arguments(model, node).is_none()
        && !model.needs_script(node)
        && round.relatives.permanent_above(model, node, Some(killed)) == Hold::Nobody;
    unmarked
        && unheld
        && !is_kept(round, node)
        && is_read
        && session_of(model, node)
            .is_some_and(|it| clear(it) && !model.sessions.is_ended_by_run(it.id))
}

/// The end of a root by a signal, as of now.
fn killed(model: &Model) -> RootExit {
    let signalled = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    gone(model, signalled)
}

/// The end of a root, as of now.
fn gone(model: &Model, ended: ExitStatus) -> RootExit {
    RootExit {
        at: model.clock.now(),
        exit_status: ended,
        was_signalled: false,
    }
}

/// What keeps it that is not a question of rules about it: what is not known of it, and what it is below.
fn kept_by_state(round: &Evaluation<'_>, node: &Node, due: Option<RootExit>) -> Option<Decision> {
    let model = round.model;
    if let Some(might) = MatchedRules::of(model, node).unreadable {
        return Hold::Keep(might, None).decision(model, due, Reason::Unreadable);
    }
    if node.state.member.is_lineage_uncertain {
        return Hold::Keep(None, None).decision(model, due, Reason::LineageUncertain);
    }
    let above = round.relatives.permanent_above(model, node, due);
    above.decision(model, due, Reason::AncestorKept)
}
