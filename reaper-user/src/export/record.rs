//! Records of the event stream. The JSON keys of an event are its fields, in the order of their declaration.

use std::fmt::{self, Display};
use std::sync::Arc;

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::clock::{EntityId, wall_time};
use super::config_file::ConfigFile;
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

/// A record of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// Time of the event in nanoseconds since boot.
    pub boot_ns: u64,
    pub body: EventBody,
}

impl EventRecord {
    /// Returns whether it reports what a process does, and not what the service decides or does.
    pub fn is_lifecycle(&self) -> bool {
        matches!(
            self.body,
            EventBody::Lifecycle { .. } | EventBody::Orphan { .. } | EventBody::Reparent { .. }
        )
    }

    /// Returns whether the record is only for the journal: the stream reports the close of a session once.
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

/// Public identity of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRef {
    pub agent: Arc<str>,
    /// First root of the session, which is part of its id.
    pub first_root: ProcessKey,
}

/// Public id of a session: agent, and pid and start time of the first root.
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

/// Writes only the id of a session.
fn session_id<S: Serializer>(session: &SessionRef, serializer: S) -> Result<S::Ok, S::Error> {
    SessionIdText(session).serialize(serializer)
}

/// Writes only the id of a session, if there is one.
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

/// State of a process at the time of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRef {
    pub key: ProcessKey,
    pub parent: Option<ProcessKey>,
    pub birth_parent: Option<ProcessKey>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub session: Option<SessionRef>,
    pub provenance: Provenance,
    /// Evidence that it is a member, if the membership was inferred.
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
        if let Some(evidence) = &self.evidence {
            map.serialize_entry("evidence", evidence.evidence)?;
            if let Some(variable) = evidence.variable {
                map.serialize_entry("evidence_variable", variable)?;
            }
            if let Some(directory) = &evidence.directory {
                map.serialize_entry("evidence_directory", directory)?;
            }
        }
        map.end()
    }
}

/// Evidence by which a process was inferred to be a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvidenceRef {
    /// Kind: `process_group`, `kernel_session`, `cgroup`, `marker` or `cwd`.
    pub evidence: &'static str,
    /// Environment variable of a `marker`.
    pub variable: Option<&'static str>,
    /// Directory of the agent that contains the process's `cwd`.
    pub directory: Option<String>,
}

impl EvidenceRef {
    /// Returns the evidence for a process. Returns `None` if it is no member, or if its membership was not inferred.
    pub fn from_node(model: &Model, node: &Node) -> Option<EvidenceRef> {
        let (evidence, directory) = model.sessions.evidence(node)?;
        Some(EvidenceRef {
            evidence: evidence.name(),
            variable: evidence.variable(),
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
        })
    }
}

/// Lifecycle events of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Lifecycle {
    Fork,
    Exec,
    /// Migration to another cgroup.
    Move,
    Exit {
        #[serde(flatten, serialize_with = "encode::exit_status")]
        exit_status: ExitStatus,
        #[serde(rename = "process.memory.peak_rss")]
        peak_rss: u64,
    },
}

/// Memory of ended processes, measured right after their first signal and added once the exit is confirmed.
///
/// A zombie has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreedMemory {
    /// Resident bytes. A page that several of the processes share counts for each.
    #[serde(rename = "memory.rss")]
    pub rss: u64,
    /// Bytes in swap.
    #[serde(rename = "memory.swap")]
    pub swap: u64,
    /// Number of processes without a measurement: they exited too early, or this service did not signal them.
    #[serde(rename = "memory.unmeasured")]
    pub unmeasured: u64,
}

impl FreedMemory {
    /// Adds the memory of an ended process; `None` counts it as unmeasured.
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
        let mut freed = FreedMemory::default();
        freed.add(Some(memory));
        freed
    }
}

/// A nested session that is still open when its outer session closes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NestedSummary {
    #[serde(rename = "session_id", serialize_with = "session_id")]
    pub session: SessionRef,
    /// Pid of its first root.
    pub root_pid: u32,
    /// Number of kept members.
    pub kept: u32,
    /// Number of members that wait for the delay of a rule.
    pub waiting: u32,
}

