//! Finds and reaps leftovers: processes that agents left behind while no service was watching.
//!
//! `reaper scan` calls [`find_leftovers`] and [`reap_found`] if no service answers. In a service, [`Scanner`] does the
//! same on its own threads. It asks the engine for the members before each scan, and sends it the records for the event
//! stream.

mod report;
mod service;
#[cfg(test)]
mod tests;

use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;

use crate::reap::{Due, DueProcess, ReapResult, Times, reap_all};
use reaper_host::facts::{scan_processes, socket_facts};
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys::{self, pidfd::Pidfd};
use reaper_model::Scope;
use reaper_model::event::ProcessKey;
use reaper_model::facts::Fact;
use reaper_model::leftover::{
    self, Leftover, LeftoverQuery, LeftoverRow, LeftoverVerdict, ProcessTable, RecordedSession,
};
use reaper_model::ruleset::{Rule, Ruleset};
pub use service::Scanner;

/// Default minimum age of a tool's shell.
pub const MIN_AGE: Duration = Duration::from_secs(600);

/// Settings of a scan, see the fields of [`LeftoverQuery`] with the same names.
#[derive(Default)]
pub struct ScanOptions {
    pub rules: Ruleset,
    pub scope: Scope,
    pub uid: Option<u32>,
    pub min_age: Duration,
    pub members: HashMap<u32, ProcessKey>,
    pub watched_since: Option<u64>,
    pub recorded: Vec<RecordedSession>,
    pub kept: Vec<ProcessKey>,
    pub waited: HashMap<ProcessKey, u64>,
    pub requested_by_user: bool,
}

/// Result of a scan.
pub struct FoundLeftovers {
    /// All processes that were read.
    pub table: ProcessTable,
    /// Leftovers with any verdict, also those that are not to be reaped.
    pub leftovers: Vec<Leftover>,
}

/// Result of reaping leftovers.
pub struct LeftoverReapResult {
    /// Ended leftovers that were discovered while others were being reaped.
    pub late: Vec<(LeftoverRow, Leftover)>,
    /// Result for each claimed leftover, also if it could not be ended.
    pub ended: Vec<ReapResult>,
}

/// Scans all processes for leftovers of any verdict. `claimed` are those being reaped: they are found even if they no
/// longer match their evidence.
///
/// # Errors
/// The process table cannot be read.
pub fn find_leftovers(
    options: &ScanOptions,
    claimed: &HashSet<ProcessKey>,
) -> Result<FoundLeftovers, ProcfsError> {
    let procfs = Procfs::default();
    let mut table = scan_processes(&procfs)?;
    find_hidden(&mut table);
    let leftovers = options.find(&table, claimed);
    let needs_sockets =
        |rule: &Rule| rule.may_keep() && (rule.when.listening.is_some() || rule.when.window);
    if !options.rules.rules().iter().any(needs_sockets) {
        return Ok(FoundLeftovers { table, leftovers });
    }
    // Sockets are read only for processes whose verdict they can change.
    let may_change = |leftover: &&Leftover| !matches!(leftover.verdict, LeftoverVerdict::Report(_));
    let pids = leftovers
        .iter()
        .filter(may_change)
        .map(|leftover| leftover.key.pid);
    for (key, sockets) in socket_facts(&procfs, pids.collect())? {
        if let Some(row) = table.rows.get_mut(&key.pid)
            && row.entry.key.has_same_tick(key)
        {
            (row.listening, row.window) = (sockets.listening, sockets.window);
        }
    }
    let leftovers = options.find(&table, claimed);
    Ok(FoundLeftovers { table, leftovers })
}

/// Adds to the unread processes the living pids in environment markers that /proc hides (mount option `hidepid`).
fn find_hidden(table: &mut ProcessTable) {
    let markers = table
        .rows
        .values()
        .filter_map(|row| match &row.env_markers {
            Fact::Known(markers) => Some(markers),
            Fact::Unread | Fact::Unreadable => None,
        });
    let pids: HashSet<u32> = markers.flat_map(|markers| markers.agent_pids()).collect();
    let is_hidden = |pid: &u32| {
        // pidfd_open(2) finds processes that /proc hides.
        let is_alive = Pidfd::open(*pid).err() != Some(Errno::ESRCH);
        is_alive && !sys::is_visible(*pid)
    };
    let hidden = pids.into_iter().filter(is_hidden);
    table.unread.extend(hidden.map(|pid| (pid, None)));
}

