//! One line of the stream before it is a line. In JSON the keys of an event are its fields, in the order in which they stand here.

use std::fmt::{self, Display};
use std::sync::Arc;

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::clock::{EntityId, wall_time};
use super::encode;
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

/// A session's name outside: its agent, and pid and start of the process that was its root first.
pub struct SessionIdText<'a>(pub &'a SessionRef);

impl Display for SessionIdText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionRef { agent, first_root } = self.0;
        write!(f, "{agent}-{}-{:x}", first_root.pid, first_root.start)
    }
}

impl Serialize for SessionIdText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for SessionRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("session_id", &SessionIdText(self))?;
        map.serialize_entry("agent", &self.agent)?;
        map.end()
    }
}

/// Writes only the name of a session.
fn session_id<S: Serializer>(session: &SessionRef, serializer: S) -> Result<S::Ok, S::Error> {
    SessionIdText(session).serialize(serializer)
}

/// Writes only the name of a session, if there is one.
fn other_session_id<S: Serializer>(
    session: &Option<SessionRef>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    session.as_ref().map(SessionIdText).serialize(serializer)
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

impl Serialize for ProcessRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (key, image) = (self.key, &self.image);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("entity_id", &EntityId(key))?;
        map.serialize_entry("process.pid", &key.pid)?;
        if let Some(parent) = self.parent {
            map.serialize_entry("process.parent_pid", &parent.pid)?;
            map.serialize_entry("parent_id", &EntityId(parent))?;
        }
        if let Some(birth_parent) = self.birth_parent {
            map.serialize_entry("birth_parent_id", &EntityId(birth_parent))?;
        }
        map.serialize_entry("process.creation.time", &wall_time(key.start))?;
        map.serialize_entry("process.start_ns", &key.start)?;
        map.serialize_entry("process.comm", &String::from_utf8_lossy(&image.comm))?;
        if !image.exe.is_empty() {
            let exe = String::from_utf8_lossy(&image.exe);
            map.serialize_entry("process.executable.path", &exe)?;
        }
        let args = encode::command_args(image);
        map.serialize_entry("process.args_count", &args.len())?;
        map.serialize_entry("process.command_args", &args)?;
        map.serialize_entry("truncated", &image.truncated)?;
        if image.cgroup_id != 0 {
            map.serialize_entry("process.linux.cgroup_id", &image.cgroup_id)?;
        }
        map.serialize_entry("process.user.id", &self.uids.effective)?;
        map.serialize_entry("process.real_user.id", &self.uids.real)?;
        if let Some(session) = &self.session {
            map.serialize_entry("session_id", &SessionIdText(session))?;
            map.serialize_entry("agent", &session.agent)?;
        }
        if let Some(by) = &self.evidence {
            map.serialize_entry("evidence", by.evidence)?;
            if let Some(variable) = by.variable {
                map.serialize_entry("evidence_variable", variable)?;
            }
            if let Some(directory) = &by.directory {
                map.serialize_entry("evidence_directory", directory)?;
            }
        }
        map.end()
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Lifecycle {
    Fork,
    Exec,
    /// It is in another cgroup.
    Move,
    Exit {
        #[serde(flatten, serialize_with = "encode::exit_status")]
        exit_status: ExitStatus,
        #[serde(rename = "process.memory.peak_rss")]
        peak_rss: u64,
    },
}

/// Memory that was given back: what processes had right after their first signal, added up once the end
/// of each is confirmed. A zombie has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreedMemory {
    /// Bytes that were resident; pages that several of them shared count for each.
    #[serde(rename = "memory.rss")]
    pub rss: u64,
    /// Bytes that were swapped out.
    #[serde(rename = "memory.swap")]
    pub swap: u64,
    /// Ended ones of which there was no reading: they were too quick, or it was not this service that
    /// signalled them.
    #[serde(rename = "memory.unmeasured")]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NestedSummary {
    #[serde(rename = "session_id", serialize_with = "session_id")]
    pub session: SessionRef,
    /// Pid of its first root.
    pub root_pid: u32,
    /// Members that are kept.
    pub kept: u32,
    /// Members that wait for a rule's delay.
    pub waiting: u32,
}

/// How often things happened; the last line of the stream tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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
    #[serde(flatten)]
    pub memory: FreedMemory,
}

/// What was found of the service before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resumed {
    /// Sessions that it had open.
    #[serde(rename = "resumed_sessions")]
    pub sessions: usize,
    /// Bytes that were waiting in the ring.
    #[serde(rename = "backlog_bytes")]
    pub backlog: u64,
    /// Records that found no room in the ring while nobody read it.
    #[serde(rename = "lost_before")]
    pub lost: u64,
}

/// The parts of a decision that are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecisionNames {
    #[serde(rename = "decision")]
    pub verdict: &'static str,
    pub reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<Arc<str>>,
    /// Of the whole tree, where a rule decides about the root of a session that lives.
    #[serde(flatten)]
    pub memory: Option<TreeMemory>,
}

