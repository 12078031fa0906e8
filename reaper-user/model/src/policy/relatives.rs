//! Members that are kept, or wait, because of an ancestor or a descendant.
//!
//! ```text
//!   npm ── sh ─┬─ vite ── esbuild      vite listens and waits for its delay: npm, sh and esbuild wait with it
//!              └─ sleep                is reaped: it is neither an ancestor nor a descendant of vite
//! ```
//!
//! If `npm` is signalled, it forwards the signal to the server, and the server needs its workers. What a permanently
//! kept process starts is kept too, such as the scripts of a package manager.
//!
//! Only the rules that match a process itself affect its relatives: a process that waits for a relative holds no other.
//! The delay runs from the exit of the root, also for processes forked later. Otherwise a server that is restarted
//! again and again would hold its relatives forever.
//!
//! Each tree is walked once per evaluation.

use std::cell::RefCell;
use std::hash::Hash;
use std::iter::once;

use hashbrown::HashMap;

use super::case::{Case, Hold};
use super::{
    Decision, MatchedRules, Reason, Verdict, facts_and_owner, longest_grace, session_of,
    unread_facts,
};
use crate::Model;
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::FactSet;
use crate::ruleset::RuleId;
use crate::session::RootExit;

/// Values of processes, by the root exit that they are evaluated for.
type ByExit<V> = HashMap<(ProcessKey, Option<RootExit>), V>;

/// Effects of processes on their relatives, cached during one evaluation.
#[derive(Default)]
pub(super) struct Relatives {
    /// Permanent keeps above a process.
    permanent: RefCell<ByExit<Hold>>,
    /// Nearest process above to whose program a rule gives a grace.
    grace: RefCell<ByExit<Option<GraceAbove>>>,
    /// Holds of processes that are due.
    due: RefCell<HashMap<ProcessKey, Holds>>,
}

/// Ancestor to whose program a rule gives a grace.
#[derive(Clone, Copy)]
pub(super) struct GraceAbove {
    pub(super) program: ProcessKey,
    /// Facts that are unread for the decision about `program`, or about a program with a grace above it, and the process
    /// to read them of.
    pub(super) unread: Option<(FactSet, ProcessKey)>,
}

#[derive(Clone, Copy, Default)]
struct Holds {
    /// Effect of the process on its relatives.
    own: Hold,
    /// Effect of its ancestors.
    above: Hold,
    /// Effect of its descendants.
    below: Hold,
}

impl Relatives {
    /// Returns the effect of a member's ancestors that lasts until they execute another program.
    pub(super) fn permanent_above(
        &self,
        model: &Model,
        node: &Node,
        due: Option<RootExit>,
    ) -> Hold {
        let key = |of| (of, due);
        from_above(model, node, &self.permanent, key, |parent, above| {
            keeps_below(model, parent, due).or(above)
        })
    }

    /// Returns the nearest member above a process to whose program a rule gives a grace.
    pub(super) fn grace_above(
        &self,
        model: &Model,
        node: &Node,
        due: Option<RootExit>,
    ) -> Option<GraceAbove> {
        let key = |of| (of, due);
        from_above(model, node, &self.grace, key, |parent, above| {
            if longest_grace(model, parent) == 0 {
                return above;
            }
            let unread = above.and_then(|above| above.unread);
            Some(GraceAbove {
                program: parent.key,
                unread: unread.or_else(|| unread_of(model, parent, due)),
            })
        })
    }

    /// Returns the decision about a due member that would be reaped, if relatives that are due with it hold it. Returns
    /// `None` if none does.
    pub(super) fn held(&self, model: &Model, node: &Node, due: RootExit) -> Option<Decision> {
        if !model
            .rules
            .may_keep_relatives(due.cause(), model.has_display)
            || !is_due(model, node, due)
        {
            return None;
        }
        let mut known = self.due.borrow_mut();
        if !known.contains_key(&node.key) {
            walk(model, node, due, &mut known);
        }
        let Holds { above, below, .. } = *known.get(&node.key)?;
        let reason = match below.rank() > above.rank() {
            true => Reason::DescendantKept,
            false => Reason::AncestorKept,
        };
        above.or(below).decision(model, Some(due), reason)
    }
}

/// Returns the facts that the decision about a member still needs, and the process to read them of.
fn unread_of(model: &Model, node: &Node, due: Option<RootExit>) -> Option<(FactSet, ProcessKey)> {
    let session = session_of(model, node)?;
    let by_rules = Case::new(model, node, session, due).decide();
    let (needs, of) = facts_and_owner(model, session, unread_facts(model, node, &by_rules));
    (!needs.is_empty()).then(|| (needs, of.unwrap_or(node.key)))
}

/// Returns what the ancestors of a member mean for it. `below` returns that for the children of a process, given what its
/// own ancestors mean for it. The results for the member and the processes between are kept in `known`, by `key`.
fn from_above<K: Eq + Hash, V: Copy + Default>(
    model: &Model,
    node: &Node,
    known: &RefCell<HashMap<K, V>>,
    key: impl Fn(ProcessKey) -> K,
    below: impl Fn(&Node, V) -> V,
) -> V {
    let mut known = known.borrow_mut();
    let (mut top, mut path) = (node.key, Vec::new());
    let ancestors = model.tree.ancestors(node.key);
    for parent in ancestors.take_while(|above| above.state.member.session.is_some()) {
        if known.contains_key(&key(top)) {
            break;
        }
        path.push((top, parent));
        top = parent.key;
    }
    let mut above = known.get(&key(top)).copied().unwrap_or_default();
    for (of, parent) in path.into_iter().rev() {
        above = below(parent, above);
        known.insert(key(of), above);
    }
    above
}

