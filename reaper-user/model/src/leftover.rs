//! Finds leftovers of agents in a process table: processes from before the service started, whose lineage is unknown.
//!
//! # Evidence
//! | evidence | names | the agent has exited if | other living agents that prevent a reap |
//! |---|---|---|---|
//! | marker with a pid (`CLAUDE_PID`, `OPENCODE_PID`) | one process | no process has the pid, or a younger one has it | its possible successors |
//! | recorded member of a session | its root: pid and start time | no process has both | its possible successors |
//! | id of a conversation (`CLAUDE_CODE_SESSION_ID`) | one conversation | never shown by this alone | one whose arguments name the id |
//! | command line of a Claude tool's shell | a kind of agent | no agent of that user is older than the shell | any that is older |
//! | other markers (`CLAUDECODE=1`) | a kind of agent | never shown: reported | - |
//!
//! Any script can set a variable. A marker with a pid needs another marker of the same agent beside it. A service that
//! acts on its own also needs a record that the pid was an agent of the same user before the process started. The
//! process must be an orphan. The shell of a tool must have a minimum age.
//!
//! A living agent other than the one that the evidence names prevents nothing, with these exceptions:
//! - A *possible successor*: an agent of the same kind and user in a terminal session that another process created, and
//!   that may be an orphan itself. Also the server to which Claude Code passes conversations.
//! - *The same marker*: a living agent of that user, or an ancestor of one under that user, has a variable with the
//!   same pid or conversation. A shell started inside an agent passes it on, so the marker proves nothing.
//! - An unreadable agent, or an unreadable ancestor of one, since it may have that marker. Programs that build a new
//!   environment for a login are excluded.
//!
//! A leftover is a whole tree: the outermost process with strong evidence, and all of its descendants. A reason to keep
//! one process of the tree keeps its descendants too.
//!
//! Weaker evidence is only reported: a marker without a pid, an agent that is alive or uncertain, and any ancestor of a
//! living agent. A process with the name of an agent counts as an agent, even without a rule. An unreadable process is
//! not assumed dead: it may be the agent, or have passed the marker on.
//!
//! The delay of a rule applies to the ancestors and descendants too. It runs from the scan that found the tree, because
//! the exit of the agent was not observed.
//!
//! # Orphans
//! The table has no birth parents. A child of init, of the init of a PID namespace or of a user's service manager
//! counts as adopted. It does not if that process has the child's marker. A process that the service manager started
//! as a unit is kept by [`KeepReason::OwnUnit`].
//!
//! Any other parent may have started the process with a variable of its choice. A batch system, for example, copies the
//! environment of a job's submitter. The child of such a parent counts as adopted only if the leader of the child's
//! kernel session has exited. That session must differ from the parent's, because a new process is in the session of
//! its parent.
//!
//! # Beside a running service
//! The service decides about its members and their descendants. It knows the lineage of processes that started since it
//! watches, so their markers are no evidence. A process reaped because of markers is therefore older than the service,
//! or descends from such a process.
//!
//! # Misleading markers
//! A terminal multiplexer that was started inside an agent passes its markers to all later panes. So do terminals,
//! editors, desktops and other programs that rules keep. While such a program is alive, nothing below it is a leftover.
//!
//! An orphan of such a pane is recognised by comparison: the multiplexer that its environment names, or the leader of
//! its kernel session, has the marker too. For a true leftover they do not. If any older program of this kind has the
//! same marker, the origin is unknown and the process is not reaped. The same holds for a program that cannot be
//! checked, such as the terminal of an editor.
//!
//! `sudo`, `su` and other programs that change the user pass on the environment of their caller. A process that may run
//! under another user than its agent is only reported.

mod judge;
#[cfg(test)]
mod tests;

use std::iter::successors;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Scope;
use super::event::{ProcEntry, ProcessKey};
use super::facts::Fact;
use super::ruleset::Ruleset;
pub use crate::env_marker::{ConversationDigest, EnvMarker, EnvMarkers, Multiplexer};
pub(crate) use judge::{is_login, is_terminal};

/// Process with the facts for this search.
#[derive(Clone, Debug)]
pub struct LeftoverRow {
    /// Process as read from /proc.
    pub entry: ProcEntry,
    /// Innermost systemd unit, as in [`Facts`](super::facts::Facts).
    pub unit: Fact<Arc<str>>,
    /// Markers in the environment of the last exec.
    pub env_markers: Fact<EnvMarkers>,
    /// Whether it has a listening socket, as in [`Facts`](super::facts::Facts); read only where it matters.
    pub listening: Fact<bool>,
    /// Whether it is connected to a display server; read only where it matters.
    pub window: Fact<bool>,
    /// Login user according to the kernel's audit; `None` if not set or unreadable.
    pub login_uid: Option<u32>,
    /// Whether it runs in a PID namespace below that of the service, with other pids.
    pub nested: bool,
    /// Pid in the innermost of these namespaces; `None` if it is not nested or the pid is unreadable.
    pub inner_pid: Option<u32>,
}

