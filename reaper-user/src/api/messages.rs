//! Messages between the API server and the engine.
//!
//! Replies are plain copies of the engine's state. The server turns them into text, because the engine must not lose
//! time with that.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::peer::{Peer, SignalTarget};
use super::{Finding, KeepResult, ProblemDetails, Status};
use crate::config::Config;
use crate::export::{EventRecord, EvidenceRef, RecentProcess, RecentSession, SessionRef};
use crate::reap::Times;
use reaper_model::Scope;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Uids};
use reaper_model::facts::{FactSet, Facts};
use reaper_model::ruleset::{Action, Rule, Ruleset, SessionKind};

/// Request to the engine. The client may have given up on the reply.
#[derive(Debug)]
pub struct EngineRequest {
    pub peer: Peer,
    pub kind: RequestKind,
    pub reply: oneshot::Sender<EngineReply>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Status,
    Tree {
        /// Only sessions of the agent of this name.
        agent: Option<String>,
        /// Whether to include processes without a session.
        all: bool,
    },
    Explain {
        pid: u32,
    },
    /// As `Explain`, with facts about its sockets. The server reads them, because the engine would read them only once
    /// the process is due.
    ExplainWith {
        key: ProcessKey,
        sockets: Box<Facts>,
        /// Time of the reading (ns since boot).
        at: u64,
    },
    Agents,
    /// Tests the rules against a process. Only the server reads the process.
    TestRules {
        pid: u32,
    },
    Keeps,
    Keep {
        target: SignalTarget,
        /// `None`: until the process exits.
        lasts: Option<Duration>,
        tree: bool,
    },
    Unkeep {
        target: SignalTarget,
    },
    Scan {
        /// Minimum age of an orphaned tool shell to count as a leftover.
        min_age: Option<Duration>,
        /// Whether to reap what is found.
        reap: bool,
    },
    /// Returns the context for a scan of untracked processes. Made by the server, as is `Emit`.
    ScanContext,
    /// Emits and counts records of leftovers that were reaped on another thread.
    Emit(Vec<EventRecord>),
    /// Returns the config in force.
    Config,
    /// Rereads the config file.
    Reload,
}

#[derive(Debug)]
pub enum EngineReply {
    Status {
        /// All but the start time and the number of zombies, which the server adds.
        status: Box<Status>,
        /// Time when the service started to watch (ns since boot).
        began: u64,
        /// Pids of the members that the user may see.
        members: Vec<u32>,
        /// Refusal of the config at the last reload.
        refused: Option<RefusedReload>,
    },
    Tree(TreeSnapshot),
    Explain(Box<ExplainSnapshot>),
    /// Answer to a request to explain a process that has exited.
    ExplainExited(Box<ExitedSnapshot>),
    Agents(Vec<AgentSnapshot>),
    /// Process to test and the requesting user, with the rules in force.
    TestRules(u32, Peer, Arc<[Rule]>),
    Keeps(Vec<KeepSnapshot>),
    Keep(KeepResult),
    /// Result for a process that is no longer kept, and its state before anything is signalled. `None` if it has exited.
    Unkeep(KeepResult, Option<Box<ExplainSnapshot>>),
    /// Members, and the context for a scan of untracked processes.
    Scan(Vec<ProcessSnapshot>, Box<ScanContext>),
    ScanContext(Box<ScanContext>),
    Emitted,
    Config(Box<Config>),
    /// Summary of the new config, or why the old config stays.
    Reload(Result<String, String>),
    Refused(ProblemDetails),
}

/// Refusal of the config at a reload.
#[derive(Clone, Debug)]
pub struct RefusedReload {
    /// Time of the first refusal since a config was applied (ns since boot).
    pub since: u64,
    /// Why the last reload was refused, one line per problem. Empty for users who may not see the config.
    pub error: String,
}

/// State of the engine that a scan of untracked processes needs.
#[derive(Clone)]
pub struct ScanContext {
    /// Members of all sessions, whatever the user may see.
    pub members: Vec<ProcessKey>,
    pub rules: Ruleset,
    pub scope: Scope,
    /// Time when the service started to watch (ns since boot).
    pub started_ns: u64,
    /// Whether the service sends signals.
    pub enforce: bool,
    pub times: Times,
    /// Whether events are missing, so that nothing new is decided.
    pub gap: bool,
}

impl std::fmt::Debug for ScanContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ScanContext {
            members,
            started_ns: began,
            ..
        } = self;
        let mut debug = f.debug_struct("ScanContext");
        debug.field("members", members).field("began", began);
        debug.finish_non_exhaustive()
    }
}

/// Copy of a process.
#[derive(Clone, Debug)]
pub struct ProcessSnapshot {
    pub key: ProcessKey,
    pub parent: Option<ProcessKey>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub session: Option<SessionRef>,
    /// Whether it is the root of that session.
    pub root: bool,
    /// Whether its parent has exited.
    pub orphan: bool,
    /// Whether it is a member whose agent has exited.
    pub due: bool,
    /// Rule that makes it a boundary.
    pub boundary: Option<Arc<str>>,
    /// Decision about a member.
    pub decision: Option<DecisionSnapshot>,
    /// Evidence that made a late-discovered process a member.
    pub evidence: Option<EvidenceRef>,
}

