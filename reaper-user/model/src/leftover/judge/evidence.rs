//! What speaks for a process being a leftover, and what against that.

use std::sync::Arc;

use super::{Judge, file_name, tick};
use crate::event::{Image, ProcessKey, TICK_NS};
use crate::facts::Fact;
use crate::leftover::{EnvMarker, EnvMarkers, LeftoverEvidence, LeftoverRow, Uncertainty};

/// The rule whose tool shells are known by their command line.
pub(super) const CLAUDE: &str = "claude-code";
/// What stands in the command line of those.
const SNAPSHOT: &[u8] = b"/shell-snapshots/snapshot-";
const SHELLS: &[&[u8]] = &[b"bash", b"zsh", b"sh", b"dash", b"busybox"];
/// Programs that run another one under another user, by file name or the kernel's name.
const SWITCHERS: &[&[u8]] = &[
    b"sudo", b"sudo-rs", b"su", b"su-rs", b"runuser", b"pkexec", b"doas",
];
/// Users that are there for one program each; root is not among them.
const PROGRAMS_UIDS: std::ops::RangeInclusive<u32> = 1..=999;
/// How the names of programs begin that may be agents.
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
/// Names of others, which are also how other words begin.
const AGENT_NAMES: &[&[u8]] = &[b"amp", b"crush", b"goose"];

/// What speaks for a process, and what against that.
pub(super) struct Claim {
    pub(super) agent: Arc<str>,
    pub(super) evidence: LeftoverEvidence,
    pub(super) doubt: Option<Uncertainty>,
}

impl<'a> Judge<'a> {
    pub(super) fn claim(&self, row: &'a LeftoverRow) -> Option<Claim> {
        let none = EnvMarkers::default();
        let trace = match &row.env_markers {
            Fact::Known(trace) => trace,
            Fact::Unread | Fact::Unreadable => &none,
        };
        if let Some(claim) = self.recorded(row, trace) {
            return Some(claim);
        }
        if self.is_watched(row) {
            return None;
        }
        let mark = trace.markers.first();
        let named = mark.and_then(|mark| Some((mark, mark.agent_pid?)));
        let weak = mark.map(|mark| LeftoverEvidence::Mark {
            variable: mark.variable,
        });
        let (agent, evidence, doubt) = if let Some((mark, pid)) = named {
            let variable = mark.variable;
            let alone = || (!trace.has_second_marker(mark)).then_some(Uncertainty::NoOwner);
            match self.owner_doubt(row, trace, mark.agent).or_else(alone) {
                Some(doubt) => (mark.agent, weak?, Some(doubt)),
                None => {
                    let evidence = LeftoverEvidence::DeadOwner { variable, pid };
                    (mark.agent, evidence, self.mark_doubt(row, trace, mark))
                }
            }
        } else if is_tool_shell(&row.entry.image) {
            (
                CLAUDE,
                LeftoverEvidence::ToolShell,
                self.shell_doubt(row, trace),
            )
        } else {
            (mark?.agent, weak?, Some(Uncertainty::NoOwner))
        };
        Some(Claim {
            agent: agent.into(),
            evidence,
            doubt,
        })
    }

    fn mark_doubt(
        &self,
        row: &'a LeftoverRow,
        trace: &EnvMarkers,
        mark: &EnvMarker,
    ) -> Option<Uncertainty> {
        if !self.is_adopted(row, trace) {
            Some(Uncertainty::NotOrphan)
        } else if self.has_changed_uid(row, trace) {
            Some(Uncertainty::ChangedUid)
        } else {
            let doubt = self.successor_doubt(row, trace, mark.agent, 0);
            let doubt = doubt.or_else(|| self.shared_doubt(row, trace));
            let doubt = doubt.or_else(|| self.may_lie(row, trace));
            doubt.or_else(|| {
                self.unknown_owner(row, trace)
                    .map(Uncertainty::OwnerUnknown)
            })
        }
    }

    /// One that it names of whom no record tells that it was such an agent; by order, none is asked for.
    fn unknown_owner(&self, row: &LeftoverRow, trace: &EnvMarkers) -> Option<u32> {
        let is_recorded = |mark: &EnvMarker, pid: u32| {
            let mut sessions = self.roots.get(&pid).into_iter().flatten();
            sessions.any(|session| {
                *session.agent == *mark.agent
                    && session.uid == Some(row.entry.uids.real)
                    && session.root.start < row.entry.key.start
            })
        };
        let mut marks = trace.markers.iter();
        let unknown = |mark: &EnvMarker| mark.agent_pid.filter(|pid| !is_recorded(mark, *pid));
        let asked = !self.question.by_order;
        asked.then(|| marks.find_map(unknown)).flatten()
    }

