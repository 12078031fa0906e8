//! State that sessions, policy and keeps hold for each process in the tree.

use super::activity::Idle;
use super::cached_facts::CachedFacts;
use super::event::Image;
use super::fact::{Fact, FactSet};
use super::facts::Facts;
use super::keeps::{Keeps, UserKeep};
use super::session::member::{Lineage, Member};
use super::tree;

/// State of one living process, by the module that owns it.
#[derive(Clone, Debug, Default)]
pub struct ProcessState {
    /// State of sessions.
    pub member: Member,
    /// State of policy.
    pub cached: CachedFacts,
    /// State of users' keeps.
    pub keeps: Keeps,
}

/// State that is kept after the exit of a process, for its descendants.
#[derive(Clone, Debug, Default)]
pub struct Remains {
    pub(crate) lineage: Lineage,
    pub(crate) user_keeps: Vec<UserKeep>,
}

/// Living process with its state.
pub type Node = tree::Node<ProcessState>;
/// Exited process with its remaining state.
pub type Exited = tree::Exited<Remains>;
/// Change of the tree.
pub type TreeChange = tree::TreeChange<ProcessState>;
/// Process tree.
pub type Tree = tree::Tree<ProcessState>;

impl tree::NodeState for ProcessState {
    type Remains = Remains;

    /// A process in scope has descendants in scope. [`Self::on_fork`] adds what a fork copies.
    fn below(parent: Option<&ProcessState>) -> ProcessState {
        let in_scope = parent.is_some_and(|parent| parent.member.in_scope);
        ProcessState {
            member: Member {
                in_scope,
                ..Member::default()
            },
            ..ProcessState::default()
        }
    }

    fn at_birth(&self, born: u64, is_current: bool) -> ProcessState {
        ProcessState {
            cached: self.cached.at_birth(born, is_current),
            ..ProcessState::default()
        }
    }

    fn on_fork(&mut self, inherited: Option<ProcessState>, is_new: bool) {
        let ProcessState { cached, .. } = inherited.unwrap_or_default();
        if is_new {
            self.cached.readings = cached.readings;
            self.cached.keep_marker = cached.keep_marker;
        }
    }

    fn on_exec(&mut self, old: &Image, new: &Image, is_later: bool) {
        self.cached.on_exec(old, new, is_later);
        self.member.on_exec(&old.comm);
    }

    fn on_unseen_exec(&mut self) {
        self.cached.on_unseen_exec();
    }

    fn on_uids(&mut self) {
        self.cached.matched_rules = None;
    }

    fn on_move(&mut self, time: u64) {
        self.cached.on_move(time);
    }

    fn add_flags(&mut self, flags: u32) {
        self.member.add_flags(flags);
    }

    fn is_member(&self) -> bool {
        self.member.session.is_some()
    }

    fn remains(&self) -> Remains {
        Remains {
            lineage: self.member.lineage(),
            user_keeps: self.keeps.user_keeps.clone(),
        }
    }

    fn disown(remains: &mut Remains) {
        remains.lineage = Lineage::default();
    }
}

impl Node {
    /// Returns the facts that were read, successfully or not; `None` if nothing was.
    pub fn facts(&self) -> Option<&Facts> {
        self.state.cached.facts()
    }

    /// Returns the facts in `wanted` that are unread.
    pub fn missing_facts(&self, wanted: FactSet) -> FactSet {
        self.state.cached.missing(wanted)
    }

    /// Returns whether the current program was started with `REAPER_KEEP=1`, as a probe reported: with its exec, or by
    /// inheritance at fork. Unread without such a report, and after an exec that was not reported.
    pub fn keep_marker(&self) -> Fact<bool> {
        self.state.cached.keep_marker
    }

    /// Returns the period without work; `None` if it was not read.
    pub(crate) fn idle(&self) -> Option<Idle> {
        self.state.cached.idle()
    }

    /// Returns since when standard input and output are hung up, in ns of `CLOCK_MONOTONIC`; `None` if they are not or
    /// were not read.
    pub(crate) fn hung_up_since(&self) -> Option<u64> {
        self.state.cached.hung_up_since()
    }

    /// Returns the request of a user that lasts longest, expired ones included; `None` if none exists.
    pub fn user_keep(&self) -> Option<&UserKeep> {
        self.state.keeps.user_keep()
    }

    /// Returns whether it is `sudo`, or `sudo` below its agent has executed it or an ancestor.
    pub(crate) fn is_by_sudo(&self) -> bool {
        self.state.member.is_by_sudo || *self.image.comm == *b"sudo"
    }

    /// Returns the lineage that its children inherit.
    pub(crate) fn lineage(&self) -> Lineage {
        self.state.member.lineage()
    }

    /// Returns whether its `comm` is that of a server or client of tmux, tmate, screen or zellij.
    pub(crate) fn is_multiplexer(&self) -> bool {
        let comm = &self.image.comm[..];
        let names: [&[u8]; 7] = [
            b"tmux",
            b"tmux: server",
            b"tmux: client",
            b"tmate",
            b"screen",
            b"SCREEN",
            b"zellij",
        ];
        names.contains(&comm)
    }
}