/// Process table.
#[derive(Clone, Debug, Default)]
pub struct ProcessTable {
    /// Living processes by pid.
    pub rows: HashMap<u32, LeftoverRow>,
    /// Pids of unreadable processes, with the effective uid if it is known.
    pub unread: HashMap<u32, Option<u32>>,
}

/// Session that a service recorded in the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSession {
    /// Name of the agent's rule.
    pub agent: Arc<str>,
    /// Last root.
    pub root: ProcessKey,
    /// Real uid of the first root; `None` if it is not to be compared.
    pub uid: Option<u32>,
    /// Members of the session.
    pub members: HashSet<ProcessKey>,
}

/// Parameters of a search.
pub struct LeftoverQuery<'a> {
    /// Rules in force.
    pub rules: &'a Ruleset,
    /// Sessions that a service recorded during this boot.
    pub recorded: &'a [RecordedSession],
    /// Pid of the calling program: it and its ancestors are never reaped.
    pub own_pid: u32,
    /// User whose processes are searched; `None` for all users.
    pub uid: Option<u32>,
    /// Scope of the search. Processes above it are ignored.
    pub scope: &'a Scope,
    /// Members of the sessions of a running service, by pid. They and their descendants are no leftovers.
    pub members: &'a HashMap<u32, ProcessKey>,
    /// Time since which a service watches, in ns since boot. Later processes have a known lineage.
    pub watched_since: Option<u64>,
    /// Processes that a user keeps.
    pub kept: &'a [ProcessKey],
    /// Minimum age of a tool's shell, in ns.
    pub min_age: u64,
    /// Current time, in ns since boot.
    pub now: u64,
    /// Whether `REAPER_KEEP=1` keeps a process.
    pub honor_keep: bool,
    /// Time for which trees are known as leftovers, in ns without suspends, by the topmost process of the tree. Rules
    /// compare their delays with it.
    pub waited: &'a HashMap<ProcessKey, u64>,
    /// Whether a user has seen the result and ordered the reap. Otherwise a marker counts only if its agent was the
    /// root of a recorded session.
    pub requested_by_user: bool,
}

/// Evidence that a process is a leftover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverEvidence {
    /// This variable names an agent that has exited.
    ExitedAgent {
        /// Name of the environment variable.
        variable: &'static str,
        /// Pid of the agent, as the variable gives it.
        pid: u32,
    },
    /// It runs the shell of a Claude tool.
    ToolShell,
    /// It was recorded as a member of the session with this root.
    Recorded {
        /// Pid of the last root; 0 if the process was forked while the same search ended the tree.
        root: u32,
    },
    /// This variable, which names no agent that could be checked.
    Marker {
        /// Name of the environment variable.
        variable: &'static str,
    },
}

/// Reason why the evidence is not sufficient. A number is the pid of the agent or process that is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncertainty {
    /// Its agent is alive, so the process is detached.
    OwnerAlive(u32),
    /// Whether its agent is alive is unknown.
    OwnerUncertain(u32),
    /// The marker names no agent, or stands alone.
    NoOwner,
    /// The marker names a pid that no process has, and no record says that it was an agent.
    OwnerUnknown(u32),
    /// A living agent of this kind may own it.
    AgentAlive(u32),
    /// This process is unreadable: it may be the agent, or have the marker.
    AgentUncertain(u32),
    /// This process has the same marker, and is a living agent or an ancestor of one.
    SharedMarker(u32),
    /// It may run under another user than its agent.
    ChangedUid,
    /// Its parent is alive and may have started it.
    NotOrphan,
    /// Its minimum age is not reached.
    Young,
    /// A multiplexer or a similar program may have passed the marker on.
    Multiplexed,
    /// It belongs to a kernel session whose leader, with this pid, has or may have the marker too.
    TerminalSession(u32),
    /// The rule of the recorded agent no longer exists, so a living agent cannot be recognised.
    AgentUnknown,
    /// It is an agent itself, or an ancestor of a living one.
    Agent,
}

/// Reason to keep a process despite the evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// The calling program or one of its ancestors.
    NeverSelf,
    /// `REAPER_KEEP=1` in its environment.
    KeepMarker,
    /// A user keeps it (`reaper keep`).
    KeptByUser,
    /// A rule with the action `keep` or `report` matches it.
    KeepRule,
    /// A rule keeps it because its uid differs from that of its ancestors.
    OtherUid,
    /// It is a boundary or a server, by a rule.
    Boundary,
    /// It is a terminal emulator.
    Terminal,
    /// It runs in its own systemd unit.
    OwnUnit,
    /// A fact that matters is unreadable.
    Unreadable,
}

/// Decision about a leftover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeftoverVerdict {
    /// Ended.
    Reap,
    /// Not touched, but reported.
    Report(Uncertainty),
    /// Reaped after the delay of a rule.
    Wait {
        /// Name of the rule with the delay.
        rule: Arc<str>,
        /// Remaining delay in ns, without suspends.
        remaining_ns: u64,
        /// Pid of the relative that the rule matches; `None` if it matches the process itself.
        relative: Option<u32>,
    },
    /// Kept despite the evidence.
    Keep {
        /// Reason to keep it.
        reason: KeepReason,
        /// Name of the rule or unit that is the reason.
        rule: Option<Arc<str>>,
        /// Pid of the ancestor, or of the descendant that needs it, that is kept for this reason; `None` if it is the
        /// process itself.
        relative: Option<u32>,
    },
}

