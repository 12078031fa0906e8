//! The judgement itself; see the module above. Every process is gone through once, after its parent: what holds of
//! those above it is taken over from there, so that a long chain costs no more than as many single ones.

mod evidence;
mod host;
mod living;
mod order;
mod spare;

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
use living::Agents;
pub(crate) use living::is_login;
pub(crate) use spare::is_terminal;
use spare::{Spared, Waiting};

pub(super) struct Judge<'a> {
    table: &'a ProcessTable,
    question: &'a LeftoverQuery<'a>,
    /// Pids of this program and its ancestors.
    own: HashSet<u32>,
    agents: Agents,
    /// Pids of agents that live, and of all above them.
    carriers: HashSet<u32>,
    hosts: Hosts,
    /// Of whom cannot be read, one for each effective uid.
    unread: HashMap<Option<u32>, u32>,
    /// By pid and tick, who was recorded, and in which of the sessions.
    recorded: HashMap<(u32, u64), Vec<(ProcessKey, usize)>>,
    /// The same sessions by the pids of their roots.
    roots: HashMap<u32, Vec<&'a RecordedSession>>,
    /// By pid and tick, who is kept because a user wants it.
    kept: HashSet<(u32, u64)>,
    /// Parents before their children, older ones before younger ones.
    rows: Vec<&'a LeftoverRow>,
    /// Places among the rows.
    places: HashMap<u32, usize>,
    /// As far as it has come.
    standings: Vec<Standing>,
}

/// What is to be said of a process, and what holds of it and those above it: up to the adopter of everybody, or to
/// the scope's top, without these.
struct Standing {
    /// Its parent's place, if that is no such end.
    up: Option<usize>,
    claim: Option<Claim>,
    /// Place of the outermost for which strong evidence speaks.
    strong: Option<usize>,
    /// Place of the head of what it is a part of: that, or the topmost that says the same of itself.
    head: usize,
    /// Place of the agent by whose right it lives: the nearest, if no boundary lies between.
    agent: Option<Option<usize>>,
    member: bool,
    /// A cgroup of the scope holds it.
    in_cgroup: bool,
    /// There is a process of the scope above it.
    below_scope: bool,
    /// Whoever is above it could be read.
    whole: bool,
    /// What spares it as it does all that is below.
    of_all: Option<Spared>,
    spared: Option<Spared>,
    /// Between it and its head one belongs to another agent, who may live.
    other: Option<Uncertainty>,
    waiting: Option<Waiting>,
    /// What it, or one below it, needs those above for.
    needs_kin: (Option<Spared>, Option<Waiting>),
}

impl<'a> Judge<'a> {
    pub(super) fn new(table: &'a ProcessTable, question: &'a LeftoverQuery<'a>) -> Judge<'a> {
        let mut judge = Judge {
            table,
            question,
            own: HashSet::from_iter([question.own_pid]),
            agents: Agents::default(),
            carriers: HashSet::new(),
            hosts: Hosts::default(),
            unread: table.unread.iter().map(|(pid, uid)| (*uid, *pid)).collect(),
            recorded: HashMap::new(),
            roots: HashMap::new(),
            kept: question.kept.iter().map(|key| tick(*key)).collect(),
            rows: Vec::new(),
            places: HashMap::new(),
            standings: Vec::new(),
        };
        let mut at = table.rows.get(&question.own_pid);
        while let Some(row) = at.and_then(|row| judge.parent(row)) {
            // A loop, which only damage could make, ends too.
            at = judge.own.insert(row.entry.key.pid).then_some(row);
        }
        for (n, session) in question.recorded.iter().enumerate() {
            let of_pid = judge.roots.entry(session.root.pid).or_default();
            of_pid.push(session);
            for member in &session.members {
                let members = judge.recorded.entry(tick(*member)).or_default();
                members.push((*member, n));
            }
        }
        judge.agents = Agents::of(&judge);
        judge.carriers = judge.carriers();
        judge.hosts = Hosts::of(&judge);
        judge.rows = judge.in_order();
        let places = judge.rows.iter().enumerate();
        judge.places = places.map(|(n, row)| (row.entry.key.pid, n)).collect();
        judge
    }

    pub(super) fn all(mut self) -> Vec<Leftover> {
        for at in 0..self.rows.len() {
            let standing = self.stand(at);
            self.standings.push(standing);
        }
        self.hold_kin();
        // Parents stand before their children.
        let mut found: Vec<(usize, Leftover)> = (0..self.rows.len())
            .filter(|at| self.is_considered(*at))
            .filter_map(|at| Some((at, self.said(at)?)))
            .collect();
        found.sort_by_key(|(at, stray)| (stray.subtree_root.start, stray.subtree_root.pid, *at));
        found.into_iter().map(|(_, stray)| stray).collect()
    }

    /// Whether it is one, or by its name might be: what was recorded as a member a service has seen to be none.
    fn is_agent(&self, row: &LeftoverRow) -> bool {
        match self.question.rules.classify(&row.entry.image) {
            Class::Agent(_) => true,
            Class::Boundary(_) | Class::Server(_) => false,
            Class::Plain => {
                !self.recorded.contains_key(&tick(row.entry.key))
                    && resembles_agent(&row.entry.image)
            }
        }
    }

    fn carriers(&self) -> HashSet<u32> {
        let mut carriers = HashSet::new();
        for row in self.table.rows.values().filter(|row| self.is_agent(row)) {
            let mut at = Some(row);
            while let Some(row) = at.filter(|row| carriers.insert(row.entry.key.pid)) {
                at = self.parent(row);
            }
        }
        carriers
    }

    /// Who has its parent's pid, if that may be its parent.
    fn parent(&self, row: &LeftoverRow) -> Option<&'a LeftoverRow> {
        let parent = self.table.rows.get(&row.entry.parent)?;
        (parent.entry.key.start <= row.entry.key.start && row.entry.parent != row.entry.key.pid)
            .then_some(parent)
    }

