//! Evidence that a process is a leftover, and reasons why it may not be sufficient.

use std::sync::Arc;

use super::{Judge, file_name, tick};
use crate::event::{Image, ProcessKey, TICK_NS};
use crate::facts::Fact;
use crate::leftover::{EnvMarker, EnvMarkers, LeftoverEvidence, LeftoverRow, Uncertainty};

/// Rule whose tool shells are recognised by their command line.
pub(super) const CLAUDE: &str = "claude-code";
/// Part of the command line of such a shell.
const SNAPSHOT: &[u8] = b"/shell-snapshots/snapshot-";
const SHELLS: &[&[u8]] = &[b"bash", b"zsh", b"sh", b"dash", b"busybox"];
/// Programs that run another one as another user, by file name or `comm`.
const SWITCHERS: &[&[u8]] = &[
    b"sudo", b"sudo-rs", b"su", b"su-rs", b"runuser", b"pkexec", b"doas",
];
/// Uids of system users, each for one program. Root is not among them.
const PROGRAMS_UIDS: std::ops::RangeInclusive<u32> = 1..=999;
/// Prefixes of the names of programs that may be agents.
const AGENT_STARTS: &[&[u8]] = &[
    b"claude",
    b"codex",
    b"opencode",
    b"gemini",
    b"copilot",
    b"cursor-agent",
    b"qwen",
    b"aider",
];
/// Full names of further agents. As prefixes they would match other words.
const AGENT_NAMES: &[&[u8]] = &[b"amp", b"crush", b"goose"];

/// Evidence, and the reason why it is not sufficient, if any.
pub(super) struct Claim {
    pub(super) agent: Arc<str>,
    pub(super) evidence: LeftoverEvidence,
    pub(super) uncertainty: Option<Uncertainty>,
}

impl<'a> Judge<'a> {
    /// Returns the evidence for a process: a record, a marker with a pid, the shell of a tool, or another marker. The
    /// first of these that exists counts. Returns `None` without evidence, and for an unrecorded process that started
    /// while a service watched.
    pub(super) fn claim(&self, row: &'a LeftoverRow) -> Option<Claim> {
        let none = EnvMarkers::default();
        let env_markers = match &row.env_markers {
            Fact::Known(env_markers) => env_markers,
            Fact::Unread | Fact::Unreadable => &none,
        };
        if let Some(claim) = self.recorded(row, env_markers) {
            return Some(claim);
        }
        if self.is_watched(row) {
            return None;
        }
        let marker = env_markers.markers.first();
        let named = marker.and_then(|marker| Some((marker, marker.agent_pid?)));
        let weak = marker.map(|marker| LeftoverEvidence::Marker {
            variable: marker.variable,
        });
        let (agent, evidence, uncertainty) = if let Some((marker, pid)) = named {
            let variable = marker.variable;
            let alone = || (!env_markers.has_second_marker(marker)).then_some(Uncertainty::NoOwner);
            match self
                .owner_uncertainty(row, env_markers, marker.agent)
                .or_else(alone)
            {
                Some(uncertainty) => (marker.agent, weak?, Some(uncertainty)),
                None => {
                    let evidence = LeftoverEvidence::ExitedAgent { variable, pid };
                    (
                        marker.agent,
                        evidence,
                        self.marker_uncertainty(row, env_markers, marker),
                    )
                }
            }
        } else if is_tool_shell(&row.entry.image) {
            (
                CLAUDE,
                LeftoverEvidence::ToolShell,
                self.shell_uncertainty(row, env_markers),
            )
        } else {
            (marker?.agent, weak?, Some(Uncertainty::NoOwner))
        };
        Some(Claim {
            agent: agent.into(),
            evidence,
            uncertainty,
        })
    }

    /// Returns the uncertainty about a marker whose agent has exited; `None` if it is sufficient.
    fn marker_uncertainty(
        &self,
        row: &'a LeftoverRow,
        env_markers: &EnvMarkers,
        marker: &EnvMarker,
    ) -> Option<Uncertainty> {
        if !self.is_adopted(row, env_markers) {
            Some(Uncertainty::NotOrphan)
        } else if self.has_changed_uid(row, env_markers) {
            Some(Uncertainty::ChangedUid)
        } else {
            let uncertainty = self.successor_uncertainty(row, env_markers, marker.agent, 0);
            let uncertainty = uncertainty.or_else(|| self.shared_uncertainty(row, env_markers));
            let uncertainty = uncertainty.or_else(|| self.origin_uncertainty(row, env_markers));
            uncertainty.or_else(|| {
                self.unknown_owner(row, env_markers)
                    .map(Uncertainty::OwnerUnknown)
            })
        }
    }

