//! Programs that may have passed a marker on: multiplexers, terminals, and others in which users start processes.

use hashbrown::HashMap;

use super::{Judge, file_name};
use crate::event::ProcessKey;
use crate::facts::Fact;
use crate::leftover::{EnvMarkers, LeftoverRow, Multiplexer, Uncertainty};

/// Programs that pass their own environment to processes that a user starts in them, by their markers.
#[derive(Default)]
pub(super) struct Hosts {
    /// Programs that have a marker with this agent pid.
    owners: HashMap<u32, Eldest>,
    /// Programs that have a marker of this agent without a pid.
    agents: HashMap<&'static str, Eldest>,
    /// Programs whose environment is unreadable or incomplete, by real uid.
    unreadable: HashMap<u32, Eldest>,
    zellij: Option<Zellij>,
}

/// The two oldest processes of a group. If one of them is the process in question, the other is used.
#[derive(Default)]
pub(super) struct Eldest(Vec<ProcessKey>);

/// All zellij servers together. The variable `ZELLIJ` does not say to which of them it belongs.
struct Zellij {
    /// Start of the youngest one, in ns since boot.
    youngest: u64,
    /// Whether the environment of one of them is unreadable or incomplete.
    unreadable: bool,
}

impl Hosts {
    /// Collects the hosts of a table; see [`Judge::is_host`].
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
        if is_unreadable(row) {
            let of_uid = self.unreadable.entry(row.entry.uids.real).or_default();
            of_uid.add(key);
        }
        let Fact::Known(env_markers) = &row.env_markers else {
            return;
        };
        for marker in &env_markers.markers {
            match marker.agent_pid {
                Some(owner) => self.owners.entry(owner).or_default().add(key),
                None => self.agents.entry(marker.agent).or_default().add(key),
            }
        }
    }

    fn add_zellij(&mut self, row: &LeftoverRow) {
        let (youngest, unreadable) = (row.entry.key.start, is_unreadable(row));
        let all = self.zellij.get_or_insert(Zellij {
            youngest,
            unreadable,
        });
        all.youngest = all.youngest.max(youngest);
        all.unreadable |= unreadable;
    }

    /// Returns whether another such program that is not younger has, or may have, the same marker (see
    /// [`EnvMarkers::shares_marker`]).
    fn may_have_passed_on(&self, row: &LeftoverRow, env_markers: &EnvMarkers) -> bool {
        let mut owners = env_markers.agent_pids().peekable();
        let is_older = |host: Option<&Eldest>| host.is_some_and(|host| host.is_older(row));
        let uids = row.entry.uids;
        let both = [uids.real, uids.effective];
        both.iter().any(|uid| is_older(self.unreadable.get(uid)))
            || if owners.peek().is_some() {
                owners.any(|owner| is_older(self.owners.get(&owner)))
            } else {
                let mut markers = env_markers.markers.iter();
                markers.any(|marker| is_older(self.agents.get(marker.agent)))
            }
    }
}

impl Eldest {
    pub(super) fn add(&mut self, key: ProcessKey) {
        self.0.push(key);
        self.0.sort_unstable_by_key(|key| (key.start, key.pid));
        self.0.truncate(2);
    }

    /// Returns whether another process of the group is not younger.
    fn is_older(&self, row: &LeftoverRow) -> bool {
        self.other_by(row, row.entry.key.start).is_some()
    }

    /// Returns the pid of another process of the group that started at `by` (ns since boot) or earlier.
    pub(super) fn other_by(&self, row: &LeftoverRow, by: u64) -> Option<u32> {
        let mut all = self.0.iter();
        let other = all.find(|key| **key != row.entry.key && key.start <= by);
        other.map(|key| key.pid)
    }
}

impl<'a> Judge<'a> {
    /// Returns the uncertainty if the markers may come from a multiplexer, a terminal or the like that an agent
    /// started.
    pub(super) fn origin_uncertainty(
        &self,
        row: &'a LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> Option<Uncertainty> {
        let mut multiplexers = env_markers.multiplexers.iter();
        let multiplexed = env_markers.cut
            || multiplexers.any(|one| !self.lacks_marker(one, row, env_markers))
            || self.hosts.may_have_passed_on(row, env_markers)
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
            Fact::Known(above) => above.cut || env_markers.shares_marker(above),
            Fact::Unread | Fact::Unreadable => true,
        };
        // The leader may be a leftover itself.
        (older && shares && !self.is_leftover(sid)).then_some(Uncertainty::TerminalSession(sid))
    }

    /// Returns whether a multiplexer is known not to have the marker, because the agent ran in it.
    fn lacks_marker(
        &self,
        multiplexer: &Multiplexer,
        row: &LeftoverRow,
        env_markers: &EnvMarkers,
    ) -> bool {
        let born = row.entry.key.start;
        let lacks_it = match multiplexer.server {
            Some(pid) => self.table.rows.get(&pid).is_some_and(|server| {
                server.entry.key.start <= born
                    && matches!(&server.env_markers, Fact::Known(above) if !above.cut && !env_markers.shares_marker(above))
            }),
            // A server with the marker is found among the hosts.
            None if multiplexer.variable == "ZELLIJ" => {
                let servers = self.hosts.zellij.as_ref();
                servers.is_some_and(|servers| servers.youngest <= born && !servers.unreadable)
            }
            None => false,
        };
        lacks_it && !row.nested
    }
}

/// Returns whether the environment of a process is unreadable or incomplete.
fn is_unreadable(row: &LeftoverRow) -> bool {
    !matches!(&row.env_markers, Fact::Known(env_markers) if !env_markers.cut)
}
