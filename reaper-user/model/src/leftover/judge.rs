//! Evaluates all processes of a table; see the parent module.
//!
//! Each process is visited once, after its parent, and takes over what holds for its ancestors. The cost therefore does
//! not depend on the depth of the tree.

mod evidence;
mod host;
mod keep;
mod living;
mod order;

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::{
    Leftover, LeftoverQuery, LeftoverRow, LeftoverVerdict, ProcessTable, RecordedSession,
    Uncertainty,
};
use crate::event::{ProcessKey, TICK_NS, Uids};
use crate::ruleset::Class;
use evidence::{Claim, resembles_agent};
use host::Hosts;
pub(crate) use keep::is_terminal;
use keep::{Kept, Waiting};
use living::Agents;
pub(crate) use living::is_login;

/// Evaluation of one process table for one query.
pub(super) struct Judge<'a> {
    table: &'a ProcessTable,
    query: &'a LeftoverQuery<'a>,
    /// Pids of the calling program and its ancestors.
    own: HashSet<u32>,
    agents: Agents,
    /// Pids of living agents and of all of their ancestors.
    agent_ancestors: HashSet<u32>,
    hosts: Hosts,
    /// One unreadable process per effective uid.
    unread: HashMap<Option<u32>, u32>,
    /// Recorded members by pid and start tick, with the index of the session.
    recorded: HashMap<(u32, u64), Vec<(ProcessKey, usize)>>,
    /// Recorded sessions by the pids of their roots.
    roots: HashMap<u32, Vec<&'a RecordedSession>>,
    /// Processes that a user keeps, by pid and start tick.
    kept_by_users: HashSet<(u32, u64)>,
    /// All processes: older before younger ones, parents before children.
    rows: Vec<&'a LeftoverRow>,
    /// Indexes in `rows` by pid.
    places: HashMap<u32, usize>,
    /// States of the processes visited so far, by the same index.
    states: Vec<RowState>,
}

/// Intermediate result for one process. It includes its ancestors up to, but without, an adopter or a root of the
/// scope.
struct RowState {
    /// Index of the parent, unless it is an adopter or a root of the scope.
    up: Option<usize>,
    /// Evidence for the process itself.
    claim: Option<Claim>,
    /// Index of the outermost process with strong evidence: an ancestor or itself.
    strong: Option<usize>,
    /// Index of the root of its subtree: `strong`, or the topmost ancestor with the same agent in its evidence.
    subtree_root: usize,
    /// Index of the agent that it belongs to; `Some(None)` below a boundary, `None` below neither.
    agent: Option<Option<usize>>,
    /// Whether it or an ancestor is a member of a session of the service.
    member: bool,
    /// Whether it or an ancestor is in a cgroup of the scope.
    in_cgroup: bool,
    /// Whether an ancestor is a root of the scope.
    below_scope: bool,
    /// Whether all ancestors were readable.
    whole: bool,
    /// Reason to keep it with all of its descendants.
    kept_with_descendants: Option<Kept>,
    /// Reason to keep it; only with evidence for it or an ancestor.
    kept: Option<Kept>,
    /// Uncertainty about it or an ancestor in the same tree that may belong to another, living agent.
    other: Option<Uncertainty>,
    /// Delay that it waits for; only with evidence for it or an ancestor.
    waiting: Option<Waiting>,
    /// Reasons that it or a descendant has to keep its ancestors, or to wait with them.
    needs_relatives: (Option<Kept>, Option<Waiting>),
}

