//! Values with several keys in records: decisions, memory, totals and others.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::description::{ProcessRef, SessionRef, session_id};
use crate::export::encode;
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::Tree;
use reaper_model::activity::TreeMemory;
use reaper_model::event::{ExitStatus, Image, ProcessKey};

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
    /// Birth ancestors up to its agent, nearest first. Not in the stream, whose fork and exit records have them.
    #[serde(skip)]
    pub ancestors: Arc<[Ancestor]>,
}

/// Birth ancestor of a process that is decided about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    pub key: ProcessKey,
    /// Last program. Shared with the tree: up to 65,536 decisions wait for a slow disk.
    pub image: Arc<Image>,
    /// Whether it had exited when the decision was made.
    pub has_exited: bool,
}

impl Ancestor {
    /// Returns the ancestors of a process with this birth parent, up to its agent; see [`Tree::member_ancestors`].
    pub fn all(tree: &Tree, birth_parent: Option<ProcessKey>) -> Arc<[Ancestor]> {
        let ancestors = tree.member_ancestors(birth_parent);
        let ancestors = ancestors.map(|(key, image, has_exited)| Ancestor {
            key,
            image: Arc::clone(image),
            has_exited,
        });
        ancestors.collect()
    }
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

/// Memory of ended processes, measured right after their first signal and added once the exit is confirmed.
///
/// A zombie has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Number of processes that wait now for the delay of a rule, or for the first decision after their agent's exit.
    pub waiting: u64,
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
