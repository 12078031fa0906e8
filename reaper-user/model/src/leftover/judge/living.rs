//! Living agents that may own a leftover although its evidence names an agent that has exited.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Judge;
use super::evidence::CLAUDE;
use super::host::Eldest;
use crate::event::{Image, ProcessKey};
use crate::facts::Fact;
use crate::leftover::{ConversationDigest, EnvMarker, EnvMarkers, LeftoverRow, Uncertainty};

/// Agent and rule of the server to which Claude Code passes conversations. If an idle worker takes one over, neither
/// the server nor the worker names it.
const SERVER: (&str, &str) = (CLAUDE, "claude-daemon");
/// Programs that build a new environment for a login, by `comm`.
const LOGINS: &[&[u8]] = &[b"sshd", b"sshd-session", b"login", b"(sd-pam)"];

/// Marker that identifies an agent or a conversation: variable, pid, conversation.
type Marker = (&'static str, Option<u32>, Option<ConversationDigest>);

/// Living agents, by real uid.
#[derive(Default)]
pub(super) struct Agents {
    /// All living agents.
    any: HashMap<u32, Eldest>,
    /// Agents that may have replaced a root in its terminal, by name; without a name if no rule matches.
    relaunched: HashMap<(Option<Arc<str>>, u32), Latest>,
    /// Agents in a PID namespace below this one, by name: their pids in that namespace, which markers contain. `None`
    /// for an unknown pid.
    nested: HashMap<(Arc<str>, u32), HashSet<Option<u32>>>,
    /// Agents and ancestors of agents, by a marker that they have.
    by_marker: HashMap<(u32, Marker), Eldest>,
    /// Agents whose arguments name a conversation from the environment of some process.
    continued: HashMap<(u32, ConversationDigest), Eldest>,
    /// Agents whose arguments are incomplete.
    cut: HashMap<u32, Eldest>,
    /// Agents whose environment is unreadable or incomplete.
    unreadable: HashMap<u32, Eldest>,
    /// Agents and ancestors of agents whose environment is unreadable or incomplete.
    unreadable_ancestors: HashMap<u32, Eldest>,
    /// Servers that continue conversations of their agent.
    servers: HashMap<u32, Eldest>,
}

/// The two youngest processes of a group. If one of them is the process in question, the other is used.
#[derive(Default)]
struct Latest(Vec<ProcessKey>);

impl Latest {
    fn add(&mut self, key: ProcessKey) {
        self.0.push(key);
        self.0
            .sort_unstable_by_key(|key| std::cmp::Reverse((key.start, key.pid)));
        self.0.truncate(2);
    }

    /// Returns the pid of another process that started at `since` (ns since boot) or later.
    fn other_since(&self, row: &LeftoverRow, since: u64) -> Option<u32> {
        let mut all = self.0.iter();
        let other = all.find(|key| **key != row.entry.key && key.start >= since);
        other.map(|key| key.pid)
    }
}

impl Agents {
    /// Collects the living agents and the servers that continue conversations.
    pub(super) fn of(judge: &Judge<'_>) -> Agents {
        let mut agents = Agents::default();
        let rows = || judge.table.rows.values();
        let wanted: HashSet<(u32, ConversationDigest)> = rows()
            .filter_map(|row| Some((row.entry.uids.real, read(row)?)))
            .flat_map(|(uid, env_markers)| env_markers.conversations().map(move |one| (uid, one)))
            .collect();
        let mut visited = HashSet::new();
        for row in rows() {
            if judge.is_agent(row) {
                agents.add(judge, row, &wanted);
                agents.add_markers(judge, row, &mut visited);
            } else if judge.is_server(&row.entry.image) {
                let servers = agents.servers.entry(row.entry.uids.real).or_default();
                servers.add(row.entry.key);
            }
        }
        agents
    }

    /// Adds a living agent to the groups that it belongs to. `wanted` has the conversations that any process has in its
    /// environment, by real uid; other conversations are not noted.
    fn add(
        &mut self,
        judge: &Judge<'_>,
        row: &LeftoverRow,
        wanted: &HashSet<(u32, ConversationDigest)>,
    ) {
        let (key, uid, image) = (row.entry.key, row.entry.uids.real, &row.entry.image);
        let rules = judge.query.rules;
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
            self.unreadable.entry(uid).or_default().add(key);
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
            // No agent starts an init, unless that is an agent itself.
            let is_end = judge.is_adopter(row) && !judge.is_agent(row);
            let passes_on = !is_end && !is_login(&row.entry.image);
            match &row.env_markers {
                Fact::Known(env_markers) => {
                    for marker in env_markers.markers.iter().filter_map(marker) {
                        self.by_marker.entry((uid, marker)).or_default().add(key);
                    }
                }
                Fact::Unread | Fact::Unreadable => {}
            }
            if read(row).is_none() && passes_on {
                self.unreadable_ancestors.entry(uid).or_default().add(key);
            }
            at = judge.parent(row).filter(|_| !is_end);
        }
    }

    /// Returns the pid of another agent of the same user that is not younger.
    pub(super) fn older_than(&self, row: &LeftoverRow) -> Option<u32> {
        let any = self.any.get(&row.entry.uids.real)?;
        any.other_by(row, row.entry.key.start)
    }

    /// Returns whether an agent of this user is alive.
    pub(super) fn has_user(&self, uid: u32) -> bool {
        self.any.contains_key(&uid)
    }

    /// Returns whether an agent of this name and user may have this pid in a nested PID namespace.
    pub(super) fn has_nested(&self, name: &str, uid: u32, pid: u32) -> bool {
        let nested = self.nested.get(&(name.into(), uid));
        nested.is_some_and(|pids| pids.contains(&None) || pids.contains(&Some(pid)))
    }

    /// Returns the pid of another process that may continue the session of an exited agent: an agent that started at
    /// `since` or later, or a server that continues conversations.
    pub(super) fn successor(&self, row: &LeftoverRow, name: &str, since: u64) -> Option<u32> {
        let uid = row.entry.uids.real;
        let mut names = [Some(name.into()), None].into_iter();
        let relaunched = names.find_map(|name| {
            let latest = self.relaunched.get(&(name, uid))?;
            latest.other_since(row, since)
        });
        let server = || {
            let servers = self.servers.get(&uid).filter(|_| name == SERVER.0)?;
            servers.other_by(row, u64::MAX)
        };
        relaunched.or_else(server)
    }

    /// Returns the uncertainty if a living agent continues, or may continue, the conversation of a process.
    pub(super) fn continuer_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let uid = row.entry.uids.real;
        env_markers.conversations().next()?;
        let mut all = env_markers.conversations();
        let named = all.find_map(|one| self.continued.get(&(uid, one))?.other_by(row, u64::MAX));
        let cut = || self.cut.get(&uid)?.other_by(row, u64::MAX);
        let uncertain = || cut().map(Uncertainty::AgentUncertain);
        named.map(Uncertainty::OwnerAlive).or_else(uncertain)
    }

    /// Returns the uncertainty if another living agent, or an ancestor of one, has or may have a marker of the process.
    pub(super) fn shared_uncertainty(
        &self,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let uid = row.entry.uids.real;
        let mut markers = env_markers.markers.iter().filter_map(marker);
        let other = |one: Marker| self.by_marker.get(&(uid, one))?.other_by(row, u64::MAX);
        let shared = markers.find_map(other).map(Uncertainty::SharedMarker);
        let unreadable = || self.unreadable.get(&uid)?.other_by(row, u64::MAX);
        let above = || {
            let ancestors = self.unreadable_ancestors.get(&uid)?;
            ancestors.other_by(row, row.entry.key.start)
        };
        shared.or_else(|| unreadable().or_else(above).map(Uncertainty::AgentUncertain))
    }
}

