//! One line of the stream before it is a line.

use std::sync::Arc;

use crate::reap::{ReapOutcome, SentSignal};
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::Model;
use reaper_model::Node;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey, Provenance, Uids};
use reaper_model::leftover::Leftover;
use reaper_model::ruleset::SessionKind;
use reaper_model::session::Session;

/// Something to tell, and when it happened (ns since boot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    pub time: u64,
    pub body: EventBody,
}

impl EventRecord {
    /// Whether it tells of what processes do, and not of what is decided and done about them.
    pub fn is_lifecycle(&self) -> bool {
        matches!(
            self.body,
            EventBody::Lifecycle { .. } | EventBody::Orphan { .. } | EventBody::Reparent { .. }
        )
    }

    /// Whether only the journal has it: the stream has each session closed once.
    pub fn is_journal_only(&self) -> bool {
        matches!(
            self.body,
            EventBody::SessionClose {
                is_repeat: true,
                ..
            }
        )
    }
}

/// A session by the names it has outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRef {
    pub agent: Arc<str>,
    /// The process that was its root first; the session's name is made of it.
    pub first_root: ProcessKey,
}

impl From<&Session> for SessionRef {
    fn from(session: &Session) -> Self {
        SessionRef {
            agent: Arc::clone(&session.agent),
            first_root: session.first_root,
        }
    }
}

/// A process as it was when something happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRef {
    pub key: ProcessKey,
    pub parent: Option<ProcessKey>,
    pub birth_parent: Option<ProcessKey>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub session: Option<SessionRef>,
    pub provenance: Provenance,
    /// What makes it a member, where that is concluded.
    pub evidence: Option<EvidenceRef>,
}

impl ProcessRef {
    pub fn new(model: &Model, node: &Node) -> ProcessRef {
        let session = node
            .state
            .member
            .session
            .and_then(|id| model.sessions.find(id))
            .map(SessionRef::from);
        ProcessRef {
            key: node.key,
            parent: node.parent,
            birth_parent: node.birth_parent,
            image: Arc::clone(&node.image),
            uids: node.uids,
            session,
            provenance: node.provenance,
            evidence: EvidenceRef::from_node(model, node),
        }
    }
}

/// What makes a process a member, where that is concluded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvidenceRef {
    /// `process_group`, `kernel_session`, `cgroup`, `marker` or `cwd`.
    pub evidence: &'static str,
    /// The variable of its environment that says so.
    pub variable: Option<&'static str>,
    /// The agent's directory, in which or below which it works.
    pub directory: Option<String>,
}

impl EvidenceRef {
    pub fn from_node(model: &Model, node: &Node) -> Option<EvidenceRef> {
        let (evidence, directory) = model.sessions.evidence(node)?;
        Some(EvidenceRef {
            evidence: evidence.name(),
            variable: evidence.variable(),
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
        })
    }
}

/// What happens to every process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lifecycle {
    Fork,
    Exec,
    /// It is in another cgroup.
    Move,
    Exit {
        exit_status: ExitStatus,
        peak_rss: u64,
    },
}

/// Memory that was given back: what processes had right after their first signal, added up once the end
/// of each is confirmed. A zombie has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreedMemory {
    /// Bytes that were resident; pages that several of them shared count for each.
    pub rss: u64,
    /// Bytes that were swapped out.
    pub swap: u64,
    /// Ended ones of which there was no reading: they were too quick, or it was not this service that
    /// signalled them.
    pub unmeasured: u64,
}

impl FreedMemory {
    /// Counts one that has ended.
    pub fn add(&mut self, memory: Option<ProcessMemory>) {
        match memory {
            Some(ProcessMemory { rss, swap }) => {
                self.rss = self.rss.saturating_add(rss);
                self.swap = self.swap.saturating_add(swap);
            }
            None => self.unmeasured += 1,
        }
    }
}

impl From<ProcessMemory> for FreedMemory {
    fn from(memory: ProcessMemory) -> FreedMemory {
        let mut given_back = FreedMemory::default();
        given_back.add(Some(memory));
        given_back
    }
}

/// What is left of a nested session when the one that it is nested in is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NestedSummary {
    pub session: SessionRef,
    /// Members that are kept.
    pub kept: u32,
    /// Members that wait for a rule's delay.
    pub waiting: u32,
}

/// How often things happened; the last line of the stream tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub sessions: u64,
    pub reaped: u64,
    /// Processes that are kept though their agent is gone, at that time.
    pub kept: u64,
    pub failed: u64,
    pub signals: u64,
    pub events: u64,
    pub lost: u64,
    /// Of those reaped.
    pub memory: FreedMemory,
}

/// What was found of the service before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Sessions that it had open.
    pub sessions: usize,
    /// Bytes that were waiting in the ring.
    pub backlog: u64,
    /// Records that found no room in the ring while nobody read it.
    pub lost: u64,
}

/// The parts of a decision that are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionNames {
    pub verdict: &'static str,
    pub reason: &'static str,
    pub rule: Option<Arc<str>>,
    /// Of the whole tree, where a rule decides about the root of a session that lives.
    pub memory: Option<TreeMemory>,
}