impl<'a> Judge<'a> {
    pub(super) fn new(table: &'a ProcessTable, query: &'a LeftoverQuery<'a>) -> Judge<'a> {
        let mut judge = Judge {
            table,
            query,
            own: HashSet::from_iter([query.own_pid]),
            agents: Agents::default(),
            agent_ancestors: HashSet::new(),
            hosts: Hosts::default(),
            unread: table.unread.iter().map(|(pid, uid)| (*uid, *pid)).collect(),
            recorded: HashMap::new(),
            roots: HashMap::new(),
            kept_by_users: query.kept.iter().map(|key| tick(*key)).collect(),
            rows: Vec::new(),
            places: HashMap::new(),
            states: Vec::new(),
        };
        let mut at = table.rows.get(&query.own_pid);
        while let Some(row) = at.and_then(|row| judge.parent(row)) {
            // Terminates on a loop, which only corrupt input could create.
            at = judge.own.insert(row.entry.key.pid).then_some(row);
        }
        for (n, session) in query.recorded.iter().enumerate() {
            let of_pid = judge.roots.entry(session.root.pid).or_default();
            of_pid.push(session);
            for member in &session.members {
                let members = judge.recorded.entry(tick(*member)).or_default();
                members.push((*member, n));
            }
        }
        judge.agents = Agents::of(&judge);
        judge.agent_ancestors = judge.agent_ancestors();
        judge.hosts = Hosts::of(&judge);
        judge.rows = judge.in_order();
        let places = judge.rows.iter().enumerate();
        judge.places = places.map(|(n, row)| (row.entry.key.pid, n)).collect();
        judge
    }

    /// Evaluates all processes and returns the results; see [`super::find`].
    pub(super) fn all(mut self) -> Vec<Leftover> {
        for at in 0..self.rows.len() {
            let state = self.state_of(at);
            self.states.push(state);
        }
        self.hold_relatives();
        // Stable order: the rows have parents before their children.
        let mut found: Vec<(usize, Leftover)> = (0..self.rows.len())
            .filter(|at| self.is_considered(*at))
            .filter_map(|at| Some((at, self.finding(at)?)))
            .collect();
        found.sort_by_key(|(at, found)| (found.subtree_root.start, found.subtree_root.pid, *at));
        found.into_iter().map(|(_, found)| found).collect()
    }

    /// Returns whether a process is an agent, or may be one by its name. Recorded members are excluded from the name
    /// check: a service has seen that they are no agents.
    fn is_agent(&self, row: &LeftoverRow) -> bool {
        match self.query.rules.classify(&row.entry.image) {
            Class::Agent(_) => true,
            Class::Boundary(_) | Class::Server(_) => false,
            Class::Plain => {
                !self.recorded.contains_key(&tick(row.entry.key))
                    && resembles_agent(&row.entry.image)
            }
        }
    }

    /// Returns the pids of living agents and of all of their ancestors.
    fn agent_ancestors(&self) -> HashSet<u32> {
        let mut agent_ancestors = HashSet::new();
        for row in self.table.rows.values().filter(|row| self.is_agent(row)) {
            let mut at = Some(row);
            while let Some(row) = at.filter(|row| agent_ancestors.insert(row.entry.key.pid)) {
                at = self.parent(row);
            }
        }
        agent_ancestors
    }

    /// Returns the process with the pid of its parent. Returns `None` if that is unreadable, unknown or younger.
    fn parent(&self, row: &LeftoverRow) -> Option<&'a LeftoverRow> {
        let parent = self.table.rows.get(&row.entry.parent)?;
        (parent.entry.key.start <= row.entry.key.start && row.entry.parent != row.entry.key.pid)
            .then_some(parent)
    }

    /// Returns whether it adopts orphans, and otherwise starts nothing but units: an init or the service manager of a
    /// user.
    fn is_adopter(&self, row: &LeftoverRow) -> bool {
        let exe = &row.entry.image.exe;
        let manager =
            exe.ends_with(b"/systemd") && row.entry.image.args().any(|arg| arg == b"--user");
        row.entry.key.pid == 1 || row.entry.namespace_init || manager
    }

    /// Returns whether it is one of the processes that the scope names.
    fn is_scope(&self, row: &LeftoverRow) -> bool {
        let roots = &self.query.scope.roots;
        roots.iter().any(|root| root.has_same_tick(row.entry.key))
    }

    /// Returns whether it is a member of a session of the service.
    fn is_member(&self, row: &LeftoverRow) -> bool {
        let member = self.query.members.get(&row.entry.key.pid);
        member.is_some_and(|key| key.has_same_tick(row.entry.key))
    }