/// Totals of the service, in the last record of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Number of sessions opened.
    pub sessions: u64,
    /// Number of processes that have exited after a signal.
    pub reaped: u64,
    /// Number of processes that are kept now although their agent has exited.
    pub kept: u64,
    /// Number of processes that could not be ended.
    pub failed: u64,
    /// Number of processes that would have been reaped, in observe mode.
    pub would_have_reaped: u64,
    /// Number of signals sent, by the service and the probes.
    pub signals: u64,
    /// Number of events read from the source.
    pub events: u64,
    /// Number of events lost.
    pub lost: u64,
    /// Memory of the reaped processes.
    #[serde(flatten)]
    pub memory: FreedMemory,
}

/// State that was resumed from an earlier service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resumed {
    /// Number of open sessions.
    #[serde(rename = "resumed_sessions")]
    pub sessions: usize,
    /// Number of unread bytes in the ring buffer.
    #[serde(rename = "backlog_bytes")]
    pub backlog: u64,
    /// Number of records that were lost because the ring buffer was full.
    #[serde(rename = "lost_before")]
    pub lost: u64,
}

/// Names of the parts of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecisionNames {
    #[serde(rename = "decision")]
    pub verdict: &'static str,
    /// Mode of the service: with `observe`, nothing is signalled.
    pub mode: &'static str,
    pub reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<Arc<str>>,
    /// How long a process waits, and for what.
    #[serde(flatten)]
    pub wait: Option<WaitInfo>,
    /// Memory of the whole tree, if a rule decides about the living root of a session.
    #[serde(flatten)]
    pub memory: Option<TreeMemory>,
}

impl DecisionNames {
    /// Returns whether the process is reaped if the service does not only observe.
    pub fn would_reap(&self) -> bool {
        self.verdict == "reap" && self.mode == "observe"
    }
}

/// End of a wait, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitInfo {
    /// End in nanoseconds since boot.
    #[serde(serialize_with = "encode::boot_time")]
    pub until: u64,
    /// Conditions of the rule that make the process wait, such as `listening`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<&'static str>,
    /// Relative that listens, if the process waits with it.
    #[serde(flatten)]
    pub listener: Option<Listener>,
    /// Ports of the listening process. The writer of the stream reads them from /proc.
    #[serde(rename = "listening_ports", skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
}

/// Relative of a process that waits with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listener {
    #[serde(flatten, serialize_with = "encode::listener")]
    pub key: ProcessKey,
    #[serde(rename = "listener_comm", serialize_with = "encode::lossy")]
    pub comm: Vec<u8>,
    /// Whether it descends from the process that waits. Otherwise that descends from it.
    #[serde(skip)]
    pub is_below: bool,
}

/// Duration and extent of a keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KeepDuration {
    /// End in nanoseconds since boot; `None` if the process is kept until it exits.
    #[serde(
        serialize_with = "encode::time",
        skip_serializing_if = "Option::is_none"
    )]
    pub until: Option<u64>,
    /// Whether its descendants are kept too.
    pub tree: bool,
}

/// Process that adopts an orphan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Adopter {
    #[serde(flatten, serialize_with = "encode::adopter")]
    pub key: ProcessKey,
    #[serde(rename = "adopter_comm", serialize_with = "encode::lossy")]
    pub comm: Vec<u8>,
}

