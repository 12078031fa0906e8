//! Who is spared for the sake of its kin: a server that is given time can do nothing with it if the `npm` above it
//! is ended, which hands the signal on, or the workers below it; and what a kept process runs is its business.
//!
//! Only what the rules say of a member by itself holds others: who is held holds nobody. And it does so from the end
//! of the root until the rule's delay is over, however late the one that holds was born: one that is begun again
//! and again holds nobody for good.
//!
//! A tree is walked once for all that is decided in a round, however deep it is.

use std::cell::RefCell;
use std::cmp::Reverse;

use hashbrown::HashMap;

use super::case::{Case, Hold};
use super::{Decision, MatchedRules, Reason, Verdict, facts_and_owner, keeps_below, session_of};
use crate::Model;
use crate::Node;
use crate::event::ProcessKey;
use crate::facts::FactSet;
use crate::ruleset::RuleId;
use crate::session::RootExit;

/// What has been found out in a round about kin, for each end of a root that was asked about.
#[derive(Default)]
pub(super) struct Known(RefCell<Vec<(Option<RootExit>, Kin)>>);

/// What one above a process does for it.
#[derive(Clone, Copy)]
pub(super) enum Above {
    /// Keeps it, by this rule if there is one.
    Keeps(Option<RuleId>),
    /// The whole command line of this process decides, by a rule that might hold then.
    Ask(RuleId, ProcessKey),
}

/// By pid, which stands for one process as long as the model stands still.
#[derive(Default)]
struct Kin {
    /// By what a process is kept together with one above it; see [`keeps_below`].
    below: HashMap<u32, Option<Above>>,
    /// What those do for a process who are above it, and those who are below.
    held: HashMap<u32, [Holders; 2]>,
    /// How many processes have been asked what they do for others.
    #[cfg(test)]
    pub(super) asked: usize,
}

/// What several do for one of their kin.
#[derive(Clone, Copy, Default)]
struct Holders {
    longest: Option<Holder>,
    /// The first of whom it is not known yet.
    ask: Option<(RuleId, FactSet, ProcessKey)>,
}

#[derive(Clone, Copy)]
struct Holder {
    rule: RuleId,
    /// It is kept with it; or else waits.
    keeps: bool,
    until: Option<u64>,
}

impl Known {
    /// Returns whether a member is kept because one above it is.
    pub(super) fn kept_below(
        &self,
        model: &Model,
        node: &Node,
        due: Option<RootExit>,
    ) -> Option<Above> {
        self.with(due, |kin| kin.kept_below(model, node, due))
    }

    /// What is decided about a member that is due, and would be reaped, because of those above and below it that are
    /// due with it; `None` if they do not hold it.
    pub(super) fn held(&self, model: &Model, node: &Node, due: RootExit) -> Option<Decision> {
        if !model.rules.may_keep_relatives(due.cause()) {
            return None;
        }
        let [above, below] = self.with(Some(due), |kin| kin.held(model, node, due));
        let decided = |verdict, reason, rule: RuleId, until| Decision {
            verdict,
            reason,
            rule: Some(model.rules.name(rule).clone()),
            due: Some(due),
            needs: FactSet::NONE,
            relative: None,
            until,
        };
        let Holders { longest, ask } = above.and(below);
        if let Some(Holder { rule, keeps, until }) = longest {
            let from_above = above.longest.map(Holder::length) == longest.map(Holder::length);
            return Some(match (keeps, from_above) {
                (false, _) => decided(Verdict::Wait, Reason::RuleDelay, rule, until),
                (true, true) => decided(Verdict::Keep, Reason::AncestorKept, rule, until),
                (true, false) => decided(Verdict::Keep, Reason::DescendantKept, rule, until),
            });
        }
        let (rule, needs, relative) = ask?;
        Some(Decision {
            needs,
            relative: Some(relative),
            ..decided(Verdict::Wait, Reason::Unread, rule, None)
        })
    }

    fn with<T>(&self, due: Option<RootExit>, ask: impl FnOnce(&mut Kin) -> T) -> T {
        let mut all = self.0.borrow_mut();
        let at = all.iter().position(|(known, _)| *known == due);
        let at = at.unwrap_or_else(|| {
            all.push((due, Kin::default()));
            all.len() - 1
        });
        ask(&mut all[at].1)
    }

    #[cfg(test)]
    pub(super) fn asked(&self) -> usize {
        self.0.borrow().iter().map(|(_, kin)| kin.asked).sum()
    }
}

