//! What speaks for a process being a leftover, and what against that.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::host::Eldest;
use super::{Judge, file_name, tick};
use crate::model::event::{Image, Key};
use crate::model::facts::Known;
use crate::model::stray::{Doubt, EnvMark, Evidence, Row, Trace};

/// The rule whose tool shells are known by their command line.
const CLAUDE: &str = "claude-code";
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
    pub(super) evidence: Evidence,
    pub(super) doubt: Option<Doubt>,
}

/// Agents that live.
#[derive(Default)]
pub(super) struct Agents {
    /// By name and real uid those that began first.
    named: HashMap<(Arc<str>, u32), Eldest>,
    /// By real uid those that no rule knows: they may be of any name.
    unnamed: HashMap<u32, Eldest>,
    /// By real uid all of them.
    any: HashMap<u32, Eldest>,
    /// Name and real uid of those that have another pid in a namespace of their own, by which their marks name them.
    nested: HashSet<(Arc<str>, u32)>,
}

impl Agents {
    pub(super) fn of(judge: &Judge<'_>) -> Agents {
        let mut agents = Agents::default();
        let rules = judge.question.rules;
        for row in judge.table.rows.values().filter(|row| judge.is_agent(row)) {
            let (key, uid) = (row.seen.key, row.seen.uids.real);
            agents.any.entry(uid).or_default().add(key);
            let Some(rule) = rules.agent(&row.seen.image) else {
                agents.unnamed.entry(uid).or_default().add(key);
                continue;
            };
            let named = (Arc::clone(rules.name(rule)), uid);
            if row.nested {
                agents.nested.insert(named.clone());
            }
            agents.named.entry(named).or_default().add(key);
        }
        agents
    }

    /// Another one of the same user that began by then: of this name, as far as that is known, or of any.
    fn possible_owner(&self, row: &Row, name: Option<&str>, by: u64) -> Option<u32> {
        let uid = row.seen.uids.real;
        let possible = match name {
            Some(name) => [self.named.get(&(name.into(), uid)), self.unnamed.get(&uid)],
            None => [self.any.get(&uid), None],
        };
        let mut possible = possible.into_iter().flatten();
        possible.find_map(|eldest| eldest.other_by(row, by))
    }
}

impl<'a> Judge<'a> {
    pub(super) fn claim(&self, row: &'a Row) -> Option<Claim> {
        let none = Trace::default();
        let trace = match &row.trace {
            Known::Is(trace) => trace,
            Known::Unasked | Known::Unreadable => &none,
        };
        if let Some(claim) = self.recorded(row, trace) {
            return Some(claim);
        }
        if self.is_watched(row) {
            return None;
        }
        let mark = trace.marks.first();
        let named = mark.and_then(|mark| Some((mark, mark.owner?)));
        let weak = mark.map(|mark| Evidence::Mark {
            variable: mark.variable,
        });
        let (agent, evidence, doubt) = if let Some((mark, pid)) = named {
            let variable = mark.variable;
            let alone = || (!trace.backs(mark)).then_some(Doubt::NoOwner);
            match self.owner_doubt(row, trace, mark.agent).or_else(alone) {
                Some(doubt) => (mark.agent, weak?, Some(doubt)),
                None => {
                    let evidence = Evidence::DeadOwner { variable, pid };
                    (mark.agent, evidence, self.mark_doubt(row, trace, mark))
                }
            }
        } else if is_tool_shell(&row.seen.image) {
            (CLAUDE, Evidence::ToolShell, self.shell_doubt(row, trace))
        } else {
            (mark?.agent, weak?, Some(Doubt::NoOwner))
        };
        Some(Claim {
            agent: agent.into(),
            evidence,
            doubt,
        })
    }

