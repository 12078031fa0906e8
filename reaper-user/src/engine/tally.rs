//! Counters of each session.

use crate::export::{FreedMemory, SessionRef};

/// Counters of a session, and its progress towards the report that it is closed.
#[derive(Default)]
pub struct Tally {
    pub reaped: u32,
    pub failed: u32,
    /// Number of members that would have been reaped, in observe mode.
    pub would_have_reaped: u32,
    /// Memory of the reaped members.
    pub memory: FreedMemory,
    /// Number of records lost while the session was open.
    pub lost: u64,
    /// Session without living members that is not reported as closed yet, for lack of confirmed exits or of a last
    /// scan.
    pub closing_session: Option<SessionRef>,
    /// Exit time of the last member, in ns since boot. Set together with `closing_session`.
    pub last_exit_at: u64,
    /// Whether the members have been evaluated since the root exited.
    pub is_evaluated: bool,
    /// Counts in the last report that the session is closed. Only the journal gets reports after the first one.
    pub reported: Option<Counts>,
}

/// Numbers of members in the report that a session is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
}
