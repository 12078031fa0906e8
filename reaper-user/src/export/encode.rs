//! JSON of values that serde cannot derive: values with several keys, and types of other crates.

use std::borrow::Cow;

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::clock::{EntityId, wall_time};
use super::names::{SignalName, outcome_name, outcome_reason};
use super::redact;
use crate::reap::{ReapOutcome, SentSignal};
use reaper_model::event::{ExitStatus, Image, ProcessKey};
use reaper_model::leftover::Leftover;

/// Result of a serializer.
type Encoded<S> = Result<<S as Serializer>::Ok, <S as Serializer>::Error>;

/// Exit status of a process; no keys if it is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExitInfo {
    /// Exit status, if the process exited by itself.
    #[serde(rename = "process.exit.code", skip_serializing_if = "Option::is_none")]
    pub code: Option<u8>,
    /// Name of the signal that killed it, such as `SIGTERM`.
    #[serde(
        rename = "process.exit.signal",
        skip_serializing_if = "Option::is_none"
    )]
    pub signal: Option<String>,
    /// Whether it dumped core. Not stored in the journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_dumped: Option<bool>,
}

impl ExitInfo {
    /// Returns the exit as the predicate of a sentence, such as `was killed by SIGTERM` or `exited with status 1`.
    pub fn predicate(&self) -> String {
        match (&self.signal, self.code) {
            (Some(signal), _) => format!("was killed by {signal}"),
            (None, Some(code)) => format!("exited with status {code}"),
            (None, None) => "exited".into(),
        }
    }
}

impl From<ExitStatus> for ExitInfo {
    fn from(status: ExitStatus) -> ExitInfo {
        let mut exit = ExitInfo::default();
        match status {
            ExitStatus::Exited(code) => exit.code = Some(code),
            ExitStatus::Signalled { signal, core } => {
                exit.signal = Some(SignalName(signal).to_string());
                exit.core_dumped = Some(core);
            }
            ExitStatus::Unknown => {}
        }
        exit
    }
}

// Functions for `serialize_with`, named after what they write.

pub fn exit_status<S: Serializer>(status: &ExitStatus, serializer: S) -> Encoded<S> {
    ExitInfo::from(*status).serialize(serializer)
}

/// Writes bytes from the kernel as a string. Replaces invalid UTF-8 with U+FFFD.
pub fn lossy<S: Serializer>(bytes: &[u8], serializer: S) -> Encoded<S> {
    serializer.serialize_str(&String::from_utf8_lossy(bytes))
}

/// Writes a time in nanoseconds since boot as wall-clock time.
pub fn time<S: Serializer>(boot_ns: &Option<u64>, serializer: S) -> Encoded<S> {
    boot_ns.map(wall_time).serialize(serializer)
}

/// Writes a time in nanoseconds since boot as wall-clock time.
pub fn boot_time<S: Serializer>(boot_ns: &u64, serializer: S) -> Encoded<S> {
    wall_time(*boot_ns).serialize(serializer)
}

/// Returns the arguments of a program with secrets redacted.
pub fn command_args(image: &Image) -> Vec<String> {
    redact::arguments(image.args())
        .map(|arg| String::from_utf8_lossy(&arg).into_owned())
        .collect()
}

pub fn entity_id<S: Serializer>(key: &ProcessKey, serializer: S) -> Encoded<S> {
    EntityId(*key).serialize(serializer)
}

pub fn root<S: Serializer>(key: &ProcessKey, serializer: S) -> Encoded<S> {
    id_and_pid(["entity_id", "process.pid"], Some(*key), serializer)
}

pub fn old_parent<S: Serializer>(key: &Option<ProcessKey>, serializer: S) -> Encoded<S> {
    id_and_pid(["old_parent_id", "old_parent_pid"], *key, serializer)
}

pub fn adopter<S: Serializer>(key: &ProcessKey, serializer: S) -> Encoded<S> {
    id_and_pid(["adopter_id", "adopter_pid"], Some(*key), serializer)
}

pub fn listener<S: Serializer>(key: &ProcessKey, serializer: S) -> Encoded<S> {
    id_and_pid(["listener_id", "listener_pid"], Some(*key), serializer)
}

/// Writes the id and the pid of a process under these keys.
fn id_and_pid<S: Serializer>(
    [id, pid]: [&str; 2],
    key: Option<ProcessKey>,
    serializer: S,
) -> Encoded<S> {
    let mut map = serializer.serialize_map(None)?;
    if let Some(key) = key {
        map.serialize_entry(id, &EntityId(key))?;
        map.serialize_entry(pid, &key.pid)?;
    }
    map.end()
}

pub fn namespace_ending<S: Serializer>(_: &bool, serializer: S) -> Encoded<S> {
    serializer.serialize_str("pid_namespace_exiting")
}

pub fn leftover<S: Serializer>(leftover: &Leftover, serializer: S) -> Encoded<S> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("agent", &leftover.agent)?;
    map.serialize_entry("decision", leftover.verdict.name())?;
    map.serialize_entry("reason", leftover.reason())?;
    if let Some(rule) = leftover.verdict.rule() {
        map.serialize_entry("rule", rule)?;
    }
    map.serialize_entry("evidence", leftover.evidence.name())?;
    if let Some(variable) = leftover.evidence.variable() {
        map.serialize_entry("evidence_variable", variable)?;
    }
    if let Some(owner) = leftover.evidence.owner() {
        map.serialize_entry("agent_pid", &owner)?;
    }
    map.serialize_entry("subtree_root_id", &EntityId(leftover.subtree_root))?;
    map.serialize_entry("subtree_root_pid", &leftover.subtree_root.pid)?;
    map.end()
}

pub fn reload_result<S: Serializer>(applied: &bool, serializer: S) -> Encoded<S> {
    serializer.serialize_str(if *applied { "applied" } else { "rejected" })
}

pub fn sent_signal<S: Serializer>(sent: &SentSignal, serializer: S) -> Encoded<S> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("signal", sent.signal.as_str())?;
    map.serialize_entry("result", "sent")?;
    map.serialize_entry("sent_by", &sent.by)?;
    if let Some(latency) = sent.latency {
        map.serialize_entry("latency_ns", &latency)?;
    }
    map.end()
}

pub fn outcome<S: Serializer>(outcome: &ReapOutcome, serializer: S) -> Encoded<S> {
    #[derive(Serialize)]
    struct Keys<'a> {
        outcome: &'a str,
        #[serde(flatten)]
        exit: Option<ExitInfo>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<Cow<'a, str>>,
    }
    let keys = Keys {
        outcome: outcome_name(outcome),
        exit: match outcome {
            ReapOutcome::Exited(status) => Some(ExitInfo::from(*status)),
            ReapOutcome::Failed(_) | ReapOutcome::NotSent(_) => None,
        },
        reason: outcome_reason(outcome),
    };
    keys.serialize(serializer)
}

/// Writes whether the state of an earlier service was resumed, and its counts.
pub fn resumed<T: Serialize, S: Serializer>(found: &Option<T>, serializer: S) -> Encoded<S> {
    #[derive(Serialize)]
    struct Keys<'a, T> {
        resumed: bool,
        #[serde(flatten)]
        found: &'a Option<T>,
    }
    let resumed = found.is_some();
    Keys { resumed, found }.serialize(serializer)
}

/// Writes the number of lost records of each kind.
pub fn lost<S: Serializer>(by_kind: &[(&'static str, u64)], serializer: S) -> Encoded<S> {
    serializer.collect_map(by_kind.iter().map(|(kind, n)| (format!("lost_{kind}"), n)))
}