    /// Whether it adopts whatever is orphaned, and is nobody's parent by itself but of units.
    fn is_adopter(&self, row: &LeftoverRow) -> bool {
        let exe = &row.entry.image.exe;
        let manager =
            exe.ends_with(b"/systemd") && row.entry.image.args().any(|arg| arg == b"--user");
        row.entry.key.pid == 1 || row.entry.namespace_init || manager
    }

    fn is_scope(&self, row: &LeftoverRow) -> bool {
        let roots = &self.question.scope.roots;
        roots.iter().any(|root| root.has_same_tick(row.entry.key))
    }

    /// Whether a service judges it.
    fn is_member(&self, row: &LeftoverRow) -> bool {
        let member = self.question.members.get(&row.entry.key.pid);
        member.is_some_and(|key| key.has_same_tick(row.entry.key))
    }

    /// Whether its lineage is known, since it began while a service watched.
    fn is_watched(&self, row: &LeftoverRow) -> bool {
        let since = self.question.watched_since;
        since.is_some_and(|since| row.entry.key.start >= since)
    }

    /// One that cannot be read, and may run under the same user.
    fn unread_of(&self, row: &LeftoverRow) -> Option<u32> {
        let Uids { real, effective } = row.entry.uids;
        let uids = [None, Some(real), Some(effective)];
        uids.iter().find_map(|uid| self.unread.get(uid)).copied()
    }

    fn stand(&self, at: usize) -> Standing {
        let row = self.rows[at];
        let parent = self.parent(row);
        let place = parent.and_then(|parent| self.places.get(&parent.entry.key.pid));
        let over = place.and_then(|place| self.standings.get(*place));
        let is_end = |parent: &LeftoverRow| self.is_adopter(parent) || self.is_scope(parent);
        let up = place
            .copied()
            .filter(|place| *place < at && !parent.is_some_and(is_end));
        let above = up.map(|up| &self.standings[up]);

        let claim = self.claim(row);
        let is_strong = claim.as_ref().is_some_and(|claim| claim.doubt.is_none());
        let strong = above.and_then(|above| above.strong);
        let strong = strong.or(is_strong.then_some(at));
        let same = |above: &&Standing| match (&above.claim, &claim) {
            (Some(above), Some(claim)) => above.agent == claim.agent,
            _ => false,
        };
        let head = strong.unwrap_or_else(|| above.filter(same).map_or(at, |above| above.head));
        // Who stands above it in the same tree.
        let tree = above.filter(|_| head != at);

        let of_itself = self.spare_of_all(row);
        let of_above = above.and_then(|above| above.of_all.clone());
        let (mut spared, mut waiting, mut needs_kin) = (None, None, (None, None));
        if claim.is_some() || strong.is_some() {
            let from_above = match tree {
                Some(above) => above.spared.clone(),
                None => of_above.clone(),
            };
            spared = self.spare(row, self.rows[head]);
            waiting = self.wait(row, self.rows[head]);
            let holds = spared.clone().filter(|spared| spared.holds_kin);
            needs_kin = (holds, waiting.clone());
            spared = spared.or(from_above);
            waiting = waiting.or_else(|| tree.and_then(|above| above.waiting.clone()));
        }
        let doubt = claim.as_ref().and_then(|claim| claim.doubt);
        let other = doubt.filter(|doubt| doubt.is_of_another());
        let agent = if self.is_agent(row) {
            Some(Some(at))
        } else if self
            .question
            .rules
            .leaves_session(&row.entry.image)
            .is_some()
        {
            Some(None)
        } else {
            above.and_then(|above| above.agent)
        };
        let cgroups = &self.question.scope.cgroups;
        Standing {
            up,
            strong,
            head,
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
            of_all: of_itself.or(of_above),
            spared,
            other: other.or_else(|| tree.and_then(|above| above.other)),
            waiting,
            needs_kin,
            claim,
        }
    }