/// Root of a resumed session.
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

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Content of a record, by kind of event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum EventBody {
    Ready {
        mode: &'static str,
        /// Reason why the service only observes although the config says otherwise.
        #[serde(skip_serializing_if = "Option::is_none")]
        mode_reason: Option<String>,
        #[serde(flatten)]
        config: ConfigFile,
        /// Socket on which the service answers requests.
        #[serde(skip_serializing_if = "Option::is_none")]
        socket: Option<String>,
        /// Command that shows what the service watches.
        #[serde(skip_serializing_if = "Option::is_none")]
        next_command: Option<String>,
        source: &'static str,
        /// Higher-priority sources that cannot be used.
        rejected_sources: Vec<RejectedSource>,
        processes: usize,
        scope: Vec<String>,
        version: &'static str,
        /// Size of the ring buffer in bytes; `None` if the source has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        ring_size: Option<u64>,
        /// Whether the probes may send the first signal.
        kernel_reap: bool,
        /// Directory of the pins; without pins tracking ends with this process.
        #[serde(skip_serializing_if = "Option::is_none")]
        pin_dir: Option<String>,
        /// State that was resumed from an earlier service, if there was one.
        #[serde(flatten, serialize_with = "encode::resumed")]
        resumed: Option<Resumed>,
    },
    Lifecycle {
        #[serde(flatten)]
        process: ProcessRef,
        provenance: Provenance,
        #[serde(flatten)]
        event: Lifecycle,
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
        /// Name of the old parent; empty if unknown.
        #[serde(skip)]
        old_parent_comm: Vec<u8>,
        #[serde(flatten)]
        adopter: Option<Adopter>,
        /// Whether there is no adopter because the init of the PID namespace has exited.
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
        /// Session in which it is nested.
        #[serde(
            rename = "outer_session_id",
            serialize_with = "other_session_id",
            skip_serializing_if = "Option::is_none"
        )]
        outer: Option<SessionRef>,
        /// Session of the process that started the root, if the new session is not nested in it.
        #[serde(
            rename = "starter_session_id",
            serialize_with = "other_session_id",
            skip_serializing_if = "Option::is_none"
        )]
        starter: Option<SessionRef>,
    },
    /// The backlog of an earlier service is read and decided, and due members are signalled.
    CaughtUp {
        records: u64,
        /// Nanoseconds since the service began to read the backlog.
        #[serde(rename = "duration_ns")]
        duration: u64,
    },
    /// A session of an earlier service is resumed.
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
        /// Whether the close was reported before, with other counts.
        #[serde(skip)]
        is_repeat: bool,
        /// Number of records lost while the session was open. If there are any, members may be unknown.
        lost_before: u64,
        reaped: u32,
        /// Number of living members that are kept.
        kept: u32,
        /// Reasons why they are kept, each once.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        kept_reasons: Vec<&'static str>,
        /// Nested sessions that have living members.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        nested: Vec<NestedSummary>,
        failed: u32,
        /// Number of members that would have been reaped, in observe mode.
        #[serde(skip_serializing_if = "is_zero")]
        would_have_reaped: u32,
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
    /// A decision about a leftover.
    Leftover {
        #[serde(flatten)]
        process: ProcessRef,
        #[serde(flatten, serialize_with = "encode::leftover")]
        leftover: Leftover,
        /// Mode of the service: with `observe`, nothing is signalled.
        mode: &'static str,
    },
    /// The config was reloaded. `message` says what has changed, or why the config was rejected.
    ConfigReload {
        #[serde(rename = "result", serialize_with = "encode::reload_result")]
        applied: bool,
        message: String,
    },
    /// A user has requested a keep, or has removed it.
    Keep {
        #[serde(flatten)]
        process: ProcessRef,
        /// Uid of the user.
        #[serde(rename = "by_uid")]
        by: u32,
        /// Keep; `None` if it was removed.
        #[serde(flatten)]
        kept: Option<KeepDuration>,
        /// Number of affected processes, including this one.
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
        /// Memory right after the first signal, if the process has ended.
        #[serde(flatten)]
        memory: Option<ProcessMemory>,
        #[serde(rename = "duration_ns", skip_serializing_if = "Option::is_none")]
        duration: Option<u64>,
    },
    /// Events may be missing from now on. No new decisions are made about what they may affect.
    GapOpen {
        /// `records_lost`, `record_malformed`, `member_map_full`, `probes_missed`, `source_failed` or `restart`.
        reason: &'static str,
        /// Current source of events.
        source: &'static str,
        /// Number of lost records; for `member_map_full`, of processes.
        #[serde(rename = "lost")]
        total: u64,
        #[serde(flatten, serialize_with = "encode::lost")]
        by_kind: [(&'static str, u64); reaper_common::RecordKind::ALL.len()],
    },
    /// A reconciliation scan has recovered what was missing.
    GapClose {
        reason: &'static str,
        #[serde(rename = "lost")]
        total: u64,
        /// Number of processes that no event had reported.
        processes_recovered: u64,
        /// Number of exits that no event had reported.
        exits_recovered: u64,
        /// Nanoseconds since the gap was opened.
        #[serde(rename = "duration_ns")]
        duration: u64,
    },
    /// Processes exceed the capacity of the kernel map of members. They are tracked only while this service runs.
    MemberMapFull {
        count: u64,
        /// Capacity of the map.
        capacity: u32,
    },
    /// Records were dropped because they could not be written, or not fast enough.
    Dropped {
        /// `stream`, `journal`, or `file` for an output that could not be written.
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
        /// Directory of the pins, if the probes stay active.
        #[serde(skip_serializing_if = "Option::is_none")]
        pin_dir: Option<String>,
    },
}

impl EventBody {
    /// Returns the value of the key `event`.
    pub fn name(&self) -> &'static str {
        match self {
            EventBody::Ready { .. } => "ready",
            EventBody::Lifecycle { event, .. } => match event {
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