/// Computes the effects between processes that are due together, from the topmost one above `node` downwards.
fn walk(model: &Model, node: &Node, due: RootExit, known: &mut HashMap<ProcessKey, Holds>) {
    let is_due = |node: &&Node| is_due(model, node, due);
    let above = model.tree.ancestors(node.key).take_while(is_due);
    let top = above.last().unwrap_or(node);
    let tree: Vec<&Node> = once(top).chain(model.tree.descendants(top.key)).collect();
    // A process that is not due has no effect and is not affected. Its descendants still affect its ancestors.
    let mut found: HashMap<ProcessKey, Holds> = HashMap::with_capacity(tree.len());
    // Parents come before their children.
    for node in &tree {
        let parent = node.parent.and_then(|parent| found.get(&parent));
        let above = parent.map_or(Hold::Nothing, |parent| parent.own.or(parent.above));
        let holds = match is_due(node) {
            true => Holds {
                own: own_hold(model, node, due),
                above,
                below: Hold::Nothing,
            },
            false => Holds::default(),
        };
        found.insert(node.key, holds);
    }
    for node in tree.iter().rev() {
        let Holds { own, below, .. } = found.get(&node.key).copied().unwrap_or_default();
        let below = match own {
            // Waiting for processes that are forked again and again would never end.
            Hold::Needs(..) if model.born_after(node, due) => below,
            own => own.or(below),
        };
        if let Some(parent) = node.parent.and_then(|parent| found.get_mut(&parent)) {
            parent.below = below.or(parent.below);
        }
    }
    let due = tree.into_iter().filter(is_due);
    known.extend(due.filter_map(|node| Some((node.key, *found.get(&node.key)?))));
}

/// Returns the effect of a due process on its ancestors and descendants.
fn own_hold(model: &Model, node: &Node, due: RootExit) -> Hold {
    let Some(session) = session_of(model, node) else {
        return Hold::Nothing;
    };
    let hold = Case::new(model, node, session, Some(due)).holds();
    // Another rule may match the whole command line or the resolved script.
    match MatchedRules::wants(model, node) {
        Some((rule, wanted)) => Hold::Needs(rule, wanted, node.key).or(hold),
        None => hold,
    }
}

/// Returns the effect of a permanently kept process on its descendants; see [`Case::permanent_keep`].
fn keeps_below(model: &Model, node: &Node, due: Option<RootExit>) -> Hold {
    let session = node.state.member.session;
    let Some(session) = session.and_then(|session| model.sessions.get(session)) else {
        return Hold::Nothing;
    };
    let case = Case::new(model, node, session, due);
    let kept = case.permanent_keep();
    if kept != Hold::Nothing {
        return kept;
    }
    if let Some((rule, wanted)) = MatchedRules::wants(model, node) {
        return Hold::Needs(rule, wanted, node.key);
    }
    match MatchedRules::unknown(model, node) {
        Some(rule) => Hold::Keep(rule, None),
        None if node.state.member.is_lineage_uncertain => Hold::Keep(None, None),
        None => Hold::Nothing,
    }
}

impl Hold {
    /// Returns the stronger of two effects; `self` if they are equal.
    fn or(self, other: Hold) -> Hold {
        if other.rank() > self.rank() {
            other
        } else {
            self
        }
    }

    /// Returns the order of effects: how long they hold relatives.
    fn rank(self) -> (u8, u64) {
        match self {
            Hold::Nothing => (0, 0),
            Hold::Needs(..) => (1, 0),
            Hold::Until(_, until) => (2, until),
            Hold::Keep(_, until) => (3, until.unwrap_or(u64::MAX)),
        }
    }

    /// Returns the decision about a relative, or `None` for [`Hold::Nothing`]. `kept` is the reason if it is kept.
    pub(super) fn decision(
        self,
        model: &Model,
        due: Option<RootExit>,
        kept: Reason,
    ) -> Option<Decision> {
        let decide = |verdict, reason, rule: Option<RuleId>, until| Decision {
            verdict,
            rule: rule.map(|rule| model.rules.name(rule).clone()),
            due,
            until,
            ..Decision::keep(reason)
        };
        Some(match self {
            Hold::Nothing => return None,
            Hold::Needs(rule, needs, of) => Decision {
                needs,
                relative: Some(of),
                ..decide(Verdict::Wait, Reason::Unread, Some(rule), None)
            },
            Hold::Until(rule, until) => {
                decide(Verdict::Wait, Reason::RuleDelay, Some(rule), Some(until))
            }
            Hold::Keep(rule, until) => decide(Verdict::Keep, kept, rule, until),
        })
    }
}

/// Returns whether a process is due because of this exit of a root.
fn is_due(model: &Model, node: &Node, due: RootExit) -> bool {
    let session = session_of(model, node).and_then(|session| model.sessions.due(session.id));
    session.is_some_and(|(_, other)| other == due)
}