    fn shell_doubt(&self, row: &'a LeftoverRow, trace: &EnvMarkers) -> Option<Uncertainty> {
        let parent = self.parent(row);
        let age = self.question.now.saturating_sub(row.entry.key.start);
        if !parent.is_some_and(|parent| self.is_adopter(parent)) {
            Some(Uncertainty::NotOrphan)
        } else if self.has_changed_uid(row, trace) {
            Some(Uncertainty::ChangedUid)
        } else if let Some(doubt) = self.agent_doubt(row) {
            Some(doubt)
        } else if let Some(doubt) = self.agents.continuer_doubt(row, trace) {
            Some(doubt)
        } else if age < self.question.min_age {
            Some(Uncertainty::Young)
        } else {
            self.may_lie(row, trace)
        }
    }

    fn recorded(&self, row: &LeftoverRow, trace: &EnvMarkers) -> Option<Claim> {
        let key = row.entry.key;
        let is = |member: &ProcessKey| !row.entry.exact || *member == key;
        let mut sessions = self.recorded.get(&tick(key))?.iter();
        let (_, session) = sessions.find(|(member, _)| is(member))?;
        let session = &self.question.recorded[*session];
        let root = session.root;
        let alive = self.table.rows.get(&root.pid);
        let uids = row.entry.uids;
        let doubt = if alive.is_some_and(|row| row.entry.key.has_same_tick(root)) {
            Some(Uncertainty::OwnerAlive(root.pid))
        } else if self.table.unread.contains_key(&root.pid) {
            Some(Uncertainty::OwnerUncertain(root.pid))
        } else if is_switched(row) || session.uid.is_some_and(|uid| uid != uids.real) {
            Some(Uncertainty::ChangedUid)
        } else {
            let named = self.named_owner_doubt(row, trace);
            // Its root may have handed over to another while nobody watched; not so of what is being ended.
            let heir = || {
                // The table knows starts to the tick.
                let since = root.start - root.start % TICK_NS;
                let known = self.question.rules.session_rule(&session.agent);
                let unknown = known.is_none().then_some(Uncertainty::AgentUnknown);
                let alive = self.successor_doubt(row, trace, &session.agent, since);
                alive.or(unknown)
            };
            named.or_else(|| heir().filter(|_| root.pid > 0))
        };
        Some(Claim {
            agent: Arc::clone(&session.agent),
            evidence: LeftoverEvidence::Recorded { root: root.pid },
            doubt,
        })
    }

    /// Returns the living agent, of any name, that may own a process whose evidence names no agent: one of the same
    /// user that began no later.
    fn agent_doubt(&self, row: &LeftoverRow) -> Option<Uncertainty> {
        let alive = self.agents.older_than(row);
        let unsure = || self.unread_of(row).map(Uncertainty::AgentUncertain);
        alive.map(Uncertainty::AgentAlive).or_else(unsure)
    }

    /// Returns the living agent that may have taken over from one that is gone; its successors began at `since` or later.
    fn successor_doubt(
        &self,
        row: &LeftoverRow,
        trace: &EnvMarkers,
        agent: &str,
        since: u64,
    ) -> Option<Uncertainty> {
        let named = self.agents.continuer_doubt(row, trace);
        let alive = || self.agents.successor(row, agent, since);
        let unsure = || self.unread_of(row).map(Uncertainty::AgentUncertain);
        named
            .or_else(|| alive().map(Uncertainty::AgentAlive))
            .or_else(unsure)
    }

    /// Returns the doubt about a marker that a living agent of the same user, or an ancestor of one, may carry too.
    fn shared_doubt(&self, row: &LeftoverRow, trace: &EnvMarkers) -> Option<Uncertainty> {
        // A process that carries a living agent is in doubt for that reason alone.
        if self.carriers.contains(&row.entry.key.pid) {
            return Some(Uncertainty::Agent);
        }
        self.agents.shared_doubt(row, trace)
    }