/// Returns whether a program builds a new environment for a login.
pub(crate) fn is_login(image: &Image) -> bool {
    LOGINS.contains(&&*image.comm)
}

impl Judge<'_> {
    /// Returns whether an agent may have replaced another one in its terminal: it was started in the kernel session of
    /// that agent, and its creator may have exited.
    fn may_be_relaunched(&self, row: &LeftoverRow) -> bool {
        let image = &row.entry.image;
        let created_by = |parent: &LeftoverRow| {
            parent.entry.image.sid == image.sid && image.sid != 0 && !self.is_adopter(parent)
        };
        image.tty != 0
            && image.sid != row.entry.key.pid
            && !self.parent(row).is_some_and(created_by)
    }

    /// Returns whether a program is the server that continues conversations ([`SERVER`]).
    fn is_server(&self, image: &Image) -> bool {
        let rules = self.query.rules;
        let rule = rules.leaves_session(image);
        rule.is_some_and(|rule| **rules.name(rule) == *SERVER.1)
    }
}

/// Returns the part of a marker that identifies an agent or a conversation; `None` if the marker only names the kind of
/// agent.
fn marker(marker: &EnvMarker) -> Option<Marker> {
    let identifies = marker.agent_pid.is_some() || marker.conversation.is_some();
    identifies.then_some((marker.variable, marker.agent_pid, marker.conversation))
}

/// Returns the markers of a process; `None` if its environment is unreadable or incomplete.
fn read(row: &LeftoverRow) -> Option<&EnvMarkers> {
    match &row.env_markers {
        Fact::Known(env_markers) => Some(env_markers).filter(|env_markers| !env_markers.cut),
        Fact::Unread | Fact::Unreadable => None,
    }
}
