//! Decisions about members: a pure function of the model that reaps or keeps a process, with a reason.

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
use case::{Case, Hold, RuleDecision};
use relatives::Relatives;

/// Treatment of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Ended by the escalation of its session: SIGTERM, later SIGKILL.
    Reap,
    /// Left alone.
    Keep,
    /// Kept, and reported to the user.
    Report,
    /// Kept for now, until [`Decision::needs`] are read or [`Decision::until`] is reached.
    Wait,
}

impl Verdict {
    /// Returns the name in the event stream and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Reap => "reap",
            Verdict::Keep => "keep",
            Verdict::Report => "report",
            Verdict::Wait => "wait",
        }
    }
}

/// Reason of a decision. Its names are part of the event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The root of its session exited.
    RootExited,
    /// It was forked after the root exited.
    ForkedAfterRootExit,
    /// Its parent exited, and the root is alive.
    Detached,
    /// Its root and its parent are alive.
    RootAlive,
    /// It has `REAPER_KEEP=1` in its environment.
    KeepMarker,
    /// A user keeps it.
    KeptByUser,
    /// The delay of a rule has not expired.
    RuleDelay,
    /// The root exited with status 0, and another process may continue the agent's conversation.
    SuccessorAwaited,
    /// As [`Reason::SuccessorAwaited`], but facts that would show the successor are unreadable.
    SuccessorUnknown,
    /// A rule reports it.
    ReportRule,
    /// A rule reaps it although its root is alive.
    ReapRule,
    /// A fact that a rule needs is unread. Never emitted.
    Unread,
    /// A rule keeps it.
    KeepRule,
    /// It runs under another uid than its root.
    OtherUid,
    /// An ancestor is kept.
    AncestorKept,
    /// A descendant is kept and may need it.
    DescendantKept,
    /// A fact that a rule needs is unreadable, such as its program or the end of its command line, and a rule might
    /// keep it.
    Unreadable,
    /// It descends from the root, but perhaps through a boundary: events about its ancestors were lost.
    LineageUncertain,
    /// Only evidence shows that it descends from the root.
    Inferred,
    /// It belongs to no session.
    NotAMember,
    /// Pid 1 of the service's PID namespace.
    NeverPid1,
    /// A thread of the kernel.
    NeverKernelThread,
    /// The service itself or one of its ancestors.
    NeverSelf,
}

impl Reason {
    /// Returns the name in the event stream and in the API.
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

/// Decision about one process, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Treatment of the process.
    pub verdict: Verdict,
    /// Reason of the verdict.
    pub reason: Reason,
    /// Name of the deciding rule, if any.
    pub rule: Option<Arc<str>>,
    /// Exit of the root that made the process due, if it is due.
    pub due: Option<RootExit>,
    /// Facts that must be read before a final decision. Not empty exactly if the verdict is [`Verdict::Wait`] with
    /// [`Reason::Unread`].
    pub needs: FactSet,
    /// Process to read them of, if it is another one: a relative, or one that shows the unit of the root.
    pub relative: Option<ProcessKey>,
    /// Time at which the decision may change without an event (`CLOCK_MONOTONIC`, ns). It is the end of a delay or
    /// keep, the time when an age is reached, or the next check of an idle session.
    pub until: Option<u64>,
    /// Time between SIGTERM and SIGKILL that a rule gives the program, in ns; 0 for the general one. Set only if the
    /// verdict is [`Verdict::Reap`].
    pub grace_ns: u64,
    /// Nearest ancestor to whose program a rule gives a grace. Until its exit it may need the process to clean up. Set
    /// only if the verdict is [`Verdict::Reap`].
    pub needed_by: Option<ProcessKey>,
}

impl Decision {
    /// Returns the decision to keep a process that is not due, without a rule.
    fn keep(reason: Reason) -> Decision {
        Decision {
            verdict: Verdict::Keep,
            reason,
            rule: None,
            due: None,
            needs: FactSet::NONE,
            relative: None,
            until: None,
            grace_ns: 0,
            needed_by: None,
        }
    }
}