    /// Whether one of the agents that it names lives, or may.
    fn owner_doubt(
        &self,
        row: &LeftoverRow,
        trace: &EnvMarkers,
        agent: &str,
    ) -> Option<Uncertainty> {
        // In another PID namespace the pid is that of another process; what was cut off may name another agent.
        let unsure = |pid: &u32| {
            row.nested || trace.cut || self.agents.has_nested(agent, row.entry.uids.real, *pid)
        };
        let unsure = || trace.owners().find(unsure).map(Uncertainty::OwnerUncertain);
        let named = self.named_owner_doubt(row, trace);
        named.or_else(unsure)
    }

    /// The same of those alone who are there under such a pid.
    fn named_owner_doubt(&self, row: &LeftoverRow, trace: &EnvMarkers) -> Option<Uncertainty> {
        let mut unsure = None;
        for pid in trace.owners().filter(|_| !row.nested) {
            match self.table.rows.get(&pid) {
                // The pid was reused: this process began after the leftover did.
                Some(owner) if owner.entry.key.start > row.entry.key.start => {}
                Some(_) => return Some(Uncertainty::OwnerAlive(pid)),
                None if self.table.unread.contains_key(&pid) => {
                    unsure = Some(Uncertainty::OwnerUncertain(pid));
                }
                None => {}
            }
        }
        unsure
    }

    /// Whether it may run under another user than the agent that its environment comes from. Where nobody has logged
    /// in, what runs under a user who is there for one program is such, unless agents of that user are known.
    fn has_changed_uid(&self, row: &LeftoverRow, trace: &EnvMarkers) -> bool {
        let uid = row.entry.uids.real;
        let of_program = || {
            let mut sessions = self.question.recorded.iter();
            PROGRAMS_UIDS.contains(&uid)
                && !self.agents.has_user(uid)
                && !sessions.any(|session| session.uid == Some(uid))
        };
        is_switched(row)
            || trace.switched
            || row.login_uid.map_or_else(of_program, |login| login != uid)
    }

    fn is_adopted(&self, row: &LeftoverRow, trace: &EnvMarkers) -> bool {
        let Some(parent) = self.parent(row) else {
            return false;
        };
        let known = self.is_adopter(parent);
        let by_mark = match &parent.env_markers {
            Fact::Known(above) => {
                let known = known || !above.cut && self.has_lost_its_session(row, parent);
                known && !trace.shares_marker(above)
            }
            Fact::Unread | Fact::Unreadable => known,
        };
        by_mark && !self.is_agent(parent) && trace.owners().all(|pid| pid != parent.entry.key.pid)
    }

    /// Whether the leader of its terminal session is gone, and that was not begun by it or its parent.
    fn has_lost_its_session(&self, row: &LeftoverRow, parent: &LeftoverRow) -> bool {
        let sid = row.entry.image.sid;
        let gone = match self.table.rows.get(&sid) {
            Some(leader) => leader.entry.key.start > row.entry.key.start,
            None => !self.table.unread.contains_key(&sid),
        };
        // 0 is one of another pid namespace.
        gone && sid != 0 && sid != row.entry.key.pid && sid != parent.entry.image.sid
    }
}

impl Uncertainty {
    /// Whether it says that somebody else may live who it belongs to.
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

/// Whether it runs under two users, or a program that runs others under another one.
fn is_switched(row: &LeftoverRow) -> bool {
    let (uids, image) = (row.entry.uids, &row.entry.image);
    let switches = |name: &[u8]| SWITCHERS.contains(&name);
    uids.real != uids.effective || switches(file_name(&image.exe)) || switches(&image.comm)
}

/// Whether it is called as agents are, known to a rule or not.
pub(super) fn resembles_agent(image: &Image) -> bool {
    [file_name(&image.exe), &image.comm].iter().any(|name| {
        let mut starts = AGENT_STARTS.iter();
        AGENT_NAMES.contains(name) || starts.any(|start| name.starts_with(start))
    })
}

/// Claude's shell for one tool call: `bash -c 'source ~/.claude/shell-snapshots/snapshot-… && …'`.
fn is_tool_shell(image: &Image) -> bool {
    let script = |arg: &[u8]| arg.windows(SNAPSHOT.len()).any(|part| part == SNAPSHOT);
    SHELLS.contains(&file_name(&image.exe)) && image.args().skip(1).any(script)
}
