//! Living agents, and what makes a leftover theirs although its evidence names an agent that is gone.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Judge;
use super::evidence::CLAUDE;
use super::host::Eldest;
use crate::event::{Image, ProcessKey};
use crate::facts::Fact;
use crate::leftover::{ConversationDigest, EnvMarker, EnvMarkers, LeftoverRow, Uncertainty};

/// The rule of the server to which Claude Code hands conversations. One that a spare worker continues is named
/// neither by the server nor by the worker.
const HOLDER: (&str, &str) = (CLAUDE, "claude-daemon");
/// Programs that build a new environment for a login, by the kernel's name (`comm`).
const LOGINS: &[&[u8]] = &[b"sshd", b"sshd-session", b"login", b"(sd-pam)"];

/// A marker that identifies one agent or one conversation: name of the variable, and what it names.
type Marker = (&'static str, Option<u32>, Option<ConversationDigest>);

/// Living agents, by real uid.
#[derive(Default)]
pub(super) struct Agents {
    /// All of them.
    any: HashMap<u32, Eldest>,
    /// Agents that may have replaced a root in its terminal, by name; `None` where no rule knows the name.
    relaunched: HashMap<(Option<Arc<str>>, u32), Latest>,
    /// Pids in their own namespaces, by name, of agents that run in a PID namespace below this one. Markers name them
    /// by these. `None`: unknown.
    nested: HashMap<(Arc<str>, u32), HashSet<Option<u32>>>,
    /// Agents and ancestors of agents that carry a marker.
    carried: HashMap<(u32, Marker), Eldest>,
    /// Agents whose arguments name a conversation that some process comes from.
    continued: HashMap<(u32, ConversationDigest), Eldest>,
    /// Agents whose arguments cannot be read in full.
    cut: HashMap<u32, Eldest>,
    /// Agents whose environment cannot be read in full.
    blind: HashMap<u32, Eldest>,
    /// Ancestors of agents whose environment cannot be read in full.
    blind_ancestors: HashMap<u32, Eldest>,
    /// Servers that continue conversations of their agent.
    holders: HashMap<u32, Eldest>,
}

/// The two that began last: one of them may be the process that is judged.
#[derive(Default)]
struct Latest(Vec<ProcessKey>);

impl Latest {
    fn add(&mut self, key: ProcessKey) {
        self.0.push(key);
        self.0
            .sort_unstable_by_key(|key| std::cmp::Reverse((key.start, key.pid)));
        self.0.truncate(2);
    }

    /// Returns the pid of another process that began at `since` or later.
    fn other_since(&self, row: &LeftoverRow, since: u64) -> Option<u32> {
        let mut all = self.0.iter();
        let other = all.find(|key| **key != row.entry.key && key.start >= since);
        other.map(|key| key.pid)
    }
}

impl Agents {
    pub(super) fn of(judge: &Judge<'_>) -> Agents {
        let mut agents = Agents::default();
        let rows = || judge.table.rows.values();
        let wanted: HashSet<(u32, ConversationDigest)> = rows()
            .filter_map(|row| Some((row.entry.uids.real, read(row)?)))
            .flat_map(|(uid, trace)| trace.conversations().map(move |one| (uid, one)))
            .collect();
        let mut visited = HashSet::new();
        for row in rows() {
            if judge.is_agent(row) {
                agents.add(judge, row, &wanted);
                agents.add_markers(judge, row, &mut visited);
            } else if judge.is_holder(&row.entry.image) {
                let holders = agents.holders.entry(row.entry.uids.real).or_default();
                holders.add(row.entry.key);
            }
        }
        agents
    }

    fn add(
        &mut self,
        judge: &Judge<'_>,
        row: &LeftoverRow,
        wanted: &HashSet<(u32, ConversationDigest)>,
    ) {
        let (key, uid, image) = (row.entry.key, row.entry.uids.real, &row.entry.image);
        let rules = judge.question.rules;
        let name = rules.agent(image).map(|rule| Arc::clone(rules.name(rule)));
        self.any.entry(uid).or_default().add(key);
        if row.nested
            && let Some(name) = &name
        {
            let nested = self.nested.entry((Arc::clone(name), uid)).or_default();
            nested.insert(row.inner_pid);
        }
        if judge.may_be_relaunched(row) {
            self.relaunched.entry((name, uid)).or_default().add(key);
        }
        let named = ConversationDigest::named_in(&image.argv).map(|one| (uid, one));
        for named in named.filter(|named| wanted.contains(named)) {
            self.continued.entry(named).or_default().add(key);
        }
        if image.truncated {
            self.cut.entry(uid).or_default().add(key);
        }
        if read(row).is_none() {
            self.blind.entry(uid).or_default().add(key);
        }
    }

    /// Adds the markers of an agent and of its ancestors of the same user, each process once.
    fn add_markers(&mut self, judge: &Judge<'_>, agent: &LeftoverRow, visited: &mut HashSet<u32>) {
        let uid = agent.entry.uids.real;
        let mut at = Some(agent);
        while let Some(row) = at
            .filter(|row| row.entry.uids.real == uid)
            .filter(|row| visited.insert(row.entry.key.pid))
        {
            let key = row.entry.key;
            // Init is started in no agent, unless it is one itself.
            let is_end = judge.is_adopter(row) && !judge.is_agent(row);
            let hands_on = !is_end && !is_login(&row.entry.image);
            match &row.env_markers {
                Fact::Known(trace) => {
                    for marker in trace.markers.iter().filter_map(marker) {
                        self.carried.entry((uid, marker)).or_default().add(key);
                    }
                }
                Fact::Unread | Fact::Unreadable => {}
            }
            if read(row).is_none() && hands_on {
                self.blind_ancestors.entry(uid).or_default().add(key);
            }
            at = judge.parent(row).filter(|_| !is_end);
        }
    }

    /// Returns the pid of another agent of the same user that began no later.
    pub(super) fn older_than(&self, row: &LeftoverRow) -> Option<u32> {
        let any = self.any.get(&row.entry.uids.real)?;
        any.other_by(row, row.entry.key.start)
    }

    /// Whether any agent of this user lives.
    pub(super) fn has_user(&self, uid: u32) -> bool {
        self.any.contains_key(&uid)
    }

    /// Whether an agent of this name and user may have this pid in a nested PID namespace.
    pub(super) fn has_nested(&self, name: &str, uid: u32, pid: u32) -> bool {
        let nested = self.nested.get(&(name.into(), uid));
        nested.is_some_and(|pids| pids.contains(&None) || pids.contains(&Some(pid)))
    }

    /// Returns the pid of another process that may have taken over from an agent of this name: an agent that began at
    /// `since` or later, or a server that continues conversations.
    pub(super) fn successor(&self, row: &LeftoverRow, name: &str, since: u64) -> Option<u32> {
        let uid = row.entry.uids.real;
        let mut names = [Some(name.into()), None].into_iter();
        let relaunched = names.find_map(|name| {
            let latest = self.relaunched.get(&(name, uid))?;
            latest.other_since(row, since)
        });
        let holder = || {
            let holders = self.holders.get(&uid).filter(|_| name == HOLDER.0)?;
            holders.other_by(row, u64::MAX)
        };
        relaunched.or_else(holder)
    }

    /// Returns the doubt about a process of a conversation that another living agent continues, or may.
    pub(super) fn continuer_doubt(
        &self,
        row: &LeftoverRow,
        trace: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let uid = row.entry.uids.real;
        trace.conversations().next()?;
        let mut all = trace.conversations();
        let named = all.find_map(|one| self.continued.get(&(uid, one))?.other_by(row, u64::MAX));
        let cut = || self.cut.get(&uid)?.other_by(row, u64::MAX);
        let unsure = || cut().map(Uncertainty::AgentUncertain);
        named.map(Uncertainty::OwnerAlive).or_else(unsure)
    }

    /// Returns the doubt about a process whose markers another living agent, or an ancestor of one, may carry too.
    pub(super) fn shared_doubt(
        &self,
        row: &LeftoverRow,
        trace: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let uid = row.entry.uids.real;
        let mut markers = trace.markers.iter().filter_map(marker);
        let carrier = |one: Marker| self.carried.get(&(uid, one))?.other_by(row, u64::MAX);
        let shared = markers.find_map(carrier).map(Uncertainty::SharedMarker);
        let blind = || self.blind.get(&uid)?.other_by(row, u64::MAX);
        let above = || {
            let ancestors = self.blind_ancestors.get(&uid)?;
            ancestors.other_by(row, row.entry.key.start)
        };
        shared.or_else(|| blind().or_else(above).map(Uncertainty::AgentUncertain))
    }
}

/// Whether a program builds a new environment for what it starts.
pub(crate) fn is_login(image: &Image) -> bool {
    LOGINS.contains(&&*image.comm)
}

impl Judge<'_> {
    /// Whether an agent may have replaced another one in its terminal: it was started in the kernel session of that
    /// one, and its creator may be gone.
    fn may_be_relaunched(&self, row: &LeftoverRow) -> bool {
        let image = &row.entry.image;
        let created_by = |parent: &LeftoverRow| {
            parent.entry.image.sid == image.sid && image.sid != 0 && !self.is_adopter(parent)
        };
        image.tty != 0
            && image.sid != row.entry.key.pid
            && !self.parent(row).is_some_and(created_by)
    }

    fn is_holder(&self, image: &Image) -> bool {
        let rules = self.question.rules;
        let rule = rules.leaves_session(image);
        rule.is_some_and(|rule| **rules.name(rule) == *HOLDER.1)
    }
}

/// Returns None if the marker only tells the kind of agent.
fn marker(mark: &EnvMarker) -> Option<Marker> {
    let tells = mark.agent_pid.is_some() || mark.conversation.is_some();
    tells.then_some((mark.variable, mark.agent_pid, mark.conversation))
}

/// Returns None if the environment was not read in full.
fn read(row: &LeftoverRow) -> Option<&EnvMarkers> {
    match &row.env_markers {
        Fact::Known(trace) => Some(trace).filter(|trace| !trace.cut),
        Fact::Unread | Fact::Unreadable => None,
    }
}