/// For how long, and with whom, a process is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepDuration {
    /// In ns since boot; `None`: until it ends.
    pub until: Option<u64>,
    /// With all that descends from it.
    pub tree: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventBody {
    Ready {
        mode: &'static str,
        /// Why the service only observes, whatever the config says.
        mode_reason: Option<String>,
        source: &'static str,
        /// The better sources that could not be used.
        rejected_sources: Vec<RejectedSource>,
        processes: usize,
        scope: Vec<String>,
        /// What was taken up from the service before, if there was one.
        resumed: Option<Resumed>,
        /// Directory of the pins; without them tracking ends with this process.
        pin_dir: Option<String>,
        /// Whether the probes send the first signal where they can.
        kernel_reap: bool,
        /// In bytes; `None` where the source has none.
        ring_size: Option<u64>,
    },
    Lifecycle {
        what: Lifecycle,
        process: ProcessRef,
        provenance: Provenance,
    },
    Orphan {
        process: ProcessRef,
        old_parent: Option<ProcessKey>,
        parent_command: Vec<u8>,
    },
    Reparent {
        process: ProcessRef,
        old_parent: Option<ProcessKey>,
        /// Empty if it is not known any more.
        old_parent_comm: Vec<u8>,
        adopter: Option<ProcessKey>,
        adopter_comm: Vec<u8>,
        /// Whether it has no adopter because the init of its PID namespace has exited.
        namespace_ending: bool,
        provenance: Provenance,
    },
    SessionOpen {
        process: ProcessRef,
        kind: SessionKind,
        rule: Arc<str>,
        /// The session that it is nested in.
        outer: Option<SessionRef>,
        /// The session of the process that started the root, where it is not nested in that.
        starter: Option<SessionRef>,
    },
    /// All that had gathered since the service before is read, decided about and, where it was due, signalled.
    CaughtUp {
        records: u64,
        /// In ns, since this service began to take it up.
        duration: u64,
    },
    /// Taken up from the service before.
    SessionResume {
        session: SessionRef,
        root: ProcessKey,
        /// The root, if it lives.
        process: Option<ProcessRef>,
        members: usize,
        root_exited: bool,
    },
    SessionRootExit {
        session: SessionRef,
        kind: SessionKind,
        root: ProcessKey,
        exit_status: ExitStatus,
        members: usize,
    },
    SessionRelaunch {
        session: SessionRef,
        process: ProcessRef,
        old_root: ProcessKey,
    },
    SessionClose {
        session: SessionRef,
        /// Whether it was reported closed before, with other counts.
        is_repeat: bool,
        reaped: u32,
        /// Members that live and are kept.
        kept: u32,
        /// Why, each reason once.
        kept_reasons: Vec<&'static str>,
        /// Sessions nested in it that have living members.
        nested: Vec<NestedSummary>,
        failed: u32,
        memory: FreedMemory,
        /// Records that were lost while it was open: there may be members nobody knows of.
        lost_before: u64,
    },
    Boundary {
        process: ProcessRef,
        session: Option<SessionRef>,
        rule: Arc<str>,
    },
    Decision {
        process: ProcessRef,
        decision: DecisionNames,
    },
    /// A leftover of an agent that nobody watched, which is to be reaped or reported.
    Leftover {
        process: ProcessRef,
        leftover: Leftover,
    },
    /// The config was read anew: it is in force as far as `message` says, or it is not and nothing has changed.
    ConfigReload {
        done: bool,
        message: String,
    },
    /// A user has asked for a process to be kept, or has taken that back.
    Keep {
        process: ProcessRef,
        /// Uid of who has asked.
        by: u32,
        /// `None`: no longer.
        kept: Option<KeepDuration>,
        /// How many it is about, itself included.
        processes: usize,
    },
    Signal {
        process: ProcessRef,
        sent: SentSignal,
    },
    Outcome {
        process: ProcessRef,
        outcome: ReapOutcome,
        signal: Option<&'static str>,
        duration: Option<u64>,
        /// What it had right after its first signal; of one that has ended.
        memory: Option<ProcessMemory>,
    },
    /// From here on events may be missing: nothing new is decided in what they may touch.
    GapOpen {
        /// `records_lost`, `record_malformed`, `member_map_full`, `probes_missed`, `source_failed` or `restart`.
        reason: &'static str,
        /// Where events come from now.
        source: &'static str,
        /// Records that are missing; of `member_map_full` processes.
        total: u64,
        by_kind: [(&'static str, u64); reaper_common::RecordKind::ALL.len()],
    },
    /// What was missing has been found by other means.
    GapClose {
        reason: &'static str,
        total: u64,
        /// Processes that nobody had told of.
        processes_recovered: u64,
        /// Ends that nobody had told of.
        exits_recovered: u64,
        /// In ns, since it was opened.
        duration: u64,
    },
    /// Processes that found no room in the kernel's map of members: they are followed only while this
    /// service runs.
    MemberMapFull {
        count: u64,
        /// How many the map has room for.
        capacity: u32,
    },
    /// Records that were left out, because they could not be written fast enough.
    Dropped {
        /// `stream` or `journal`.
        by: &'static str,
        count: u64,
    },
    Malformed {
        count: u64,
        reason: String,
    },
    Summary {
        count: Totals,
        reason: &'static str,
        /// Directory of the pins that were left at work.
        pin_dir: Option<String>,
    },
}
