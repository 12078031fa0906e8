//! One line of the stream before it is a line.

use std::sync::Arc;

use crate::model::Model;
use crate::model::event::{Ended, Image, Key, Provenance, Uids};
use crate::model::session::Session;
use crate::model::tree::Node;
use crate::reap::{Outcome, Sent};

/// Something to tell, and when it happened (ns since boot).
#[derive(Clone, Debug)]
pub struct Record {
    pub time: u64,
    pub body: Body,
}

impl Record {
    /// Whether it tells of what processes do, and not of what is decided and done about them.
    pub fn is_lifecycle(&self) -> bool {
        matches!(
            self.body,
            Body::Lifecycle { .. } | Body::Orphan { .. } | Body::Reparent { .. }
        )
    }
}

/// A session by the names it has outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRef {
    pub agent: Arc<str>,
    /// The process that was its root first; the session's name is made of it.
    pub first_root: Key,
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
#[derive(Clone, Debug)]
pub struct Who {
    pub key: Key,
    pub parent: Option<Key>,
    pub birth_parent: Option<Key>,
    pub image: Arc<Image>,
    pub uids: Uids,
    pub session: Option<SessionRef>,
    pub provenance: Provenance,
}

impl Who {
    pub fn new(model: &Model, node: &Node) -> Who {
        let session = node
            .session
            .and_then(|id| model.sessions.get(id))
            .map(SessionRef::from);
        Who {
            key: node.key,
            parent: node.parent,
            birth_parent: node.birth_parent,
            image: Arc::clone(&node.image),
            uids: node.uids,
            session,
            provenance: node.provenance,
        }
    }
}

/// What happens to every process.
#[derive(Clone, Debug)]
pub enum Lifecycle {
    Fork,
    Exec,
    Exit { ended: Ended, peak_rss: u64 },
}

/// How often things happened; the last line of the stream tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub sessions: u64,
    pub reaped: u64,
    pub kept: u64,
    pub failed: u64,
    pub signals: u64,
    pub events: u64,
    pub lost: u64,
}

/// The parts of a decision that are told.
#[derive(Clone, Debug)]
pub struct Names {
    pub verdict: &'static str,
    pub reason: &'static str,
    pub rule: Option<Arc<str>>,
}

#[derive(Clone, Debug)]
pub enum Body {
    Ready {
        mode: &'static str,
        source: &'static str,
        processes: usize,
        scope: Vec<String>,
    },
    Lifecycle {
        what: Lifecycle,
        who: Who,
        provenance: Provenance,
    },
    Orphan {
        who: Who,
        old_parent: Option<Key>,
        parent_command: Vec<u8>,
    },
    Reparent {
        who: Who,
        old_parent: Option<Key>,
        /// Empty if it is not known any more.
        old_parent_command: Vec<u8>,
        adopter: Option<Key>,
        adopter_command: Vec<u8>,
        provenance: Provenance,
    },
    SessionOpen {
        who: Who,
        rule: Arc<str>,
        outer: Option<SessionRef>,
    },
    SessionRootGone {
        session: SessionRef,
        root: Key,
        ended: Ended,
        members: usize,
    },
    SessionRelaunch {
        session: SessionRef,
        who: Who,
        old_root: Key,
    },
    SessionClose {
        session: SessionRef,
        reaped: u32,
        kept: u32,
        failed: u32,
        /// Records that were lost while it was open: there may be members nobody knows of.
        lost_before: u64,
    },
    Boundary {
        who: Who,
        session: Option<SessionRef>,
        rule: Arc<str>,
    },
    Decision {
        who: Who,
        names: Names,
    },
    Signal {
        who: Who,
        sent: Sent,
    },
    Outcome {
        who: Who,
        outcome: Outcome,
        signal: Option<&'static str>,
        duration: Option<u64>,
    },
    Lost {
        total: u64,
        by_kind: [(&'static str, u64); 4],
    },
    /// Lines that this stream left out, because it could not be written fast enough.
    Dropped {
        count: u64,
    },
    Malformed {
        count: u64,
        reason: String,
    },
    Summary {
        count: Count,
        reason: &'static str,
    },
}