    /// Returns whether its lineage is known because it started while a service watched.
    fn is_watched(&self, row: &LeftoverRow) -> bool {
        let since = self.query.watched_since;
        since.is_some_and(|since| row.entry.key.start >= since)
    }

    /// Returns the pid of an unreadable process that may run under the same user as `row`. Its effective uid is
    /// unknown, or one of the uids of `row`.
    fn unread_of(&self, row: &LeftoverRow) -> Option<u32> {
        let Uids { real, effective } = row.entry.uids;
        let uids = [None, Some(real), Some(effective)];
        uids.iter().find_map(|uid| self.unread.get(uid)).copied()
    }

    /// Returns the state of the process at index `at`. The states of all earlier processes must be known.
    fn state_of(&self, at: usize) -> RowState {
        let row = self.rows[at];
        let parent = self.parent(row);
        let place = parent.and_then(|parent| self.places.get(&parent.entry.key.pid));
        let over = place.and_then(|place| self.states.get(*place));
        let is_end = |parent: &LeftoverRow| self.is_adopter(parent) || self.is_scope(parent);
        let up = place
            .copied()
            .filter(|place| *place < at && !parent.is_some_and(is_end));
        let above = up.map(|up| &self.states[up]);

        let claim = self.claim(row);
        let is_strong = claim
            .as_ref()
            .is_some_and(|claim| claim.uncertainty.is_none());
        let strong = above.and_then(|above| above.strong);
        let strong = strong.or(is_strong.then_some(at));
        let same = |above: &&RowState| match (&above.claim, &claim) {
            (Some(above), Some(claim)) => above.agent == claim.agent,
            _ => false,
        };
        let subtree_root =
            strong.unwrap_or_else(|| above.filter(same).map_or(at, |above| above.subtree_root));
        // The parent, if it is in the same tree.
        let tree = above.filter(|_| subtree_root != at);

        let of_itself = self.keep_with_descendants(row);
        let of_above = above.and_then(|above| above.kept_with_descendants.clone());
        let (mut kept, mut waiting, mut needs_relatives) = (None, None, (None, None));
        if claim.is_some() || strong.is_some() {
            let from_above = match tree {
                Some(above) => above.kept.clone(),
                None => of_above.clone(),
            };
            kept = self.keep_reason(row, self.rows[subtree_root]);
            waiting = self.wait(row, self.rows[subtree_root]);
            let holds = kept.clone().filter(|kept| kept.holds_relatives);
            needs_relatives = (holds, waiting.clone());
            kept = kept.or(from_above);
            waiting = waiting.or_else(|| tree.and_then(|above| above.waiting.clone()));
        }
        let uncertainty = claim.as_ref().and_then(|claim| claim.uncertainty);
        let other = uncertainty.filter(|uncertainty| uncertainty.is_of_another());
        let agent = if self.is_agent(row) {
            Some(Some(at))
        } else if self.query.rules.leaves_session(&row.entry.image).is_some() {
            Some(None)
        } else {
            above.and_then(|above| above.agent)
        };
        let cgroups = &self.query.scope.cgroups;
        RowState {
            up,
            strong,
            subtree_root,
            agent,
            member: self.is_member(row) || above.is_some_and(|above| above.member),
            in_cgroup: cgroups.contains(&row.entry.image.cgroup_id)
                || above.is_some_and(|above| above.in_cgroup),
            below_scope: parent.is_some_and(|parent| self.is_scope(parent))
                || over.is_some_and(|over| over.below_scope),
            whole: match above {
                Some(above) => above.whole,
                None => parent.is_some() || row.entry.parent == 0,
            },
            kept_with_descendants: of_itself.or(of_above),
            kept,
            other: other.or_else(|| tree.and_then(|above| above.other)),
            waiting,
            needs_relatives,
            claim,
        }
    }

