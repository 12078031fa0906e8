//! Keeps: requests of users to keep a process.

use hashbrown::HashSet;

use crate::event::ProcessKey;

/// Request of a user to keep a process. No two requests are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserKeep {
    /// Expiry, in ns of `CLOCK_MONOTONIC`; `None` for a permanent keep.
    pub until_monotonic_ns: Option<u64>,
    /// Whether present and future descendants are kept too.
    pub with_descendants: bool,
    /// Uid of the user.
    pub by_uid: u32,
    /// Time of the request, in ns since the epoch.
    pub made_at: u64,
}

impl UserKeep {
    pub(crate) fn is_in_force(&self, monotonic_now: u64) -> bool {
        self.until_monotonic_ns
            .is_none_or(|until| monotonic_now < until)
    }

    /// Returns the expiry for comparisons, in ns of `CLOCK_MONOTONIC`; `u64::MAX` for a permanent keep.
    pub(crate) fn expires_at(&self) -> u64 {
        self.until_monotonic_ns.unwrap_or(u64::MAX)
    }
}

/// Process that is kept by a request to a previous service.
#[derive(Clone, Copy, Debug)]
pub struct StoredKeep {
    /// Process that is kept.
    pub key: ProcessKey,
    /// First root of the process's session.
    pub session: ProcessKey,
    /// Whether the request named this process, not an ancestor.
    pub is_direct: bool,
    /// Request that keeps it.
    pub keep: UserKeep,
}

/// Request with its targets. It stays in force even if no process is currently kept by it.
#[derive(Clone, Debug)]
pub(crate) struct KeepRequest {
    pub(crate) keep: UserKeep,
    /// Process that the user named. Older processes do not descend from it.
    pub(crate) process: ProcessKey,
    /// Processes that are known to be kept, rounded to the tick. A previous service may have known more of them.
    pub(crate) names: HashSet<ProcessKey>,
    /// First root of the session of `process`. Sessions nested in it belong to it.
    pub(crate) session: ProcessKey,
    /// Whether no session with that name is known yet.
    pub(crate) is_session_unknown: bool,
    /// Whether it is for all members, because `process` is the root. Members descend from it even after a relaunch.
    pub(crate) is_whole_session: bool,
    /// Time of the request, in ns since boot; 0 if a previous service received it. Map entries of younger processes
    /// show whether they are kept.
    pub(crate) at: u64,
}

/// Requests of users for one living process.
#[derive(Clone, Debug, Default)]
pub struct Keeps {
    /// Requests that keep it, expired ones included.
    pub(crate) user_keeps: Vec<UserKeep>,
}

impl Keeps {
    /// Returns the request that lasts longest, expired ones included.
    pub fn user_keep(&self) -> Option<&UserKeep> {
        self.user_keeps.iter().max_by_key(|keep| keep.expires_at())
    }
}