    fn mark_doubt(&self, row: &'a Row, trace: &Trace, mark: &EnvMark) -> Option<Doubt> {
        if !self.is_adopted(row, trace) {
            Some(Doubt::NotOrphan)
        } else if self.has_changed_uid(row, trace) {
            Some(Doubt::ChangedUid)
        } else {
            let agent = self.agent_doubt(row, Some(mark.agent), row.seen.key.start);
            let lies = agent.or_else(|| self.may_lie(row, trace));
            lies.or_else(|| self.unknown_owner(row, trace).map(Doubt::OwnerUnknown))
        }
    }

    /// One that it names of whom no record tells that it was such an agent; by order, none is asked for.
    fn unknown_owner(&self, row: &Row, trace: &Trace) -> Option<u32> {
        let is_recorded = |mark: &EnvMark, pid: u32| {
            let mut sessions = self.roots.get(&pid).into_iter().flatten();
            sessions.any(|session| {
                *session.agent == *mark.agent
                    && session.uid == Some(row.seen.uids.real)
                    && session.root.start < row.seen.key.start
            })
        };
        let mut marks = trace.marks.iter();
        let unknown = |mark: &EnvMark| mark.owner.filter(|pid| !is_recorded(mark, *pid));
        let asked = !self.question.by_order;
        asked.then(|| marks.find_map(unknown)).flatten()
    }

    fn shell_doubt(&self, row: &'a Row, trace: &Trace) -> Option<Doubt> {
        let parent = self.parent(row);
        let age = self.question.now.saturating_sub(row.seen.key.start);
        if !parent.is_some_and(|parent| self.is_adopter(parent)) {
            Some(Doubt::NotOrphan)
        } else if self.has_changed_uid(row, trace) {
            Some(Doubt::ChangedUid)
        } else if let Some(doubt) = self.agent_doubt(row, None, row.seen.key.start) {
            Some(doubt)
        } else if age < self.question.max_age {
            Some(Doubt::Young)
        } else {
            self.may_lie(row, trace)
        }
    }

    fn recorded(&self, row: &Row, trace: &Trace) -> Option<Claim> {
        let key = row.seen.key;
        let is = |member: &Key| !row.seen.exact || *member == key;
        let mut sessions = self.recorded.get(&tick(key))?.iter();
        let (_, session) = sessions.find(|(member, _)| is(member))?;
        let session = &self.question.recorded[*session];
        let root = session.root;
        let alive = self.table.rows.get(&root.pid);
        let uids = row.seen.uids;
        let doubt = if alive.is_some_and(|row| row.seen.key.same_tick(root)) {
            Some(Doubt::OwnerAlive(root.pid))
        } else if self.table.unread.contains_key(&root.pid) {
            Some(Doubt::OwnerUnsure(root.pid))
        } else if is_switched(row) || session.uid.is_some_and(|uid| uid != uids.real) {
            Some(Doubt::ChangedUid)
        } else {
            let named = self.named_owner_doubt(row, trace);
            // Its root may have handed over to another while nobody watched; not so of what is being ended.
            let heir = || {
                let known = self.question.rules.agent_named(&session.agent);
                let unknown = known.is_none().then_some(Doubt::AgentUnknown);
                let alive = self.agent_doubt(row, Some(&session.agent), u64::MAX);
                alive.or(unknown)
            };
            named.or_else(|| heir().filter(|_| root.pid > 0))
        };
        Some(Claim {
            agent: Arc::clone(&session.agent),
            evidence: Evidence::Recorded { root: root.pid },
            doubt,
        })
    }

    /// Whether an agent of this name, or of any, that began by then lives, or may, and so may be its own.
    fn agent_doubt(&self, row: &Row, name: Option<&str>, by: u64) -> Option<Doubt> {
        let alive = self.agents.possible_owner(row, name, by);
        let unsure = || self.unread_of(row).map(Doubt::AgentUnsure);
        alive.map(Doubt::AgentAlive).or_else(unsure)
    }