/// Evaluation of several processes in one state of the model. Shares intermediate results between the decisions.
pub struct Evaluation<'a> {
    model: &'a Model,
    relatives: Relatives,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(model: &'a Model) -> Evaluation<'a> {
        let relatives = Relatives::default();
        Evaluation { model, relatives }
    }

    /// Returns the model.
    pub(super) fn model(&self) -> &'a Model {
        self.model
    }

    /// Returns the living process with this key.
    pub fn node(&self, key: ProcessKey) -> Option<&'a Node> {
        self.model.tree.get(key)
    }

    /// Decides about a process; see [`Model::decide`].
    pub fn decide(&self, key: ProcessKey) -> Decision {
        decide(self, key)
    }
}

/// Decides about a process. One that has exited, or is not in scope, is not a member.
///
/// The first match decides, in this order: the never-list, no membership, a successor that may appear, a user's keep,
/// the environment marker, the rules in their order. Without a match, a due member is reaped, or reported if its
/// membership is inferred. Any other member is kept because its root is alive.
///
/// A process that would be reaped may still be kept, or wait, because of a relative or an unreadable fact. Facts that
/// cannot change the decision are not requested.
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

/// Returns the decision to wait, or to keep, while another agent may continue the session or one around it. Returns
/// `None` if none may.
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

/// Returns the open session of a member that is in scope.
fn session_of<'a>(model: &'a Model, node: &Node) -> Option<&'a Session> {
    model.sessions.get(
        node.state
            .member
            .session
            .filter(|_| node.state.member.in_scope)?,
    )
}

/// Returns why a process must never be signalled. No rule and no mode overrides this list.
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

/// Decides about a member by keeps, rules and relatives, as if `due` were the exit that makes it due. `None` stands for
/// a member that is not due.
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
    let has_marker = keep_marker(model, node);
    let by_rules = Case::new(model, node, session, due).decide();
    // A living root takes precedence as the reason to keep a member.
    let kept_as_not_due = due.is_none() && by_rules.verdict == Verdict::Keep;
    if has_marker == Fact::Known(true) && !kept_as_not_due {
        return keep(Reason::KeepMarker);
    }
    let mut decision = Decision {
        verdict: by_rules.verdict,
        reason: by_rules.reason,
        rule: by_rules.rule.map(|rule| Arc::clone(model.rules.name(rule))),
        due,
        needs: unread_facts(model, node, &by_rules),
        relative: None,
        until: by_rules.until,
        grace_ns: 0,
        needed_by: None,
    };
    if !by_rules.is_kept() {
        if MatchedRules::wants(model, node).is_none()
            && let Some(decision) = kept_by_state(round, node, due)
        {
            return decision;
        }
        if has_marker == Fact::Unreadable {
            return keep(Reason::Unreadable);
        }
    }
    if !decision.needs.is_empty() {
        (decision.verdict, decision.reason) = (Verdict::Wait, Reason::Unread);
        decision.until = None;
    }
    (decision.needs, decision.relative) = facts_and_owner(model, session, decision.needs);
    if decision.verdict != Verdict::Reap {
        return decision;
    }
    if let Some(held) = due.and_then(|due| round.relatives.held(model, node, due)) {
        return held;
    }
    let above = round.relatives.grace_above(model, node, due);
    // The program above may turn out to be kept. If it is reaped, it must be claimed before this process.
    if let Some((needs, of)) = above.and_then(|above| above.unread) {
        (decision.verdict, decision.reason) = (Verdict::Wait, Reason::Unread);
        (decision.needs, decision.relative) = (needs, Some(of));
        return decision;
    }
    decision.grace_ns = longest_grace(model, node);
    decision.needed_by = above.map(|above| above.program);
    decision
}

/// Returns the unread facts that may still change the decision of the rules about a process.
fn unread_facts(model: &Model, node: &Node, by_rules: &RuleDecision) -> FactSet {
    let mut needs = by_rules.needs;
    if !by_rules.is_kept()
        && let Some((_, wanted)) = MatchedRules::wants(model, node)
    {
        needs |= wanted;
    }
    if by_rules.verdict != Verdict::Keep && keep_marker(model, node) == Fact::Unread {
        needs |= FactSet::MARKERS;
    }
    needs
}

