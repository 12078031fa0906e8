//! Who may have handed a mark on: multiplexers, terminals, and what else people start processes from.

use hashbrown::HashMap;

use super::{Judge, file_name};
use crate::event::ProcessKey;
use crate::facts::Fact;
use crate::leftover::{EnvMarkers, LeftoverRow, Multiplexer, Uncertainty};

/// Those that hand their own environment to whatever a person starts, by what of it is known.
#[derive(Default)]
pub(super) struct Hosts {
    owners: HashMap<u32, Eldest>,
    agents: HashMap<&'static str, Eldest>,
    /// Whose environment cannot be read, or not all of it, by real uid.
    blind: HashMap<u32, Eldest>,
    zellij: Option<Zellij>,
}

/// The two that began first: one of them may be the process that is asked about.
#[derive(Default)]
pub(super) struct Eldest(Vec<ProcessKey>);

/// Servers of the multiplexer that does not tell which of them it is.
struct Zellij {
    youngest: u64,
    blind: bool,
}

impl Hosts {
    pub(super) fn of(judge: &Judge<'_>) -> Hosts {
        let mut hosts = Hosts::default();
        for row in judge.table.rows.values() {
            let zellij = file_name(&row.entry.image.exe) == b"zellij";
            if zellij {
                hosts.add_zellij(row);
            }
            if zellij || judge.is_host(row) {
                hosts.add(row);
            }
        }
        hosts
    }

    fn add(&mut self, row: &LeftoverRow) {
        let key = row.entry.key;
        if is_blind(row) {
            let of_uid = self.blind.entry(row.entry.uids.real).or_default();
            of_uid.add(key);
        }
        let Fact::Known(trace) = &row.env_markers else {
            return;
        };
        for mark in &trace.markers {
            match mark.agent_pid {
                Some(owner) => self.owners.entry(owner).or_default().add(key),
                None => self.agents.entry(mark.agent).or_default().add(key),
            }
        }
    }

    fn add_zellij(&mut self, row: &LeftoverRow) {
        let (youngest, blind) = (row.entry.key.start, is_blind(row));
        let all = self.zellij.get_or_insert(Zellij { youngest, blind });
        all.youngest = all.youngest.max(youngest);
        all.blind |= blind;
    }

    /// Whether one of them that is no younger has the same mark, as [`EnvMarkers::shares_marker`] has it, or may.
    fn may_have_handed_on(&self, row: &LeftoverRow, trace: &EnvMarkers) -> bool {
        let mut owners = trace.owners().peekable();
        let is_older = |host: Option<&Eldest>| host.is_some_and(|host| host.is_older(row));
        let uids = row.entry.uids;
        let blind = [uids.real, uids.effective];
        blind.iter().any(|uid| is_older(self.blind.get(uid)))
            || if owners.peek().is_some() {
                owners.any(|owner| is_older(self.owners.get(&owner)))
            } else {
                let mut marks = trace.markers.iter();
                marks.any(|mark| is_older(self.agents.get(mark.agent)))
            }
    }
}

impl Eldest {
    pub(super) fn add(&mut self, key: ProcessKey) {
        self.0.push(key);
        self.0.sort_unstable_by_key(|key| (key.start, key.pid));
        self.0.truncate(2);
    }

    /// Whether one that is another process began no later.
    fn is_older(&self, row: &LeftoverRow) -> bool {
        self.other_by(row, row.entry.key.start).is_some()
    }

    /// Pid of one that is another process and began by then.
    pub(super) fn other_by(&self, row: &LeftoverRow, by: u64) -> Option<u32> {
        let mut all = self.0.iter();
        let other = all.find(|key| **key != row.entry.key && key.start <= by);
        other.map(|key| key.pid)
    }
}

impl<'a> Judge<'a> {
    /// Whether the marks may have come from a multiplexer, a terminal or the like that an agent has started.
    pub(super) fn may_lie(&self, row: &'a LeftoverRow, trace: &EnvMarkers) -> Option<Uncertainty> {
        let mut multiplexers = trace.multiplexers.iter();
        let multiplexed = trace.cut
            || multiplexers.any(|one| !self.is_honest(one, row, trace))
            || self.hosts.may_have_handed_on(row, trace)
            || self.unread_of(row).is_some();
        if multiplexed {
            return Some(Uncertainty::Multiplexed);
        }
        let sid = row.entry.image.sid;
        if self.table.unread.contains_key(&sid) {
            return Some(Uncertainty::TerminalSession(sid));
        }
        let leader = self.table.rows.get(&sid)?;
        let older =
            leader.entry.key.start <= row.entry.key.start && leader.entry.key != row.entry.key;
        let shares = match &leader.env_markers {
            Fact::Known(above) => above.cut || trace.shares_marker(above),
            Fact::Unread | Fact::Unreadable => true,
        };
        // The leader may be left behind itself.
        (older && shares && !self.is_left(sid)).then_some(Uncertainty::TerminalSession(sid))
    }

    /// Whether a multiplexer can be asked, and has not the mark: the agent ran in it.
    fn is_honest(&self, multiplexer: &Multiplexer, row: &LeftoverRow, trace: &EnvMarkers) -> bool {
        let born = row.entry.key.start;
        let honest = match multiplexer.server {
            Some(pid) => self.table.rows.get(&pid).is_some_and(|server| {
                server.entry.key.start <= born
                    && matches!(&server.env_markers, Fact::Known(above) if !above.cut && !trace.shares_marker(above))
            }),
            // Those that have the mark are among the hosts.
            None if multiplexer.variable == "ZELLIJ" => {
                let servers = self.hosts.zellij.as_ref();
                servers.is_some_and(|servers| servers.youngest <= born && !servers.blind)
            }
            None => false,
        };
        honest && !row.nested
    }
}

fn is_blind(row: &LeftoverRow) -> bool {
    !matches!(&row.env_markers, Fact::Known(trace) if !trace.cut)
}