/// Result for one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Process that the result is about.
    pub key: ProcessKey,
    /// Topmost process of its tree.
    pub subtree_root: ProcessKey,
    /// Name of the agent's rule.
    pub agent: Arc<str>,
    /// Evidence for the process or for the top of its tree.
    pub evidence: LeftoverEvidence,
    /// Decision about it.
    pub verdict: LeftoverVerdict,
}

impl LeftoverEvidence {
    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            LeftoverEvidence::ExitedAgent { .. } => "dead_agent",
            LeftoverEvidence::ToolShell => "tool_shell",
            LeftoverEvidence::Recorded { .. } => "recorded_session",
            LeftoverEvidence::Marker { .. } => "marker",
        }
    }

    /// Returns the environment variable that is the evidence.
    pub fn variable(self) -> Option<&'static str> {
        match self {
            LeftoverEvidence::ExitedAgent { variable, .. }
            | LeftoverEvidence::Marker { variable } => Some(variable),
            LeftoverEvidence::ToolShell | LeftoverEvidence::Recorded { .. } => None,
        }
    }

    /// Returns the pid of the agent that the evidence names; `None` if it names no single process.
    pub fn owner(self) -> Option<u32> {
        match self {
            LeftoverEvidence::ExitedAgent { pid, .. } => Some(pid),
            LeftoverEvidence::Recorded { root } => Some(root).filter(|root| *root > 0),
            LeftoverEvidence::ToolShell | LeftoverEvidence::Marker { .. } => None,
        }
    }
}

impl Uncertainty {
    /// Returns the name in JSON.
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
    /// Returns the name in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            LeftoverVerdict::Reap => "reap",
            LeftoverVerdict::Report(_) => "report",
            LeftoverVerdict::Wait { .. } => "wait",
            LeftoverVerdict::Keep { .. } => "keep",
        }
    }

    /// Returns the name of the rule or unit that is the reason; `None` if none exists.
    pub fn rule(&self) -> Option<&str> {
        match self {
            LeftoverVerdict::Reap | LeftoverVerdict::Report(_) => None,
            LeftoverVerdict::Wait { rule, .. } => Some(rule),
            LeftoverVerdict::Keep { rule, .. } => rule.as_deref(),
        }
    }
}

impl Leftover {
    /// Returns the name of the reason in JSON.
    pub fn reason(&self) -> &'static str {
        match &self.verdict {
            LeftoverVerdict::Reap => self.evidence.name(),
            LeftoverVerdict::Report(uncertainty) => uncertainty.name(),
            LeftoverVerdict::Wait { .. } => "rule_delay",
            LeftoverVerdict::Keep { reason, .. } => reason.name(),
        }
    }
}

impl KeepReason {
    /// Returns the name in JSON.
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

/// Grace of a process to reap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grace {
    /// Time between SIGTERM and SIGKILL that a rule gives its program, in ns; 0 for the general one.
    pub ns: u64,
    /// Nearest ancestor to reap whose program has a grace. Until its exit it may need the process to clean up.
    pub needed_by: Option<ProcessKey>,
}

/// Returns the graces of the processes in `reaped` that have one, or that an ancestor with one may need.
pub fn graces(
    table: &ProcessTable,
    rules: &Ruleset,
    reaped: &HashSet<ProcessKey>,
) -> HashMap<ProcessKey, Grace> {
    let row = |pid: u32| table.rows.get(&pid);
    let own = |key: &ProcessKey| {
        let image = &row(key.pid)?.entry.image;
        Some(rules.longest_grace(&rules.matching_member_rules(image))).filter(|grace| *grace > 0)
    };
    let own: HashMap<_, _> = reaped
        .iter()
        .filter_map(|key| Some((*key, own(key)?)))
        .collect();
    if own.is_empty() {
        return HashMap::new();
    }
    let parent = |of: &LeftoverRow| row(of.entry.parent);
    let needed_by = |key: &ProcessKey| {
        // A table that was read while pids were reused might contain a circle.
        let above =
            successors(row(key.pid).and_then(parent), |row| parent(row)).take(table.rows.len());
        above
            .map(|row| row.entry.key)
            .find(|above| own.contains_key(above))
    };
    let all = reaped.iter().map(|key| {
        let ns = own.get(key).copied().unwrap_or(0);
        (
            *key,
            Grace {
                ns,
                needed_by: needed_by(key),
            },
        )
    });
    all.filter(|(_, grace)| *grace != Grace::default())
        .collect()
}

/// Returns the result for each process with evidence: tree after tree, the oldest top first, and parents before their
/// children.
///
/// Leaves out processes outside of the user and scope of the query, members of a running service and what belongs to a
/// living agent. Kernel threads, inits, and the calling program with its ancestors are left out too.
pub fn find(table: &ProcessTable, query: &LeftoverQuery<'_>) -> Vec<Leftover> {
    judge::Judge::new(table, query).all()
}