/// Returns the longest grace that a rule gives the program of a process, in ns; 0 for none.
pub(super) fn longest_grace(model: &Model, node: &Node) -> u64 {
    let matched = MatchedRules::of(model, node);
    model.rules.longest_grace(&matched.rules)
}

/// Returns the facts to read for a decision and, if they are those of another process, that process. A member's own
/// facts come first, as they may settle the decision.
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

/// Returns whether `REAPER_KEEP=1` is in the environment of a process; always false if markers are not honoured.
fn keep_marker(model: &Model, node: &Node) -> Fact<bool> {
    if !model.rules.honors_keep() {
        return Fact::Known(false);
    }
    match node.facts().map(|facts| facts.markers) {
        _ if node.state.cached.keep_marker != Fact::Unread => node.state.cached.keep_marker,
        None | Some(Fact::Unread) => Fact::Unread,
        Some(Fact::Unreadable) => Fact::Unreadable,
        Some(Fact::Known(markers)) => Fact::Known(markers & 1 != 0),
    }
}

/// Returns whether a process is the living root of a session and a rule about roots (`idle` or `server`) matches its
/// known state.
pub(super) fn has_rules_for_root(model: &Model, node: &Node) -> bool {
    session_of(model, node)
        .is_some_and(|session| Case::new(model, node, session, None).may_be_judged_as_root())
}

/// Returns whether a member would be kept if it were due, or is never signalled. Unread facts do not count as a keep
/// while the root is alive. For any other process, returns whether it is never signalled.
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

/// Returns the decision about a member if its root exited now with `ended`, by known facts. Returns `None` if the
/// process is no member, is already due, is never signalled, or has exited.
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

/// Returns whether nothing but an exec of another program could keep a member if a signal ended its root now.
pub(super) fn is_kernel_killable(round: &Evaluation<'_>, node: &Node) -> bool {
    let model = round.model;
    let unmarked = matches!(keep_marker(model, node), Fact::Known(false));
    let killed = killed(model);
    // The relatives may change until then.
    let unheld = !model
        .rules
        .may_keep_relatives(killed.exit_status, model.has_display);
    let clear = |session| !Case::new(model, node, session, Some(killed)).may_be_kept();
    let is_read = MatchedRules::wants(model, node).is_none()
        && !model.needs_script(node)
        && round.relatives.permanent_above(model, node, Some(killed)) == Hold::Nothing;
    unmarked
        && unheld
        && !is_kept(round, node)
        && is_read
        // In an escalation, the probes kill members that fork.
        && longest_grace(model, node) == 0
        && round.relatives.grace_above(model, node, Some(killed)).is_none()
        && session_of(model, node)
            .is_some_and(|it| clear(it) && !model.sessions.is_ended_by_run(it.id))
}

/// Returns the exit of a root by a signal, at the current time.
fn killed(model: &Model) -> RootExit {
    let signalled = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    gone(model, signalled)
}

/// Returns the exit of a root, at the current time.
fn gone(model: &Model, ended: ExitStatus) -> RootExit {
    RootExit {
        at: model.clock.now(),
        exit_status: ended,
        was_signalled: false,
    }
}

/// Returns the decision to keep a process, or to wait, that no rule about it makes: because it is partly unknown, or
/// because of an ancestor. Returns `None` if nothing keeps it.
fn kept_by_state(round: &Evaluation<'_>, node: &Node, due: Option<RootExit>) -> Option<Decision> {
    let model = round.model;
    if let Some(might) = MatchedRules::unknown(model, node) {
        return Hold::Keep(might, None).decision(model, due, Reason::Unreadable);
    }
    if node.state.member.is_lineage_uncertain {
        return Hold::Keep(None, None).decision(model, due, Reason::LineageUncertain);
    }
    let above = round.relatives.permanent_above(model, node, due);
    above.decision(model, due, Reason::AncestorKept)
}