/// For how long, and with whom, a process is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KeepDuration {
    /// In ns since boot; `None`: until it ends.
    #[serde(
        serialize_with = "encode::time",
        skip_serializing_if = "Option::is_none"
    )]
    pub until: Option<u64>,
    /// With all that descends from it.
    pub tree: bool,
}

/// The process that adopts an orphan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Adopter {
    #[serde(flatten, serialize_with = "encode::adopter")]
    pub key: ProcessKey,
    #[serde(rename = "adopter_comm", serialize_with = "encode::lossy")]
    pub comm: Vec<u8>,
}

/// The root of a session that is resumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ResumedRoot {
    Alive(ProcessRef),
    Exited {
        #[serde(flatten)]
        session: SessionRef,
        #[serde(flatten, serialize_with = "encode::root")]
        key: ProcessKey,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum EventBody {
    Ready {
        mode: &'static str,
        /// Why the service only observes, whatever the config says.
        #[serde(skip_serializing_if = "Option::is_none")]
        mode_reason: Option<String>,
        source: &'static str,
        /// The better sources that could not be used.
        rejected_sources: Vec<RejectedSource>,
        processes: usize,
        scope: Vec<String>,
        version: &'static str,
        /// In bytes; `None` where the source has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        ring_size: Option<u64>,
        /// Whether the probes send the first signal where they can.
        kernel_reap: bool,
        /// Directory of the pins; without them tracking ends with this process.
        #[serde(skip_serializing_if = "Option::is_none")]
        pin_dir: Option<String>,
        /// What was taken up from the service before, if there was one.
        #[serde(flatten, serialize_with = "encode::resumed")]
        resumed: Option<Resumed>,
    },
    Lifecycle {
        #[serde(flatten)]
        process: ProcessRef,
        provenance: Provenance,
        #[serde(flatten)]
        what: Lifecycle,
    },
    Orphan {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten, serialize_with = "encode::old_parent")]
        old_parent: Option<ProcessKey>,
        #[serde(rename = "old_parent_comm", serialize_with = "encode::lossy")]
        parent_command: Vec<u8>,
    },
    Reparent {
        #[serde(flatten)]
        process: ProcessRef,
        provenance: Provenance,
        #[serde(flatten, serialize_with = "encode::old_parent")]
        old_parent: Option<ProcessKey>,
        /// Empty if it is not known any more.
        #[serde(skip)]
        old_parent_comm: Vec<u8>,
        #[serde(flatten)]
        adopter: Option<Adopter>,
        /// Whether it has no adopter because the init of its PID namespace has exited.
        #[serde(
            rename = "no_adopter_reason",
            serialize_with = "encode::namespace_ending",
            skip_serializing_if = "std::ops::Not::not"
        )]
        namespace_ending: bool,
    },
    SessionOpen {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(rename = "session_kind")]
        kind: SessionKind,
        rule: Arc<str>,
        /// The session that it is nested in.
        #[serde(
            rename = "outer_session_id",
            serialize_with = "other_session_id",
            skip_serializing_if = "Option::is_none"
        )]
        outer: Option<SessionRef>,
        /// The session of the process that started the root, where it is not nested in that.
        #[serde(
            rename = "starter_session_id",
            serialize_with = "other_session_id",
            skip_serializing_if = "Option::is_none"
        )]
        starter: Option<SessionRef>,
    },
    /// All that had gathered since the service before is read, decided about and, where it was due, signalled.
    CaughtUp {
        records: u64,
        /// In ns, since this service began to take it up.
        #[serde(rename = "duration_ns")]
        duration: u64,
    },
    /// Taken up from the service before.
    SessionResume {
        #[serde(skip)]
        session: SessionRef,
        #[serde(flatten)]
        root: ResumedRoot,
        members: usize,
        root_exited: bool,
    },
    SessionRootExit {
        #[serde(flatten)]
        session: SessionRef,
        #[serde(rename = "session_kind")]
        kind: SessionKind,
        #[serde(flatten, serialize_with = "encode::root")]
        root: ProcessKey,
        members: usize,
        #[serde(flatten, serialize_with = "encode::exit_status")]
        exit_status: ExitStatus,
    },
    SessionRelaunch {
        #[serde(skip)]
        session: SessionRef,
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(rename = "old_root_id", serialize_with = "encode::entity_id")]
        old_root: ProcessKey,
    },
    SessionClose {
        #[serde(flatten)]
        session: SessionRef,
        /// Whether it was reported closed before, with other counts.
        #[serde(skip)]
        is_repeat: bool,
        /// Records that were lost while it was open: there may be members nobody knows of.
        lost_before: u64,
        reaped: u32,
        /// Members that live and are kept.
        kept: u32,
        /// Why, each reason once.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        kept_reasons: Vec<&'static str>,
        /// Sessions nested in it that have living members.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        nested: Vec<NestedSummary>,
        failed: u32,
        #[serde(flatten)]
        memory: FreedMemory,
    },
    Boundary {
        #[serde(flatten)]
        process: ProcessRef,
        rule: Arc<str>,
        #[serde(
            rename = "left_session_id",
            serialize_with = "other_session_id",
            skip_serializing_if = "Option::is_none"
        )]
        session: Option<SessionRef>,
    },
    Decision {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten)]
        decision: DecisionNames,
    },
    /// A leftover of an agent that nobody watched, which is to be reaped or reported.
    Leftover {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten, serialize_with = "encode::leftover")]
        leftover: Leftover,
    },
    /// The config was read anew: it is in force as far as `message` says, or it is not and nothing has changed.
    ConfigReload {
        #[serde(rename = "result", serialize_with = "encode::reload_result")]
        done: bool,
        message: String,
    },
    /// A user has asked for a process to be kept, or has taken that back.
    Keep {
        #[serde(flatten)]
        process: ProcessRef,
        /// Uid of who has asked.
        #[serde(rename = "by_uid")]
        by: u32,
        /// `None`: no longer.
        #[serde(flatten)]
        kept: Option<KeepDuration>,
        /// How many it is about, itself included.
        processes: usize,
    },
    Signal {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten, serialize_with = "encode::sent_signal")]
        sent: SentSignal,
    },
    Outcome {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten, serialize_with = "encode::outcome")]
        outcome: ReapOutcome,
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<&'static str>,
        /// What it had right after its first signal; of one that has ended.
        #[serde(flatten)]
        memory: Option<ProcessMemory>,
        #[serde(rename = "duration_ns", skip_serializing_if = "Option::is_none")]
        duration: Option<u64>,
    },
    /// From here on events may be missing: nothing new is decided in what they may touch.
    GapOpen {
        /// `records_lost`, `record_malformed`, `member_map_full`, `probes_missed`, `source_failed` or `restart`.
        reason: &'static str,
        /// Where events come from now.
        source: &'static str,
        /// Records that are missing; of `member_map_full` processes.
        #[serde(rename = "lost")]
        total: u64,
        #[serde(flatten, serialize_with = "encode::lost")]
        by_kind: [(&'static str, u64); reaper_common::RecordKind::ALL.len()],
    },
    /// What was missing has been found by other means.
    GapClose {
        reason: &'static str,
        #[serde(rename = "lost")]
        total: u64,
        /// Processes that nobody had told of.
        processes_recovered: u64,
        /// Ends that nobody had told of.
        exits_recovered: u64,
        /// In ns, since it was opened.
        #[serde(rename = "duration_ns")]
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
        #[serde(rename = "dropped_by")]
        by: &'static str,
        count: u64,
    },
    Malformed {
        count: u64,
        reason: String,
    },
    Summary {
        reason: &'static str,
        #[serde(flatten)]
        count: Totals,
        /// Directory of the pins that were left at work.
        #[serde(skip_serializing_if = "Option::is_none")]
        pin_dir: Option<String>,
    },
}

impl EventBody {
    /// Name of what happened, as it stands under `event`.
    pub fn name(&self) -> &'static str {
        match self {
            EventBody::Ready { .. } => "ready",
            EventBody::Lifecycle { what, .. } => match what {
                Lifecycle::Fork => "fork",
                Lifecycle::Exec => "exec",
                Lifecycle::Move => "cgroup.migrate",
                Lifecycle::Exit { .. } => "exit",
            },
            EventBody::Orphan { .. } => "orphan",
            EventBody::Reparent { .. } => "reparent",
            EventBody::SessionOpen { .. } => "session.open",
            EventBody::CaughtUp { .. } => "caught_up",
            EventBody::SessionResume { .. } => "session.resume",
            EventBody::SessionRootExit { .. } => "session.root_exit",
            EventBody::SessionRelaunch { .. } => "session.relaunch",
            EventBody::SessionClose { .. } => "session.close",
            EventBody::Boundary { .. } => "boundary",
            EventBody::Decision { .. } => "decision",
            EventBody::Leftover { .. } => "leftover",
            EventBody::Keep { kept: Some(_), .. } => "keep",
            EventBody::Keep { kept: None, .. } => "unkeep",
            EventBody::ConfigReload { .. } => "config.reload",
            EventBody::Signal { .. } => "signal",
            EventBody::Outcome { .. } => "outcome",
            EventBody::GapOpen { .. } => "gap.open",
            EventBody::GapClose { .. } => "gap.close",
            EventBody::MemberMapFull { .. } => "member_map.full",
            EventBody::Dropped { .. } => "dropped",
            EventBody::Malformed { .. } => "malformed",
            EventBody::Summary { .. } => "summary",
        }
    }
}