    /// Whoever is above one that needs its kin is spared, or given time, with it.
    fn hold_kin(&mut self) {
        // Children before their parents.
        for at in (0..self.rows.len()).rev() {
            let standing = &mut self.standings[at];
            let (spared, waiting) = standing.needs_kin.clone();
            standing.spared = standing.spared.take().or_else(|| spared.clone());
            standing.waiting = standing.waiting.take().or_else(|| waiting.clone());
            if let Some(up) = standing.up.filter(|_| standing.head != at) {
                let needs = &mut self.standings[up].needs_kin;
                needs.0 = needs.0.take().or(spared);
                needs.1 = needs.1.take().or(waiting);
            }
        }
    }

    fn is_considered(&self, at: usize) -> bool {
        let (row, standing) = (self.rows[at], &self.standings[at]);
        let Uids { real, effective } = row.entry.uids;
        let scope = self.question.scope;
        let mut uid = self.question.uid.iter();
        row.entry.key.pid > 1
            && !row.entry.kernel_thread
            && !row.entry.namespace_init
            && !self.own.contains(&row.entry.key.pid)
            && uid.all(|uid| *uid == real && *uid == effective)
            && !standing.member
            && (scope.is_unlimited()
                || standing.in_cgroup
                || standing.below_scope && !self.is_scope(row))
    }

    /// What is to be said of a process, if anything.
    fn said(&self, at: usize) -> Option<Leftover> {
        let (row, standing) = (self.rows[at], &self.standings[at]);
        let of = standing.strong.unwrap_or(at);
        let claim = self.standings[of].claim.as_ref()?;
        let agent = standing.agent.flatten();
        // What lives by right of a living agent is that one's.
        let is_left = standing.strong.is_some() || claim.doubt == Some(Uncertainty::Agent);
        if agent.is_some_and(|agent| agent != at || !is_left) {
            return None;
        }
        Some(Leftover {
            key: row.entry.key,
            subtree_root: self.rows[standing.head].entry.key,
            agent: Arc::clone(&claim.agent),
            evidence: claim.evidence,
            verdict: self.verdict(row, standing, claim),
        })
    }

    fn verdict(&self, row: &LeftoverRow, standing: &Standing, claim: &Claim) -> LeftoverVerdict {
        let pid = row.entry.key.pid;
        let kin = |of: u32| Some(of).filter(|of| *of != pid);
        let doubt = if let Some(spared) = &standing.spared {
            return LeftoverVerdict::Keep {
                spare: spared.spare,
                rule: spared.rule.clone(),
                kin: kin(spared.pid),
            };
        } else if claim.doubt.is_some() {
            claim.doubt
        } else if self.carriers.contains(&pid) {
            Some(Uncertainty::Agent)
        } else if !standing.whole {
            Some(Uncertainty::NotOrphan)
        } else {
            standing.other
        };
        match (doubt, &standing.waiting) {
            (Some(doubt), _) => LeftoverVerdict::Report(doubt),
            (None, Some(waiting)) => LeftoverVerdict::Wait {
                rule: Arc::clone(&waiting.rule),
                rest: waiting.rest,
                kin: kin(waiting.pid),
            },
            (None, None) => LeftoverVerdict::Reap,
        }
    }

    /// Whether a process that was gone through before is a leftover itself, and nothing speaks for it.
    fn is_left(&self, pid: u32) -> bool {
        let standing = self.places.get(&pid).and_then(|at| self.standings.get(*at));
        standing.is_some_and(|standing| {
            standing.strong.is_some()
                && standing.spared.is_none()
                && standing.other.is_none()
                && standing.agent.flatten().is_none()
                && !self.carriers.contains(&pid)
        })
    }
}

fn tick(key: ProcessKey) -> (u32, u64) {
    (key.pid, key.start / TICK_NS)
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}
