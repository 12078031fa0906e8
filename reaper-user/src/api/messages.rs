//! What the server asks the engine, and the copies of what it knows that the engine answers with.
//!
//! Nothing here is put into words: that takes time, and the engine has none.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::peer::{Peer, SignalTarget};
use super::{ErrorResponse, KeepDone, Status};
use crate::export::{EventRecord, EvidenceRef, SessionRef};
use crate::reap::Times;
use reaper_model::Scope;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Uids};
use reaper_model::facts::{FactSet, Facts};
use reaper_model::ruleset::{Action, Ruleset, SessionKind};

/// A question on its way to the engine. Nobody may wait for the answer any more.
#[derive(Debug)]
pub struct EngineRequest {
    pub peer: Peer,
    pub question: RequestKind,
    pub answer: oneshot::Sender<EngineReply>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Status,
    Tree {
        /// Only sessions of the agent of this name.
        agent: Option<String>,
        /// Also who is a member of none.
        all: bool,
    },
    Explain {
        pid: u32,
    },
    Agents,
    Keeps,
    Keep {
        target: SignalTarget,
        /// `None`: until it ends.
        lasts: Option<Duration>,
        tree: bool,
    },
    Unkeep {
        target: SignalTarget,
    },
    Scan {
        /// How old a tool's shell has to be that nobody watched.
        min_age: Option<Duration>,
        /// Carry it out.
        reap: bool,
    },
    /// What is known of who is watched: the server's own question, as the one below.
    Watched,
    /// Tell this, of what was done off the engine's thread, and count it.
    Emit(Vec<EventRecord>),
    /// Read the config anew.
    Reload,
}

#[derive(Debug)]
pub enum EngineReply {
    Status {
        /// But for what the time of day says.
        status: Box<Status>,
        /// When the service began to watch, in ns since boot.
        began: u64,
        /// Pids of the members that are seen.
        members: Vec<u32>,
    },
    Tree(TreeSnapshot),
    Explain(Box<ExplainSnapshot>),
    Agents(Vec<AgentSnapshot>),
    Keeps(Vec<KeepSnapshot>),
    Keep(KeepDone),
    /// Members.
    Scan(Vec<ProcessSnapshot>, Box<ScanContext>),
    Watched(Box<ScanContext>),
    Emitted,
    /// What is in force now, or why that stays which was.
    Reload(Result<String, String>),
    Refused(ErrorResponse),
}

/// By what the service goes, and who is its own: for a look at all others.
#[derive(Clone)]
pub struct ScanContext {
    /// All members of all sessions, whoever asks.
    pub members: Vec<ProcessKey>,
    pub rules: Ruleset,
    pub scope: Scope,
    /// Since when it watches, in ns since boot.
    pub started_ns: u64,
    /// Whether decisions are carried out.
    pub enforce: bool,
    pub times: Times,
    /// Events are missing, and nothing new is decided.
    pub gap: bool,
}

impl std::fmt::Debug for ScanContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ScanContext {
            members,
            started_ns: began,
            ..
        } = self;
        let mut debug = f.debug_struct("Watched");
        debug.field("members", members).field("began", began);
        debug.finish_non_exhaustive()
    }
}

/// A process.
#[derive(Clone, Debug)]
pub struct ProcessSnapshot {
    pub key: ProcessKey,
    pub parent: Option<ProcessKey>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub session: Option<SessionRef>,
    /// It is that session's root.
    pub root: bool,
    /// An orphan.
    pub orphan: bool,
    pub due: bool,
    pub boundary: Option<Arc<str>>,
    /// Of members.
    pub judged: Option<DecisionSnapshot>,
    /// What makes it one, where that is concluded.
    pub evidence: Option<EvidenceRef>,
}

/// A decision in the words of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionSnapshot {
    pub verdict: &'static str,
    pub reason: &'static str,
    pub rule: Option<Arc<str>>,
    /// On the monotonic clock, in ns.
    pub until: Option<u64>,
    /// What the rule does.
    pub action: Option<Action>,
    /// What has to be read before it can be said.
    pub needs: FactSet,
}

/// A session.
#[derive(Clone, Debug)]
pub struct SessionSnapshot {
    pub name: SessionRef,
    pub kind: SessionKind,
    pub root: ProcessKey,
    /// Nanoseconds since boot.
    pub opened: u64,
    pub members: usize,
    /// How many of them are kept though the root is gone.
    pub kept: usize,
    pub outer: Option<SessionRef>,
    /// When and how its root ended, if it has.
    pub gone: Option<(u64, ExitStatus)>,
}

/// A rule by which an agent or an agent's server is recognised.
#[derive(Clone, Debug)]
pub struct AgentSnapshot {
    pub name: Arc<str>,
    pub kind: SessionKind,
    /// What it asks for, in short: one text for each alternative.
    pub matches: Vec<String>,
    pub sessions: Vec<SessionSnapshot>,
}

/// Rows in no order.
#[derive(Clone, Debug, Default)]
pub struct TreeSnapshot {
    /// Outermost sessions first, each followed by those nested in it, with all their rows. `None` is no session.
    pub groups: Vec<(Option<SessionSnapshot>, Vec<ProcessSnapshot>)>,
}

/// A process that a user keeps.
#[derive(Clone, Debug)]
pub struct KeepSnapshot {
    pub row: ProcessSnapshot,
    pub by: u32,
    /// On the monotonic clock, in ns.
    pub until: Option<u64>,
    pub tree: bool,
}

/// All that there is to say of one process.
#[derive(Clone, Debug)]
pub struct ExplainSnapshot {
    pub row: ProcessSnapshot,
    /// The nearest first.
    pub lineage: Vec<Ancestor>,
    /// Where it is not who begot it.
    pub adopter: Option<ProcessName>,
    pub session: Option<SessionSnapshot>,
    /// Of the sessions that it is in, the outermost whose root is gone, and the first such end.
    pub due: Option<(SessionSnapshot, u64, ExitStatus)>,
    /// What would be decided if its agent, which lives, were ended by a signal.
    pub if_killed: Option<DecisionSnapshot>,
    /// The same, if its agent ended of its own accord with status 0.
    pub if_succeeded: Option<DecisionSnapshot>,
    /// Why it is nobody's, if it is.
    pub untracked_reason: Option<UntrackedReason>,
    pub facts: Facts,
    /// Whether decisions are carried out.
    pub enforce: bool,
    /// Why the service only observes, whatever the config says.
    pub mode_reason: Option<String>,
    /// How long before SIGKILL.
    pub grace: Duration,
    /// Events are missing, and nothing new is decided.
    pub gap: bool,
    /// It is older than the service, which looks for what agents left behind before.
    pub unwatched: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessName {
    pub pid: u32,
    pub comm: Vec<u8>,
}

/// One of those from whom a process descends.
#[derive(Clone, Debug)]
pub struct Ancestor {
    pub key: ProcessKey,
    /// `None` if it is not remembered.
    pub image: Option<Arc<Image>>,
    /// Who asks may see it.
    pub visible: bool,
    pub alive: bool,
    pub ended: Option<ExitStatus>,
    pub agent: Option<Arc<str>>,
    pub boundary: Option<Arc<str>>,
    pub adopter: Option<ProcessName>,
}

/// Why a process is a member of no session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UntrackedReason {
    OutOfScope,
    KernelThread,
    /// It is a boundary, by the rule of this name.
    Boundary(Arc<str>),
    /// It descends from this boundary.
    BelowBoundary(ProcessName, Arc<str>),
    /// It descends from no agent.
    NoAgent,
}
