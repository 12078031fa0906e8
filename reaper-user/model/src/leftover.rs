//! Who is a leftover of an agent, of a process table alone: what began before anybody watched has no lineage.
//!
//! # Evidence
//! | evidence | names | the agent is gone if | other living agents that keep the process |
//! |---|---|---|---|
//! | marker with a pid (`CLAUDE_PID`, `OPENCODE_PID`) | one process | no process has the pid, or one that began after the leftover | its possible successors |
//! | recorded member of a session | its root: pid and start time | no process has both | its possible successors |
//! | id of a conversation (`CLAUDE_CODE_SESSION_ID`) | one conversation | never shown by this alone | one whose arguments name the id |
//! | command line of a Claude tool's shell | a kind of agent | no agent of that user is older than the shell | any that is older |
//! | other markers (`CLAUDECODE=1`) | a kind of agent | never shown: reported | - |
//!
//! Any script can set a variable. A marker with a pid needs another marker of the same agent beside it. A service that
//! acts by itself also needs a record that the pid was an agent's, of the same user, before the process began. The
//! process must be an orphan, and a tool's shell must be old.
//!
//! A living agent that is not the one named keeps nothing, with these exceptions:
//! - A *possible successor*: an agent of the same kind and user in a terminal that another process began, and that may
//!   be an orphan itself; or the server to which Claude Code hands conversations.
//! - *The same marker*: a living agent of that user, or an ancestor of one under that user, has a variable with the
//!   same pid or conversation. A shell started inside an agent hands it on, so it proves nothing.
//! - An agent or an ancestor of one that cannot be read, since it may have that marker. Programs that build a new
//!   environment for a login are left out.
//!
//! All that descends from such a process is part of it, up to the outermost for which strong evidence speaks: what
//! keeps anybody on the way keeps all below. Everything weaker is reported: a mark without an owner, an owner that
//! lives, or one of whom cannot be told whether it does, and what a living agent descends from. What is called as
//! agents are counts for one, also where no rule knows it. Unknown is never dead: who cannot be read may be the agent,
//! or who has handed the mark on.
//!
//! A rule that gives time gives it to the whole line, from when a look has found that it is left behind: when its
//! agent ended nobody has seen.
//!
//! # Who is an orphan
//! The table has no birth parents. A child of init, of the init of a pid namespace or of a user's service manager
//! was adopted, unless that has started it as a unit of its own, which [`KeepReason::OwnUnit`] is for, or has the mark of
//! its child. Of any other parent that is not enough: a program may start another with a variable of its choice, as
//! a batch system does that hands on the environment of who has given it a job. It has adopted its child where that
//! belongs to a terminal session whose leader is gone: one is born into the session of one's parent.
//!
//! # What a service knows
//! Where a service watches, its members are its own to judge, with all that descends from them, and so is what began
//! since it watches: of that the lineage is known, and is not an agent's. Who is to be reaped by marks then is older
//! than the service, or descends from one who is.
//!
//! # Marks lie
//! A terminal multiplexer that was started inside of an agent hands its mark to every later pane, and so does a
//! terminal, an editor, a desktop or whatever else rules keep. Below one that lives nothing is a leftover. An orphan of such a pane is told by
//! comparing: the multiplexer that its environment names, or the leader of its session, has the mark too, where
//! those of a true leftover have not. Where any such place lives that has the same mark and is older, there is no
//! telling. One that cannot be asked any more speaks for the process, as does one that never could be: a terminal of
//! an editor, say.
//!
//! `sudo`, `su` and what else changes the user hand on the environment of who has called them: what may run under
//! another user than its agent is reported.

mod judge;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Scope;
use super::event::{ProcEntry, ProcessKey};
use super::facts::Fact;
use super::ruleset::Ruleset;
pub use crate::env_marker::{ConversationDigest, EnvMarker, EnvMarkers, Multiplexer};
pub(crate) use judge::{is_login, is_terminal};

/// A process, and what was read of it for this.
#[derive(Clone, Debug)]
pub struct LeftoverRow {
    pub entry: ProcEntry,
    /// As in [`Facts`](super::facts::Facts).
    pub unit: Fact<Arc<str>>,
    pub env_markers: Fact<EnvMarkers>,
    /// As in [`Facts`](super::facts::Facts); read only of those of whom it matters.
    pub listening: Fact<bool>,
    /// The user that has logged in, by the kernel's audit; `None` where nobody has, or it cannot be read.
    pub login_uid: Option<u32>,
    /// It runs in a pid namespace below this program's, where pids are others.
    pub nested: bool,
    /// Its pid in the innermost of these namespaces; `None` if it is not nested or that cannot be read.
    pub inner_pid: Option<u32>,
}