    /// Extends keeps and delays to the ancestors of each process that needs its relatives.
    fn hold_relatives(&mut self) {
        // Children before their parents.
        for at in (0..self.rows.len()).rev() {
            let state = &mut self.states[at];
            let (kept, waiting) = state.needs_relatives.clone();
            state.kept = state.kept.take().or_else(|| kept.clone());
            state.waiting = state.waiting.take().or_else(|| waiting.clone());
            if let Some(up) = state.up.filter(|_| state.subtree_root != at) {
                let needs = &mut self.states[up].needs_relatives;
                needs.0 = needs.0.take().or(kept);
                needs.1 = needs.1.take().or(waiting);
            }
        }
    }

    /// Returns whether the query asks about a process: by its user, the scope and the processes that are always left
    /// out.
    fn is_considered(&self, at: usize) -> bool {
        let (row, state) = (self.rows[at], &self.states[at]);
        let Uids { real, effective } = row.entry.uids;
        let scope = self.query.scope;
        let mut uid = self.query.uid.iter();
        row.entry.key.pid > 1
            && !row.entry.kernel_thread
            && !row.entry.namespace_init
            && !self.own.contains(&row.entry.key.pid)
            && uid.all(|uid| *uid == real && *uid == effective)
            && !state.member
            && (scope.is_unlimited() || state.in_cgroup || state.below_scope && !self.is_scope(row))
    }

    /// Returns the result for a process. Returns `None` without evidence, and if it belongs to a living agent.
    fn finding(&self, at: usize) -> Option<Leftover> {
        let (row, state) = (self.rows[at], &self.states[at]);
        let of = state.strong.unwrap_or(at);
        let claim = self.states[of].claim.as_ref()?;
        let agent = state.agent.flatten();
        // A process that belongs to a living agent is not a leftover.
        let is_leftover = state.strong.is_some() || claim.uncertainty == Some(Uncertainty::Agent);
        if agent.is_some_and(|agent| agent != at || !is_leftover) {
            return None;
        }
        Some(Leftover {
            key: row.entry.key,
            subtree_root: self.rows[state.subtree_root].entry.key,
            agent: Arc::clone(&claim.agent),
            evidence: claim.evidence,
            verdict: self.verdict(row, state, claim),
        })
    }

    /// Returns the verdict about a process. A reason to keep comes first, then an uncertainty, then a delay.
    fn verdict(&self, row: &LeftoverRow, state: &RowState, claim: &Claim) -> LeftoverVerdict {
        let pid = row.entry.key.pid;
        let relative = |of: u32| Some(of).filter(|of| *of != pid);
        let uncertainty = if let Some(kept) = &state.kept {
            return LeftoverVerdict::Keep {
                reason: kept.reason,
                rule: kept.rule.clone(),
                relative: relative(kept.pid),
            };
        } else if claim.uncertainty.is_some() {
            claim.uncertainty
        } else if self.agent_ancestors.contains(&pid) {
            Some(Uncertainty::Agent)
        } else if !state.whole {
            Some(Uncertainty::NotOrphan)
        } else {
            state.other
        };
        match (uncertainty, &state.waiting) {
            (Some(uncertainty), _) => LeftoverVerdict::Report(uncertainty),
            (None, Some(waiting)) => LeftoverVerdict::Wait {
                rule: Arc::clone(&waiting.rule),
                remaining_ns: waiting.remaining_ns,
                relative: relative(waiting.pid),
            },
            (None, None) => LeftoverVerdict::Reap,
        }
    }

    /// Returns whether a visited process, or one above it in its tree, has strong evidence and nothing found so far
    /// speaks against a reap.
    fn is_leftover(&self, pid: u32) -> bool {
        let state = self.places.get(&pid).and_then(|at| self.states.get(*at));
        state.is_some_and(|state| {
            state.strong.is_some()
                && state.kept.is_none()
                && state.other.is_none()
                && state.agent.flatten().is_none()
                && !self.agent_ancestors.contains(&pid)
        })
    }
}

/// Returns the pid and the start in ticks, for comparison with keys from /proc.
fn tick(key: ProcessKey) -> (u32, u64) {
    (key.pid, key.start / TICK_NS)
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}