    /// Returns a pid in the markers that no record shows to be that of such an agent. Returns `None` if none exists,
    /// or if a user ordered the reap: records are then not required.
    fn unknown_owner(&self, row: &LeftoverRow, env_markers: &EnvMarkers) -> Option<u32> {
        let is_recorded = |marker: &EnvMarker, pid: u32| {
            let mut sessions = self.roots.get(&pid).into_iter().flatten();
            sessions.any(|session| {
                *session.agent == *marker.agent
                    && session.uid == Some(row.entry.uids.real)
                    && session.root.start < row.entry.key.start
            })
        };
        let mut markers = env_markers.markers.iter();
        let unknown =
            |marker: &EnvMarker| marker.agent_pid.filter(|pid| !is_recorded(marker, *pid));
        let needs_record = !self.query.requested_by_user;
        needs_record.then(|| markers.find_map(unknown)).flatten()
    }

    /// Returns the uncertainty about the shell of a Claude tool; `None` if its command line is sufficient evidence.
    fn shell_uncertainty(
        &self,
        row: &'a LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let parent = self.parent(row);
        let age = self.query.now.saturating_sub(row.entry.key.start);
        if !parent.is_some_and(|parent| self.is_adopter(parent)) {
            Some(Uncertainty::NotOrphan)
        } else if self.has_changed_uid(row, env_markers) {
            Some(Uncertainty::ChangedUid)
        } else if let Some(uncertainty) = self.agent_uncertainty(row) {
            Some(uncertainty)
        } else if let Some(uncertainty) = self.agents.continuer_uncertainty(row, env_markers) {
            Some(uncertainty)
        } else if age < self.query.min_age {
            Some(Uncertainty::Young)
        } else {
            self.origin_uncertainty(row, env_markers)
        }
    }

    /// Returns the evidence that a process was a recorded member of a session; `None` if it was not.
    fn recorded(&self, row: &LeftoverRow, env_markers: &EnvMarkers) -> Option<Claim> {
        let key = row.entry.key;
        let is = |member: &ProcessKey| !row.entry.exact || *member == key;
        let mut sessions = self.recorded.get(&tick(key))?.iter();
        let (_, session) = sessions.find(|(member, _)| is(member))?;
        let session = &self.query.recorded[*session];
        let root = session.root;
        let alive = self.table.rows.get(&root.pid);
        let uids = row.entry.uids;
        let uncertainty = if alive.is_some_and(|row| row.entry.key.has_same_tick(root)) {
            Some(Uncertainty::OwnerAlive(root.pid))
        } else if self.table.unread.contains_key(&root.pid) {
            Some(Uncertainty::OwnerUncertain(root.pid))
        } else if is_switched(row) || session.uid.is_some_and(|uid| uid != uids.real) {
            Some(Uncertainty::ChangedUid)
        } else {
            let named = self.named_owner_uncertainty(row, env_markers);
            // The root may have passed the session on while no service watched. Pid 0 stands for processes that are
            // already being ended.
            let successor_uncertainty = || {
                // The table has starts rounded to the tick.
                let since = root.start - root.start % TICK_NS;
                let known = self.query.rules.session_rule(&session.agent);
                let unknown = known.is_none().then_some(Uncertainty::AgentUnknown);
                let alive = self.successor_uncertainty(row, env_markers, &session.agent, since);
                alive.or(unknown)
            };
            named.or_else(|| successor_uncertainty().filter(|_| root.pid > 0))
        };
        Some(Claim {
            agent: Arc::clone(&session.agent),
            evidence: LeftoverEvidence::Recorded { root: root.pid },
            uncertainty,
        })
    }

    /// Returns the uncertainty if a living agent of the same user may own a process whose evidence names none: any
    /// agent that is not younger.
    fn agent_uncertainty(&self, row: &LeftoverRow) -> Option<Uncertainty> {
        let alive = self.agents.older_than(row);
        let uncertain = || self.unread_of(row).map(Uncertainty::AgentUncertain);
        alive.map(Uncertainty::AgentAlive).or_else(uncertain)
    }

