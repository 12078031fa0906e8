//! Keeps of users: what they are, and which of them are for one process.

use hashbrown::HashSet;

use crate::event::ProcessKey;

/// What somebody has asked for. No two wishes are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserKeep {
    /// Until when, in monotonic nanoseconds; `None`: for good.
    pub until_monotonic_ns: Option<u64>,
    /// Together with what descends from it: what lives now, and what is born later.
    pub with_descendants: bool,
    /// Uid of who has asked for it.
    pub by_uid: u32,
    /// When that was, in ns since the epoch.
    pub made_at: u64,
}

impl UserKeep {
    pub(crate) fn is_in_force(&self, awake_now: u64) -> bool {
        self.until_monotonic_ns
            .is_none_or(|until| awake_now < until)
    }

    /// Comparable: until when.
    pub(crate) fn expires_at(&self) -> u64 {
        self.until_monotonic_ns.unwrap_or(u64::MAX)
    }
}

/// A process that the service before this one was asked to keep.
#[derive(Clone, Copy, Debug)]
pub struct StoredKeep {
    pub key: ProcessKey,
    /// First root of its session.
    pub session: ProcessKey,
    /// The wish was for itself, not for one that it descends from.
    pub is_direct: bool,
    pub keep: UserKeep,
}

/// A wish with whom it is about, which holds also where nobody who is known to be kept by it lives any more.
#[derive(Clone, Debug)]
pub(crate) struct KeepRequest {
    pub(crate) keep: UserKeep,
    /// The process that it was asked for. Who is older does not descend from it.
    pub(crate) process: ProcessKey,
    /// Whom it is for by name, to the tick: the service before this one may have known more than `top`.
    pub(crate) names: HashSet<ProcessKey>,
    /// First root of the session of `top`; those nested in it belong to it.
    pub(crate) session: ProcessKey,
    /// That session has not been found yet.
    pub(crate) is_session_unknown: bool,
    /// It is for all members: they descend from the root, also from one that was relaunched.
    pub(crate) is_whole_session: bool,
    /// When this program was asked, in ns since boot, 0 if the one before it was: what the kernel's map has of those
    /// who were born later is told apart by it.
    pub(crate) at: u64,
}

/// What users have asked for one living process.
#[derive(Clone, Debug, Default)]
pub struct Keeps {
    /// Requests of users to keep it, expired ones included.
    pub(crate) user_keeps: Vec<UserKeep>,
}

impl Keeps {
    /// Returns the request of a user that keeps it for longest, expired ones included.
    pub fn user_keep(&self) -> Option<&UserKeep> {
        self.user_keeps.iter().max_by_key(|keep| keep.expires_at())
    }
}