impl ScanOptions {
    /// Evaluates a process table. `claimed` processes and their children count as leftovers that have waited long
    /// enough.
    fn find(&self, table: &ProcessTable, claimed: &HashSet<ProcessKey>) -> Vec<Leftover> {
        let claimed_session = (!claimed.is_empty()).then(|| RecordedSession {
            agent: "agent".into(),
            root: ProcessKey { pid: 0, start: 0 },
            uid: None,
            members: claimed.clone(),
        });
        let recorded: Vec<_> = claimed_session
            .into_iter()
            .chain(self.recorded.clone())
            .collect();
        let mut waited = self.waited.clone();
        // Processes that are being reaped have waited long enough, as have their children.
        waited.extend(claimed.iter().map(|key| (*key, u64::MAX)));
        let query = LeftoverQuery {
            rules: &self.rules,
            recorded: &recorded,
            own_pid: std::process::id(),
            uid: self.uid,
            scope: &self.scope,
            members: &self.members,
            watched_since: self.watched_since,
            kept: &self.kept,
            min_age: sys::nanoseconds(self.min_age),
            now: sys::boot_time(),
            honor_keep: self.rules.honors_keep(),
            waited: &waited,
            requested_by_user: self.requested_by_user,
        };
        leftover::find(table, &query)
    }
}

/// Reaps the leftovers in `found` with the verdict `Reap`, and new ones that `scan` finds meanwhile, until it finds no
/// more. Processes that were present in `found` without that verdict are never reaped. `scan` gets the claimed
/// processes.
///
/// # Errors
/// Returns the error of `scan`. Signals that were sent before cannot be taken back.
pub fn reap_found<E>(
    found: &FoundLeftovers,
    rules: &Ruleset,
    times: Times,
    mut scan: impl FnMut(&HashSet<ProcessKey>) -> Result<FoundLeftovers, E>,
) -> Result<LeftoverReapResult, E> {
    let is_due = |leftover: &&Leftover| leftover.verdict == LeftoverVerdict::Reap;
    let first = found.leftovers.iter().filter(is_due);
    let first: HashSet<ProcessKey> = first.map(|leftover| leftover.key).collect();
    let was_there = |key: ProcessKey| {
        let rows = &found.table.rows;
        let row = rows.get(&key.pid);
        row.is_some_and(|row| row.entry.key == key) || found.table.unread.contains_key(&key.pid)
    };
    let mut late: HashMap<ProcessKey, (LeftoverRow, Leftover)> = HashMap::new();
    let find = |claimed: &HashSet<ProcessKey>| {
        let FoundLeftovers {
            mut table,
            leftovers,
        } = scan(claimed)?;
        let mut due = Due::new();
        let reaped = leftovers.iter().filter(is_due);
        let reaped = reaped.map(|leftover| leftover.key).collect();
        let graces = leftover::graces(&table, rules, &reaped);
        for leftover in leftovers.into_iter().filter(|leftover| is_due(&leftover)) {
            let (key, known) = (leftover.key, first.contains(&leftover.key));
            if (known || !was_there(key))
                && let Some(row) = table.rows.remove(&key.pid)
            {
                let process = DueProcess {
                    uids: Some(row.entry.uids),
                    grace: graces.get(&key).copied().unwrap_or_default(),
                };
                due.insert(key, process);
                if !known {
                    late.entry(key).or_insert((row, leftover));
                }
            }
        }
        Ok(due)
    };
    let ended = reap_all(find, times)?;
    // Processes that exited before their signal are not reported.
    let mut late: Vec<_> = ended
        .iter()
        .filter_map(|result| late.remove(&result.key))
        .collect();
    late.sort_by_key(|(_, leftover)| leftover.key);
    Ok(LeftoverReapResult { late, ended })
}

fn by_pid(keys: &[ProcessKey]) -> HashMap<u32, ProcessKey> {
    keys.iter().map(|key| (key.pid, *key)).collect()
}