    /// Whether one of the agents that it names lives, or may.
    fn owner_doubt(&self, row: &Row, trace: &Trace, agent: &str) -> Option<Doubt> {
        // In another namespace the pid is somebody else's; what was cut off may name another.
        let elsewhere = (agent.into(), row.seen.uids.real);
        let elsewhere = self.agents.nested.contains(&elsewhere);
        let unsure = row.nested || elsewhere || trace.cut;
        let unsure = trace.owners().next().filter(|_| unsure);
        let named = self.named_owner_doubt(row, trace);
        named.or_else(|| unsure.map(Doubt::OwnerUnsure))
    }

    /// The same of those alone who are there under such a pid.
    fn named_owner_doubt(&self, row: &Row, trace: &Trace) -> Option<Doubt> {
        let mut unsure = None;
        for pid in trace.owners().filter(|_| !row.nested) {
            match self.table.rows.get(&pid) {
                // Another agent by now, or this one after all, and what it names was begun for it.
                Some(owner) if owner.seen.key.start > row.seen.key.start => {
                    let unsure_of = self.is_agent(owner).then_some(Doubt::OwnerUnsure(pid));
                    unsure = unsure.or(unsure_of);
                }
                Some(_) => return Some(Doubt::OwnerAlive(pid)),
                None if self.table.unread.contains_key(&pid) => {
                    unsure = Some(Doubt::OwnerUnsure(pid));
                }
                None => {}
            }
        }
        unsure
    }

    /// Whether it may run under another user than the agent that its environment comes from. Where nobody has logged
    /// in, what runs under a user who is there for one program is such, unless agents of that user are known.
    fn has_changed_uid(&self, row: &Row, trace: &Trace) -> bool {
        let uid = row.seen.uids.real;
        let of_program = || {
            let mut sessions = self.question.recorded.iter();
            PROGRAMS_UIDS.contains(&uid)
                && !self.agents.any.contains_key(&uid)
                && !sessions.any(|session| session.uid == Some(uid))
        };
        is_switched(row)
            || trace.switched
            || row.login_uid.map_or_else(of_program, |login| login != uid)
    }

    fn is_adopted(&self, row: &Row, trace: &Trace) -> bool {
        let Some(parent) = self.parent(row) else {
            return false;
        };
        let known = self.is_adopter(parent);
        let by_mark = match &parent.trace {
            Known::Is(above) => {
                let known = known || !above.cut && self.has_lost_its_session(row, parent);
                known && !trace.shares(above)
            }
            Known::Unasked | Known::Unreadable => known,
        };
        by_mark && !self.is_agent(parent) && trace.owners().all(|pid| pid != parent.seen.key.pid)
    }

    /// Whether the leader of its terminal session is gone, and that was not begun by it or its parent.
    fn has_lost_its_session(&self, row: &Row, parent: &Row) -> bool {
        let sid = row.seen.image.sid;
        let gone = match self.table.rows.get(&sid) {
            Some(leader) => leader.seen.key.start > row.seen.key.start,
            None => !self.table.unread.contains_key(&sid),
        };
        // 0 is one of another pid namespace.
        gone && sid != 0 && sid != row.seen.key.pid && sid != parent.seen.image.sid
    }
}

impl Doubt {
    /// Whether it says that somebody else may live who it belongs to.
    pub(super) fn is_of_another(self) -> bool {
        match self {
            Doubt::OwnerAlive(_)
            | Doubt::OwnerUnsure(_)
            | Doubt::AgentAlive(_)
            | Doubt::AgentUnsure(_)
            | Doubt::AgentUnknown => true,
            Doubt::NoOwner
            | Doubt::OwnerUnknown(_)
            | Doubt::ChangedUid
            | Doubt::NotOrphan
            | Doubt::Young
            | Doubt::Multiplexed
            | Doubt::TerminalSession(_)
            | Doubt::Agent => false,
        }
    }
}

/// Whether it runs under two users, or a program that runs others under another one.
fn is_switched(row: &Row) -> bool {
    let (uids, image) = (row.seen.uids, &row.seen.image);
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
