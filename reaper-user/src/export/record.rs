//! Records of the event stream. The JSON keys of an event are its fields, in the order of their declaration.

mod description;
mod fields;

use std::sync::Arc;

use serde::Serialize;

use super::config_file::ConfigFile;
use super::encode;
use crate::reap::{ReapOutcome, SentSignal};
use description::other_session_id;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::{ExitStatus, ProcessKey, Provenance};
use reaper_model::leftover::Leftover;
use reaper_model::ruleset::SessionKind;

pub use description::{EvidenceRef, ProcessRef, SessionIdText, SessionRef};
pub use fields::{
    Adopter, Ancestor, DecisionNames, FreedMemory, KeepDuration, Lifecycle, Listener,
    NestedSummary, Resumed, ResumedRoot, Totals, WaitInfo,
};

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
        /// The first of the waiting processes.
        #[serde(skip)]
        first_waiting: Vec<ProcessRef>,
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