    /// Returns the uncertainty if a living agent may continue the session of an exited one. Successors started at
    /// `since` (ns since boot) or later.
    fn successor_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
        agent: &str,
        since: u64,
    ) -> Option<Uncertainty> {
        let named = self.agents.continuer_uncertainty(row, env_markers);
        let alive = || self.agents.successor(row, agent, since);
        let uncertain = || self.unread_of(row).map(Uncertainty::AgentUncertain);
        named
            .or_else(|| alive().map(Uncertainty::AgentAlive))
            .or_else(uncertain)
    }

    /// Returns the uncertainty if a living agent of the same user, or an ancestor of one, may have the same marker.
    fn shared_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        // For an ancestor of a living agent this reason comes first.
        if self.agent_ancestors.contains(&row.entry.key.pid) {
            return Some(Uncertainty::Agent);
        }
        self.agents.shared_uncertainty(row, env_markers)
    }

    /// Returns the uncertainty if an agent named in the markers is or may be alive.
    fn owner_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
        agent: &str,
    ) -> Option<Uncertainty> {
        // In another PID namespace the pid means another process. The part that was not read may name another agent.
        let uncertain = |pid: &u32| {
            row.nested
                || env_markers.cut
                || self.agents.has_nested(agent, row.entry.uids.real, *pid)
        };
        let uncertain = || {
            env_markers
                .agent_pids()
                .find(uncertain)
                .map(Uncertainty::OwnerUncertain)
        };
        let named = self.named_owner_uncertainty(row, env_markers);
        named.or_else(uncertain)
    }

    /// Like [`Judge::owner_uncertainty`], but only for pids that are in use.
    fn named_owner_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let mut uncertain = None;
        for pid in env_markers.agent_pids().filter(|_| !row.nested) {
            match self.table.rows.get(&pid) {
                // The pid was reused: this process is younger than the leftover.
                Some(owner) if owner.entry.key.start > row.entry.key.start => {}
                Some(_) => return Some(Uncertainty::OwnerAlive(pid)),
                None if self.table.unread.contains_key(&pid) => {
                    uncertain = Some(Uncertainty::OwnerUncertain(pid));
                }
                None => {}
            }
        }
        uncertain
    }

    /// Returns whether a process may run as another user than the agent in its environment. Without a login user, this
    /// is assumed for system users, unless agents of that user are known.
    fn has_changed_uid(&self, row: &LeftoverRow, env_markers: &EnvMarkers) -> bool {
        let uid = row.entry.uids.real;
        let of_program = || {
            let mut sessions = self.query.recorded.iter();
            PROGRAMS_UIDS.contains(&uid)
                && !self.agents.has_user(uid)
                && !sessions.any(|session| session.uid == Some(uid))
        };
        is_switched(row)
            || env_markers.switched
            || row.login_uid.map_or_else(of_program, |login| login != uid)
    }

    /// Returns whether a process counts as adopted; see the section on orphans in the parent module. False if its
    /// parent is unknown, is an agent or shares its marker.
    fn is_adopted(&self, row: &LeftoverRow, env_markers: &EnvMarkers) -> bool {
        let Some(parent) = self.parent(row) else {
            return false;
        };
        let known = self.is_adopter(parent);
        let is_adopted = match &parent.env_markers {
            Fact::Known(above) => {
                let known = known || !above.cut && self.has_lost_its_session(row, parent);
                known && !env_markers.shares_marker(above)
            }
            Fact::Unread | Fact::Unreadable => known,
        };
        is_adopted
            && !self.is_agent(parent)
            && env_markers
                .agent_pids()
                .all(|pid| pid != parent.entry.key.pid)
    }

    /// Returns whether the leader of its kernel session has exited. False if its parent is in that session too, or if
    /// the process is the leader.
    fn has_lost_its_session(&self, row: &LeftoverRow, parent: &LeftoverRow) -> bool {
        let sid = row.entry.image.sid;
        let gone = match self.table.rows.get(&sid) {
            Some(leader) => leader.entry.key.start > row.entry.key.start,
            None => !self.table.unread.contains_key(&sid),
        };
        // The id is 0 for a session of another PID namespace.
        gone && sid != 0 && sid != row.entry.key.pid && sid != parent.entry.image.sid
    }
}

impl Uncertainty {
    /// Returns whether the process may belong to another, living agent.
    pub(super) fn is_of_another(self) -> bool {
        match self {
            Uncertainty::OwnerAlive(_)
            | Uncertainty::OwnerUncertain(_)
            | Uncertainty::AgentAlive(_)
            | Uncertainty::AgentUncertain(_)
            | Uncertainty::SharedMarker(_)
            | Uncertainty::AgentUnknown => true,
            Uncertainty::NoOwner
            | Uncertainty::OwnerUnknown(_)
            | Uncertainty::ChangedUid
            | Uncertainty::NotOrphan
            | Uncertainty::Young
            | Uncertainty::Multiplexed
            | Uncertainty::TerminalSession(_)
            | Uncertainty::Agent => false,
        }
    }
}

/// Returns whether a process has two uids, or its program runs others as another user.
fn is_switched(row: &LeftoverRow) -> bool {
    let (uids, image) = (row.entry.uids, &row.entry.image);
    let switches = |name: &[u8]| SWITCHERS.contains(&name);
    uids.real != uids.effective || switches(file_name(&image.exe)) || switches(&image.comm)
}

/// Returns whether the file name or comm of a program begins with the name of a known agent, or is one of
/// [`AGENT_NAMES`]. No rule need exist for it.
pub(super) fn resembles_agent(image: &Image) -> bool {
    [file_name(&image.exe), &image.comm].iter().any(|name| {
        let mut starts = AGENT_STARTS.iter();
        AGENT_NAMES.contains(name) || starts.any(|start| name.starts_with(start))
    })
}

/// Returns whether it is Claude's shell for a tool call: `bash -c 'source ~/.claude/shell-snapshots/snapshot-… && …'`.
fn is_tool_shell(image: &Image) -> bool {
    let script = |arg: &[u8]| arg.windows(SNAPSHOT.len()).any(|part| part == SNAPSHOT);
    SHELLS.contains(&file_name(&image.exe)) && image.args().skip(1).any(script)
}