/// All processes.
#[derive(Clone, Debug, Default)]
pub struct ProcessTable {
    /// Those that live, by pid.
    pub rows: HashMap<u32, LeftoverRow>,
    /// Pids that are somebody's who could not be read, and under which effective uid that runs, as far as is known.
    pub unread: HashMap<u32, Option<u32>>,
}

/// A session that was written down while somebody watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSession {
    /// Name of the agent's rule.
    pub agent: Arc<str>,
    /// Its last root.
    pub root: ProcessKey,
    /// Real uid of its first root; `None`: whatever it was is right.
    pub uid: Option<u32>,
    /// Who belonged to it.
    pub members: HashSet<ProcessKey>,
}

/// What is asked of a table.
pub struct LeftoverQuery<'a> {
    pub rules: &'a Ruleset,
    /// Of this boot alone.
    pub recorded: &'a [RecordedSession],
    /// This program's: it and its ancestors are never reaped.
    pub own_pid: u32,
    /// Only processes of this user; `None`: of everybody.
    pub uid: Option<u32>,
    /// Only what is in it; above its processes nothing is looked at.
    pub scope: &'a Scope,
    /// By pid, the members of sessions that a service watches: no leftovers, nor is what descends from them.
    pub members: &'a HashMap<u32, ProcessKey>,
    /// Since when a service watches, in ns since boot: what began later is known by its lineage.
    pub watched_since: Option<u64>,
    /// Who is kept because a user wants it.
    pub kept: &'a [ProcessKey],
    /// How old a tool's shell has to be, in ns.
    pub min_age: u64,
    /// Ns since boot.
    pub now: u64,
    /// Whether `REAPER_KEEP=1` keeps.
    pub honor_keep: bool,
    /// For how long the trees of these heads are known to be left behind, in ns that the machine was awake.
    pub waited: &'a HashMap<ProcessKey, u64>,
    /// Somebody who has seen what is found has it ended: that the owner of a mark is gone is enough then. Else
    /// it has to be the root of a recorded session.
    pub by_order: bool,
}

/// What speaks for a process being a leftover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverEvidence {
    /// This variable names an agent that is gone.
    DeadOwner { variable: &'static str, pid: u32 },
    /// It runs the shell of a Claude tool.
    ToolShell,
    /// It was recorded as a member of the session with this root.
    Recorded { root: u32 },
    /// This variable, and nothing that could be checked.
    Mark { variable: &'static str },
}

/// Why that is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncertainty {
    /// Its agent lives: it is detached.
    OwnerAlive(u32),
    /// Whether its agent lives cannot be told.
    OwnerUncertain(u32),
    /// The mark names nobody, or stands alone.
    NoOwner,
    /// The mark names a pid that is nobody's, and no record tells that it was an agent's.
    OwnerUnknown(u32),
    /// An agent of this kind lives that may be its owner.
    AgentAlive(u32),
    /// This process cannot be read: it may be its agent, or carry its marker.
    AgentUncertain(u32),
    /// This process carries the same marker, and is a living agent or an ancestor of one.
    SharedMarker(u32),
    /// It may run under another user than its agent.
    ChangedUid,
    /// Its parent lives, or cannot be told to have adopted it.
    NotOrphan,
    /// Not old enough.
    Young,
    /// A multiplexer, or what else people start processes from, may have handed the mark on.
    Multiplexed,
    /// It belongs to a terminal whose shell has the mark too.
    TerminalSession(u32),
    /// No rule is there any more for the agent that was recorded, and so none tells whether it lives.
    AgentUnknown,
    /// It is an agent itself, or one that lives is below it.
    Agent,
}

/// Why a process is kept, whatever speaks against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// This program, or one of its ancestors.
    NeverSelf,
    /// `REAPER_KEEP=1` in its environment.
    KeepMarker,
    /// `reaper keep`
    KeptByUser,
    KeepRule,
    OtherUid,
    /// A rule says that membership stops here.
    Boundary,
    /// A terminal.
    Terminal,
    /// It runs in a unit of systemd that is its own.
    OwnUnit,
    /// What would have to be known cannot be read.
    Unreadable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeftoverVerdict {
    Reap,
    /// Left alone, and worth a look.
    Report(Uncertainty),
    /// To be reaped, and not yet.
    Wait {
        /// Name of the rule that gives it time.
        rule: Arc<str>,
        /// Ns until that is over, awake.
        rest: u64,
        /// Pid of the process above or below it that the rule is about; `None`: it is itself.
        kin: Option<u32>,
    },
    Keep {
        spare: KeepReason,
        /// Name of the rule that says so.
        rule: Option<Arc<str>>,
        /// Pid of the process above it, or of one below that needs it, that this holds for; `None`: it holds for
        /// itself.
        kin: Option<u32>,
    },
}