impl Kin {
    fn kept_below(&mut self, model: &Model, node: &Node, due: Option<RootExit>) -> Option<Above> {
        let mut path = Vec::new();
        let mut next = node;
        // The nearest of which it is not known yet, and how many are below it.
        let mut ask = None;
        let kept = loop {
            if let Some(known) = self.below.get(&next.key.pid) {
                break *known;
            }
            path.push(next.key.pid);
            let above = next.parent.and_then(|parent| model.tree.get(parent));
            // A loop, which damaged input could make, ends it.
            let looped = path.len() > model.tree.len();
            let Some(above) = above.filter(|above| above.state.member.session.is_some() && !looped)
            else {
                break None;
            };
            self.count();
            match keeps_below(model, above, due) {
                None => {}
                Some(keeps @ Above::Keeps(_)) => break Some(keeps),
                Some(asked) => ask = ask.or(Some((asked, path.len()))),
            }
            next = above;
        };
        let is_kept = matches!(kept, Some(Above::Keeps(_)));
        let ask = ask.filter(|_| !is_kept);
        let all = path.into_iter().enumerate().map(|(at, pid)| {
            let asked = ask.filter(|(_, below)| at < *below);
            (pid, asked.map(|(asked, _)| asked).or(kept))
        });
        self.below.extend(all);
        ask.map(|(asked, _)| asked).or(kept)
    }

    fn held(&mut self, model: &Model, node: &Node, due: RootExit) -> [Holders; 2] {
        if !self.held.contains_key(&node.key.pid) {
            self.walk(model, topmost(model, node, due), due);
        }
        self.held.get(&node.key.pid).copied().unwrap_or_default()
    }

    /// Finds out what all those below one, and that itself, do for each other.
    fn walk(&mut self, model: &Model, top: &Node, due: RootExit) {
        let descendants = model.tree.descendants(top.key);
        let all: Vec<&Node> = std::iter::once(top).chain(descendants).collect();
        let at = all.iter().enumerate().map(|(at, node)| (node.key.pid, at));
        let at: HashMap<u32, usize> = at.collect();
        let parent = |node: &Node| at.get(&node.parent?.pid).copied();
        let own: Vec<_> = all
            .iter()
            .map(|node| {
                self.count();
                Holders::of(model, node, due)
            })
            .collect();
        let mut held = vec![[Holders::default(); 2]; all.len()];
        // Parents stand before their children.
        for (child, node) in all.iter().enumerate().skip(1) {
            if let Some(parent) = parent(node)
                && is_due(model, all[parent], due)
            {
                held[child][0] = own[parent][0].and(held[parent][0]);
            }
        }
        for (child, node) in all.iter().enumerate().skip(1).rev() {
            if let Some(parent) = parent(node) {
                let below = own[child][1].and(held[child][1]);
                held[parent][1] = below.and(held[parent][1]);
            }
        }
        let pids = all.iter().map(|node| node.key.pid);
        self.held.extend(pids.zip(held));
    }

    fn count(&mut self) {
        #[cfg(test)]
        {
            self.asked += 1;
        }
    }
}

impl Holders {
    /// What one does by itself for those below it, and for those above it.
    fn of(model: &Model, node: &Node, due: RootExit) -> [Holders; 2] {
        let mut own = Holders::default();
        let session = session_of(model, node).filter(|_| is_due(model, node, due));
        let Some(session) = session else {
            return [own; 2];
        };
        let holder = |rule, keeps, until| Some(Holder { rule, keeps, until });
        match Case::new(model, node, session, Some(due)).holds() {
            Hold::Nobody => {}
            Hold::Ask(rule, needs) => {
                let (needs, other) = facts_and_owner(model, session, needs);
                own.ask = Some((rule, needs, other.unwrap_or(node.key)));
            }
            Hold::Until(rule, until) => own.longest = holder(rule, false, Some(until)),
            Hold::Keep(rule, until) => own.longest = holder(rule, true, until),
        }
        // By the end of its command line, another rule may hold.
        if let Some(rule) = MatchedRules::wants_arguments(model, node) {
            own.ask = Some((rule, FactSet::ARGUMENTS, node.key));
        }
        // What is born below it again and again would hold it for good.
        let ask = own.ask.filter(|_| !model.born_after(node, due));
        [own, Holders { ask, ..own }]
    }

    /// Together with others, who are farther away.
    fn and(self, farther: Holders) -> Holders {
        let longest = match (self.longest, farther.longest) {
            (Some(near), Some(far)) if near.length() < far.length() => Some(far),
            (near, far) => near.or(far),
        };
        let ask = self.ask.or(farther.ask);
        Holders { longest, ask }
    }
}

impl Holder {
    /// Comparable: how long it holds its kin.
    fn length(self) -> (bool, u64, Reverse<RuleId>) {
        let until = self.until.unwrap_or(u64::MAX);
        (self.keeps, until, Reverse(self.rule))
    }
}

fn is_due(model: &Model, node: &Node, due: RootExit) -> bool {
    let session = session_of(model, node).and_then(|session| model.sessions.due(session.id));
    session.is_some_and(|(_, other)| other == due)
}

/// The farthest above one whom all between are due with.
fn topmost<'a>(model: &'a Model, node: &'a Node, due: RootExit) -> &'a Node {
    let above = model.tree.ancestors(node.key);
    let due = above.take_while(|above| is_due(model, above, due));
    due.last().unwrap_or(node)
}