/// Decision in the terms of the event stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionSnapshot {
    pub decision: &'static str,
    /// Mode of the service.
    pub mode: &'static str,
    pub reason: &'static str,
    pub rule: Option<Arc<str>>,
    /// End of the rule's delay (CLOCK_MONOTONIC, ns).
    pub until: Option<u64>,
    /// Action of the rule.
    pub action: Option<Action>,
    /// Facts that must be read before a decision is possible.
    pub needs: FactSet,
}

/// Copy of a session.
#[derive(Clone, Debug)]
pub struct SessionSnapshot {
    pub name: SessionRef,
    pub kind: SessionKind,
    pub root: ProcessKey,
    /// Time when it opened (ns since boot).
    pub opened: u64,
    pub members: usize,
    /// Number of members that are kept although the root has exited.
    pub kept: usize,
    pub outer: Option<SessionRef>,
    /// Exit time (ns since boot) and status of the root, if it has exited.
    pub root_exit: Option<(u64, ExitStatus)>,
    /// Rules that make members of any program wait after an exit of the root; empty after its exit.
    pub waits: Vec<WaitSnapshot>,
}

/// Rule that makes members wait.
#[derive(Clone, Debug)]
pub struct WaitSnapshot {
    pub rule: Arc<str>,
    /// Delay in ns, or the age up to which it waits.
    pub wait: u64,
    /// Whether members wait after an exit with status 0.
    pub after_status_0: bool,
    /// Whether members wait after a failure, a signal, or both.
    pub after_others: bool,
}

/// Rule that recognises an agent or an agent's server.
#[derive(Clone, Debug)]
pub struct AgentSnapshot {
    pub name: Arc<str>,
    pub kind: SessionKind,
    /// Conditions of the rule in short form, one text for each alternative.
    pub matches: Vec<String>,
    pub sessions: Vec<SessionSnapshot>,
}

/// Processes of a tree, in no order.
#[derive(Clone, Debug, Default)]
pub struct TreeSnapshot {
    /// Outermost sessions, each with its own rows and those of the sessions nested in it. `None`: processes without a
    /// session.
    pub groups: Vec<(Option<SessionSnapshot>, Vec<ProcessSnapshot>)>,
}

/// Process kept with `reaper keep`.
#[derive(Clone, Debug)]
pub struct KeepSnapshot {
    pub row: ProcessSnapshot,
    /// Uid of the user that keeps it.
    pub by: u32,
    /// End of the keep (CLOCK_MONOTONIC, ns); `None` if the process is kept until it exits.
    pub until: Option<u64>,
    pub tree: bool,
}

/// Data for `reaper explain`.
#[derive(Clone, Debug)]
pub struct ExplainSnapshot {
    pub row: ProcessSnapshot,
    /// Birth ancestors, the nearest first.
    pub lineage: Vec<Ancestor>,
    /// Current parent, if it is not the birth parent.
    pub adopter: Option<ProcessName>,
    pub session: Option<SessionSnapshot>,
    /// Outermost of its sessions whose root has exited, with the time (ns since boot) and status of the first such
    /// exit.
    pub exited_root: Option<(SessionSnapshot, u64, ExitStatus)>,
    /// Decision that would follow if its living agent were killed by a signal.
    pub if_killed: Option<DecisionSnapshot>,
    /// Decision that would follow if its living agent exited with status 0.
    pub if_succeeded: Option<DecisionSnapshot>,
    /// Reason why it is a member of no session.
    pub untracked_reason: Option<UntrackedReason>,
    /// Rules in force; empty unless no agent is recognised.
    pub rules: Arc<[Rule]>,
    pub facts: Facts,
    /// Whether the service sends signals.
    pub enforce: bool,
    /// Reason why the service only observes although the config says otherwise.
    pub mode_reason: Option<String>,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Whether events are missing, so that nothing new is decided.
    pub gap: bool,
    /// Whether it is older than the service and no scan has shown yet whether it is a leftover.
    pub predates_service: bool,
    /// Signal and outcome, if it was signalled.
    pub signalled: Option<RecentProcess>,
    /// Whether a process with `REAPER_KEEP=1` in its environment is kept.
    pub honors_keep: bool,
    /// Result of a scan for leftovers about it.
    pub leftover: Option<Finding>,
}

/// Data for `reaper explain` about a process that has exited, from the memory of the engine.
#[derive(Clone, Debug)]
pub struct ExitedSnapshot {
    pub recent: RecentProcess,
    pub session: RecentSession,
    /// Whether the service sends signals.
    pub enforce: bool,
    /// Whether a process with `REAPER_KEEP=1` in its environment is kept.
    pub honors_keep: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessName {
    pub pid: u32,
    pub comm: Vec<u8>,
}

/// Birth ancestor of a process.
#[derive(Clone, Debug)]
pub struct Ancestor {
    pub key: ProcessKey,
    /// `None` if the tree no longer has it.
    pub image: Option<Arc<Image>>,
    /// Whether the user may see it.
    pub visible: bool,
    pub alive: bool,
    pub exit_status: Option<ExitStatus>,
    pub agent: Option<Arc<str>>,
    pub boundary: Option<Arc<str>>,
    pub adopter: Option<ProcessName>,
}

/// Reason why a process is a member of no session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UntrackedReason {
    OutOfScope,
    /// It is never signalled, for this reason of a decision.
    Never(&'static str),
    /// It is a boundary by this rule.
    Boundary(Arc<str>),
    /// It descends from this boundary, which is one by this rule, and which itself descends from an agent.
    BelowBoundary(ProcessName, Arc<str>),
    /// None of its ancestors is an agent, as far as this boundary or, without one, at all.
    NoAgent(Option<ProcessName>),
}
