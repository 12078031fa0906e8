//! Descriptions of sessions and processes in records.

use std::fmt::{self, Display};
use std::sync::Arc;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::export::clock::{EntityId, wall_time};
use crate::export::encode;
use reaper_model::event::{Image, ProcessKey, Provenance, Uids};
use reaper_model::session::Session;
use reaper_model::{Model, Node};

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
pub(super) fn session_id<S: Serializer>(
    session: &SessionRef,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    SessionIdText(session).serialize(serializer)
}

/// Writes only the id of a session, if there is one.
pub(super) fn other_session_id<S: Serializer>(
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