/// What is to be said of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    pub key: ProcessKey,
    /// The topmost process of what it is a part of.
    pub subtree_root: ProcessKey,
    /// Name of the agent's rule.
    pub agent: Arc<str>,
    /// Its own, or that of its head.
    pub evidence: LeftoverEvidence,
    pub verdict: LeftoverVerdict,
}

impl LeftoverEvidence {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            LeftoverEvidence::DeadOwner { .. } => "dead_agent",
            LeftoverEvidence::ToolShell => "tool_shell",
            LeftoverEvidence::Recorded { .. } => "recorded_session",
            LeftoverEvidence::Mark { .. } => "marker",
        }
    }

    /// The variable of the environment that says so.
    pub fn variable(self) -> Option<&'static str> {
        match self {
            LeftoverEvidence::DeadOwner { variable, .. } | LeftoverEvidence::Mark { variable } => {
                Some(variable)
            }
            LeftoverEvidence::ToolShell | LeftoverEvidence::Recorded { .. } => None,
        }
    }

    /// Pid of the agent that it names, or that was recorded.
    pub fn owner(self) -> Option<u32> {
        match self {
            LeftoverEvidence::DeadOwner { pid, .. } => Some(pid),
            LeftoverEvidence::Recorded { root } => Some(root).filter(|root| *root > 0),
            LeftoverEvidence::ToolShell | LeftoverEvidence::Mark { .. } => None,
        }
    }
}

impl Uncertainty {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Uncertainty::OwnerAlive(_) => "owner_alive",
            Uncertainty::OwnerUncertain(_) => "owner_uncertain",
            Uncertainty::NoOwner => "no_owner",
            Uncertainty::OwnerUnknown(_) => "owner_unknown",
            Uncertainty::AgentAlive(_) => "agent_alive",
            Uncertainty::AgentUncertain(_) => "agent_uncertain",
            Uncertainty::SharedMarker(_) => "shared_marker",
            Uncertainty::AgentUnknown => "agent_unknown",
            Uncertainty::ChangedUid => "changed_uid",
            Uncertainty::NotOrphan => "not_orphan",
            Uncertainty::Young => "young",
            Uncertainty::Multiplexed => "multiplexed",
            Uncertainty::TerminalSession(_) => "terminal_session",
            Uncertainty::Agent => "agent",
        }
    }
}

impl LeftoverVerdict {
    /// The name in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            LeftoverVerdict::Reap => "reap",
            LeftoverVerdict::Report(_) => "report",
            LeftoverVerdict::Wait { .. } => "wait",
            LeftoverVerdict::Keep { .. } => "keep",
        }
    }

    /// Name of the rule that says so.
    pub fn rule(&self) -> Option<&str> {
        match self {
            LeftoverVerdict::Reap | LeftoverVerdict::Report(_) => None,
            LeftoverVerdict::Wait { rule, .. } => Some(rule),
            LeftoverVerdict::Keep { rule, .. } => rule.as_deref(),
        }
    }
}

impl Leftover {
    /// Name in JSON of what its verdict rests on.
    pub fn reason(&self) -> &'static str {
        match &self.verdict {
            LeftoverVerdict::Reap => self.evidence.name(),
            LeftoverVerdict::Report(doubt) => doubt.name(),
            LeftoverVerdict::Wait { .. } => "rule_delay",
            LeftoverVerdict::Keep { spare, .. } => spare.name(),
        }
    }
}

impl KeepReason {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            KeepReason::NeverSelf => "never_self",
            KeepReason::KeepMarker => "keep_marker",
            KeepReason::KeptByUser => "kept_by_user",
            KeepReason::KeepRule => "keep_rule",
            KeepReason::OtherUid => "other_uid",
            KeepReason::Boundary => "boundary",
            KeepReason::Terminal => "terminal",
            KeepReason::OwnUnit => "own_unit",
            KeepReason::Unreadable => "unreadable",
        }
    }
}

/// All processes for whose being leftovers something speaks, parents before their children.
pub fn find(table: &ProcessTable, question: &LeftoverQuery<'_>) -> Vec<Leftover> {
    judge::Judge::new(table, question).all()
}
