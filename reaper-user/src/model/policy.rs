//! Who is to be reaped, who is kept, and why: a pure function over the model.

use std::sync::Arc;

use super::Model;
use super::agent::RuleId;
use super::event::Key;
use super::session::RootGone;
use super::tree::Node;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    Reap,
    Keep,
}

/// Why. The names stand in the event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Its agent is gone.
    RootGone,
    /// It was born when its agent was gone already.
    BornWhileDue,
    /// Its parent is gone, its agent is not.
    Detached,
    /// Its agent lives, and so does its parent.
    RootAlive,
    /// A rule keeps it.
    KeepRule,
    /// It runs under another uid than its agent.
    OtherUid,
    /// A living parent of it is kept.
    BelowKept,
    /// Its program, or the end of its command line, is not known, and might be one that is kept.
    Unreadable,
    NotAMember,
    NeverPid1,
    NeverKernelThread,
    /// This program or one of its ancestors.
    NeverSelf,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Reason::RootGone => "root_gone",
            Reason::BornWhileDue => "born_while_due",
            Reason::Detached => "detached",
            Reason::RootAlive => "root_alive",
            Reason::KeepRule => "keep_rule",
            Reason::OtherUid => "other_uid",
            Reason::BelowKept => "below_kept",
            Reason::Unreadable => "unreadable",
            Reason::NotAMember => "not_a_member",
            Reason::NeverPid1 => "never_pid1",
            Reason::NeverKernelThread => "never_kernel_thread",
            Reason::NeverSelf => "never_self",
        }
    }
}

/// Why a process is kept, and the rule that says so, if one does.
pub(super) type Kept = (Reason, Option<RuleId>);

/// A decision about one process, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub verdict: Verdict,
    pub reason: Reason,
    /// Name of the rule that decided, if one did.
    pub rule: Option<Arc<str>>,
    /// What made the process due, if it is.
    pub due: Option<RootGone>,
}

impl Decision {
    fn keep(reason: Reason) -> Decision {
        Decision {
            verdict: Verdict::Keep,
            reason,
            rule: None,
            due: None,
        }
    }
}

/// Decides about a process; one that does not live is not a member.
///
/// The order is that of strength: what is never signalled, what is no member, what lives by right of
/// its agent, what a rule keeps. Only what none of these spares is reaped.
pub fn decide(model: &Model, key: Key) -> Decision {
    let Some(node) = model.tree.get(key) else {
        return Decision::keep(Reason::NotAMember);
    };
    if let Some(reason) = never(model, node) {
        return Decision::keep(reason);
    }
    let Some(session) = node.session.filter(|_| node.in_scope) else {
        return Decision::keep(Reason::NotAMember);
    };
    let Some((_, due)) = model.sessions.due(session) else {
        let reason = if node.orphaned.is_some() {
            Reason::Detached
        } else {
            Reason::RootAlive
        };
        return Decision::keep(reason);
    };
    let kept = |(reason, rule)| Decision {
        rule,
        due: Some(due),
        ..Decision::keep(reason)
    };
    if let Some(why) = kept_itself(model, node) {
        return kept(why);
    }
    // What a kept process runs is its business: the scripts of a package manager, a supervisor's servers.
    let above = model
        .tree
        .ancestors(key)
        .take_while(|above| above.session.is_some());
    if let Some((_, rule)) = above
        .into_iter()
        .find_map(|above| kept_itself(model, above))
    {
        return kept((Reason::BelowKept, rule));
    }
    let born_later = model.born_after(node, due);
    let reason = if born_later {
        Reason::BornWhileDue
    } else {
        Reason::RootGone
    };
    Decision {
        verdict: Verdict::Reap,
        reason,
        rule: None,
        due: Some(due),
    }
}

/// The never-list: no rule and no mode gets past it.
fn never(model: &Model, node: &Node) -> Option<Reason> {
    if node.key.pid <= 1 {
        Some(Reason::NeverPid1)
    } else if node.kernel_thread {
        Some(Reason::NeverKernelThread)
    } else if node.key.pid == model.own_pid || model.is_own(node.key) {
        Some(Reason::NeverSelf)
    } else {
        None
    }
}

fn kept_itself(model: &Model, node: &Node) -> Option<(Reason, Option<Arc<str>>)> {
    let kept = match node.weighed {
        Some((session, kept)) if Some(session) == node.session => kept,
        _ => weigh(model, node),
    };
    let (reason, rule) = kept?;
    Some((reason, rule.map(|rule| Arc::clone(model.rules.name(rule)))))
}

/// Why a process is kept as a member of its session, if it is. What cannot be known speaks for it.
pub(super) fn weigh(model: &Model, node: &Node) -> Option<Kept> {
    let root = model.sessions.get(node.session?)?.uids;
    if let Some(rule) = model.rules.keep(&node.image, node.uids, root) {
        let other_uid = model.rules.rule(rule).other_uid;
        let reason = if other_uid {
            Reason::OtherUid
        } else {
            Reason::KeepRule
        };
        return Some((reason, Some(rule)));
    }
    if node.image.exe.is_empty() {
        return Some((Reason::Unreadable, None));
    }
    let might = model.rules.might_spare(&node.image)?;
    Some((Reason::Unreadable, Some(might)))
}
