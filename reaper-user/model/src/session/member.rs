//! Membership of one process in a session.

use std::sync::Arc;

use reaper_common::{MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT, MEMBER_WATCHED};

use crate::event::ProcessKey;

/// Number of a session, never given twice by one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u32);

/// What says that a process is a member whose birth nobody saw; the best that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// A member began its process group.
    Group,
    /// A member began its session in the kernel.
    Session,
    /// It runs in the cgroup that the session has for itself.
    Cgroup,
    /// This variable of its environment names the agent.
    Marker(&'static str),
    /// It works in the directory of the agent, or below.
    Directory,
}

impl Evidence {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Evidence::Group => "process_group",
            Evidence::Session => "kernel_session",
            Evidence::Cgroup => "cgroup",
            Evidence::Marker(_) => "marker",
            Evidence::Directory => "cwd",
        }
    }

    /// The variable of the environment that says so.
    pub fn variable(self) -> Option<&'static str> {
        match self {
            Evidence::Marker(variable) => Some(variable),
            _ => None,
        }
    }
}

/// Whose a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lineage {
    pub(crate) session: Option<SessionId>,
    /// See [`Member::is_lineage_uncertain`].
    pub(crate) is_uncertain: bool,
    /// See [`Member::inferred`].
    pub(crate) inferred: Option<Evidence>,
}

/// What sessions keep of a living process.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// Innermost session that the process is a member of.
    pub session: Option<SessionId>,
    /// Whether the process may be below a boundary: the processes between it and its agent are gone, and their events
    /// are lost. It is kept.
    pub is_lineage_uncertain: bool,
    /// Evidence from which its membership, or that of the process it comes from, is inferred. It is reported, and
    /// reaped only where a rule says that this is enough.
    pub inferred: Option<Evidence>,
    /// Name of the rule by which membership stops here.
    pub boundary: Option<Arc<str>>,
    /// Whether it is, or has been, the root of a session.
    pub root: bool,
    /// Whether its membership is certain: its creator was known here, or is known to the kernel.
    pub(crate) is_lineage_certain: bool,
    /// For an untracked process: the awaited process that it is or comes from by births. See `Model::awaited`.
    pub(crate) awaited: Option<ProcessKey>,
    /// Whether its exit matters to sessions, though it is a member of none.
    pub watched: bool,
    /// Whether it is within the scope of this service.
    pub in_scope: bool,
    /// Signals that it was sent: `MEMBER_SIGTERM_SENT` and `MEMBER_SIGKILL_SENT` of `reaper-common`.
    pub signals_sent: u32,
}

impl Member {
    /// Returns what its children inherit.
    pub(crate) fn lineage(&self) -> Lineage {
        Lineage {
            session: self.session,
            is_uncertain: self.is_lineage_uncertain,
            inferred: self.inferred,
        }
    }

    /// Adds what the flags of the kernel's map say. None of it is ever lost again.
    pub(crate) fn add_flags(&mut self, flags: u32) {
        self.signals_sent |= flags & (MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
        self.watched |= flags & MEMBER_WATCHED != 0;
        self.in_scope |= flags & MEMBER_SCOPE != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_marker_names_a_variable() {
        assert_eq!(
            Evidence::Marker("CLAUDECODE").variable(),
            Some("CLAUDECODE")
        );
        for other in [
            Evidence::Group,
            Evidence::Session,
            Evidence::Cgroup,
            Evidence::Directory,
        ] {
            assert_eq!(other.variable(), None, "{other:?}");
        }
    }

    #[test]
    fn flags_add_what_they_say_and_nothing_else() {
        let mut member = Member::default();
        let said = |member: &Member| (member.signals_sent, member.watched, member.in_scope);
        member.add_flags(0);
        assert_eq!(said(&member), (0, false, false));
        member.add_flags(MEMBER_WATCHED);
        assert_eq!(said(&member), (0, true, false));
        member.add_flags(MEMBER_SCOPE | MEMBER_SIGTERM_SENT);
        assert_eq!(said(&member), (MEMBER_SIGTERM_SENT, true, true));
        member.add_flags(0);
        assert_eq!(said(&member), (MEMBER_SIGTERM_SENT, true, true));
    }
}
