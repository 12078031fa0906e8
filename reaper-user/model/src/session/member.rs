//! Membership of one process in a session.

use std::sync::Arc;

use reaper_common::{
    MEMBER_BY_SUDO, MEMBER_DETACHED, MEMBER_SCOPE, MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT,
    MEMBER_WATCHED,
};

use crate::event::ProcessKey;

/// Number of a session, unique within one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u32);

/// Strongest evidence that a process whose birth was not observed is a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// A member created its process group.
    Group,
    /// A member created its session in the kernel (`setsid`).
    Session,
    /// It runs in a cgroup of which the session is the only user.
    Cgroup,
    /// This environment variable names the agent.
    Marker(&'static str),
    /// Its working directory is that of the agent or below.
    Directory,
}

impl Evidence {
    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Evidence::Group => "process_group",
            Evidence::Session => "kernel_session",
            Evidence::Cgroup => "cgroup",
            Evidence::Marker(_) => "marker",
            Evidence::Directory => "cwd",
        }
    }

    /// Returns the environment variable that is the evidence.
    pub fn variable(self) -> Option<&'static str> {
        match self {
            Evidence::Marker(variable) => Some(variable),
            _ => None,
        }
    }
}

/// Descent of a process, as its children inherit it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lineage {
    /// Innermost session; `None` for an untracked process.
    pub(crate) session: Option<SessionId>,
    /// See [`Member::is_lineage_uncertain`].
    pub(crate) is_uncertain: bool,
    /// See [`Member::inferred`].
    pub(crate) inferred: Option<Evidence>,
}

/// State that sessions hold for a living process.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// Innermost session that the process is a member of.
    pub session: Option<SessionId>,
    /// Whether the process may be below a boundary, because the processes between it and its agent exited and their
    /// events were lost. Such a process is kept.
    pub is_lineage_uncertain: bool,
    /// Evidence from which the membership of the process or of its ancestor is inferred. Such a process is reported,
    /// and reaped only if a rule says that evidence suffices.
    pub inferred: Option<Evidence>,
    /// Name of the rule that makes the process a boundary.
    pub boundary: Option<Arc<str>>,
    /// Whether it is or was the root of a session.
    pub root: bool,
    /// Whether no later event can know its lineage better: its creator was known here or in the kernel's map. This is
    /// not the opposite of `is_lineage_uncertain`.
    pub(crate) is_lineage_certain: bool,
    /// Awaited process that it is or descends from; for untracked processes only. *Awaited* means that its script must
    /// be read to see whether it is an agent; see `Model::awaited`.
    pub(crate) awaited: Option<ProcessKey>,
    /// Whether its exit matters to sessions although it is not a member. Examples are a boundary and the parent of a
    /// root.
    pub watched: bool,
    /// Whether it is in the scope of the service (see [`Scope`](crate::Scope)), by itself or by descent.
    pub in_scope: bool,
    /// Whether it has run `nohup` or `setsid`, which then executed its program. Not inherited at a fork.
    pub is_detached: bool,
    /// Whether `sudo` below its agent has executed it or an ancestor. Inherited at a fork.
    pub is_by_sudo: bool,
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

    /// Adds the flags of an entry in the kernel's map. No flag is ever cleared.
    pub(crate) fn add_flags(&mut self, flags: u32) {
        self.signals_sent |= flags & (MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT);
        self.watched |= flags & MEMBER_WATCHED != 0;
        self.in_scope |= flags & MEMBER_SCOPE != 0;
        self.is_detached |= flags & MEMBER_DETACHED != 0;
        self.is_by_sudo |= flags & MEMBER_BY_SUDO != 0;
    }

    /// Records that the program with this `comm` has executed another one.
    pub(crate) fn on_exec(&mut self, old: &[u8]) {
        self.is_detached |= [&b"nohup"[..], b"setsid"].contains(&old);
        self.is_by_sudo |= old == b"sudo";
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
    fn added_flags_set_no_other_fields() {
        let mut member = Member::default();
        let fields = |member: &Member| (member.signals_sent, member.watched, member.in_scope);
        member.add_flags(0);
        assert_eq!(fields(&member), (0, false, false));
        member.add_flags(MEMBER_WATCHED);
        assert_eq!(fields(&member), (0, true, false));
        member.add_flags(MEMBER_SCOPE | MEMBER_SIGTERM_SENT);
        assert_eq!(fields(&member), (MEMBER_SIGTERM_SENT, true, true));
        assert!(!member.is_detached && !member.is_by_sudo);
        member.add_flags(MEMBER_DETACHED);
        assert_eq!(fields(&member), (MEMBER_SIGTERM_SENT, true, true));
        assert!(member.is_detached && !member.is_by_sudo);
        member.add_flags(MEMBER_BY_SUDO);
        assert!(member.is_by_sudo);
    }
}
